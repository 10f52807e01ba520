"""Deploy: from a gated bundle to the values of the chart that serves it."""

from typing import Any

import yaml
from pydantic import Field

from components.contract.context import Input, Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import GateError
from components.contract.stage import Port

ROLE = "core"
VERSION = 3
MEMOISED = False
INPUTS = {
    "bundle": Port("the bundle to serve"),
    "verdict": Port("the gate's verdict on that bundle"),
}
OUTPUTS = {
    "values.yaml": "values of the chart charts/qdflash: image, bundle with its checksum and its acceptance length's "
    "lower bound, and every vLLM argument"
}


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
    measured = _measurements(inputs["verdict"], bundle.digest)
    if not measured:
        raise GateError(f"deploy: the verdict was not given on bundle {bundle.digest[:16]}; run its gate")
    serving = load_serving(inputs["bundle"].file("serving.yaml"))
    rendered = values(bundle, serving, config.profile, config.image, _floor(measured))
    storage_uri = rendered["bundle"]["uri"]
    (output.path / "values.yaml").write_text(yaml.safe_dump(rendered, sort_keys=False))
    output.log.event("rendered", profile=config.profile, storage_uri=storage_uri)
    return {"profile": config.profile, "storage_uri": storage_uri}


def _measurements(verdict: Input, digest: str) -> list[Input]:
    """Return what of the verdict's evidence was taken from the artifact with this digest."""
    evidence = [one for uris in verdict.artifact.manifest["inputs"].values() for one in map(Input, uris)]
    return [
        one
        for one in evidence
        if digest in {Input(uri).digest for uris in one.artifact.manifest["inputs"].values() for uri in uris}
    ]


def _floor(measured: list[Input]) -> float | None:
    """Return the lower 95 % bound of the bundle's acceptance length, or None where it was not measured."""
    lows = [(one.metrics.get("acceptance_length") or {}).get("low") for one in measured]
    return min((low for low in lows if low is not None), default=None)
