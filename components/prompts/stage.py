"""Declaration and run of the ``prompts`` stage."""

from typing import Any, Self

from pydantic import Field, model_validator

from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.stage import Port

ROLE = "core"
VERSION = 1
INPUTS = {
    "files": Port("JSONL files of {id?, category?, conversations | messages}", optional=True, many=True),
    "exclude": Port("earlier prompts artifacts, whose prompts are not drawn again", optional=True, many=True),
}
OUTPUTS = {
    "part-*.jsonl": "rows {id, category, conversations}, each ending on a user turn",
    "statistics.json": "prompts by category, and rows dropped by reason",
}


class Dataset(StageConfig):
    """A data set on the Hugging Face hub; a token for gated ones comes from ``HF_TOKEN``."""

    id: str = Field(description="owner/name", pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str = Field(description="commit: 40 hex digits, never a branch", pattern=r"^[0-9a-f]{40}$")
    subset: str | None = Field(None, description="configuration of the data set, where it has several")
    splits: list[str] = Field(["train"], description="splits to read, in this order", min_length=1)


class Config(StageConfig):
    """Config of the ``prompts`` stage."""

    dataset: Dataset | None = Field(None, description="hub data set to read instead of the files")
    count: int = Field(150, description="prompts to draw", ge=1)
    quotas: dict[str, int] = Field(
        {}, description="prompts to draw by category, adding up to count; empty draws uniformly over all rows"
    )
    seed: int = Field(0, description="seed of the draw", ge=0)
    max_characters: int = Field(8000, description="longer conversations are dropped", ge=1)

    @model_validator(mode="after")
    def _quotas_add_up(self) -> Self:
        if self.quotas and sum(self.quotas.values()) != self.count:
            raise ValueError(f"quotas add up to {sum(self.quotas.values())}, count is {self.count}")
        return self


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Read, drop, draw and write the prompts; return the statistics."""
    import json

    from components.chats.rows import write_rows
    from components.contract.errors import UserError
    from components.prompts import draw, sources

    if config.dataset is not None and "files" in inputs:
        raise UserError("config.dataset: given together with --input files=…; use one of the two")
    if config.dataset is not None:
        place, rows = f"data set {config.dataset.id}", sources.from_hub(config.dataset)
    elif "files" in inputs:
        paths = [one.path for one in inputs.all("files")]
        place, rows = "files " + ", ".join(path.name for path in paths), sources.from_files(paths)
    else:
        raise UserError("prompts: neither --input files=… nor config.dataset says where prompts come from")
    excluded = draw.Excluded.of(one.path for one in inputs.all("exclude"))
    with output.timed("draw"):
        drawn = draw.draw(rows, config, excluded, place)
    for number, start in enumerate(range(0, len(drawn.rows), ROWS_PER_PART)):
        write_rows(output.path / f"part-{number:05d}.jsonl", drawn.rows[start : start + ROWS_PER_PART])
    (output.path / "statistics.json").write_text(json.dumps(drawn.statistics, indent=2, sort_keys=True) + "\n")
    output.log.progress(len(drawn.rows), len(drawn.rows))
    return drawn.statistics


ROWS_PER_PART = 4096
