"""Where manifests and chart meet: one serving runtime, the rights to install it, the policies around it."""

import os
from typing import Any

import pytest
import yaml

from components.serving.arguments import OFFLINE
from pipelines.deployment.preflight import OWN, ROUTES
from tests.charts.conftest import given, render  # noqa: F401 (fixtures)
from tests.charts.test_objects import EVERYTHING, VARIANTS
from tests.manifests.conftest import MANIFESTS, Build
from tests.manifests.rules import reaches, rights

VERBS = {"get", "list", "watch", "create", "update", "patch", "delete"}
HEADER = """# The chart's runtime for InferenceServices made without it: model.args follow `serve /mnt/models`, and
# QDFLASH_SUMS in model.env is the sha256 of the bundle's SHA256SUMS; without it only damage on the way is found.
# Made from the chart: QDFLASH_REGENERATE=1 pytest tests/manifests
"""


def test_the_serving_runtime_is_the_chart_s_without_a_bundle(render) -> None:  # noqa: F811
    runtime = render()["ServingRuntime"]
    container = runtime["spec"]["containers"][0]
    container["image"] = "qdflash-vllm"
    container["command"] += container["args"][:2]
    container["args"] = container["args"][-4:]
    container["env"] = [{"name": name, "value": value} for name, value in {"HOME": "/tmp", **OFFLINE}.items()]
    runtime["metadata"] = {"name": "qdflash-vllm"}
    path = MANIFESTS / "base" / "serving-runtime.yaml"
    if os.environ.get("QDFLASH_REGENERATE"):
        path.write_text(HEADER + yaml.safe_dump(runtime, sort_keys=False))
    assert container["command"] == ["python", "-m", "components.serving.start", "serve", "/mnt/models"]
    assert yaml.safe_load(path.read_text()) == runtime


def test_the_deploy_account_may_install_the_chart_and_no_more(build: Build, render) -> None:  # noqa: F811
    groups = {"v1": ""}
    kinds: set[tuple[str, str]] = {("", "configmaps")}  # where Helm keeps its releases, as HELM_DRIVER=configmap says
    for changes in (*VARIANTS, *EVERYTHING):
        for one in render(changes).values():
            group = groups.get(one["apiVersion"], one["apiVersion"].rpartition("/")[0])
            kinds.add((group, plural(one["kind"])))
    objects = build("eks-a10g")
    held = rights(objects, "qdflash-deploy") - {("argoproj.io", "workflowtaskresults", verb) for verb in VERBS}
    written = {(group, resource, verb) for group, resource in kinds for verb in VERBS}
    waited = {
        (group, what, verb)
        for group, what in (("", "pods"), ("apps", "replicasets"))
        for verb in ("get", "list", "watch")
    }
    deployed = {(group, what, verb) for (group, what), verbs in (OWN | ROUTES).items() for verb in verbs}
    assert held == written | waited | deployed


@pytest.mark.parametrize("overlay", ["eks-a10g", "seaweedfs"])
def test_a_server_reaches_the_store_and_nothing_outside(build: Build, render, overlay: str) -> None:  # noqa: F811
    changes: dict[str, Any] = {"networkPolicy": {"storePorts": [8333]}} if overlay == "seaweedfs" else {}
    objects = render(changes)
    labels = objects["InferenceService"]["spec"]["predictor"]["labels"]
    together = [*build(overlay), objects["NetworkPolicy"]]
    assert reaches(
        together, labels, "10.1.2.3", 8333 if changes else 443, peer={"app.kubernetes.io/name": "seaweedfs"}
    )
    assert not reaches(together, labels, "1.1.1.1", 443)
    assert not reaches(together, labels, "169.254.169.254", 80)


def plural(kind: str) -> str:
    return kind.lower()[:-1] + "ies" if kind.endswith("y") else kind.lower() + "s"
