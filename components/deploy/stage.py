"""Deploy: from a gated bundle to an InferenceService and its ServingRuntime."""

from typing import Any

import yaml
from pydantic import Field

from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import GateError
from components.contract.stage import Port

ROLE = "core"
VERSION = 1
MEMOISED = False
INPUTS = {
    "bundle": Port("the bundle to serve"),
    "verdict": Port("the gate's verdict on that bundle"),
}
OUTPUTS = {"kserve.yaml": "ServiceAccount, ServingRuntime and InferenceService, in the order to apply"}


class Config(StageConfig):
    """Where the pair is served; the vLLM arguments come from the bundle."""

    name: str = Field(
        "qdflash", description="Name of the InferenceService", pattern=r"^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$"
    )
    namespace: str = Field("qdflash", description="Kubernetes namespace")
    profile: str = Field("a10g", description="Serving profile of the bundle")
    image: str = Field("qdflash-vllm", description="The vllm role's image, by digest on a cluster")
    service_account: str = Field("qdflash-serving", description="Account whose role or secret may read the bundle")
    node_selector: dict[str, str] = Field(
        {"node.kubernetes.io/instance-type": "g5.xlarge"}, description="Labels of the accelerator pool"
    )
    tolerations: list[dict[str, str]] = Field(
        [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        description="Taints of the pool that the pod tolerates",
    )


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Write ``kserve.yaml`` for a bundle whose gate passed. Metrics: ``name``, ``storage_uri``, ``applied`` (False).

    Raises :class:`GateError` when the verdict is a refusal or was given on another bundle's measurements.
    """
    from components.deploy.kserve import objects
    from components.serving.profiles import load_serving

    if not inputs["verdict"].metrics["passed"]:
        raise GateError(f"deploy: the gate refused this bundle: {', '.join(inputs['verdict'].metrics['failed'])}")
    bundle = inputs["bundle"].artifact
    serving = load_serving(inputs["bundle"].file("serving.yaml"))
    storage_uri = bundle.store.uri(bundle.key(""))
    rendered = objects(config, serving, storage_uri)
    (output.path / "kserve.yaml").write_text(yaml.safe_dump_all(rendered, sort_keys=False))
    output.log.event("rendered", name=config.name, storage_uri=storage_uri)
    return {"name": config.name, "namespace": config.namespace, "storage_uri": storage_uri, "applied": False}
