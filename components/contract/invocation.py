"""From a config and the addresses of its inputs to the argv that runs a stage, and the artifact it will write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.contract.context import Input
from components.contract.digest import StageConfig, stage_digest
from components.contract.stage import load


@dataclass(frozen=True)
class Invocation:
    """One run of a stage. ``argv`` follows the interpreter; ``uri`` is ``<store>/<stage>/<digest>``."""

    stage: str
    argv: tuple[str, ...]
    digest: str
    uri: str


def invocation(
    stage: str, store_url: str, config: StageConfig, inputs: Mapping[str, Sequence[str]], salt: str | None = None
) -> Invocation:
    """Return how to run ``stage`` on ``inputs`` (port to addresses, in order); nothing has to exist yet."""
    module = load(stage)
    digests = {port: [Input(uri).digest for uri in uris] for port, uris in inputs.items() if uris}
    digest = stage_digest(stage, module.VERSION, config, digests, salt)
    uri = f"{store_url.rstrip('/')}/{stage}/{digest}"
    argv = ["-m", f"components.{stage}", "--config", config.model_dump_json()]
    for port, uris in inputs.items():
        for one in uris:
            argv += ["--input", f"{port}={one}"]
    argv += ["--output", uri]
    if salt is not None:
        argv += ["--salt", salt]
    return Invocation(stage, tuple(argv), digest, uri)
