"""A second bundle beside the one that serves, on a share of the requests; then in its place, or taken away.

In KServe's Standard mode, and with plain Deployments, traffic is shared by the weights of a Gateway API HTTPRoute that
clients come through. The decision is by both servers' own counters over the same time.
"""

from collections.abc import Callable
from dataclasses import astuple
from time import sleep
from typing import Any

from components.contract.errors import GateError, StageError, TransientError, UserError
from pipelines.deployment import rollout
from pipelines.deployment.api import Namespace, Object
from pipelines.deployment.chart import ROUTE, canary_of, pod_labels, port_of, route_of, service_of
from pipelines.deployment.counters import Window, faults
from pipelines.deployment.evidence import Evidence
from pipelines.deployment.preflight import demand_rights
from pipelines.deployment.record import Record, Revision
from pipelines.deployment.smoke import Caller
from pipelines.deployment.waiting import is_ready

Say = Callable[[str], None]


def start(
    namespace: Namespace,
    name: str,
    evidence: Evidence,
    changes: list[dict[str, Any]],
    weight: int,
    gateway: str | None,
    host: str | None,
    say: Say,
) -> None:
    """Deploy a bundle beside ``name`` and give it ``weight`` percent of the route's requests.

    ``gateway`` (namespace/name) and ``host`` make the route when there is none yet. What fails takes the canary away.
    """
    serving = _serving(namespace, name)
    demand_rights(namespace, [{"apiVersion": ROUTE[0], "kind": ROUTE[1]}])
    live = namespace.get(*route_of(name))
    if live is None and gateway is None:
        raise UserError(f"HTTPRoute {route_of(name)[-1]}: is not there; name the gateway, --gateway NAMESPACE/NAME")
    spec = dict(live["spec"]) if live else {}
    if gateway:
        where, _, called = gateway.rpartition("/")
        spec["parentRefs"] = [{"name": called, "namespace": where or namespace.name}]
    if host:
        spec["hostnames"] = [host]
    _weigh(namespace, name, spec, [(serving, 100)], dry=True)
    rollout.deploy(namespace, canary_of(name), evidence, changes, False, say)
    _weigh(namespace, name, spec, [(serving, 100 - weight), (_serving(namespace, canary_of(name)), weight)])
    say(f"{canary_of(name)}: takes {weight} % of the requests; qdflash promote decides")


def promote(
    namespace: Namespace,
    name: str,
    gather: Callable[[str], Evidence],
    seconds: float,
    say: Say,
) -> None:
    """Watch both for a time; then put the canary in the other's place, or take it away and raise :class:`GateError`.

    While the other is replaced the canary takes all requests; when that fails, their shares are as before. ``gather``
    returns the evidence for a bundle's address.
    """
    serving, canary = _serving(namespace, name), _serving(namespace, canary_of(name))
    before = [observe(namespace, one) for one in (serving, canary)]
    say(f"watching both for {seconds / 60:.0f} minutes")
    sleep(seconds)
    after = [observe(namespace, one) for one in (serving, canary)]
    stable, new = map(_between, before, after)
    if found := faults(stable, new):
        abort(namespace, name, say)
        raise GateError(f"{canary_of(name)}: {'; '.join(found)}; taken away")
    held = f"{new.requests:.0f} requests, acceptance length {new.acceptance_length:.2f}"
    say(f"{canary_of(name)}: {held}: no worse")
    spec = _route(namespace, name)
    _weigh(namespace, name, spec, [(serving, 0), (canary, 100)])
    try:
        rollout.deploy(namespace, name, gather(canary.bundle), [canary.values], False, say)
    except StageError:
        _apply(namespace, name, spec)
        raise
    abort(namespace, name, say)


def abort(namespace: Namespace, name: str, say: Say) -> None:
    """Give what serves all requests again and take the canary away."""
    if live := namespace.get(*route_of(name)):
        _weigh(namespace, name, dict(live["spec"]), [(_serving(namespace, name), 100)])
    rollout.undeploy(namespace, canary_of(name), say)


def observe(namespace: Namespace, revision: Revision) -> dict[str, Window]:
    """Return what each ready pod of a revision has counted since it started."""
    selector = ",".join(f"{key}={value}" for key, value in pod_labels(revision.objects).items())
    port = port_of(revision.objects)
    pods = [pod["metadata"]["name"] for pod in namespace.pods(selector) if is_ready(pod)]
    return {pod: Caller(namespace, pod, port).counters() for pod in pods}


def _between(before: dict[str, Window], after: dict[str, Window]) -> Window:
    """Return what the pods that are there now have counted since ``before``."""
    counted = [now - before.get(pod, Window()) for pod, now in after.items()]
    if not all(value >= 0 for one in counted for value in astuple(one)):
        raise TransientError("a pod was restarted meanwhile, its counters began anew; watch again")
    return sum(counted, Window())


def _serving(namespace: Namespace, name: str) -> Revision:
    found = Record(namespace, name).deployed
    if found is None:
        raise UserError(f"{name}: nothing is deployed in namespace {namespace.name}; qdflash deploy, or canary")
    return found


def _route(namespace: Namespace, name: str) -> Object:
    found = namespace.get(*route_of(name))
    if found is None:
        raise UserError(f"HTTPRoute {route_of(name)[-1]}: is not there; qdflash canary makes it")
    return dict(found["spec"])


def _weigh(
    namespace: Namespace, name: str, spec: Object, shares: list[tuple[Revision, int]], dry: bool = False
) -> None:
    """Apply the route with each revision's Service and its weight."""
    backends = [{**service_of(revision.objects), "weight": weight} for revision, weight in shares]
    _apply(namespace, name, spec | {"rules": [{"backendRefs": backends}]}, dry)


def _apply(namespace: Namespace, name: str, spec: Object, dry: bool = False) -> None:
    api_version, kind, called = route_of(name)
    namespace.apply({"apiVersion": api_version, "kind": kind, "metadata": {"name": called}, "spec": spec}, dry)
