"""What objects for a cluster are held against: Kubernetes' schemas, those of tests/crds, and what a pod has to be."""

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator

CRDS = Path(__file__).parent / "crds"
VERSIONS = ("1.29", "1.37")
_APART = {"nullable", "default", "format"}  # of a CRD alone
CUSTOM = (
    "argoproj.io/",
    "serving.kserve.io/",
    "trainer.kubeflow.org/",
    "monitoring.coreos.com/",
    "keda.sh/",
    "gateway.networking.k8s.io/",
)


def faults(objects: list[dict[str, Any]]) -> list[str]:
    """Return every fault, with the object's name; of a custom kind without a CRD here, the pod within it alone."""
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
def crds() -> dict[tuple[str, str], Draft202012Validator]:
    """Return each custom kind's validator, by apiVersion and kind; a field that its schema lacks is a fault."""
    found = {}
    for api_version, kind, schema in (*_definitions(), *_single()):
        closed = _closed(schema)
        closed["properties"]["metadata"] = {"type": "object"}
        found[api_version, kind] = Draft202012Validator(closed)
    return found


def _definitions() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield apiVersion, kind and schema of CustomResourceDefinitions."""
    for path in CRDS.glob("*.json.gz"):
        spec = json.loads(gzip.decompress(path.read_bytes()))["spec"]
        for version in spec["versions"]:
            yield f"{spec['group']}/{version['name']}", spec["names"]["kind"], version["schema"]["openAPIV3Schema"]


def _single() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield apiVersion, kind and schema of kinds that have a file of their own."""
    for path in CRDS.glob("*.json"):
        schema = json.loads(path.read_text())
        (api_version,), (kind,) = (schema["properties"][name]["enum"] for name in ("apiVersion", "kind"))
        yield api_version, kind, schema


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    """Return a structural schema of Kubernetes as a JSON Schema that takes no field beside those it declares."""
    made = {key: value for key, value in node.items() if not key.startswith("x-kubernetes") and key not in _APART}
    if node.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
        made.pop("anyOf", None)
    if "properties" in node:
        made["properties"] = {name: _closed(child) for name, child in node["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties", "not"):
        if isinstance(node.get(key), dict):
            made[key] = _closed(node[key])
    for key in ("allOf", "anyOf", "oneOf"):  # these only add to what is declared beside them, so they close nothing
        if key in made:
            made[key] = [{**_closed(child), "additionalProperties": True} for child in made[key]]
    if node.get("nullable"):
        made["type"] = [node["type"], "null"]
    return made
