"""Regenerate chats: prompts and a model in, the model's sampled answers out."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

from pydantic import Field

from components.chats.rows import Row, read_rows, write_rows
from components.chats.template import Template
from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig, runtime
from components.contract.errors import UserError
from components.contract.stage import Port
from components.regen.shards import Writer, shards
from components.regen.statistics import statistics
from components.serving.profiles import CPU, Profile

ROLE = "vllm"
VERSION = 1
FAILURES = "failures.json"
SAMPLES = 16
"""Rows whose prompts each engine compares with those of vLLM's chat endpoint before it answers any."""

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
    replicas: int = runtime(1, "Engines, each in a process of its own and, on GPUs, on a GPU of its own", ge=1)
    parallel: int = runtime(32, "Rows that each engine generates at the same time", ge=1)
    shard_rows: int = runtime(
        16, "Rows committed together, or fewer after 30 s; at most these and those in flight are redone", ge=1
    )
    enforce_eager: bool = runtime(True, "Start faster, without compilation and CUDA graphs")
    gpu_memory_utilization: float = runtime(0.9, "Share of the GPU's memory to take", gt=0, le=1)


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Generate what is not committed yet, then write all rows as parts; returns the statistics as metrics.

    Raises:
        UserError: there are no prompts, an id occurs twice, or no answer is left to write.
        StageError: more than ``max_failed_share`` of the rows failed three times.
        TransientError: the same, but because engines died; the next run tries those rows again.
    """
    prompts = _prompts(config, inputs)
    committed = {row["id"] for rows in shards(output.work) for row in rows}
    failures: dict[str, str] = json.loads(output.work.get(FAILURES) or b"{}")
    left = [row for row in prompts if row["id"] not in committed and row["id"] not in failures]
    output.log.progress(len(prompts) - len(left), len(prompts))
    rate = None
    if left:
        rate = _generate(config, inputs, output, left, len(prompts), failures)
        output.work.put(FAILURES, json.dumps(failures).encode())
    counted = statistics(_write(config, output))
    if not any(output.path.iterdir()):
        raise UserError("no answer is left to write; raise max_tokens or set truncated: keep")
    document = {
        **counted,
        "written": counted["rows"] - (counted["finish_reasons"].get("length", 0) if config.truncated == "drop" else 0),
        "failed": len(failures),
        "failed_share": round(len(failures) / len(prompts), 4),
        "resumed": len(committed),
        "tokens_per_second": rate,
    }
    (output.path / "statistics.json").write_text(json.dumps({**document, "failures": failures}, indent=1))
    return document


def _prompts(config: Config, inputs: Inputs) -> list[Row]:
    rows = list(itertools.islice(read_rows(inputs["prompts"].path), config.count))
    if not rows:
        raise UserError(f"input prompts ({inputs['prompts'].uri}): no rows; give a prompts artifact with some")
    row_id, times = Counter(row["id"] for row in rows).most_common(1)[0]
    if times > 1:
        raise UserError(f"input prompts ({inputs['prompts'].uri}): id {row_id} occurs twice; ids must be unique")
    return rows


def _generate(
    config: Config, inputs: Inputs, output: Output, left: list[Row], total: int, failures: dict[str, str]
) -> float:
    """Answer and commit the rows that are left, add to ``failures``; return generated tokens a second."""
    from components.regen.engine import Asked
    from components.regen.generate import Progress, generate
    from components.regen.replicas import Replicas

    sampling = {**config.sampling.model_dump(), "max_tokens": config.max_tokens, "seed": config.seed}
    samples = tuple(row["conversations"] for row in left[:SAMPLES])
    asked = Asked(config.template, sampling, inputs["model"].digest, samples)
    with ExitStack() as stack:
        with output.timed("start"):
            engines = Replicas(inputs["model"].path, _profile(config), asked, config.replicas, config.device)
            stack.enter_context(engines)
        with output.timed("generate"), Writer(output.work, config.shard_rows) as writer:
            allowed = config.max_failed_share * total - len(failures)
            progress = Progress(total - len(left), total, allowed)
            generate(engines, left, progress, writer, output.log)
        progress.report(output.log, writer.committed)
        failures.update({fault.row_id: fault.error for fault in progress.faults})
        return progress.tokens_per_second


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


def _write(config: Config, output: Output) -> Iterator[Row]:
    """Write each committed shard as one part, without truncated answers when they are not kept; yield every row."""
    for number, rows in enumerate(shards(output.work)):
        kept = [row for row in rows if config.truncated == "keep" or row["finish_reason"] != "length"]
        if kept:
            write_rows(output.path / f"part-{number:05d}.jsonl", kept)
        yield from rows
