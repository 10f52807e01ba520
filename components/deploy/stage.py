"""Deploy: from a gated bundle to the values of the chart that serves it."""

from typing import Any

import yaml
from pydantic import Field

from components.contract.context import Input, Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import GateError
from components.contract.stage import Port

ROLE = "core"
VERSION = 2
MEMOISED = False
INPUTS = {
    "bundle": Port("the bundle to serve"),
    "verdict": Port("the gate's verdict on that bundle"),
}
OUTPUTS = {"values.yaml": "values of the chart charts/qdflash: image, bundle, and every vLLM argument"}


class Config(StageConfig):
    """What serves the pair; where it runs is in the chart's values, the vLLM arguments come from the bundle."""

    profile: str = Field("a10g", description="Serving profile of the bundle")
    image: str = Field("qdflash-vllm", description="The vllm role's image; the chart takes one by digest only")


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Write ``values.yaml`` for a bundle whose gate passed. Metrics: ``profile``, ``storage_uri``.

    Raises :class:`GateError` when the verdict is a refusal, or was given on another bundle's measurements.
    """
    from components.deploy.values import values
    from components.serving.profiles import load_serving

    if not inputs["verdict"].metrics["passed"]:
        raise GateError(f"deploy: the gate refused this bundle: {', '.join(inputs['verdict'].metrics['failed'])}")
    bundle = inputs["bundle"].artifact
    if bundle.digest not in _measured(inputs["verdict"]):
        raise GateError(f"deploy: the verdict was not given on bundle {bundle.digest[:16]}; run its gate")
    serving = load_serving(inputs["bundle"].file("serving.yaml"))
    rendered = values(bundle, serving, config.profile, config.image)
    storage_uri = rendered["bundle"]["uri"]
    (output.path / "values.yaml").write_text(yaml.safe_dump(rendered, sort_keys=False))
    output.log.event("rendered", profile=config.profile, storage_uri=storage_uri)
    return {"profile": config.profile, "storage_uri": storage_uri}


def _measured(verdict: Input) -> set[str]:
    """Return the digests of what the verdict's evidence was taken from."""
    evidence = [one for uris in verdict.artifact.manifest["inputs"].values() for one in map(Input, uris)]
    return {Input(uri).digest for one in evidence for uris in one.artifact.manifest["inputs"].values() for uri in uris}
