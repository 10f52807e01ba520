"""Declaration and run of the ``prompts`` stage."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from components.chats.rows import Row, prompts_of, read_lines, write_rows
from components.chats.template import Template
from components.contract.context import Input, Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import UserError
from components.contract.stage import Port
from components.prompts.clean import SYSTEM

if TYPE_CHECKING:
    from components.chats.tokenizer import Tokenizer
    from components.prompts.pool import Pool
    from components.prompts.sources import Shard

ROLE = "core"
VERSION = 2
ROWS_PER_PART = 4096
INPUTS = {
    "model": Port("model folder whose chat template and tokenizer measure prompts"),
    "files": Port(
        "JSONL or parquet files of {id | uuid, category?, conversations | messages}", optional=True, many=True
    ),
    "manifest": Port("ids that may be drawn, one a line, such as an earlier draw's ids.txt", optional=True),
    "exclude": Port("earlier prompts artifacts, whose prompts are not drawn again", optional=True, many=True),
    "held_out": Port(
        "prompts artifacts and JSONL files that are measured on: prompts that overlap with them are dropped",
        optional=True,
        many=True,
    ),
}
OUTPUTS = {
    "part-*.jsonl": "rows {id, category, conversations}, each ending on a user turn",
    "ids.txt": "manifest of the draw: its ids in order, no content",
    "statistics.json": "prompts drawn, usable and dropped by reason, in all and by category; their lengths in tokens",
}


class Dataset(StageConfig):
    """A hub data set of parquet or JSON lines, copied into the store once; gated ones need ``HF_TOKEN``."""

    id: str = Field(description="owner/name", pattern=r"^\w[\w.-]*/\w[\w.-]*$")
    revision: str = Field(description="commit: 40 hex digits, never a branch", pattern=r"^[0-9a-f]{40}$")
    subset: str | None = Field(None, description="configuration of the data set, where it has several")
    splits: list[str] = Field(["train"], description="splits to read; a prompt's category is its split", min_length=1)


class Config(StageConfig):
    """Config of the ``prompts`` stage."""

    dataset: Dataset | None = Field(None, description="hub data set to read instead of the files")
    template: Template = Field(Template(), description="How prompts are rendered, to measure them")
    count: int = Field(150, description="prompts to draw", ge=1)
    quotas: dict[str, Annotated[int, Field(ge=0)]] = Field(
        {}, description="prompts to draw by category, adding up to count; empty draws uniformly over all rows"
    )
    shortfall: Literal["fail", "fill"] = Field(
        "fail", description="when a category has fewer prompts than its quota: fail, or draw the rest from all quotas"
    )
    seed: int = Field(0, description="seed of the draw", ge=0)
    system: str | None = Field(SYSTEM, description="system message of prompts without one; null adds none")
    max_prompt_tokens: int = Field(14336, description="prompts of more tokens are dropped", ge=1)

    @model_validator(mode="after")
    def _quotas_add_up(self) -> Self:
        if self.quotas and sum(self.quotas.values()) != self.count:
            raise ValueError(f"quotas add up to {sum(self.quotas.values())}, count is {self.count}")
        return self


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Read, drop, draw and write the prompts; return the statistics."""
    from components.prompts.draw import Draw, Meter
    from components.prompts.overlap import HeldOut
    from components.prompts.pool import Pool, disk_errors
    from components.prompts.read import Parts, read
    from components.prompts.statistics import statistics

    place, shards = _source(config, inputs, output)
    tokenizer = _tokenizer(inputs["model"])
    manifest = _ids(inputs["manifest"]) if "manifest" in inputs else None
    parts = Parts(output.work, output.scratch / "parts")
    with output.timed("read"):
        held_out = [one.path for one in inputs.all("held_out")]
        read(shards, parts, config.system, manifest, HeldOut.of(held_out), output.log)
    with output.timed("sort_out"), disk_errors():
        pool = Pool(output.scratch)
        pool.fill(parts, config.seed)
        _take_out_earlier(pool, inputs.all("exclude"), place)
        if manifest is not None:
            _demand(pool, manifest, place)
        pool.keep_one_of_each()
        pool.drop_overlaps()
    with output.timed("draw"), disk_errors():
        meter = Meter(tokenizer, config.template, parts, output.work)
        draw = Draw(pool, parts, meter, config.max_prompt_tokens, place, output.log)
        missing = {}
        if config.quotas:
            missing = draw.quotas(config.quotas, config.shortfall == "fill")
            if missing:
                output.log.event("filled", missing=missing)
        else:
            draw.uniform(config.count)
    lengths: Counter[int] = Counter()
    _write(pool, output.path, lengths)
    found = statistics(parts, pool, lengths, missing)
    (output.path / "statistics.json").write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    return found


def _source(config: Config, inputs: Inputs, output: Output) -> tuple[str, list["Shard"]]:
    """Return how errors name the source, and its shards."""
    from components.prompts import hub, sources

    if config.dataset is not None and "files" in inputs:
        raise UserError("config.dataset: given together with --input files=…; use one of the two")
    if config.dataset is not None:
        return f"data set {config.dataset.id}", hub.of_hub(
            config.dataset, output.work.store, output.scratch, output.log
        )
    if "files" not in inputs:
        raise UserError("prompts: neither --input files=… nor config.dataset says where prompts come from")
    paths = [one.path for one in inputs.all("files")]
    return "files " + ", ".join(path.name for path in paths), sources.of_files(paths)


def _tokenizer(model: Input) -> "Tokenizer":
    from components.chats.tokenizer import FILES, Tokenizer

    held = {entry["path"] for entry in model.artifact.files}
    return Tokenizer({name: model.file(name).read_text(encoding="utf-8") for name in FILES if name in held})


def _ids(manifest: Input) -> set[str]:
    ids = {line.strip() for line in read_lines(manifest.path)} - {""}
    if not ids:
        raise UserError(f"manifest {manifest.path.name}: no ids in it; it holds one a line")
    return ids


def _take_out_earlier(pool: "Pool", earlier: list[Input], place: str) -> None:
    for number, one in enumerate(earlier):
        if not pool.exclude(number, prompts_of(one.path)):
            raise UserError(f"exclude {one.uri}: matches no row of {place}; is it a draw from another data set?")


def _demand(pool: "Pool", manifest: set[str], place: str) -> None:
    if lacking := pool.lacks(manifest):
        raise UserError(
            f"manifest: {len(lacking)} of its {len(manifest)} ids are not in {place} ({lacking[0]} for one); is it of "
            "another data set or revision?"
        )


def _write(pool: "Pool", folder: Path, lengths: Counter[int]) -> None:
    """Write the shards and the manifest; count the prompts' lengths in tokens on the way."""
    with (folder / "ids.txt").open("w", encoding="utf-8") as ids:

        def rows() -> Iterator[Row]:
            for row_id, category, conversation, tokens in pool.chosen():
                lengths[tokens] += 1
                ids.write(f"{row_id}\n")
                yield {"id": row_id, "category": category, "conversations": json.loads(conversation)}

        left = rows()
        number = 0
        while write_rows(path := folder / f"part-{number:05d}.jsonl", islice(left, ROWS_PER_PART)):
            number += 1
        path.unlink()
