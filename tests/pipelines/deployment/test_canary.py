"""A canary: its share of the requests, and what decides whether it takes the other's place."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from components.contract.errors import GateError, StageError, TransientError, UserError
from pipelines.deployment import canary, rollout
from pipelines.deployment.api import Namespace
from pipelines.deployment.chart import route_of
from pipelines.deployment.counters import Window, faults, read
from pipelines.deployment.evidence import Evidence, gather
from tests.kubernetes_api.controllers import Object, World, playing
from tests.kubernetes_api.server import Api
from tests.kubernetes_api.servers import serves
from tests.pipelines.deployment import vllm_stand_in
from tests.pipelines.deployment.vllm_stand_in import Server

SEEN = Window(1000, 5, 20000, 40000, 1000, 100.0, 20000, 600.0)


def test_what_is_no_worse_has_no_faults() -> None:
    assert faults(SEEN, SEEN) == []
    tenth = Window(100, 1, 2000, 3900, 100, 11.5, 2000, 70.0)
    assert faults(SEEN, tenth) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"errors": 50}, "5.0% of its answers are errors, of the others 0.5%"),
        ({"accepted": 36000}, "acceptance length 2.80, of the others 3.00"),
        ({"first_token_seconds": 130.0}, "first token after 130 ms, of the others 100 ms"),
        ({"token_seconds": 800.0}, "between tokens 40 ms, of the others 30 ms"),
    ],
)
def test_what_is_worse_is_said(change: dict[str, float], fault: str) -> None:
    assert faults(SEEN, replace(SEEN, **change)) == [fault]
    assert faults(replace(SEEN, **change), SEEN) == []


@pytest.mark.parametrize("change", [{"requests": 99}, {"drafts": 999}])
def test_too_little_decides_nothing(change: dict[str, float]) -> None:
    with pytest.raises(TransientError, match=r"the canary saw .* watch longer"):
        faults(SEEN, replace(SEEN, **change))
    with pytest.raises(TransientError, match="what serves saw"):
        faults(replace(SEEN, **change), SEEN)


def test_the_counters_are_read_off_the_page(vllm: Server) -> None:
    page = vllm_stand_in.PAGE.format(**vars(vllm) | {"requests": 8, "errors": 2, "token_seconds": 1.5})
    assert read(page) == Window(10, 2, 0, 0, 8, 0, 0, 1.5)


@pytest.fixture
def other() -> Iterator[Server]:
    with vllm_stand_in.serving() as found:
        yield found


@pytest.fixture
def cluster(api: Api, vllm: Server, other: Server) -> Iterator[Api]:
    """A cluster where ``vllm`` answers for the service and ``other`` for its canary."""

    def script(world: World, one: Object) -> Iterator[float]:
        server = other if one["metadata"]["name"] == "pair-canary" else vllm
        return serves(server.address)(world, one)

    with playing(api, {"InferenceService": script}):
        yield api


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch, vllm: Server, other: Server) -> Callable[..., None]:
    """Let the time of watching be one of many requests; say how the canary's went."""

    def during(**canary_s: float) -> None:
        def count(_: float) -> None:
            for server in (vllm, other):
                server.requests += 500
                server.drafts += 5000
                server.accepted += 10000
                server.first_token_seconds += 50
                server.token_seconds += 150
            for name, value in canary_s.items():
                setattr(other, name, getattr(other, name) + value)

        monkeypatch.setattr("pipelines.deployment.canary.sleep", count)

    return during


def beside(namespace: Namespace, evidence: Evidence, said: list[str], **given: Any) -> None:
    given = {"weight": 10, "gateway": "gateways/public", "host": "pair.example", **given}
    canary.start(
        namespace, "pair", evidence, [{"shm": "1Gi"}], given["weight"], given["gateway"], given["host"], said.append
    )


def weights(namespace: Namespace) -> dict[str, int]:
    route = namespace.get(*route_of("pair"))
    assert route is not None
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
    assert route["spec"]["hostnames"] == ["pair.example"]
    (rule,) = route["spec"]["rules"]
    assert {one["port"] for one in rule["backendRefs"]} == {80}
    return {one["name"]: one["weight"] for one in rule["backendRefs"]}


def storage(namespace: Namespace, name: str) -> str | None:
    found = namespace.get("serving.kserve.io/v1beta1", "InferenceService", name)
    return found["spec"]["predictor"]["model"]["storageUri"] if found else None


def find(evidence: Evidence) -> Callable[[str], Evidence]:
    return lambda uri: gather(evidence.bundle.store, uri)


def test_a_canary_that_holds_takes_the_other_s_place(
    cluster: Api, deployer: Namespace, first: Evidence, second: Evidence, busy: Callable[..., None]
) -> None:
    said: list[str] = []
    with pytest.raises(UserError, match="pair: nothing is deployed"):
        beside(deployer, second, said)
    rollout.deploy(deployer, "pair", first, [], False, said.append)
    with pytest.raises(UserError, match="name the gateway"):
        beside(deployer, second, said, gateway=None)
    with pytest.raises(UserError, match=r"422 .*hostnames"):
        beside(deployer, second, said, host="Not a host")
    assert storage(deployer, "pair-canary") is None
    beside(deployer, second, said)
    assert weights(deployer) == {"pair-predictor": 90, "pair-canary-predictor": 10}
    beside(deployer, second, said, weight=50, gateway=None, host=None)
    assert weights(deployer) == {"pair-predictor": 50, "pair-canary-predictor": 50}
    busy()
    canary.promote(deployer, "pair", find(second), 60, said.append)
    assert "pair-canary: 500 requests, acceptance length 3.00: no worse" in said
    assert weights(deployer) == {"pair-predictor": 100}
    assert storage(deployer, "pair") == second.values["bundle"]["uri"]
    assert storage(deployer, "pair-canary") is None
    runtime = deployer.get("serving.kserve.io/v1alpha1", "ServingRuntime", "pair")
    assert runtime is not None
    assert '"sizeLimit": "1Gi"' in str(runtime).replace("'", '"')  # with the values that the canary had
    rollout.undeploy(deployer, "pair", said.append)
    assert deployer.get(*route_of("pair")) is None


def test_a_canary_that_is_worse_is_taken_away(
    cluster: Api, deployer: Namespace, first: Evidence, second: Evidence, busy: Callable[..., None], other: Server
) -> None:
    said: list[str] = []
    rollout.deploy(deployer, "pair", first, [], False, said.append)
    beside(deployer, second, said)
    busy(requests=-450)
    with pytest.raises(TransientError, match="the canary saw 50 requests"):
        canary.promote(deployer, "pair", find(second), 60, said.append)
    for odd in ({"requests": -5000}, {"errors": -1}, {"accepted": float("nan")}):
        busy(**odd)
        before = dict(vars(other))
        with pytest.raises(TransientError, match="restarted meanwhile"):
            canary.promote(deployer, "pair", find(second), 60, said.append)
        vars(other).update(before)
    assert weights(deployer) == {"pair-predictor": 90, "pair-canary-predictor": 10}
    busy(errors=60, accepted=-3000)
    with pytest.raises(
        GateError, match=r"10\.7% of its answers are errors, .*; acceptance length 2\.40, .*; taken away"
    ):
        canary.promote(deployer, "pair", find(second), 60, said.append)
    assert weights(deployer) == {"pair-predictor": 100}
    assert storage(deployer, "pair") == first.values["bundle"]["uri"]
    assert storage(deployer, "pair-canary") is None


def test_shares_are_as_before_when_the_other_cannot_be_replaced(
    cluster: Api, deployer: Namespace, first: Evidence, second: Evidence, busy: Callable[..., None], vllm: Server
) -> None:
    said: list[str] = []
    rollout.deploy(deployer, "pair", first, [], False, said.append)
    beside(deployer, second, said)
    busy()
    vllm.text = ""
    with pytest.raises(StageError, match="answer to a chat is empty; rolled back to revision 1"):
        canary.promote(deployer, "pair", find(second), 60, said.append)
    assert weights(deployer) == {"pair-predictor": 90, "pair-canary-predictor": 10}
    assert storage(deployer, "pair") == first.values["bundle"]["uri"]
    canary.abort(deployer, "pair", said.append)
    assert weights(deployer) == {"pair-predictor": 100}


def test_gateways_have_to_be_there(cluster: Api, deployer: Namespace, first: Evidence, second: Evidence) -> None:
    cluster.state.installed.remove("gateway.networking.k8s.io")
    rollout.deploy(deployer, "pair", first, [], False, print)
    with pytest.raises(UserError, match="the cluster has no HTTPRoute"):
        beside(deployer, second, [])


def test_a_pod_that_was_evicted_counts_nothing(
    cluster: Api, deployer: Namespace, first: Evidence, second: Evidence, busy: Callable[..., None]
) -> None:
    said: list[str] = []
    rollout.deploy(deployer, "pair", first, [], False, said.append)
    beside(deployer, second, said)
    (pod,) = (one for key, one in cluster.state.objects.items() if key[0].kind == "Pod" and "canary" in key[2])
    labels = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gone", "labels": pod["metadata"]["labels"]}}
    cluster.add(labels | {"spec": pod["spec"], "status": {"phase": "Failed", "reason": "Evicted"}})
    busy()
    canary.promote(deployer, "pair", find(second), 60, said.append)
    assert "pair-canary: 500 requests, acceptance length 3.00: no worse" in said


def test_a_page_that_counts_nothing_decides_nothing(
    cluster: Api, deployer: Namespace, first: Evidence, second: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout.deploy(deployer, "pair", first, [], False, print)
    beside(deployer, second, [])
    monkeypatch.setattr(vllm_stand_in, "PAGE", "<html>Sign in here</html>")
    with pytest.raises(GateError, match="/metrics is no page of counters"):
        canary.promote(deployer, "pair", find(second), 0, print)
    assert weights(deployer) == {"pair-predictor": 90, "pair-canary-predictor": 10}


def test_a_canary_goes_when_its_route_is_gone(
    cluster: Api, deployer: Namespace, first: Evidence, second: Evidence
) -> None:
    rollout.deploy(deployer, "pair", first, [], False, print)
    beside(deployer, second, [])
    with pytest.raises(UserError, match="pair-canary is beside it; qdflash abort"):
        rollout.undeploy(deployer, "pair", print)
    deployer.delete(*route_of("pair"))
    canary.abort(deployer, "pair", print)
    rollout.undeploy(deployer, "pair", print)
    assert storage(deployer, "pair-canary") is None
