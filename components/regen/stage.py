"""Regenerate chats: prompts and a model in, the model's sampled answers out."""

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from components.chats.rows import Row, read_rows
from components.chats.template import Template
from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig, runtime
from components.contract.errors import UserError
from components.contract.stage import Port
from components.regen.statistics import statistics
from components.serving.profiles import CPU, Profile

ROLE = "vllm"
VERSION = 1
INPUTS = {
    "prompts": Port("prompts artifact: rows {id, category, conversations}"),
    "model": Port("model folder that vLLM serves: BF16 or compressed-tensors W4A16"),
}
OUTPUTS = {
    "part-*.jsonl": "prompt rows with prompt_token_ids, token_ids, text, reasoning, finish_reason, sampling, seed",
    "statistics.json": "rows, tokens, truncated share, finish reasons, per category; the rows that failed",
}


class Sampling(StageConfig):
    """How answers are drawn."""

    temperature: float = Field(0.7, description="0 is greedy", ge=0)
    top_p: float = Field(0.8, description="Nucleus: smallest set of tokens with this probability", gt=0, le=1)
    top_k: int = Field(20, description="Most likely tokens considered; 0 means all", ge=0)


class Config(StageConfig):
    """What is asked for, and of which engine."""

    template: Template = Field(Template(), description="How prompts are rendered")
    sampling: Sampling = Field(Sampling(), description="How answers are drawn")
    max_tokens: int = Field(4096, description="Most generated tokens of an answer", ge=1)
    seed: int = Field(0, description="Base of the per-row seeds", ge=0)
    count: int | None = Field(None, description="Only the first rows of the prompts; none means all", ge=1)
    truncated: Literal["keep", "drop"] = Field("keep", description="What happens to answers cut at max_tokens")
    max_failed_share: float = Field(0.01, description="Larger share of failed rows fails the stage", ge=0, le=1)
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where vLLM runs; numerics differ")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="Activation dtype")
    max_model_len: int | None = Field(None, description="Longest prompt plus answer; none: the model's own", ge=16)
    parallel: int = runtime(32, "Rows generated at the same time", ge=1)
    shard_rows: int = runtime(16, "Rows committed together; at most these and those in flight are redone", ge=1)
    enforce_eager: bool = runtime(True, "Start faster, without compilation and CUDA graphs")
    gpu_memory_utilization: float = runtime(0.9, "Share of the GPU's memory to take", gt=0, le=1)


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Generate what is not committed yet, then write all rows as parts; returns the statistics as metrics."""
    prompts = _prompts(config, inputs)
    work = output.work
    committed = {row["id"] for row in _committed(output)}
    failures: dict[str, str] = json.loads(work.get("failures.json") or b"{}")
    left = [row for row in prompts if row["id"] not in committed and row["id"] not in failures]
    output.log.progress(len(committed), len(prompts))
    rate = None
    if left:
        rate = _generate(config, inputs, output, left, len(committed), len(prompts), failures)
    share = len(failures) / len(prompts)
    if share > config.max_failed_share:
        row_id, error = next(iter(failures.items()))
        raise UserError(
            f"{len(failures)} of {len(prompts)} rows failed (max_failed_share {config.max_failed_share}); "
            f"the first, {row_id}: {error}"
        )
    work.put("failures.json", json.dumps(failures).encode())
    counted = statistics(_committed(output))
    written = _write(config, output)
    if not written:
        raise UserError("no answer is left to write; raise max_tokens or set truncated: keep")
    document = {**counted, "written": written, "failed": len(failures), "tokens_per_second": rate}
    (output.path / "statistics.json").write_text(json.dumps({**document, "failures": failures}, indent=1))
    return document


def _prompts(config: Config, inputs: Inputs) -> list[Row]:
    rows = list(itertools.islice(read_rows(inputs["prompts"].path), config.count))
    if not rows:
        raise UserError(f"input prompts ({inputs['prompts'].uri}): no rows; give a prompts artifact with some")
    ids = [row["id"] for row in rows]
    if len(set(ids)) != len(ids):
        twice = next(row_id for position, row_id in enumerate(ids) if row_id in ids[:position])
        raise UserError(f"input prompts ({inputs['prompts'].uri}): id {twice} occurs twice; ids must be unique")
    return rows


def _committed(output: Output) -> Iterator[Row]:
    for name in output.work.names("rows/"):
        yield from map(json.loads, _lines(output, name))


def _lines(output: Output, name: str) -> list[str]:
    return (output.work.get(name) or b"").decode().split("\n")  # answers may hold other line separators


def _generate(
    config: Config, inputs: Inputs, output: Output, left: list[Row], done: int, total: int, failures: dict[str, str]
) -> float:
    from components.regen.engine import Engine, Failure

    with output.timed("start"):
        engine = Engine(inputs["model"].path, _profile(config))
    sampling = {**config.sampling.model_dump(), "max_tokens": config.max_tokens, "seed": config.seed}
    finished: list[Row] = []
    tokens = truncated = 0
    number = len(output.work.names("rows/"))
    started = time.monotonic()
    with output.timed("generate"):
        for row in engine.generate(left, config.template, sampling, inputs["model"].digest):
            if isinstance(row, Failure):
                failures[row.row_id] = row.error
                continue
            finished.append(row)
            tokens += len(row["token_ids"])
            truncated += row["finish_reason"] == "length"
            if len(finished) >= config.shard_rows:
                done += _commit(output, number, finished)
                number += 1
                finished = []
                rate = tokens / (time.monotonic() - started)
                output.log.progress(done, total, tokens_per_second=rate, truncated=truncated, failed=len(failures))
        if finished:
            done += _commit(output, number, finished)
    engine.close()
    rate = tokens / (time.monotonic() - started)
    output.log.progress(done, total, tokens_per_second=rate, truncated=truncated, failed=len(failures))
    return round(rate, 2)


def _commit(output: Output, number: int, rows: list[Row]) -> int:
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    output.work.put(f"rows/{number:06d}", "\n".join(lines).encode())
    return len(rows)


def _profile(config: Config) -> Profile:
    return Profile(
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.parallel,
        enforce_eager=config.enforce_eager,
        gpu_memory_utilization=config.gpu_memory_utilization if config.device == "cuda" else None,
        language_model_only=True,
        env=CPU.env if config.device == "cpu" else {},
    )


def _write(config: Config, output: Output) -> int:
    """Write each committed shard as one part; truncated answers are left out when they are not kept."""
    written = 0
    for number, name in enumerate(output.work.names("rows/")):
        lines = _lines(output, name)
        if config.truncated == "drop":
            lines = [line for line in lines if json.loads(line)["finish_reason"] != "length"]
        if lines:
            (output.path / f"part-{number:05d}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        written += len(lines)
    return written
