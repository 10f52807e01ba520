"""The Argo rendering holds the plan's own argv and edges, and is a Workflow that Argo's own schema takes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.contract.errors import UserError
from components.store.backend import Store
from pipelines.argo import compile_plan
from pipelines.plan import Plan
from tests.pipelines.planning import RECIPES, REGENERATE, TINY, Render, commit_all, plan_of
from tests.schemas import faults

GOLDEN = Path(__file__).parent / "golden" / "argo"
PAPER = next(path for path in RECIPES if path.stem == "qwen3.5-4b-a10g")


def templates(workflow: Any) -> dict[str, Any]:
    return {one["name"]: one for one in workflow["spec"]["templates"]}


def nodes(workflow: Any) -> dict[str, str]:
    """Return each task's expression of what it waits for."""
    return {one["name"]: one.get("depends", "") for one in templates(workflow)["pipeline"]["dag"]["tasks"]}


def pods(workflow: Any) -> list[dict[str, Any]]:
    """Return the pods that Argo makes of the templates, without its own containers."""
    made = []
    for name, one in templates(workflow).items():
        if name != "pipeline":
            spec = {"containers": [{"name": "main", **one["container"]}], "automountServiceAccountToken": False}
            spec |= {key: one[key] for key in ("volumes", "nodeSelector", "tolerations") if key in one}
            spec["securityContext"] = workflow["spec"]["securityContext"]
            made.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    return made


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_pods_and_edges_are_those_of_the_plan(path: Path, rendered: Render) -> None:
    plan, text = rendered(path)
    workflow = yaml.safe_load(text)
    waits = nodes(workflow)
    assert len(waits) == len(plan.tasks)
    for task in plan.tasks:
        name = task.name.replace("_", "-")
        pod = templates(workflow)[name]["container"]
        assert (pod["command"], tuple(pod["args"])) == (["python"], task.argv)
        assert pod["image"] == plan.cluster.image(task.role)
        succeeded = set(re.findall(r"([\w-]+)\.Succeeded(?! \|\|)", waits[name]))
        ended = set(re.findall(r"([\w-]+)\.Failed", waits[name]))
        assert succeeded == {one.replace("_", "-") for one in task.needs}
        assert ended == {one.replace("_", "-") for one in task.soft_needs}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_rendering_is_the_committed_one(path: Path, rendered: Render) -> None:
    """QDFLASH_REGENERATE=1 writes the golden files anew."""
    text, golden = rendered(path)[1], GOLDEN / path.name
    if REGENERATE:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text, f"{golden.name} differs; if that is meant, QDFLASH_REGENERATE=1 rewrites it"


def test_argo_and_kubernetes_take_it(rendered: Render) -> None:
    workflow = yaml.safe_load(rendered(PAPER)[1])
    workflow["metadata"]["name"] = workflow["metadata"]["generateName"]
    assert faults([workflow, *pods(workflow)]) == []
    workflow["spec"]["templates"][1]["container"]["imagePullPolice"] = "Always"
    workflow["spec"]["entryPoint"] = "pipeline"
    found = faults([workflow])
    assert found == [] or {"imagePullPolice", "entryPoint"} <= set(re.findall(r"'(\w+)' was unexpected", str(found)))


def test_what_is_committed_is_neither_run_nor_waited_for(s3_store: Store, tmp_path: Path) -> None:
    store = Store(s3_store.url.replace("golden", tmp_path.name))
    commit_all(plan_of(store), store, tmp_path / "x", {"teacher", "prompts_eval"})
    compile_plan(plan_of(store), tmp_path / "workflow.yaml")
    waits = nodes(yaml.safe_load((tmp_path / "workflow.yaml").read_text()))
    assert not {"teacher", "prompts-eval"} & waits.keys()
    assert waits["ptq"] == ""
    assert waits["regen-a"] == "prompts-a.Succeeded"


def test_placement_reaches_the_pod(rendered: Render) -> None:
    made = templates(yaml.safe_load(rendered(PAPER)[1]))
    qad = made["qad"]
    share = {"cpu": "12", "memory": "160Gi", "nvidia.com/gpu": "1"}
    assert qad["container"]["resources"] == {"requests": share, "limits": share}
    assert qad["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in qad["volumes"]
    assert made["measure-pair"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "g5.xlarge"}
    (token,) = made["prompts-a"]["container"]["env"]
    assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}}}
    assert made["qad"]["metadata"]["labels"]["app.kubernetes.io/component"] == "qad"


def test_only_what_may_succeed_is_tried_again(rendered: Render) -> None:
    retries = templates(yaml.safe_load(rendered(TINY)[1]))["qad"]["retryStrategy"]
    assert (retries["limit"], retries["retryPolicy"]) == ("2", "Always")
    rule = retries["expression"].replace("||", "or").replace("asInt", "int")

    def again(status: str, code: str) -> bool:
        last = type("Last", (), {"status": status, "exitCode": code})
        return bool(eval(rule, {"lastRetry": last, "int": int}))

    assert again("Error", "")
    assert [code for code in (0, 1, 2, 3, 75, 137, 143) if again("Failed", str(code))] == [75, 137, 143]


def test_what_argo_would_read_as_a_parameter_is_refused(s3_store: Store, tmp_path: Path) -> None:
    plan = plan_of(s3_store, TINY, "prompts.system='{{workflow.name}}'")
    with pytest.raises(UserError, match=r"prompts_eval: its config holds \{\{"):
        compile_plan(plan, tmp_path / "x.yaml")


def test_nothing_to_run_is_said(s3_store: Store, tmp_path: Path) -> None:
    plan = Plan("tiny", s3_store.url, (), plan_of(s3_store).cluster)
    with pytest.raises(UserError, match="everything is committed"):
        compile_plan(plan, tmp_path / "x.yaml")
