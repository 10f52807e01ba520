"""The objects of a deployment: the chart, rendered by Helm's own library, with the deploy stage's values."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from components.contract.errors import UserError
from pipelines.deployment.api import Object

CHART = Path(__file__).resolve().parents[2] / "charts" / "qdflash"
LABEL = "qdflash/objects"
LAST = ("InferenceService", "Deployment")
ROUTE = ("gateway.networking.k8s.io/v1", "HTTPRoute")


def route_of(name: str) -> tuple[str, str, str]:
    """Return the HTTPRoute that shares requests between a service and its canary; KServe has one of the bare name."""
    return *ROUTE, f"{name}-shares"


def canary_of(name: str) -> str:
    """Return what a service's canary is called."""
    return f"{name}-canary"


def read_values(path: Path) -> dict[str, Any]:
    """Read a file of the operator's values."""
    try:
        found = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--values {path}: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise UserError(f"--values {path}: no mapping; see charts/qdflash/values.yaml")
    return found


def over(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with ``changes`` over them, as Helm merges a second file of values."""
    result = copy.deepcopy(values)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = over(result[key], value) if both else value
    return result


def render(values: dict[str, Any], name: str, namespace: str) -> tuple[list[Object], dict[str, Any]]:
    """Return the chart's objects, the server last, and all values they were made of.

    The server's pods carry a digest of all objects as a label: another image or argument makes other pods, and which
    ones are of this deployment is known. Raises :class:`UserError` for values that the chart refuses.
    """
    import helm_python

    try:
        with helm_python.Chart.load(CHART) as chart:
            chart.validate_schema(values)
            files = chart.render(values, name=name, namespace=namespace)
            merged = chart.merge_values(values)
    except helm_python.HelmError as error:
        said = " ".join(str(error).split())[:400]
        raise UserError(f"charts/qdflash: {said}; give what is missing with --values FILE") from error
    found = [yaml.safe_load(text) for path, text in sorted(files.items()) if path.endswith(".yaml")]
    objects = sorted((one for one in found if one), key=lambda one: one["kind"] in LAST)
    for one in objects:
        one["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "qdflash"
    server = objects[-1]
    pods = server["spec"]["template"]["metadata"] if server["kind"] == "Deployment" else server["spec"]["predictor"]
    pods["labels"][LABEL] = hashlib.sha256(json.dumps(objects, sort_keys=True).encode()).hexdigest()[:16]
    return objects, merged


def pod_labels(objects: list[Object]) -> dict[str, str]:
    """Return the labels of the pods that serve."""
    spec = objects[-1]["spec"]
    return dict(spec["template"]["metadata"]["labels"] if "template" in spec else spec["predictor"]["labels"])


def port_of(objects: list[Object]) -> int:
    """Return the port of the container that serves."""
    found = {one["kind"]: one.get("spec", {}) for one in objects}
    pod = found["Deployment"]["template"]["spec"] if "Deployment" in found else found["ServingRuntime"]
    return int(pod["containers"][0]["ports"][0]["containerPort"])


def service_of(objects: list[Object]) -> dict[str, Any]:
    """Return name and port of the Service in front of the pods; KServe makes its own."""
    server = objects[-1]
    name = server["metadata"]["name"]
    if server["kind"] == "InferenceService":
        return {"name": f"{name}-predictor", "port": 80}
    return {"name": name, "port": port_of(objects)}
