"""One deploy of a name at a time: a Lease that its holder renews."""

import contextlib
import getpass
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from components.contract.errors import TransientError
from pipelines.deployment.api import Namespace, Object

SECONDS = 120
LEASE = "coordination.k8s.io/v1"
_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"


@contextlib.contextmanager
def held(namespace: Namespace, name: str) -> Iterator[Callable[[], None]]:
    """Hold the lease ``<name>-deploy``; yield what renews it, to be called at least every two minutes.

    Raises :class:`TransientError` when another one holds it, or has taken it since. A lease that was not renewed for
    two minutes is of a deploy that died, and is taken over.
    """
    me = f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
    lease = _taken(namespace, f"{name}-deploy", me)

    def renew() -> None:
        nonlocal lease
        lease["spec"]["renewTime"] = _now()
        try:
            put = namespace.replace(lease) or mine()
        except TransientError:  # no answer: who takes it over meanwhile is found at the next time
            return
        if put is None:
            raise TransientError(f"{name}: another deploy took the lease over; look at qdflash deployed")
        lease = put

    def mine() -> Object | None:
        there = namespace.get(LEASE, "Lease", f"{name}-deploy")
        return there if there and there["spec"]["holderIdentity"] == me else None

    try:
        yield renew
    finally:
        with contextlib.suppress(TransientError):  # it runs out
            if mine():
                namespace.delete(LEASE, "Lease", f"{name}-deploy")


def _taken(namespace: Namespace, name: str, me: str) -> Object:
    spec = {"holderIdentity": me, "leaseDurationSeconds": SECONDS, "acquireTime": _now(), "renewTime": _now()}
    wanted = {"apiVersion": LEASE, "kind": "Lease", "metadata": {"name": name}, "spec": spec}
    made = namespace.create(wanted)
    if made is not None:
        return made
    there = namespace.get(LEASE, "Lease", name)
    if there is not None and _is_stale(there):
        metadata = {"name": name, "resourceVersion": there["metadata"]["resourceVersion"]}
        made = namespace.replace(wanted | {"metadata": metadata})
        if made is not None:
            return made
    holder = there["spec"]["holderIdentity"] if there else "another one"
    since = f" since {there['spec']['acquireTime'][:19]}" if there else ""
    raise TransientError(f"{name}: {holder} deploys{since}; wait for it")


def _is_stale(lease: Object) -> bool:
    renewed = datetime.strptime(lease["spec"]["renewTime"], _FORMAT).replace(tzinfo=UTC)
    return (datetime.now(UTC) - renewed).total_seconds() > SECONDS


def _now() -> str:
    return datetime.now(UTC).strftime(_FORMAT)
