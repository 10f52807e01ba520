"""Measure one served model or pair: what gate, report and people read.

Metrics (all figures with ``n`` and a 95 % interval ``low``/``high``; a suite that was not asked for is absent):

- ``label``, ``machine`` {device, name, cores, memory_gb, load}, ``server_start_seconds``
- ``tokens_per_second``: generated tokens per wall-clock second over the serial greedy answers (batch 1)
- ``parity`` {compared, equal, ties, broken, exact, passed, logprobs {compared, mean_gap, max_gap [nats]}}: against
  the ``baseline`` input
- ``sampled`` {passed, tests {way to sample: {p, passed, level, prompts, draws, tokens, power}}}: against the same
  input's continuations, see ``components/measure/sampling.py``
- ``repeated`` {greedy, seeded: {compared, equal}}: answers that are the same when asked for again; with ``sampled``
- ``acceptance_length`` {value, low, high, n, drafts, per_position [share], by_kind {kind: {value, low, high, n,
  drafts}}, bigram {same keys; only with ``chats``}}
- ``latency`` {regime: {median_ms, low, high, p95_ms, ttft_ms, ttft_p95_ms, per_token_ms, tokens, tokens_per_second, n,
  failed}}
- ``quality`` {suite: {score, low, high, n, chance, power, truncated, shots, thinking, max_tokens, subject_mean,
  against_baseline {value, low, high, n, gained, lost}}}; ``subject_mean`` for MMLU-Pro only; ``power`` false: the
  interval includes chance, the score gates nothing; ``against_baseline``: the paired difference from the ``baseline``
  input's score, where that has the same items
- ``window`` {chosen, by_window}: with ``windows``, which measure nothing else; see ``components/measure/window.py``
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from components.chats.rows import read_rows
from components.chats.template import Template
from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import UserError
from components.contract.stage import Port
from components.serving.profiles import A10G, DRAFT_FOLDER, Profile

ROLE = "vllm"
VERSION = 4
INPUTS = {
    "model": Port("the model folder, or the bundle with its drafter in draft/"),
    "prompts": Port("prompts for the greedy answers; none of them may have been trained on"),
    "tasks": Port("quality task files: mmlu_pro.jsonl, mmlu_pro_validation.jsonl, …", optional=True, many=True),
    "drafter": Port("the drafter whose windows are measured, beside its target alone", optional=True),
    "chats": Port("the drafter's training chats, to make the bigram drafter from", optional=True),
    "baseline": Port("the measure artifact whose greedy answers parity compares with", optional=True),
}
OUTPUTS = {
    "samples.jsonl": "every greedy answer: ids, the two best candidates per token, text, drafts, seconds",
    "parity.json": "the parity figures, and each first difference in context",
    "sampled.json": "token ids of every sampled continuation, by way to sample and prompt",
    "acceptance.json": "acceptance figures of the drafter and the bigram drafter, and drafts per prompt",
    "latency.json": "latency figures and every timed request",
    "*/*/*": "with windows: samples.jsonl and acceptance.json by window and length",
    "quality.json": "scores, and per item the messages, answer, extracted answer and marks",
}


class Answers(StageConfig):
    """Greedy answers to the prompts: what parity and acceptance are computed from."""

    prompts: int = Field(64, description="Prompts asked one at a time, spread over the categories", ge=1)
    max_tokens: int = Field(256, description="Longest answer, tokens", ge=2)
    concurrent_prompts: int = Field(
        64, description="How many of them are asked once more, concurrently; for parity", ge=0
    )
    concurrency: int = Field(8, description="Requests in flight in that second round", ge=1)


class Sampled(StageConfig):
    """Continuations at temperature 0.7, top-p 0.8, top-k 20 and at 1: parity tests that they are distributed alike."""

    prompts: int = Field(0, description="Prompts continued, the shortest ones; 0: no test", ge=0)
    draws: int = Field(64, description="Continuations of each prompt and way to sample", ge=2)
    tokens: int = Field(8, description="Tokens of a continuation", ge=2)


class Regime(StageConfig):
    """One latency regime."""

    input_tokens: int = Field(description="Prompt length, exact", ge=1)
    output_tokens: int = Field(description="Answer length", ge=2)
    output: Literal["exact", "natural"] = Field(
        "exact", description="exact: the answer's length is forced; natural: it may end early, as published"
    )
    concurrency: int = Field(1, description="Requests in flight", ge=1)
    warmups: int = Field(5, description="Requests before the timed ones", ge=0)
    samples: int = Field(50, description="Timed requests, each with its own prompt", ge=1)


class Quality(StageConfig):
    """One quality suite; None keeps the published protocol's value."""

    limit: int | None = Field(
        None, description="Items asked, the first ones (MMLU-Pro: evenly over subjects); None: all", ge=1
    )
    max_tokens: int | None = Field(
        None, description="Longest answer; None: MMLU-Pro 2048, IFEval 1280, GPQA 12288", ge=1
    )
    shots: int | None = Field(None, description="Examples before the question (MMLU-Pro only); None: 5", ge=0)
    thinking: bool | None = Field(None, description="Thinking mode; None: on for GPQA, off for the others")


REGIMES = {
    "short": Regime(input_tokens=64, output_tokens=128),
    "medium": Regime(input_tokens=2048, output_tokens=256),
    "long": Regime(input_tokens=8192, output_tokens=256),
}


class Config(StageConfig):
    """What is served, and which suites run."""

    label: str = Field("", description="Name of the measured variant, for people")
    draft: bool = Field(False, description="Serve the bundle's draft/ as drafter and measure acceptance")
    parity: bool = Field(False, description="Compare greedy answers with the baseline input's; float32 must be exact")
    profile: Profile = Field(A10G, description="vLLM arguments of the server")
    template: Template = Field(Template(), description="How conversations become tokens")
    seed: int = Field(0, description="Chooses prompts, latency texts and bootstrap resamples")
    answers: Answers = Field(Answers(), description="Greedy answers for parity and acceptance")
    sampled: Sampled = Field(Sampled(), description="Sampled continuations for parity, and answers asked for again")
    latency: dict[str, Regime] = Field(REGIMES, description="Latency regimes by name; empty: none")
    quality: dict[Literal["mmlu_pro", "ifeval", "gpqa"], Quality] = Field(
        {}, description="Quality suites by name, on the tasks input's files"
    )
    quality_concurrency: int = Field(8, description="Quality requests in flight", ge=1)
    windows: tuple[PositiveInt, ...] = Field(
        (), description="Windows of the drafter input to compare with full attention; nothing else is measured then"
    )

    @model_validator(mode="after")
    def _regimes_fit(self) -> "Config":
        longest = self.profile.max_model_len
        for name, regime in self.latency.items():
            if longest is not None and regime.input_tokens + regime.output_tokens > longest:
                raise ValueError(f"latency.{name}: input and output tokens exceed profile.max_model_len {longest}")
        return self


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Start the server once, run the suites, write raw samples and figures; metrics as the module says."""
    from components.measure import exam, machine
    from components.serving.server import Server

    if config.windows:
        return _windows(config, inputs, output)
    model = inputs["model"].path
    draft = _draft(model, config)
    baseline = _baseline(config, inputs)
    items = exam.read_items(config, inputs)
    metrics: dict[str, Any] = {"label": config.label, "machine": machine.describe()}
    with Server(model, draft, config.profile, log_path=output.scratch / "server.log") as server:
        from transformers import AutoTokenizer

        from components.measure import suites
        from components.measure.ledger import Ledger

        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = _prompts(config, inputs, tokenizer)
        with output.timed("tasks"):
            tasks = exam.load_quality(config, items, output)
        ledger = Ledger(output, _items(config, len(prompts)) + sum(task.count for task in tasks))
        with output.timed("start"):
            server.wait()
        metrics["server_start_seconds"] = server.start_seconds
        bench = suites.Bench(config, tokenizer, server.client, ledger, output)
        with output.timed("answers"):
            samples = suites.greedy(bench, prompts)
        metrics["tokens_per_second"] = suites.tokens_per_second(samples)
        if baseline is not None:
            metrics["parity"] = suites.compare_with_baseline(bench, samples, baseline)
        if config.sampled.prompts:
            with output.timed("sampled"):
                metrics["repeated"] = suites.repeated(bench, prompts, samples)
                suites.draw_samples(bench, prompts, config.label)
            if baseline is not None:
                metrics["sampled"] = suites.compare_samples(output.path, baseline, config.seed)
        if draft is not None:
            chats = inputs["chats"].path if "chats" in inputs else None
            metrics["acceptance_length"] = suites.measure_acceptance(bench, samples, chats)
        if config.latency:
            with output.timed("latency"):
                (metrics["latency"],) = suites.measure_latency([bench])
        if tasks:
            with output.timed("quality"):
                metrics["quality"] = exam.measure_quality(bench, tasks, baseline)
    return metrics


def _windows(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    if "drafter" not in inputs:
        raise UserError("measure: windows are given but no drafter input is bound; bind the drafter of this target")
    from transformers import AutoTokenizer

    from components.measure import machine, window

    model, drafter = inputs["model"].path, inputs["drafter"].path
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = _prompts(config, inputs, tokenizer)
    found = window.measure(config, model, drafter, prompts, tokenizer, output)
    return {"label": config.label, "machine": machine.describe(), "window": found}


def _prompts(config: Config, inputs: Inputs, tokenizer: Any) -> list[dict[str, Any]]:
    from components.measure import answers

    longest = config.profile.max_model_len
    return answers.select(
        read_rows(inputs["prompts"].path),
        tokenizer,
        config.template,
        count=config.answers.prompts,
        seed=config.seed,
        longest=None if longest is None else longest - config.answers.max_tokens,
    )


def _items(config: Config, prompts: int) -> int:
    from components.measure import suites

    timed = sum(regime.warmups + regime.samples for regime in config.latency.values())
    return prompts + min(prompts, config.answers.concurrent_prompts) + timed + suites.sampled_items(config, prompts)


def _baseline(config: Config, inputs: Inputs) -> Path | None:
    if not config.parity:
        return None
    if "baseline" not in inputs:
        raise UserError("measure: parity is on but no baseline input is bound; bind the target's measure artifact")
    return inputs["baseline"].path


def _draft(model: Path, config: Config) -> Path | None:
    if not config.draft:
        return None
    draft = model / DRAFT_FOLDER
    if not draft.is_dir():
        raise UserError(f"measure: draft is on but {model} has no {DRAFT_FOLDER}/; bind a bundle as the model input")
    return draft
