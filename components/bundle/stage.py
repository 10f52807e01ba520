"""Bundle: put a target and its drafter into one prefix that anything can serve."""

import json
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from components.bundle.card import card
from components.bundle.fit import check_fit, context_length
from components.bundle.lineage import lineage
from components.bundle.window import window_of, with_window
from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig, file_sha256
from components.contract.errors import UserError
from components.contract.stage import Port
from components.serving.profiles import (
    DRAFT_FOLDER,
    PROFILES,
    SERVING_FILE,
    SUMS_FILE,
    Profile,
    Serving,
    write_serving,
)
from components.store.links import link

ROLE = "core"
VERSION = 3
INPUTS = {
    "target": Port("the target: a model folder, usually packed W4A16"),
    "drafter": Port("the DFlash drafter for it"),
    "windows": Port("the measurement of windows that window auto goes by", optional=True),
}
OUTPUTS = {
    "*": "the target's files, unchanged",
    "draft/*": "the drafter's files, unchanged but for its config where another window is set",
    "serving.yaml": "served model name, and every vLLM argument per accelerator profile",
    "README.md": "model card: what it is, where it comes from, licences, how to serve it",
    "lineage.json": "digest, config and inputs of every artifact that led here, down to the prompts",
    "SHA256SUMS": "checksums of all files, for sha256sum -c",
}
CARD, LINEAGE = "README.md", "lineage.json"
OWN = {SERVING_FILE, CARD, LINEAGE, SUMS_FILE}


class Config(StageConfig):
    """What the bundle says of itself."""

    serving: Serving = Field(
        Serving(), description="Served model name and vLLM arguments per accelerator; what is left out stays as here"
    )
    window: Literal["trained", "auto"] | PositiveInt | None = Field(
        "trained",
        description="The drafter's attention window, tokens: as trained, null for full attention, or auto for the one "
        "that the windows input chose",
    )
    base_model: str = Field("", description="Name of the model that the target was made from")
    base_model_licence: str = Field("", description="Its licence")
    data: str = Field("", description="Where the prompts come from")
    data_licence: str = Field("", description="Their licence")

    @field_validator("serving", mode="before")
    @classmethod
    def _over_defaults(cls, given: Any) -> Any:
        """Lay the given profiles over the shipped ones, field by field."""
        if not isinstance(given, dict) or not isinstance(given.get("profiles"), dict):
            return given
        shipped = {name: profile.model_dump() for name, profile in PROFILES.items()}
        profiles = {
            name: {**shipped.get(name, {}), **fields} if isinstance(fields, dict) else fields
            for name, fields in {**shipped, **given["profiles"]}.items()
        }
        return {**given, "profiles": profiles}


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Check that the pair fits, link its files and write what goes beside them."""
    target, drafter = inputs["target"].path, inputs["drafter"].path
    shape, window = check_fit(target, drafter), _window(config, inputs)
    serving = _resolved(config.serving, shape.block_size, context_length(target))
    link(target, output.path, leave_out=OWN | {DRAFT_FOLDER})
    if window == "trained":
        link(drafter, output.path / DRAFT_FOLDER, leave_out=set())
    else:
        with_window(drafter, output.path / DRAFT_FOLDER, window)
    write_serving(output.path, serving)
    ancestors = lineage({port: inputs[port] for port in INPUTS if port in inputs})
    (output.path / LINEAGE).write_text(json.dumps(ancestors, indent=1, sort_keys=True))
    sources = {
        "base_model": config.base_model,
        "base_model_licence": config.base_model_licence,
        "data": config.data,
        "data_licence": config.data_licence,
    }
    (output.path / CARD).write_text(card(output.path, serving, shape, ancestors, sources))
    sizes = {path: path.stat().st_size for path in sorted(output.path.rglob("*")) if path.is_file()}
    sums = [f"{file_sha256(path)}  {path.relative_to(output.path).as_posix()}\n" for path in sizes]
    (output.path / SUMS_FILE).write_text("".join(sums))
    draft_bytes = sum(size for path, size in sizes.items() if path.is_relative_to(output.path / DRAFT_FOLDER))
    return {
        "files": len(sizes) + 1,
        "target_bytes": sum(sizes.values()) - draft_bytes,
        "draft_bytes": draft_bytes,
        "block_size": shape.block_size,
        "window": window_of(output.path / DRAFT_FOLDER),
        "ancestors": len(ancestors["artifacts"]),
    }


def _window(config: Config, inputs: Inputs) -> Any:
    """Return ``trained``, a number of tokens, or None for full attention."""
    if config.window != "auto":
        return config.window
    if "windows" not in inputs or "window" not in inputs["windows"].metrics:
        raise UserError(
            "window is auto, which needs a measurement of windows: bind a measure artifact as input windows"
        )
    return inputs["windows"].metrics["window"]["chosen"]


def _resolved(serving: Serving, block_size: int, context: int | None) -> Serving:
    """Spell out what profiles leave open: drafted tokens, and the graph sizes of one sequence.

    Lengths are cut to ``context``, the longest that the target knows: vLLM starts with no more.
    """
    profiles: dict[str, Profile] = {}
    for name, profile in serving.profiles.items():
        tokens = profile.num_speculative_tokens or block_size - 1
        if tokens > block_size - 1:
            raise UserError(
                f"serving.profiles.{name}.num_speculative_tokens is {tokens}; "
                f"the drafter's block size {block_size} allows at most {block_size - 1}"
            )
        graphs = profile.cudagraph_capture_sizes
        if graphs is None and not profile.enforce_eager and profile.max_num_seqs == 1:
            graphs = (1, 1 + tokens)
        lengths = [length for length in (profile.max_model_len, context) if length is not None]
        profiles[name] = profile.model_copy(
            update={
                "num_speculative_tokens": tokens,
                "cudagraph_capture_sizes": graphs,
                "max_model_len": min(lengths, default=None),
            }
        )
    return serving.model_copy(update={"profiles": profiles})
