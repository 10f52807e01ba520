"""Every overlay against the schemas and this project's promises."""

import contextlib
import copy
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.contract.stage import STAGES
from pipelines import seaweed
from pipelines.cli import SHIPPED
from pipelines.recipe import load_recipe
from tests.manifests.conftest import KEYS, MANIFESTS, OVERLAYS, Build, kustomize
from tests.manifests.rules import excess, reaches, rights
from tests.schemas import faults, pod_spec

GOLDEN = Path(__file__).parents[1] / "pipelines" / "golden"
PUBLIC, PRIVATE, METADATA = "1.1.1.1", "10.1.2.3", "169.254.169.254"
OUTSIDE = {"model", "prompts"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_renders_to_objects_of_the_schemas(build: Build, overlay: str) -> None:
    objects = build(overlay)
    assert faults(objects) == []
    assert {one["metadata"].get("namespace") for one in objects if one["kind"] != "Namespace"} == {"qdflash"}
    kinds = {one["kind"] for one in objects}
    assert kinds >= {"Namespace", "ServiceAccount", "Role", "RoleBinding", "ResourceQuota", "LimitRange"}
    assert kinds >= {"NetworkPolicy", "TrainingRuntime", "ServingRuntime", "ConfigMap"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_accounts_have_the_rights_they_use_and_no_more(build: Build, overlay: str) -> None:
    objects = build(overlay)
    report = {("argoproj.io", "workflowtaskresults", verb) for verb in ("create", "patch")}
    report.add(("", "configmaps", "get"))
    assert excess(objects) == []
    assert rights(objects, "qdflash-stage") == report
    settings = [
        rule["resourceNames"]
        for one in objects
        if one["kind"] == "Role" and one["metadata"]["name"] in ("qdflash-stage", "qdflash-launcher")
        for rule in one["rules"]
        if rule["resources"] == ["configmaps"]
    ]
    assert settings == [["kfp-launcher"]] * 2
    launcher = rights(objects, "qdflash-launcher") - report
    assert {resource for _, resource, verb in launcher if verb not in ("get", "list", "watch")} == {"trainjobs"}
    assert {resource for _, resource, _ in launcher} == {"trainjobs", "pods", "pods/log"}


def test_a_store_in_the_cluster_asks_for_the_keys_first(tmp_path: Path) -> None:
    shutil.copytree(MANIFESTS, tmp_path / "m", ignore=shutil.ignore_patterns("store.env"))
    done = kustomize(tmp_path / "m" / "overlays" / "seaweedfs")
    assert done.returncode
    assert "store.env" in done.stderr


def test_images_without_digests_are_found(tree: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(tree, tmp_path / "m")
    path = mine / "overlays" / "kind" / "kustomization.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"images": []}))
    path = mine / "overlays" / "seaweedfs" / "kustomization.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"images": []}))
    found = faults(list(yaml.safe_load_all(kustomize(mine / "overlays" / "kind").stdout)))
    named = {match[1] for one in found if (match := re.search(r"image (\S+) is not given by digest", one))}
    assert named == {"qdflash-core", "qdflash-train", "qdflash-vllm"}


def test_keys_are_in_one_secret_and_nowhere_else(build: Build) -> None:
    for overlay in OVERLAYS:
        for one in build(overlay):
            if one["kind"] == "Secret":
                assert set(one["data"]) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
            else:
                assert "of-these-tests" not in yaml.safe_dump(one)
    assert "Secret" not in {one["kind"] for one in build("eks-a10g")}
    assert not list(MANIFESTS.rglob("store.env")) or "store.env" in (MANIFESTS.parent / ".gitignore").read_text()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_model_and_prompts_reach_outside(build: Build, overlay: str) -> None:
    objects = build(overlay)
    for stage in STAGES:
        labels = {"app.kubernetes.io/part-of": "qdflash", "app.kubernetes.io/component": stage}
        assert reaches(objects, labels, PUBLIC, 443) is (stage in OUTSIDE), stage
        assert not reaches(objects, labels, PUBLIC, 80)
        assert not reaches(objects, labels, METADATA, 80)
        assert not reaches(objects, labels, METADATA, 443)
        assert reaches(objects, labels, PRIVATE, 443)
    server = {"app.kubernetes.io/name": "qdflash", "app.kubernetes.io/instance": "pair"}
    for other in ({}, {"app.kubernetes.io/component": "model"}, server):
        assert not reaches(objects, other, PUBLIC, 443)
    assert not reaches(objects, server, PRIVATE, 443)  # until the chart adds its own policy


def test_the_pipeline_s_pods_carry_the_labels_that_policies_select() -> None:
    for path in GOLDEN.glob("*.yaml"):
        spec, platform = yaml.load_all(path.read_text(), yaml.CSafeLoader)
        pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        for name, executor in spec["deploymentSpec"]["executors"].items():
            stage = executor["container"]["args"][1].removeprefix("components.")
            labels = pods[name]["podMetadata"]["labels"]
            assert labels == {"app.kubernetes.io/part-of": "qdflash", "app.kubernetes.io/component": stage}


def test_the_nodes_of_a_train_job_reach_each_other_and_nobody_else(build: Build) -> None:
    trainer = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    objects = build("eks-a10g")
    assert reaches(objects, trainer, PRIVATE, 29500, peer=trainer)
    assert not reaches(objects, trainer, PRIVATE, 29500, peer={"app.kubernetes.io/component": "qad"})
    runtime = next(one for one in objects if one["kind"] == "TrainingRuntime")
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    assert job["metadata"]["labels"] == trainer
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"].items() >= trainer.items()
    # Every node fails its job at once, and stays: the launcher reads how it ended, and its retry goes on.
    assert (job["spec"]["backoffLimit"], pod["spec"]["restartPolicy"]) == (0, "Never")


@pytest.mark.parametrize("overlay", ["seaweedfs", "kind"])
def test_every_pod_reaches_the_store_in_the_cluster_and_only_its_s3(build: Build, overlay: str) -> None:
    objects = build(overlay)
    store = next(one for one in objects if one["kind"] == "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    service = next(one for one in objects if one["kind"] == "Service")
    assert service["spec"]["selector"].items() <= store.items()
    settings = next(one for one in objects if one["kind"] == "ConfigMap")["data"]
    assert settings["AWS_ENDPOINT_URL"] == f"http://{service['metadata']['name']}.qdflash.svc:8333"
    for labels in ({}, {"app.kubernetes.io/name": "qdflash"}):
        assert reaches(objects, labels, PRIVATE, 8333, peer=store)
        assert not reaches(objects, labels, PRIVATE, 8888, peer=store)
    ingress = [
        port["port"]
        for one in objects
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "seaweedfs"
        for rule in one["spec"]["ingress"]
        for port in rule["ports"]
    ]
    assert ingress == [8333]


def test_the_quota_holds_the_4b_recipe_and_a_server(build: Build) -> None:
    """Two training tasks run beside each other, and one that serves vLLM for a stage."""
    hard = next(one for one in build("eks-a10g") if one["kind"] == "ResourceQuota")["spec"]["hard"]
    cluster = load_recipe(SHIPPED["qwen3.5-4b-a10g"], []).cluster
    train, vllm = cluster.roles["train"], cluster.roles["vllm"]
    cores = [2 * float(train.cpu or 0), float(vllm.cpu or 0), 3]
    memory = [2 * gibibytes(train.memory), gibibytes(vllm.memory), 12]
    assert sum(cores) <= float(hard["requests.cpu"])
    assert sum(memory) <= gibibytes(hard["requests.memory"])
    assert 2 * (train.gpus or 0) + (vllm.gpus or 0) + 1 <= int(hard["requests.nvidia.com/gpu"])


def test_without_a_gpu_nothing_asks_for_one(build: Build) -> None:
    objects = build("kind")
    hard = next(one for one in objects if one["kind"] == "ResourceQuota")["spec"]["hard"]
    assert hard["requests.nvidia.com/gpu"] == "0"
    for one in objects:
        for container in (pod_spec(one) or {}).get("containers", ()):
            assert "nvidia.com/gpu" not in str(container["resources"]), one["metadata"]["name"]
            assert gibibytes(container["resources"]["requests"]["memory"]) <= 4


@pytest.mark.parametrize(
    ("kind", "path", "value", "fault"),
    [
        ("ResourceQuota", ("spec", "hard"), ["pods"], "hard"),
        ("LimitRange", ("spec", "limits", 0, "defaults"), {}, "defaults"),
        ("NetworkPolicy", ("spec", "podselector"), {}, "podselector"),
        ("RoleBinding", ("roleRef", "kind"), 1, "kind"),
        ("StatefulSet", ("spec", "template", "spec", "securityContext"), {}, "seccomp"),
        ("StatefulSet", ("spec", "template", "spec", "automountServiceAccountToken"), True, "token"),
        ("ServingRuntime", ("spec", "containers", 0, "readinessProbe", "exec"), ["true"], "exec"),
        ("TrainingRuntime", ("spec", "template", "spec", "replicatedJobs", 0, "template", "spec", "template", "spec",
                             "containers", 0, "resources"), {}, "limits"),
    ],
)  # fmt: skip
def test_the_schema_checks_bite(build: Build, kind: str, path: tuple, value: Any, fault: str) -> None:
    broken = copy.deepcopy(next(one for one in build("kind") if one["kind"] == kind))
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    found = faults([broken])
    assert any(fault in one for one in found), found


@pytest.mark.parametrize(
    "rule",
    [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]},
        {"apiGroups": ["*"], "resources": ["pods"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create"]},
        {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles"], "verbs": ["create"]},
    ],
)
def test_an_excess_of_rights_is_found(build: Build, rule: dict[str, Any]) -> None:
    objects = copy.deepcopy(build("eks-a10g"))
    role = next(one for one in objects if one["kind"] == "Role" and one["metadata"]["name"] == "qdflash-stage")
    role["rules"].append(rule)
    assert len(excess(objects)) == 1
    assert excess([*objects, {"kind": "ClusterRoleBinding", "metadata": {"name": "x"}}])[0] == "ClusterRoleBinding x"


def test_a_policy_that_opens_too_much_is_found(build: Build) -> None:
    objects = build("eks-a10g")
    qad = {"app.kubernetes.io/part-of": "qdflash", "app.kubernetes.io/component": "qad"}
    without = [one for one in objects if one["kind"] != "NetworkPolicy"]
    assert reaches(without, qad, PUBLIC, 443)
    opened = copy.deepcopy(objects)
    policy = next(one for one in opened if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "outside")
    policy["spec"]["podSelector"]["matchExpressions"][0]["values"].append("qad")
    assert reaches(opened, qad, PUBLIC, 443)


@pytest.fixture
def in_cluster(build: Build, tmp_path: Path) -> Iterator[tuple[dict[str, str], list[int]]]:
    """The overlay's own SeaweedFS command, with its folder and its ports moved: its environment, the inner ports."""
    workload = next(one for one in build("kind") if one["kind"] == "StatefulSet")
    container = workload["spec"]["template"]["spec"]["containers"][0]
    inner = ("master", "volume", "filer")
    with contextlib.ExitStack() as held:
        listeners = {name: held.enter_context(socket.create_server(("127.0.0.1", 0))) for name in (*inner, "s3")}
        listeners |= {
            f"{name}.port.grpc": held.enter_context(socket.create_server(("127.0.0.1", 0))) for name in inner
        }
        ports = {name: listener.getsockname()[1] for name, listener in listeners.items()}
    argv = [seaweed.binary(), *(word.replace("/data", str(tmp_path)) for word in container["command"][1:])]
    argv = [word for word in argv if not word.startswith("-s3.port=")]
    argv += [f"-{name if 'port' in name else f'{name}.port'}={port}" for name, port in ports.items()]
    keys = dict(line.split("=", 1) for line in KEYS.split())
    process = subprocess.Popen(argv, env={**os.environ, **keys}, stderr=subprocess.DEVNULL, cwd=tmp_path)
    endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.2:{ports['s3']}", "AWS_REGION": "us-east-1"}
    yield {**keys, **endpoint}, [ports[name] for name in inner]
    process.kill()
    process.wait()


@pytest.mark.slow
def test_the_store_in_the_cluster_takes_its_keys_and_hides_what_asks_for_none(in_cluster) -> None:
    import botocore.session
    from botocore.exceptions import BotoCoreError, ClientError

    environment, inner = in_cluster

    def client(secret: str) -> Any:
        return botocore.session.Session().create_client(
            "s3",
            region_name=environment["AWS_REGION"],
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=secret,
        )

    end = time.monotonic() + 60
    while True:
        try:
            client(environment["AWS_SECRET_ACCESS_KEY"]).put_object(Bucket="qdflash", Key="runs/x", Body=b"x")
            break
        except (ClientError, BotoCoreError):
            assert time.monotonic() < end
            time.sleep(0.5)
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        client("guess").get_object(Bucket="qdflash", Key="runs/x")
    for port in inner:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def gibibytes(text: str | None) -> float:
    match = re.fullmatch(r"([0-9.]+)(Mi|Gi)", text or "0Gi")
    assert match is not None
    return float(match[1]) / (1024 if match[2] == "Mi" else 1)
