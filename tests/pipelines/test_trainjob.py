"""Training on several nodes: the TrainJob of a plan, and its launcher on the declared fake of Kubernetes' API."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.contract.errors import UserError
from components.store.artifact import commit
from components.store.backend import Store
from pipelines import argo, kubeflow
from pipelines.recipe import load_recipe
from pipelines.trainjob import __main__ as command
from pipelines.trainjob import launcher, nodes
from pipelines.trainjob.spec import ACCOUNT, STAGE_ACCOUNT, job_spec
from tests.kubernetes_api.controllers import Object, Script, World, playing
from tests.kubernetes_api.resources import BY_KIND
from tests.kubernetes_api.server import Api, serving
from tests.kubernetes_api.state import NAMESPACE
from tests.kubernetes_api.trainjobs import flapping, job
from tests.manifests.conftest import MANIFESTS
from tests.manifests.rules import rights
from tests.pipelines.planning import TINY, plan_of
from tests.schemas import faults

JOB, POD = BY_KIND["trainer.kubeflow.org/v1alpha1", "TrainJob"], BY_KIND["v1", "Pod"]
TWO = (
    "cluster.tasks.qad={nodes: 2, gpus: 4, cpu: '16', shm: 8Gi, scratch: 500Gi, storage_class: gp3, "
    "node_selector: {pool: h200}, tolerations: [{key: nvidia.com/gpu, operator: Exists}], "
    "secrets: {store-key: {id: AWS_ACCESS_KEY_ID}}}"
)
SPLITS = "qad.batch=32"


@pytest.fixture
def planned(s3_store: Store) -> Any:
    return plan_of(s3_store, TINY, TWO, SPLITS)


def spec_in(args: list[str]) -> tuple[Any, tuple[str, ...]]:
    """Return a launcher's TrainJob spec, and the command that it was given."""
    assert args[:3] == ["-m", "pipelines.trainjob", "--spec"]
    assert args[4] == "--"
    return json.loads(args[3]), tuple(args[5:])


def test_kfp_runs_the_launcher_with_the_plan_s_own_argv(planned: Any, tmp_path: Path) -> None:
    kubeflow.compile_plan(planned, tmp_path / "two.yaml")
    spec, platform = yaml.safe_load_all((tmp_path / "two.yaml").read_text())
    pod = spec["deploymentSpec"]["executors"]["exec-qad"]["container"]
    task = next(one for one in planned.tasks if one.name == "qad")
    made, argv = spec_in(pod["args"])
    assert argv[: len(task.argv)] == task.argv
    assert argv[len(task.argv)] == "--executor-output"
    assert pod["image"] == planned.cluster.images.core
    assert made["trainer"]["args"] == list(task.argv)
    assert made["trainer"]["image"] == planned.cluster.images.train
    assert "accelerator" not in pod.get("resources", {})
    fields = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-qad"]["fieldPathAsEnv"]
    assert {one["name"]: one["fieldPath"] for one in fields} == {
        "QDFLASH_POD": "metadata.name",
        "QDFLASH_NAMESPACE": "metadata.namespace",
    }
    upstream = next(one for one in spec["root"]["dag"]["tasks"].values() if one["taskInfo"]["name"] == "qad")
    assert set(upstream["dependentTasks"]) == {"teacher", "ptq", "sequences"}


def test_argo_runs_the_launcher_under_its_own_account(planned: Any, tmp_path: Path) -> None:
    argo.compile_plan(planned, tmp_path / "two.yaml")
    workflow = yaml.safe_load((tmp_path / "two.yaml").read_text())
    assert faults([workflow | {"metadata": {"name": "two"}}]) == []
    made = {one["name"]: one for one in workflow["spec"]["templates"]}
    task = next(one for one in planned.tasks if one.name == "qad")
    assert spec_in(made["qad"]["container"]["args"])[1] == task.argv
    assert made["qad"]["serviceAccountName"] == ACCOUNT
    assert [one for one in made if made[one].get("serviceAccountName")] == ["qad"]
    assert {one["name"] for one in made["qad"]["container"]["env"]} == {"QDFLASH_POD", "QDFLASH_NAMESPACE"}


def test_the_train_job_holds_to_its_schema_and_names_what_the_runtime_has(planned: Any) -> None:
    task = next(one for one in planned.tasks if one.name == "qad")
    spec = job_spec(task.argv, "r/train@sha256:" + "d" * 64, planned.cluster.placement("qad", "train"))
    one = {"apiVersion": launcher.API, "kind": launcher.KIND, "metadata": {"name": "x"}, "spec": spec}
    assert faults([one]) == []
    trainer = spec["trainer"]
    assert (trainer["command"], trainer["numNodes"], trainer["numProcPerNode"]) == (["torchrun"], 2, 4)
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "16", "nvidia.com/gpu": "4"}
    runtime = yaml.safe_load((MANIFESTS / "base" / "training-runtime.yaml").read_text())
    assert spec["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (theirs,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (ours,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert ours["name"] == theirs["name"]
    pod, base = (one["template"]["spec"]["template"]["spec"] for one in (ours, theirs))
    assert pod["containers"][0]["name"] == base["containers"][0]["name"]
    assert pod["nodeSelector"] == {"pool": "h200"}
    assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    claim = pod["volumes"][1]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (claim["resources"]["requests"]["storage"], claim["storageClassName"]) == ("500Gi", "gp3")
    assert {"name": "AWS_ACCESS_KEY_ID", "valueFrom": {"secretKeyRef": {"name": "store-key", "key": "id"}}} in trainer[
        "env"
    ]
    spec["trainer"]["numNode"] = 2
    assert faults([one]) == [] or "numNode" in str(faults([one]))


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["cluster.tasks.qad={nodes: 3}", SPLITS], "qad.batch: 32 does not split into micro-batches of 4 on 3 proc"),
        (["cluster.tasks.qad={nodes: 2, gpus: 16}", SPLITS], r"qad\.batch: 32 .* on 32 processes of 2 nodes"),
        (
            ["cluster.tasks.drafter_2={nodes: 2, gpus: 16}", "drafter.batch=16"],
            r"drafter_2\.batch: .* on 32 processes",
        ),
        (["cluster.tasks.pack={nodes: 2}"], r"cluster\.tasks\.pack\.nodes: only qad and drafter"),
        (["cluster.roles.train={nodes: 2}"], r"cluster\.roles\.train\.nodes: give it to a task"),
        (["cluster.tasks.qad={nodes: 2, priority: high}", SPLITS], "priority: a TrainJob's is in its TrainingRuntime"),
    ],
)
def test_what_cannot_train_on_several_nodes_is_said_first(overrides: list[str], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        load_recipe(TINY, overrides)


class Cluster:
    """The fake, a folder store, and one call of the launcher for them."""

    def __init__(self, api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api, self.folder, self._monkeypatch = api, folder, monkeypatch
        self.store, self.digest = Store(str(folder / "store")), "d" * 64
        self.name = f"qad-{self.digest[:16]}"
        argv = ["-m", "components.qad", "--config", "{}", "--output", self.store.uri(f"qad/{self.digest}")]
        spec = job_spec(
            (*argv[:3], '{"processes": 0}'),
            "r/train@sha256:" + "d" * 64,
            load_recipe(TINY, [TWO, SPLITS]).cluster.placement("qad", "train"),
        )
        self.argv = ["--spec", json.dumps(spec), "--", *argv]
        self.token("admin")

    def token(self, name: str, held: set[tuple[str, str, str]] | None = None) -> None:
        """Let the launcher be an account with these rights; None: all."""
        self.api.state.rights[name] = (name, held)
        (self.folder / "kubeconfig").write_text(self.api.kubeconfig(name))

    def run(self) -> int:
        for module in ("kubernetes.config", "kubernetes.config.kube_config"):  # KUBECONFIG, read when it was imported
            self._monkeypatch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", str(self.folder / "kubeconfig"))
        handler = signal.getsignal(signal.SIGTERM)
        try:
            return command.main(self.argv)
        finally:
            signal.signal(signal.SIGTERM, handler)

    def start(self) -> subprocess.Popen[str]:
        """Start the launcher in a process of its own."""
        code = (
            "from pipelines.trainjob import __main__ as command, launcher, nodes\n"
            "launcher.POLL_SECONDS = nodes.RETRY_SECONDS = 0.05\n"
            "raise SystemExit(command.main())"
        )
        environment = os.environ | {"KUBECONFIG": str(self.folder / "kubeconfig")}
        return subprocess.Popen(
            [sys.executable, "-c", code, *self.argv], env=environment, stderr=subprocess.PIPE, text=True
        )

    def commit(self) -> None:
        """Do what rank 0 does at its end."""
        (self.folder / "out").mkdir(exist_ok=True)
        (self.folder / "out" / "latents").write_text("x")
        commit(self.store, "qad", self.digest, self.folder / "out", {"metrics": {}})

    def jobs(self) -> list[Object]:
        return self.api.state.list(JOB, NAMESPACE)

    def seen(self, what: Callable[[], Any]) -> None:
        """Wait until something is so."""
        end = time.monotonic() + 30
        while not what():
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(nodes, "RETRY_SECONDS", 0.02)
    with serving() as api:
        yield Cluster(api, tmp_path, monkeypatch)


def committing(script: Script, commit: Callable[[], None], gate: threading.Event | None = None, at: int = 3) -> Script:
    """Let rank 0 commit after ``at`` steps of ``script``, once ``gate`` is set."""

    def played(world: World, one: Object) -> Iterator[float]:
        steps = script(world, one)
        for _ in range(at):
            yield next(steps)
        while gate is not None and not gate.is_set():
            yield 0.02
        commit()
        yield from steps

    return played


def test_created_followed_and_cleaned_up(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "w", "uid": "u-1", "controller": True}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "launcher", "ownerReferences": [owner]}}
    cluster.api.add(pod | {"spec": {"containers": [{"name": "main", "image": "x"}]}})
    cluster._monkeypatch.setenv("QDFLASH_POD", "launcher")
    cluster.argv += ["--executor-output", str(cluster.folder / "executor.json")]
    made: list[Object] = []

    def commit() -> None:
        made.extend(cluster.jobs())
        cluster.commit()

    with playing(cluster.api, {"TrainJob": committing(job(["step 1", "step 2"]), commit)}):
        assert cluster.run() == 0
    (one,) = made
    assert one["metadata"]["name"] == cluster.name
    assert one["metadata"]["ownerReferences"] == [{key: owner[key] for key in owner if key != "controller"}]
    said = capfd.readouterr().err
    assert [line for line in said.splitlines() if line.startswith("step")] == ["step 1 (0)", "step 2 (0)"]
    assert f"created trainjob={cluster.name} nodes=2" in said
    assert cluster.jobs() == []
    assert (cluster.folder / "executor.json").exists()
    assert cluster.run() == 0  # committed: no TrainJob
    assert "cached" in capfd.readouterr().err


def test_what_is_complete_and_committed_nothing_is_a_bug(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    with playing(cluster.api, {"TrainJob": job([])}):
        assert cluster.run() == 1
    assert "complete, but nothing is committed" in capfd.readouterr().err
    assert cluster.jobs() == []


@pytest.mark.parametrize(
    ("exit_code", "words", "code", "said"),
    [
        (1, {0: "75\n", 1: "2\n75\n"}, 2, "node 1: lower the rate"),
        (1, {0: "75\n"}, 75, "node 0: lower the rate; run again to continue"),
        (137, {}, 75, "run again to continue"),
        (1, {}, 1, "node 0: lower the rate"),
    ],
)
def test_a_failure_has_the_code_of_what_failed_for_good(
    cluster: Cluster, exit_code: int, words: dict[int, str], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    line = '12:00:00 qad failed error="lower the rate"'
    script = job([line], "Failed", exit_code, words=words)

    def unquoted(world: World, one: Object) -> Iterator[float]:
        yield from script(world, one)

    with playing(cluster.api, {"TrainJob": unquoted}):
        assert cluster.run() == code
    assert said in capfd.readouterr().err.replace('"', "").replace("\\", "").replace(" (0)", "").replace(" (1)", "")
    assert cluster.jobs() == []


def test_pods_that_are_gone_may_be_tried_again(cluster: Cluster) -> None:
    def lost(world: World, one: Object) -> Iterator[float]:
        world.conditions(one, "JobsFailed", "pods were deleted", Failed=True)
        yield 0.0

    with playing(cluster.api, {"TrainJob": lost}):
        assert cluster.run() == 75


def test_a_flapping_job_and_a_server_that_is_away_are_waited_for(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    def away() -> None:
        cluster.commit()
        cluster.api.state.unavailable = 5

    with playing(cluster.api, {"TrainJob": committing(flapping(["step 1"]), away, at=8)}):
        assert cluster.run() == 0
    said = capfd.readouterr().err
    assert "Suspended (Suspended)" in said
    assert "waiting" in said


def test_what_is_left_of_a_failed_job_makes_room(cluster: Cluster) -> None:
    spec = json.loads(cluster.argv[1])
    one = {"apiVersion": launcher.API, "kind": launcher.KIND, "metadata": {"name": cluster.name}, "spec": spec}
    old = cluster.api.add(one)
    World(cluster.api).conditions(old, "JobsFailed", Failed=True)
    made: list[Object] = []

    def script(world: World, one: Object) -> Iterator[float]:
        if one["metadata"]["uid"] != old["metadata"]["uid"]:
            made.append(one)
            yield from committing(job([]), cluster.commit)(world, one)

    with playing(cluster.api, {"TrainJob": script}):
        assert cluster.run() == 0
    assert len(made) == 1


def test_a_job_that_somebody_deletes_may_be_tried_again(cluster: Cluster) -> None:
    def deleted(world: World, one: Object) -> Iterator[float]:
        yield 0.05
        world.state.delete(JOB, NAMESPACE, one["metadata"]["name"], {})

    with playing(cluster.api, {"TrainJob": deleted}):
        assert cluster.run() == 75


@pytest.mark.slow
def test_a_killed_launcher_is_followed_by_one_that_adopts_and_a_cancelled_one_deletes(cluster: Cluster) -> None:
    gate = threading.Event()
    with playing(cluster.api, {"TrainJob": committing(job(["step 1"]), cluster.commit, gate)}):
        first = cluster.start()
        cluster.seen(lambda: cluster.api.state.list(POD, NAMESPACE))
        first.kill()
        assert first.communicate()[0] is None
        (one,) = cluster.jobs()
        second = cluster.start()
        assert second.stderr is not None
        assert "adopted" in second.stderr.readline()
        gate.set()
        assert "done" in second.communicate(timeout=60)[1]
        assert second.returncode == 0
        assert cluster.jobs() == []

    cluster.digest = "e" * 64
    cluster.argv[-1] = cluster.store.uri(f"qad/{cluster.digest}")
    gate.clear()
    with playing(cluster.api, {"TrainJob": committing(job(["step 1"]), cluster.commit, gate)}):
        third = cluster.start()
        cluster.seen(lambda: cluster.api.state.list(POD, NAMESPACE))
        assert cluster.jobs()[0]["metadata"]["uid"] != one["metadata"]["uid"]
        third.terminate()
        assert "cancelled" in third.communicate(timeout=60)[1]
        assert third.returncode == 75
        assert cluster.jobs() == []
        assert cluster.api.state.list(POD, NAMESPACE) == []


def test_the_account_has_the_rights_that_it_needs_and_no_other(cluster: Cluster) -> None:
    objects = [
        one
        for name in ("accounts", "roles")
        for one in yaml.safe_load_all((MANIFESTS / "base" / f"{name}.yaml").read_text())
    ]
    theirs = rights(objects, STAGE_ACCOUNT)  # what Argo's executor and KFP's launcher need in every pod
    held = rights(objects, ACCOUNT) - theirs
    cluster._monkeypatch.setenv("QDFLASH_POD", "launcher")
    cluster.api.add(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "launcher"},
            "spec": {"containers": [{"name": "main", "image": "x"}]},
        }
    )
    with playing(cluster.api, {"TrainJob": job(["step"], "Failed", 1, step=0.01, words={0: "75"})}):
        cluster.token("all", held)
        assert cluster.run() == 75
        for right in sorted(held):
            cluster.token("/".join(right), held - {right})
            assert cluster.run() == 2, right
            cluster.token("admin")
            assert cluster.run() == 75
