"""The four suites against a running server: ask through the ledger, write the raw samples, return the figures."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.chats.rows import read_rows, write_rows
from components.chats.template import Template, prompt_token_ids
from components.contract.context import Inputs, Output
from components.contract.errors import UserError
from components.measure import acceptance, answers, harness, latency, parity, quality
from components.measure.bigram import Bigram, replay
from components.measure.ledger import Ask, Ledger
from components.serving.client import Client

if TYPE_CHECKING:
    from components.measure.stage import Config

THINK_END = "</think>"
QUALITY_SEED = 1234

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What every suite needs: whom to ask, where answers are kept, and what was asked for."""

    config: "Config"
    tokenizer: Any
    client: Client
    ledger: Ledger
    output: Output

    def write(self, name: str, document: Any) -> None:
        """Write one of the stage's JSON files."""
        (self.output.path / name).write_text(json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False))


def greedy(bench: Bench, prompts: list[Row]) -> list[Row]:
    """Answer every prompt alone, the first ones once more concurrently; write ``samples.jsonl``."""
    asked = bench.config.answers
    alone, together = prompts, prompts[: asked.concurrent_prompts]
    serial = bench.ledger.items(
        {
            f"answer/{prompt['id']}": partial(answers.ask_alone, bench.client, prompt, asked.max_tokens)
            for prompt in alone
        },
        concurrency=1,
    )
    concurrent = bench.ledger.items(
        {
            f"answer-concurrently/{prompt['id']}": partial(answers.ask, bench.client, prompt, asked.max_tokens)
            for prompt in together
        },
        concurrency=asked.concurrency,
    )
    samples = [
        {**prompt, "concurrency": concurrency, **record}
        for concurrency, many, records in ((1, alone, serial), (asked.concurrency, together, concurrent))
        for prompt, record in zip(many, records, strict=True)
    ]
    write_rows(bench.output.path / "samples.jsonl", samples)
    return samples


def tokens_per_second(samples: list[Row]) -> float:
    """Return generated tokens per second over the answers that were asked for one at a time."""
    serial = [sample for sample in samples if sample["concurrency"] == 1]
    return sum(len(sample["token_ids"]) for sample in serial) / sum(sample["seconds"] for sample in serial)


def compare_with_baseline(bench: Bench, samples: list[Row], baseline: Path) -> Row:
    """Compare the answers with an earlier measurement's; write ``parity.json``; return its figures."""
    exact = bench.config.profile.dtype == "float32"
    found = parity.compare(samples, list(read_rows(baseline)), exact, bench.tokenizer.decode)
    bench.write("parity.json", found)
    for difference in found["differences"]:
        bench.output.log.event("parted", **difference)
    return {key: value for key, value in found.items() if key != "differences"}


def measure_acceptance(bench: Bench, samples: list[Row], chats: Path | None) -> Row:
    """Summarise the drafts of the serial answers, beside a bigram drafter's; write ``acceptance.json``."""
    seed = bench.config.seed
    serial = [sample for sample in samples if sample["concurrency"] == 1]
    figures = acceptance.summarise(serial, seed)
    raw = {"drafter": _drafts(serial)}
    if chats is not None:
        bigram = Bigram([*row["prompt_token_ids"], *row["token_ids"]] for row in read_rows(chats))
        drafted = len(serial[0]["accepted"])
        replayed = []
        for sample in serial:
            drafts, accepted = replay(bigram, sample["token_ids"], drafted)
            replayed.append({**sample, "drafts": drafts, "accepted": accepted})
        figures["bigram"] = acceptance.summarise(replayed, seed)
        figures["gain_over_bigram"] = acceptance.gain(serial, replayed, seed)
        raw["bigram"] = _drafts(replayed)
    bench.write("acceptance.json", {**figures, "prompts": raw})
    return figures


def measure_latency(bench: Bench) -> Row:
    """Time every regime, one request at a time; write ``latency.json``; return the figures by regime."""
    figures, raw = {}, {}
    for name, regime in bench.config.latency.items():
        asks: dict[str, Callable[[], Row]] = {}
        for number in range(regime.warmups + regime.samples):
            key = f"latency/{name}/{number}"
            prompt = latency.prompt_of_length(bench.tokenizer, regime.input_tokens, f"{bench.config.seed}/{key}")
            asks[key] = partial(latency.time_one, bench.client, prompt, regime.output_tokens)
        samples = bench.ledger.items(asks, concurrency=1)[regime.warmups :]
        figures[name] = latency.summarise(samples, bench.config.seed)
        raw[name] = samples
        if not figures[name]["n"]:
            raise UserError(f"measure: all {len(samples)} requests of latency.{name} failed: {samples[0]['failed']}")
    bench.write("latency.json", {name: {**figures[name], "samples": raw[name]} for name in figures})
    return figures


@dataclass(frozen=True)
class QualityTask:
    """One suite ready to be asked: lm-eval's tasks and the settings that the scores are reported with."""

    name: str
    tasks: dict[str, Any]
    count: int
    shots: int
    thinking: bool
    max_tokens: int


def load_quality(config: "Config", inputs: Inputs, output: Output) -> list[QualityTask]:
    """Read and check the rows of every quality suite, before any server starts."""
    files = {one.path.name: one.path for one in inputs.all("tasks")}
    loaded = []
    for name, wanted in config.quality.items():
        suite = quality.SUITES[name]
        shots = suite.shots if wanted.shots is None else min(wanted.shots, suite.shots)
        rows = quality.select_rows(name, files, wanted.limit, shots)
        loaded.append(
            QualityTask(
                name=name,
                tasks=harness.load_tasks(name, rows, shots, output.scratch),
                count=len(rows[suite.split]),
                shots=shots,
                thinking=suite.thinking if wanted.thinking is None else wanted.thinking,
                max_tokens=wanted.max_tokens or suite.max_tokens,
            )
        )
    return loaded


def measure_quality(bench: Bench, tasks: list[QualityTask]) -> Row:
    """Ask every suite's items; write ``quality.json``; return the figures by suite."""
    figures, raw = {}, {}
    for task in tasks:
        samples = harness.run(task.name, task.tasks, partial(_answer_all, bench, task))
        chance = harness.chance(task.name, task.tasks, samples)
        settings = {"shots": task.shots, "thinking": task.thinking, "max_tokens": task.max_tokens}
        figures[task.name] = {**quality.summarise(task.name, samples, chance), **settings}
        raw[task.name] = samples
    bench.write("quality.json", {name: {**figures[name], "samples": raw[name]} for name in figures})
    return figures


def _answer_all(bench: Bench, task: QualityTask, items: list[tuple[harness.Messages, Row]]) -> list[Row]:
    asks: dict[str, Ask] = {
        f"quality/{task.name}/{json.dumps(messages)}": partial(_answer, bench, task, messages, settings)
        for messages, settings in items
    }
    return bench.ledger.items(asks, bench.config.quality_concurrency)


def _answer(bench: Bench, task: QualityTask, messages: harness.Messages, settings: Row) -> Row:
    ids = prompt_token_ids(bench.tokenizer, messages, Template(thinking=task.thinking))
    longest, room = bench.config.profile.max_model_len, task.max_tokens
    if longest is not None:
        room = min(room, longest - len(ids))
        if room < 1:
            raise UserError(
                f"quality.{task.name}: a prompt has {len(ids)} tokens, profile.max_model_len is {longest}; raise it "
                "or ask fewer shots"
            )
    stop = [text for text in settings.get("until", []) if text]
    answer = bench.client.complete(ids, max_tokens=room, stop=stop, seed=QUALITY_SEED)
    text = answer.text.split(THINK_END)[-1].lstrip() if task.thinking else answer.text
    return {
        "text": text,
        "finish_reason": answer.finish_reason,
        "tokens": len(answer.token_ids),
        "output": answer.text,
    }


def _drafts(records: list[Row]) -> list[Row]:
    return [{key: record[key] for key in ("id", "category", "drafts", "accepted")} for record in records]
