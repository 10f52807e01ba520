"""Where a recipe's images come from, and how placements reach pods."""

from pathlib import Path

import pytest
import yaml

from components.contract.errors import UserError
from components.store.backend import Store
from pipelines import argo, cluster, kubeflow
from pipelines.recipe import load_recipe
from pipelines.trainjob import spec
from tests.pipelines.planning import TINY, plan_of
from tests.schemas import faults


def image(role: str, letter: str) -> str:
    return f"registry.example/qdflash-{role}@sha256:{letter * 64}"


def test_images_default_to_the_lock_and_the_recipe_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOCK", tmp_path / "lock.yaml")
    with pytest.raises(UserError, match=r"cluster\.images\.core: not given"):
        load_recipe(TINY).cluster.image("core")
    (tmp_path / "lock.yaml").write_text(f"core: {image('core', 'a')}\ntrain: {image('train', 'a')}\n")
    chosen = load_recipe(TINY, [f"cluster.images.train={image('train', 'b')}"]).cluster
    assert chosen.image("core") == image("core", "a")
    assert chosen.image("train") == image("train", "b")
    with pytest.raises(UserError, match=r"cluster\.images\.vllm: not given"):
        chosen.image("vllm")


@pytest.mark.parametrize("text", ["core: registry.example/qdflash-core:latest", "gpu: x", "core: [", "- core"])
def test_a_lock_that_pins_nothing_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOCK", tmp_path / "lock.yaml")
    (tmp_path / "lock.yaml").write_text(text)
    with pytest.raises(UserError, match=r"lock\.yaml: not as qdflash images lock writes it"):
        load_recipe(TINY)


@pytest.mark.parametrize(
    "given",
    [
        "memory: 64",
        "secrets: {a b: {token: HF_TOKEN}}",
        "secrets: {hub: {to ken: HF_TOKEN}}",
        "secrets: {hub: {token: HF-TOKEN}}",
        "config_maps: {Store: {url: STORE}}",
        "node_selector: {no such key: x}",
        "node_selector: {pool: -}",
        "tolerations: [{key: nvidia.com/}]",
        "gpu_resource: my gpu",
        "priority: High",
        "storage_class: gp_3",
    ],
)
def test_what_kubernetes_would_refuse_is_refused_before(given: str) -> None:
    with pytest.raises(UserError, match=r"cluster\.tasks\.qad\." + given.partition(":")[0]):
        load_recipe(TINY, [f"cluster.tasks.qad={{{given}}}"])


def test_numbers_need_no_quotes() -> None:
    placed = load_recipe(TINY, ["cluster.tasks.qad={cpu: 0.5, node_selector: {gpus: 8}}"]).cluster.tasks["qad"]
    assert (placed.cpu, placed.node_selector) == ("0.5", {"gpus": "8"})


PLACED = "cluster.tasks.gptq={scratch: 500Gi, storage_class: gp3}"


def test_argo_gives_priority_a_volume_of_its_own_and_an_end(s3_store: Store, tmp_path: Path) -> None:
    high = "cluster.tasks.pack={priority: high}"
    argo.compile_plan(plan_of(s3_store, TINY, PLACED, high, "cluster.ttl_seconds=3600"), tmp_path / "x.yaml")
    workflow = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert faults([workflow | {"metadata": {"name": "x"}}]) == []
    assert workflow["spec"]["ttlStrategy"] == {"secondsAfterCompletion": 3600}
    made = {one["name"]: one for one in workflow["spec"]["templates"]}
    assert {name for name, one in made.items() if "priorityClassName" in one} == {"pack"}
    assert made["pack"]["priorityClassName"] == "high"
    gptq = made["gptq"]
    (volume,) = (one for one in gptq["volumes"] if one["name"] == "scratch")
    claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (claim["accessModes"], claim["storageClassName"]) == (["ReadWriteOnce"], "gp3")
    assert claim["resources"] == {"requests": {"storage": "500Gi"}}
    assert {"name": "scratch", "mountPath": "/tmp/qdflash"} in gptq["container"]["volumeMounts"]
    assert gptq["securityContext"] == {
        "fsGroup": 65532,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_kfp_gives_a_volume_of_its_own_and_an_end_and_refuses_priority(s3_store: Store, tmp_path: Path) -> None:
    kubeflow.compile_plan(plan_of(s3_store, TINY, PLACED, "cluster.ttl_seconds=3600"), tmp_path / "x.yaml")
    _, platform = yaml.safe_load_all((tmp_path / "x.yaml").read_text())
    kubernetes = platform["platforms"]["kubernetes"]
    assert kubernetes["pipelineConfig"]["resourceTtlOnCompletion"] == 3600
    (volume,) = kubernetes["deploymentSpec"]["executors"]["exec-gptq"]["genericEphemeralVolume"]
    assert (volume["mountPath"], volume["size"], volume["storageClassName"]) == ("/tmp/qdflash", "500Gi", "gp3")
    high = "cluster.tasks.pack={priority: high}"
    with pytest.raises(UserError, match="pack: cluster priority high: KFP sets none; compile for argo"):
        kubeflow.compile_plan(plan_of(s3_store, TINY, high), tmp_path / "x.yaml")


def test_the_volume_is_where_the_images_keep_their_state() -> None:
    dockerfile = (Path(__file__).parents[2] / "images" / "Dockerfile").read_text()
    assert f"QDFLASH_HOME={spec.HOME}" in dockerfile
    assert f"USER {spec.NOBODY}:{spec.NOBODY}" in dockerfile
