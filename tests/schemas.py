"""What objects for a cluster are held against: Kubernetes' schemas, the CRDs' where they lie beside the project, and
what every pod here has to be.
"""

import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate

CRDS = Path(__file__).parents[2] / "shared" / "crds" / "validate.py"
VERSIONS = ("1.29", "1.37")
CUSTOM = ("argoproj.io/", "serving.kserve.io/", "trainer.kubeflow.org/", "monitoring.coreos.com/", "keda.sh/")


def faults(objects: list[dict[str, Any]]) -> list[str]:
    """Return every fault, with the object's name; nothing is skipped but CRDs that are not at hand."""
    return [
        f"{one['kind']}/{one['metadata']['name']}: {fault}"
        for one in objects
        for fault in (*_schema_faults(json.dumps(one, sort_keys=True)), *_pod_faults(one))
    ]


@cache
def _schema_faults(text: str) -> list[str]:
    """Check one object's JSON; variants that share an object pay once."""
    one, found = json.loads(text), []
    if one["apiVersion"].startswith(CUSTOM):
        if validator := crds().get((one["apiVersion"], one["kind"])):
            found += [f"{'/'.join(map(str, e.path))}: {e.message[:200]}" for e in validator.iter_errors(one)]
        spec = pod_spec(one)
        if not spec:
            return found
        one = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "within"}, "spec": spec}
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {'/'.join(map(str, error.path))}: {error.message[:200]}")
    return found


def pod_spec(one: dict[str, Any]) -> dict[str, Any] | None:
    """Return the pod inside an object of any kind, or None; a ServingRuntime and its predictor are half a pod each."""
    spec = one.get("spec", {})
    match one["kind"]:
        case "Pod":
            return spec
        case "Deployment" | "StatefulSet" | "Job":
            return spec["template"]["spec"]
        case "ServingRuntime":
            return {key: spec[key] for key in ("containers", "volumes") if key in spec}
        case "InferenceService":
            own = {"model", "minReplicas", "maxReplicas", "deploymentStrategy", "labels"}
            predictor = {key: value for key, value in spec["predictor"].items() if key not in own}
            return {"containers": [{"name": "of-the-runtime"}], **predictor}
        case "TrainingRuntime":
            return spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return None


def _pod_faults(one: dict[str, Any]) -> Iterator[str]:
    """Say what of the restricted pod security standard, and of this project's own rules, a pod breaks."""
    spec = pod_spec(one) or {}
    if one["kind"] != "ServingRuntime" and spec:
        if spec.get("automountServiceAccountToken") is not False:
            yield "mounts a token of the Kubernetes API"
        if spec.get("securityContext", {}).get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield "no seccomp profile"
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        if container["name"] == "of-the-runtime":
            continue
        context, name = container.get("securityContext", {}), container["name"]
        if not context.get("runAsNonRoot") or not context.get("readOnlyRootFilesystem"):
            yield f"{name}: root, or a root file system that can be written"
        if context.get("allowPrivilegeEscalation") is not False or context.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{name}: keeps privileges"
        resources = container.get("resources", {})
        if not {"cpu", "memory"} <= resources.get("requests", {}).keys() & resources.get("limits", {}).keys():
            yield f"{name}: no requests and limits of cpu and memory"
        if "@sha256:" not in container["image"]:
            yield f"{name}: image {container['image']} is not given by digest"
        if secret := [one["name"] for one in container.get("env", ()) if _is_secret(one)]:
            yield f"{name}: {secret} in plain text"


def _is_secret(variable: dict[str, Any]) -> bool:
    return "value" in variable and any(word in variable["name"] for word in ("KEY", "SECRET", "TOKEN", "PASSWORD"))


@cache
def crds() -> dict[tuple[str, str], Any]:
    if not CRDS.exists():
        return {}
    spec = importlib.util.spec_from_file_location("crds", CRDS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_schemas()
