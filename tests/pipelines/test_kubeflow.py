from pathlib import Path
from typing import Any

import pytest
import yaml

from components.contract.errors import UserError
from components.store.backend import Store
from pipelines.kubeflow import compile_plan
from pipelines.plan import Plan, Selection, make_plan
from pipelines.recipe import load_recipe
from tests.pipelines.planning import IMAGES, RECIPES, REGENERATE, TINY, Render, commit_all, plan_of

GOLDEN = Path(__file__).parent / "golden"


def compiled(plan: Plan, folder: Path) -> tuple[Any, Any]:
    """Return the pipeline spec, and the Kubernetes part by executor."""
    compile_plan(plan, folder / "pipeline.yaml")
    spec, *platform = yaml.safe_load_all((folder / "pipeline.yaml").read_text())
    return spec, platform[0]["platforms"]["kubernetes"]["deploymentSpec"]["executors"] if platform else {}


def spec_of(text: str) -> Any:
    return next(yaml.safe_load_all(text))


def container(spec: Any, name: str) -> Any:
    return spec["deploymentSpec"]["executors"][f"exec-{name.replace('_', '-')}"]["container"]


def dag_tasks(spec: Any) -> Any:
    return {task["taskInfo"]["name"]: task for task in spec["root"]["dag"]["tasks"].values()}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_rendering_has_the_argv_of_the_plan(path: Path, rendered: Render) -> None:
    plan, text = rendered(path)
    spec = spec_of(text)
    assert len(spec["deploymentSpec"]["executors"]) == len(plan.tasks)
    for task in plan.tasks:
        pod = container(spec, task.name)
        assert pod["command"] == ["python"]
        assert tuple(pod["args"][: len(task.argv)]) == task.argv
        assert pod["args"][len(task.argv)] == "--executor-output"
        assert pod["image"] == getattr(plan.cluster.images, task.role)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_edges_of_the_rendering_are_the_needs_of_the_plan(path: Path, rendered: Render) -> None:
    plan, text = rendered(path)
    tasks = dag_tasks(spec_of(text))
    for task in plan.tasks:
        needs = {name.replace("_", "-") for name in (*task.needs, *task.soft_needs)}
        assert set(tasks[task.name].get("dependentTasks", [])) == needs


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_rendering_is_the_committed_one(path: Path, rendered: Render) -> None:
    """QDFLASH_REGENERATE=1 writes the golden files anew."""
    text = rendered(path)[1]
    golden = GOLDEN / path.name
    if REGENERATE:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text, f"{golden.name} differs; if that is meant, QDFLASH_REGENERATE=1 rewrites it"


def test_compiling_again_gives_the_same_bytes(rendered: Render, s3_store: Store, tmp_path: Path) -> None:
    compile_plan(plan_of(s3_store), tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == rendered(TINY)[1]


def test_cached_tasks_become_importers_of_their_manifests(s3_store: Store, tmp_path: Path) -> None:
    store = Store(s3_store.url.replace("golden", tmp_path.name))
    commit_all(plan_of(store), store, tmp_path / "x", {"teacher", "prompts_a"})
    plan = plan_of(store)
    spec, _ = compiled(plan, tmp_path)
    tasks = dag_tasks(spec)
    teacher = next(task for task in plan.tasks if task.name == "teacher")
    importers = [one["importer"] for one in spec["deploymentSpec"]["executors"].values() if "importer" in one]
    assert len(importers) == 2
    assert {"digest": teacher.digest, "uri": teacher.uri, "stage": "model"} in [one["metadata"] for one in importers]
    uri = tasks["teacher"]["inputs"]["parameters"]["uri"]["runtimeValue"]["constant"]
    assert uri == f"{teacher.uri}/_manifest.json"
    assert store.size(uri.removeprefix(f"{store.url}/"))
    producer = tasks["regen_a"]["inputs"]["artifacts"]["model"]["taskOutputArtifact"]["producerTask"]
    assert spec["root"]["dag"]["tasks"][producer]["taskInfo"]["name"] == "teacher"


def test_the_report_runs_although_the_gate_is_not_met(rendered: Render) -> None:
    tasks = dag_tasks(spec_of(rendered(TINY)[1]))
    assert tasks["report"]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    assert "triggerPolicy" not in tasks["deploy"]


def test_kfp_caches_nothing_and_retries(rendered: Render) -> None:
    for task in dag_tasks(spec_of(rendered(TINY)[1])).values():
        assert not task["cachingOptions"].get("enableCache")
        assert task["retryPolicy"]["maxRetryCount"] == 2


def test_placement_reaches_the_pod(s3_store: Store, tmp_path: Path) -> None:
    placement = (
        "cluster.tasks.qad={cpu: '16', memory: 200Gi, gpus: 8, shm: 32Gi, node_selector: {pool: h200}, "
        "tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}], "
        "secrets: {store-key: {id: AWS_ACCESS_KEY_ID}}, config_maps: {store: {endpoint: AWS_ENDPOINT_URL_S3}}}"
    )
    spec, platform = compiled(plan_of(s3_store, TINY, "cluster.roles={}", "cluster.tasks={}", placement), tmp_path)
    resources = container(spec, "qad")["resources"]
    assert resources["accelerator"]["resourceCount"] == "8"
    assert resources["accelerator"]["resourceType"] == "nvidia.com/gpu"
    assert (resources["resourceCpuLimit"], resources["resourceMemoryRequest"]) == ("16", "200Gi")
    pod = platform["exec-qad"]
    assert pod["emptyDirMounts"] == [
        {"volumeName": "shm", "mountPath": "/dev/shm", "medium": "Memory", "sizeLimit": "32Gi"}
    ]
    assert pod["nodeSelector"]["labels"] == {"pool": "h200"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["secretAsEnv"][0]["secretName"] == "store-key"
    assert pod["secretAsEnv"][0]["keyToEnv"] == [{"secretKey": "id", "envVar": "AWS_ACCESS_KEY_ID"}]
    assert pod["configMapAsEnv"][0]["keyToEnv"] == [{"configMapKey": "endpoint", "envVar": "AWS_ENDPOINT_URL_S3"}]
    assert [name for name, one in platform.items() if set(one) != {"podMetadata"}] == ["exec-qad"]


def test_as_kubernetes_objects_it_is_the_same_pipeline(rendered: Render, s3_store: Store, tmp_path: Path) -> None:
    compile_plan(plan_of(s3_store), tmp_path / "objects.yaml", objects=True)
    pipeline, version = yaml.safe_load_all((tmp_path / "objects.yaml").read_text())
    assert (pipeline["kind"], version["kind"]) == ("Pipeline", "PipelineVersion")
    assert {pipeline["apiVersion"], version["apiVersion"]} == {"pipelines.kubeflow.org/v2beta1"}
    assert version["spec"]["pipelineName"] == pipeline["metadata"]["name"] == "tiny"
    assert version["spec"]["pipelineSpec"] == spec_of(rendered(TINY)[1])
    compile_plan(plan_of(s3_store, TINY, "gptq.damping=0.02"), tmp_path / "other.yaml", objects=True)
    _, other = yaml.safe_load_all((tmp_path / "other.yaml").read_text())
    assert other["metadata"]["name"] != version["metadata"]["name"]


def test_a_folder_is_no_store_for_pods(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pods cannot reach a folder"):
        compile_plan(plan_of(Store(str(tmp_path / "store"))), tmp_path / "x.yaml")


def test_a_name_that_kfp_refuses(s3_store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ends in \.yaml"):
        compile_plan(plan_of(s3_store), tmp_path / "pipeline.json")


def test_what_kfp_would_fill_in_is_refused(s3_store: Store, tmp_path: Path) -> None:
    plan = plan_of(s3_store, TINY, "prompts.system='{{$}}'")
    with pytest.raises(UserError, match=r"prompts_eval: its config holds \{\{\$"):
        compile_plan(plan, tmp_path / "x.yaml")


def test_a_missing_image_is_named(s3_store: Store, tmp_path: Path) -> None:
    plan = make_plan(load_recipe(TINY, IMAGES[:2]), s3_store)
    with pytest.raises(UserError, match=r"cluster\.images\.vllm: not given"):
        compile_plan(plan, tmp_path / "x.yaml")


def test_a_blocked_task_is_named(s3_store: Store, tmp_path: Path) -> None:
    plan = make_plan(load_recipe(TINY, IMAGES), s3_store, Selection(only=("gptq",)))
    with pytest.raises(UserError, match="gptq: blocked: drafter_2 is not committed"):
        compile_plan(plan, tmp_path / "x.yaml")
