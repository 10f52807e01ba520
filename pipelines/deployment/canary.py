"""A second bundle beside the one that serves, on a share of the requests; then in its place, or taken away.

In KServe's Standard mode, and with plain Deployments, traffic is shared by the weights of a Gateway API HTTPRoute that
clients come through. The decision is by both servers' own counters over the same time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from components.contract.errors import GateError, StageError, TransientError, UserError
from components.measure.intervals import wilson
from pipelines.deployment import rollout
from pipelines.deployment.api import Namespace, Object
from pipelines.deployment.chart import ROUTE, pod_labels, port_of, service_of
from pipelines.deployment.evidence import Evidence, length
from pipelines.deployment.preflight import demand_rights
from pipelines.deployment.record import Record, Revision
from pipelines.deployment.smoke import ACCEPTED, DRAFTS, Caller

Say = Callable[[str], None]
LEAST_REQUESTS, LEAST_DRAFTS = 100, 1000
ACCEPTANCE, SLOWER = 0.95, 1.2


@dataclass(frozen=True)
class Window:
    """What a server's pods counted; times in seconds, summed."""

    requests: float = 0
    errors: float = 0
    drafts: float = 0
    accepted: float = 0
    first_tokens: float = 0
    first_token_seconds: float = 0
    tokens: float = 0
    token_seconds: float = 0

    def __sub__(self, earlier: "Window") -> "Window":
        """Return what lies between two moments."""
        return Window(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(Window)))

    def __add__(self, other: "Window") -> "Window":
        """Return the sum over pods."""
        return Window(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Window)))


def faults(stable: Window, canary: Window) -> list[str]:
    """Return what makes the canary worse than what serves, over the same time.

    Answers with an error of the server: their shares' 95 % intervals (Wilson) lie apart. Acceptance length: more than
    5 % shorter. Time to the first token, time between tokens: more than 20 % longer on average. Raises
    :class:`TransientError` when fewer than 100 requests or 1000 drafts were seen on either side.
    """
    for name, one in (("what serves", stable), ("the canary", canary)):
        if one.requests < LEAST_REQUESTS or one.drafts < LEAST_DRAFTS:
            seen = f"{one.requests:.0f} requests and {one.drafts:.0f} drafts"
            raise TransientError(
                f"{name} saw {seen}; {LEAST_REQUESTS} and {LEAST_DRAFTS} say enough: watch longer, or send it more"
            )
    found = []
    shares = [one.errors / one.requests for one in (stable, canary)]
    if wilson(shares[1], round(canary.requests))[0] > wilson(shares[0], round(stable.requests))[1]:
        found.append(f"{shares[1]:.1%} of its answers are errors, of the others {shares[0]:.1%}")
    before, now = (length(one.accepted, one.drafts) for one in (stable, canary))
    if now < ACCEPTANCE * before:
        found.append(f"acceptance length {now:.2f}, of the others {before:.2f}")
    for what, total, count in (
        ("first token after", "first_token_seconds", "first_tokens"),
        ("between tokens", "token_seconds", "tokens"),
    ):
        before, now = (getattr(one, total) / max(getattr(one, count), 1) for one in (stable, canary))
        if now > SLOWER * before:
            found.append(f"{what} {now * 1000:.0f} ms, of the others {before * 1000:.0f} ms")
    return found


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
    live = namespace.get(*ROUTE, name)
    if live is None and gateway is None:
        raise UserError(f"HTTPRoute {name}: is not there; name the gateway, --gateway NAMESPACE/NAME")
    spec = dict(live["spec"]) if live else {}
    if gateway:
        where, _, called = gateway.rpartition("/")
        spec["parentRefs"] = [{"name": called, "namespace": where or namespace.name}]
    if host:
        spec["hostnames"] = [host]
    rollout.deploy(namespace, _canary(name), evidence, changes, False, say)
    _weigh(namespace, name, spec, [(serving, 100 - weight), (_serving(namespace, _canary(name)), weight)])
    say(f"{_canary(name)}: takes {weight} % of the requests; qdflash promote decides")


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
    serving, canary = _serving(namespace, name), _serving(namespace, _canary(name))
    before = [observe(namespace, one) for one in (serving, canary)]
    say(f"watching both for {seconds / 60:.0f} minutes")
    time.sleep(seconds)
    stable, new = (observe(namespace, one) - then for one, then in zip((serving, canary), before, strict=True))
    if min(stable.requests, new.requests, stable.drafts, new.drafts) < 0:
        raise TransientError(f"{name}: a pod was restarted meanwhile, its counters began anew; watch again")
    if found := faults(stable, new):
        abort(namespace, name, say)
        raise GateError(f"{_canary(name)}: {'; '.join(found)}; taken away")
    held = f"{new.requests:.0f} requests, acceptance length {length(new.accepted, new.drafts):.2f}"
    say(f"{_canary(name)}: {held}: no worse")
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
    _weigh(namespace, name, _route(namespace, name), [(_serving(namespace, name), 100)])
    rollout.undeploy(namespace, _canary(name), say)


def observe(namespace: Namespace, revision: Revision) -> Window:
    """Return what the pods of a revision have counted since they started."""
    selector = ",".join(f"{key}={value}" for key, value in pod_labels(revision.objects).items())
    pages = [
        Caller(namespace, pod["metadata"]["name"], port_of(revision.objects)).page("/metrics")
        for pod in namespace.pods(selector)
    ]
    return sum(map(read, pages), Window())


def read(page: str) -> Window:
    """Read vLLM's counters off its ``/metrics``."""
    sums: dict[str, float] = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
            if name == "http_requests_total" and 'status="5xx"' in series:
                sums["errors"] = sums.get("errors", 0.0) + float(value)
    first, between = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
    latencies = [f"{one}_{what}" for one in (first, between) for what in ("count", "sum")]
    names = ["vllm:request_success_total", "errors", DRAFTS, ACCEPTED, *latencies]
    found = Window(*(sums.get(one, 0.0) for one in names))
    return found + Window(requests=found.errors)


def _canary(name: str) -> str:
    return f"{name}-canary"


def _serving(namespace: Namespace, name: str) -> Revision:
    found = Record(namespace, name).deployed
    if found is None:
        raise UserError(f"{name}: nothing is deployed in namespace {namespace.name}; qdflash deploy, or canary")
    return found


def _route(namespace: Namespace, name: str) -> Object:
    found = namespace.get(*ROUTE, name)
    if found is None:
        raise UserError(f"HTTPRoute {name}: is not there; qdflash canary makes it")
    return dict(found["spec"])


def _weigh(namespace: Namespace, name: str, spec: Object, shares: list[tuple[Revision, int]]) -> None:
    """Apply the route with each revision's Service and its weight."""
    backends = [{**service_of(revision.objects), "weight": weight} for revision, weight in shares]
    _apply(namespace, name, spec | {"rules": [{"backendRefs": backends}]})


def _apply(namespace: Namespace, name: str, spec: Object) -> None:
    namespace.apply({"apiVersion": ROUTE[0], "kind": ROUTE[1], "metadata": {"name": name}, "spec": spec})
