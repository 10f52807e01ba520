"""The KServe objects of one bundle, as plain mappings in the order to apply them.

One namespaced ServingRuntime carries the container and every vLLM argument; the InferenceService names it and the
bundle's prefix. ``storageUri`` ends in a slash: the storage initialiser lists by raw prefix and would otherwise also
fetch neighbours whose name begins alike.
"""

from typing import Any

from components.contract.errors import UserError
from components.deploy.stage import Config
from components.serving.arguments import arguments, environment
from components.serving.profiles import DRAFT_FOLDER, Serving

MODELS = "/mnt/models"
PORT = 8080


def objects(config: Config, serving: Serving, storage_uri: str) -> list[dict[str, Any]]:
    """Return ServiceAccount, ServingRuntime and InferenceService for ``config.profile``.

    Raises :class:`UserError` when the bundle has no such profile or leaves the number of drafted tokens open.
    """
    profile = serving.profile(config.profile)
    if profile.num_speculative_tokens is None:
        raise UserError(f"deploy: profile {config.profile} of serving.yaml sets no num_speculative_tokens")
    command = arguments(
        profile,
        MODELS,
        f"{MODELS}/{DRAFT_FOLDER}",
        served_model_name=serving.served_model_name,
        host="0.0.0.0",
        port=PORT,
    )
    labels = {"app.kubernetes.io/name": "qdflash", "app.kubernetes.io/instance": config.name}
    metadata = {"namespace": config.namespace, "labels": labels}
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": config.service_account, **metadata},
    }
    runtime = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": {"name": config.name, **metadata},
        "spec": {
            "supportedModelFormats": [{"name": "qdflash", "version": "1"}],
            "protocolVersions": ["v2"],
            "multiModel": False,
            "containers": [_container(config.image, command, environment(profile))],
            "volumes": [
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": config.name,
            **metadata,
            "annotations": {"serving.kserve.io/deploymentMode": "Standard"},
        },
        "spec": {
            "predictor": {
                "serviceAccountName": config.service_account,
                "minReplicas": 1,
                "maxReplicas": 1,
                # One GPU a node: a surge pod would wait for the very GPU it is to replace.
                "deploymentStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
                "nodeSelector": config.node_selector,
                "tolerations": config.tolerations,
                "model": {
                    "modelFormat": {"name": "qdflash", "version": "1"},
                    "runtime": config.name,
                    "storageUri": storage_uri,
                },
            }
        },
    }
    return [account, runtime, service]


def _container(image: str, command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    return {
        "name": "kserve-container",
        "image": image,
        "command": command[:1],
        "args": command[1:],
        "env": [{"name": name, "value": value} for name, value in {**variables, "HOME": "/tmp"}.items()],
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "resources": {
            "requests": {"cpu": "3", "memory": "12Gi", "nvidia.com/gpu": "1"},
            "limits": {"cpu": "4", "memory": "13Gi", "nvidia.com/gpu": "1"},
        },
        "securityContext": {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "startupProbe": {**_http("/health"), "periodSeconds": 10, "failureThreshold": 120},
        "readinessProbe": {**_http("/health"), "periodSeconds": 10, "failureThreshold": 3},
        "livenessProbe": {**_http("/health"), "periodSeconds": 30, "failureThreshold": 5},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}],
    }


def _http(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": PORT}, "timeoutSeconds": 5}
