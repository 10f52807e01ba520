"""The kinds that the fake knows, and the schema that each write is held against."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema
import referencing
from kubernetes_validate.utils import schema_contents

from tests.schemas import crds

KUBERNETES = "1.37"


@dataclass(frozen=True)
class Resource:
    """One kind and its path; ``custom`` kinds are there when their CRD is installed."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False
    custom: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def named(self) -> str:
        """As error messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


RESOURCES = (
    Resource("", "v1", "namespaces", "Namespace", namespaced=False),
    Resource("", "v1", "nodes", "Node", namespaced=False, status=True),
    Resource("", "v1", "pods", "Pod", status=True),
    Resource("", "v1", "services", "Service", status=True),
    Resource("", "v1", "serviceaccounts", "ServiceAccount"),
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "secrets", "Secret"),
    Resource("apps", "v1", "deployments", "Deployment", status=True),
    Resource("coordination.k8s.io", "v1", "leases", "Lease"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", status=True),
    Resource("serving.kserve.io", "v1alpha1", "servingruntimes", "ServingRuntime", custom=True),
    Resource("serving.kserve.io", "v1beta1", "inferenceservices", "InferenceService", status=True, custom=True),
    Resource("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime", custom=True),
    Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob", status=True, custom=True),
    Resource("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor", custom=True),
    Resource("monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule", custom=True),
    Resource("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject", status=True, custom=True),
    Resource("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute", status=True, custom=True),
)
BY_PATH = {(one.group, one.version, one.plural): one for one in RESOURCES}
BY_KIND = {(one.api_version, one.kind): one for one in RESOURCES}


def faults(one: dict[str, Any]) -> list[str]:
    """Return what the kind's schema refuses; a custom kind that tests/crds has no schema of has none."""
    errors = _validator(one["apiVersion"], one["kind"])
    found = errors.iter_errors(json.loads(json.dumps(one))) if errors else ()
    return [f"{'.'.join(map(str, error.path)) or one['kind']}: {error.message[:200]}" for error in found]


@cache
def _validator(api_version: str, kind: str) -> Any:
    if BY_KIND[api_version, kind].custom:
        return crds().get((api_version, kind))
    folder = f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
    group = api_version.replace(".k8s.io", "").replace("/", "-")
    schema = schema_contents(f"{folder}/{kind.lower()}-{group}.json", KUBERNETES)
    return jsonschema.Draft202012Validator(schema, registry=_definitions(folder))


@cache
def _definitions(folder: str) -> referencing.Registry:
    contents = schema_contents(f"{folder}/_definitions.json", KUBERNETES)
    return referencing.Resource.from_contents(contents) @ referencing.Registry()
