"""Deploying against the fake of the Kubernetes API: what is put into service, what is put back, and what is said."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from components.contract.errors import GateError, StageError, TransientError, UserError
from pipelines.deployment import lock, rollout
from pipelines.deployment.api import Namespace
from pipelines.deployment.chart import over, render
from pipelines.deployment.evidence import Evidence
from pipelines.deployment.record import Record
from pipelines.deployment.waiting import wait
from tests.kubernetes_api.controllers import Object, World, playing
from tests.kubernetes_api.server import Api
from tests.kubernetes_api.servers import serves, unready, waiting
from tests.pipelines.deployment.vllm_stand_in import Server

KSERVE = ("serving.kserve.io/v1beta1", "InferenceService", "pair")


class Said(list):
    """Collects what is said."""

    def __call__(self, line: str) -> None:
        self.append(line)


def deploy(namespace: Namespace, evidence: Evidence, *changes: dict[str, Any], dry: bool = False) -> Said:
    said = Said()
    rollout.deploy(namespace, "pair", evidence, list(changes), dry, said)
    return said


def states(namespace: Namespace) -> list[tuple[int, str]]:
    return [(one.number, one.state) for one in Record(namespace, "pair").revisions]


def objects(api: Api) -> dict[tuple[str, str], tuple[str, str]]:
    """Return (uid, resourceVersion) of all that deploys make, but their record."""
    return {
        (key[0].kind, key[2]): (one["metadata"]["uid"], one["metadata"]["resourceVersion"])
        for key, one in api.state.objects.items()
        if key[0].kind not in ("Namespace", "Pod", "Node") and key[2] != "pair-revisions"
    }


def storage(namespace: Namespace) -> str:
    found = namespace.get(*KSERVE)
    assert found is not None
    return str(found["spec"]["predictor"]["model"]["storageUri"])


def test_a_bundle_is_put_into_service_once(api: Api, namespace: Namespace, first: Evidence, vllm: Server) -> None:
    with playing(api, {"InferenceService": serves(vllm.address, steps=3, flaps=2)}):
        said = deploy(namespace, first)
        assert "new: InferenceService/pair" in said
        assert "smoke test: acceptance length 3.00 (at least 2.50), 32 drafts" in said
        assert "ProgressDeadlineExceeded" in " ".join(said)
        assert said[-1] == "pair: revision 1 serves"
        asked = [body["prompt"] for path, body in vllm.asked if path == "/v1/completions"]
        assert asked == [one["prompt_token_ids"] for one in first.prompts]
        before = objects(api)
        said = deploy(namespace, first)
        assert "unchanged: InferenceService/pair" in said
        assert not [line for line in said if line.startswith(("new", "changed", "removed"))]
        assert objects(api) == before
        assert states(namespace) == [(1, "deployed")]
        assert storage(namespace) == first.values["bundle"]["uri"]


def test_what_an_eviction_left_behind_is_not_waited_for(
    api: Api, namespace: Namespace, first: Evidence, vllm: Server
) -> None:
    labels = {"app.kubernetes.io/name": "qdflash", "app.kubernetes.io/instance": "pair"}
    spec, status = {"containers": [{"name": "vllm", "image": "i"}]}, {"phase": "Failed", "reason": "Evicted"}
    old = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "old", "labels": labels}}
    api.add(old | {"spec": spec, "status": status})
    with playing(api, {"InferenceService": serves(vllm.address)}):
        deploy(namespace, first)


def test_plain_deployments_need_no_kserve(api: Api, namespace: Namespace, first: Evidence, vllm: Server) -> None:
    api.state.installed.remove("serving.kserve.io")
    with pytest.raises(
        UserError, match=r"no ServingRuntime .*, InferenceService .*; install KServe, or set mode: dep"
    ):
        deploy(namespace, first)
    with playing(api, {"Deployment": serves(vllm.address)}):
        assert deploy(namespace, first, {"mode": "deployment"})[-1] == "pair: revision 1 serves"


def test_an_upgrade_goes_back_by_itself_and_by_command(
    api: Api, namespace: Namespace, first: Evidence, second: Evidence, vllm: Server
) -> None:
    with playing(api, {"InferenceService": serves(vllm.address)}):
        deploy(namespace, first)
        deploy(namespace, second, {"podDisruptionBudget": {"enabled": False}})
        assert states(namespace) == [(1, "replaced"), (2, "deployed")]
        assert ("PodDisruptionBudget", "pair") not in objects(api)
        said = Said()
        rollout.rollback(namespace, "pair", said)
        assert states(namespace) == [(1, "replaced"), (2, "replaced"), (3, "deployed")]
        assert storage(namespace) == first.values["bundle"]["uri"]
        assert ("PodDisruptionBudget", "pair") in objects(api)
        vllm.per_draft = 0.2
        with pytest.raises(
            GateError, match=r"length 1.20 on 8 prompts .* below 2.50; 3.00 was .*; rolled back to rev.*n 3"
        ):
            deploy(namespace, second)
        assert states(namespace)[-2:] == [(3, "deployed"), (4, "failed")]
        assert storage(namespace) == first.values["bundle"]["uri"]
        rollout.undeploy(namespace, "pair", said)
        assert objects(api) == {}
        with pytest.raises(UserError, match="not deployed"):
            rollout.undeploy(namespace, "pair", said)


POD = "pair-predictor-1-abcde"
CRASHED = {"restarts": 3, "last": {"exitCode": 1, "reason": "Error"}}
KILLED = {"restarts": 2, "last": {"exitCode": 137, "reason": "OOMKilled"}}
CUDA = """INFO loading
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22 GiB
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
WHY = {
    "image": (
        {"containerStatuses": [waiting("kserve-container", "InvalidImageName", "couldn't parse it")]},
        {},
        f"{POD}: image of kserve-container is not pulled, InvalidImageName \\(couldn't parse it\\)",
    ),
    "storage": (
        {"initContainerStatuses": [waiting("storage-initializer", "CrashLoopBackOff", **CRASHED)]},
        {"storage-initializer": "INFO copying\nbotocore.exceptions.ClientError: (403) Forbidden\n"},
        f"{POD}: fetching the bundle ended .*network policy, 3 restarts\\): .*ClientError: \\(403\\) Forbidden",
    ),
    "cuda": (
        {"containerStatuses": [waiting("kserve-container", "CrashLoopBackOff", **CRASHED)]},
        {"kserve-container": CUDA},
        f"{POD}: vLLM ended \\(CUDA out of memory: .*, 3 restarts\\): torch.OutOfMemoryError: CUDA out of memory",
    ),
    "memory": (
        {"containerStatuses": [waiting("kserve-container", "CrashLoopBackOff", **KILLED)]},
        {"kserve-container": "loading\n"},
        f"{POD}: vLLM ended \\(out of memory .*limits.memory, 2 restarts\\): loading",
    ),
    "crash": (
        {"containerStatuses": [waiting("kserve-container", "CrashLoopBackOff", **CRASHED)]},
        {"kserve-container": "INFO\nValueError: no\nRuntimeError: Engine core initialization failed.\n"},
        f"{POD}: vLLM ended \\(exit code 1, 3 restarts\\): ValueError: no",
    ),
}


@pytest.mark.parametrize("why", WHY)
def test_what_cannot_become_ready_is_explained_and_taken_away(
    api: Api, namespace: Namespace, first: Evidence, why: str
) -> None:
    status, logs, line = WHY[why]
    with (
        playing(api, {"InferenceService": unready(status, logs)}),
        pytest.raises(UserError, match=f"{line}.*; taken away, nothing was deployed before"),
    ):
        deploy(namespace, first)
    assert objects(api) == {}
    assert states(namespace) == [(1, "failed")]


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."},
            "Evicted (The node was low on resource: ephemeral-storage.)",
        ),
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient nvidia.com/gpu"}
                ]
            },
            "no node takes it (0/3 nodes: Insufficient nvidia.com/gpu)",
        ),
        (
            {"containerStatuses": [waiting("kserve-container", "ImagePullBackOff", "401 Unauthorized")]},
            "is not pulled, ImagePullBackOff (401 Unauthorized)",
        ),
        (
            {
                "containerStatuses": [
                    waiting("kserve-container", "CreateContainerConfigError", 'secret "clients" not found')
                ]
            },
            'kserve-container is not made (secret "clients" not found): a Secret or its key',
        ),
    ],
    ids=["evicted", "unschedulable", "pull", "secret"],
)
def test_what_may_mend_itself_is_waited_for(
    api: Api, namespace: Namespace, first: Evidence, status: Any, line: str
) -> None:
    def until_said(text: str) -> None:
        if line in text and not text.startswith("failed"):
            raise TransientError("this is how long the test waits")

    with (
        playing(api, {"InferenceService": unready(status)}),
        pytest.raises(TransientError, match="how long the test waits; taken away"),
    ):
        rollout.deploy(namespace, "pair", first, [], False, until_said)


def test_waiting_ends(api: Api, namespace: Namespace, first: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "SLACK_SECONDS", -1200.0)  # startupMinutes is 20
    with pytest.raises(TransientError, match="not ready after 0 minutes: InferenceService pair: starting; taken away"):
        deploy(namespace, first)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"drafts_a_token": 0}, "drafted nothing"),
        ({"text": ""}, "the answer to a chat is empty"),
        ({"text": "Paris"}, "a stream came in 1 pieces"),
        ({"page": "<html>"}, "does not answer as vLLM does"),
    ],
)
def test_a_server_that_does_not_serve_is_taken_away(
    api: Api, namespace: Namespace, first: Evidence, vllm: Server, wrong: dict[str, Any], told: str
) -> None:
    for name, value in wrong.items():
        setattr(vllm, name, value)
    with (
        playing(api, {"InferenceService": serves(vllm.address)}),
        pytest.raises(GateError, match=f"{told}.*; taken away"),
    ):
        deploy(namespace, first)
    assert objects(api) == {}


def test_a_service_with_a_key_is_asked_with_it(
    api: Api, namespace: Namespace, first: Evidence, vllm: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.key = "of-clients"
    keyed = {"apiKey": {"secretName": "clients"}}
    with playing(api, {"InferenceService": serves(vllm.address)}):
        with pytest.raises(UserError, match="secret clients: is not there"):
            deploy(namespace, first, keyed)
        api.add({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "clients"}, "data": {"api-key": "aw=="}})
        with pytest.raises(UserError, match="set VLLM_API_KEY"):
            deploy(namespace, first, keyed)
        monkeypatch.setenv("VLLM_API_KEY", "of-clients")
        deploy(namespace, first, keyed)
    assert "of-clients" not in str(list(api.state.objects.values()))


def test_of_two_deploys_one_wins(
    api: Api, namespace: Namespace, first: Evidence, vllm: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[StageError | None] = []

    def run() -> None:
        try:
            deploy(namespace, first)
            ended.append(None)
        except StageError as error:
            ended.append(error)

    def once_one_has_lost(world: World, one: Object) -> Iterator[float]:
        while not ended:
            yield 0.05
        yield from serves(vllm.address)(world, one)

    with playing(api, {"InferenceService": once_one_has_lost}):
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (loser,) = [one for one in ended if one]
        assert isinstance(loser, TransientError)
        assert "deploys since" in str(loser)
        assert states(namespace) == [(1, "deployed")]
        monkeypatch.setattr(lock, "SECONDS", 0)  # as if its holder had died two minutes ago
        with (
            lock.held(namespace, "pair") as renew,
            lock.held(namespace, "pair"),
            pytest.raises(TransientError, match="took the lease over"),
        ):
            renew()


def test_an_interrupted_deploy_is_taken_over(
    api: Api, namespace: Namespace, first: Evidence, second: Evidence, vllm: Server
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    with playing(api, {"InferenceService": serves(vllm.address)}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout, "wait", killed)
            with pytest.raises(Killed):
                deploy(namespace, first, {"serviceMonitor": {"enabled": True}})
        assert states(namespace) == [(1, "started")]
        deploy(namespace, second)
        assert states(namespace) == [(1, "failed"), (2, "deployed")]
        assert ("ServiceMonitor", "pair") not in objects(api)


def test_a_dry_run_changes_nothing(api: Api, namespace: Namespace, first: Evidence) -> None:
    before = dict(api.state.objects)
    said = deploy(namespace, first, dry=True)
    assert api.state.objects == before
    assert [line for line in said if line.startswith("new: ")]
    assert "nodes: none with node.kubernetes.io/instance-type=g5.xlarge, nvidia.com/gpu free" in " ".join(said)


def test_fields_of_another_manager_are_not_taken(api: Api, namespace: Namespace, first: Evidence) -> None:
    metadata = {"name": "pair", "labels": {"app.kubernetes.io/managed-by": "Helm"}}
    api.add({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    with pytest.raises(
        UserError, match=r'409 .*conflict with "cluster": .metadata.labels.app.kubernetes.io/managed-by'
    ):
        deploy(namespace, first)
    assert set(objects(api)) == {("ServiceAccount", "pair")}


def test_what_the_cluster_shows_is_looked_at(api: Api, namespace: Namespace, first: Evidence) -> None:
    controller = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {"containers": [{"name": "m", "image": "kserve/m:v0.15.2"}]},
    }
    api.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kserve"}})
    spec = {"selector": {"matchLabels": {"a": "b"}}, "template": controller}
    metadata = {"name": "kserve-controller-manager", "namespace": "kserve"}
    api.add({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    labels = {"node.kubernetes.io/instance-type": "g5.xlarge"}
    status = {"allocatable": {"nvidia.com/gpu": "1"}}
    api.add(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": labels}, "spec": {}, "status": status}
    )
    with pytest.raises(UserError, match=r"KServe 0\.15\.2 does not know mode Standard; set kserve.deploymentMode"):
        deploy(namespace, first, dry=True)
    said = deploy(namespace, first, {"kserve": {"deploymentMode": "RawDeployment"}}, dry=True)
    assert "KServe 0.15.2, mode RawDeployment" in said
    assert [line for line in said if line.startswith("nodes: 1 with")]


def test_what_cannot_be_gone_back_to_is_said(
    api: Api, namespace: Namespace, first: Evidence, vllm: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nothing in ("rollback", "undeploy"):
        with pytest.raises(UserError, match=r"no revision to go back to|not deployed in namespace"):
            getattr(rollout, nothing)(namespace, "pair", print)
    with playing(api, {"InferenceService": serves(vllm.address)}):
        deploy(namespace, first)
        with pytest.raises(UserError, match="no revision to go back to; see qdflash deployed"):
            rollout.rollback(namespace, "pair", print)
        vllm.text = ""

        def away_once_it_failed(line: str) -> None:
            if line.startswith("failed: "):
                api.state.unavailable = 3

        with pytest.raises(GateError, match=r"answer to a chat is empty; not undone: Kubernetes: 503 .*; qdflash"):
            rollout.deploy(namespace, "pair", first, [{"drainSeconds": 30}], False, away_once_it_failed)
        api.state.unavailable = 0
        assert states(namespace) == [(1, "deployed"), (2, "started")]
        vllm.text = "Paris is the capital."
        monkeypatch.setattr(lock, "SECONDS", 0)  # the lease that could not be given back has run out
        deploy(namespace, first)
        assert states(namespace) == [(1, "replaced"), (2, "failed"), (3, "deployed")]


def test_an_api_server_that_is_away_for_a_moment_undoes_nothing(
    api: Api, namespace: Namespace, first: Evidence, vllm: Server
) -> None:
    def away(world: World, one: Object) -> Iterator[float]:
        for _ in range(3):
            api.state.unavailable = 3
            yield 0.2
        yield from serves(vllm.address)(world, one)

    with playing(api, {"InferenceService": away}):
        said = deploy(namespace, first)
    assert [line for line in said if line.startswith("Kubernetes: 503")]
    assert said[-1] == "pair: revision 1 serves"
    assert ("Lease", "pair-deploy") not in objects(api)


def test_a_renewal_whose_answer_was_lost_is_not_taken_for_another_s(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(one: Object) -> None:
        put(one)
        raise TransientError("Kubernetes: no answer")

    put = namespace.replace
    with lock.held(namespace, "pair") as renew:
        with monkeypatch.context() as patch:
            patch.setattr(namespace, "replace", lost)
            renew()
        renew()
        with pytest.raises(TransientError, match=r"deploys since .*; wait for it"), lock.held(namespace, "pair"):
            pass


def test_a_slow_answer_of_the_api_is_tried_again_by_people(api: Api, namespace: Namespace, first: Evidence) -> None:
    api.state.unavailable = 1
    with pytest.raises(TransientError, match=r"503 .*try again"):
        deploy(namespace, first)
    assert objects(api) == {}


def test_a_deploy_that_lost_its_lease_undoes_nothing(
    api: Api, namespace: Namespace, first: Evidence, second: Evidence, vllm: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It slept past its lease, another one deployed meanwhile, and the pod that it asks is gone when it wakes."""

    def other_deploys(line: str) -> None:
        if line.startswith("smoke test: What"):
            with monkeypatch.context() as patch:
                patch.setattr(lock, "SECONDS", -1)
                deploy(namespace, first, {"drainSeconds": 31})

    with playing(api, {"InferenceService": serves(vllm.address)}):
        deploy(namespace, first)
        with pytest.raises(TransientError, match="not undone: pair: another deploy took the lease over"):
            rollout.deploy(namespace, "pair", second, [], False, other_deploys)
    assert states(namespace) == [(1, "replaced"), (2, "failed"), (3, "deployed")]
    runtime = namespace.get("serving.kserve.io/v1alpha1", "ServingRuntime", "pair")
    assert runtime is not None
    assert "31" in runtime["spec"]["containers"][0]["args"]


def test_failures_in_a_row_do_not_make_it_forget_what_served_before(
    api: Api, namespace: Namespace, first: Evidence, second: Evidence, vllm: Server
) -> None:
    with playing(api, {"InferenceService": serves(vllm.address)}):
        deploy(namespace, first)
        deploy(namespace, second)
        vllm.text = ""
        for drain in range(20, 26):
            with pytest.raises(GateError, match="rolled back to revision 2"):
                deploy(namespace, first, {"drainSeconds": drain})
        vllm.text = "Paris is the capital."
        rollout.rollback(namespace, "pair", print)
    assert storage(namespace) == first.values["bundle"]["uri"]


@pytest.mark.parametrize("text", ["{", "7", '[{"a": 1}]'])
def test_a_record_that_somebody_changed_is_refused(namespace: Namespace, text: str) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "pair-revisions"}}
    namespace.create(body | {"data": {"revisions": text}})
    with pytest.raises(UserError, match="ConfigMap pair-revisions: not as qdflash deploy writes it"):
        rollout.undeploy(namespace, "pair", print)


@pytest.mark.parametrize("mode", ["kserve", "deployment"])
def test_a_full_quota_is_named(api: Api, namespace: Namespace, first: Evidence, mode: str) -> None:
    full = "pods is forbidden: exceeded quota: qdflash"

    def refused(world: World, one: Object) -> Iterator[float]:
        conditions = [
            {"type": "Available", "status": "False", "message": "no minimum availability"},
            {"type": "ReplicaFailure", "status": "True", "message": full},
        ]
        if one["kind"] == "InferenceService":
            world.conditions(one, "Scripted", "no minimum availability", Ready=False)
            metadata = {"name": "pair-predictor", "namespace": one["metadata"]["namespace"]}
            pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
            spec = {"selector": {"matchLabels": {"a": "b"}}, "template": pod}
            one = api.add({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
        world.status(one, conditions=conditions)
        yield 0.05

    kind = "InferenceService" if mode == "kserve" else "Deployment"
    objects, _ = render(over(first.values, {"mode": mode}), "pair", namespace.name)
    with playing(api, {kind: refused}):
        for one in objects:
            namespace.apply(one)
        with pytest.raises(TransientError, match=full):
            wait(namespace, objects, 1, print, lambda: None)
