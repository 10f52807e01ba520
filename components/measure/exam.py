"""Quality suites of a running server: lm-eval's items asked through the ledger, the samples written, figures back."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.chats.template import Template, prompt_token_ids
from components.contract.context import Inputs, Output
from components.contract.errors import UserError
from components.measure import harness, quality
from components.measure.ledger import Ask
from components.measure.suites import Bench, Row

if TYPE_CHECKING:
    from components.measure.stage import Config

THINK_END = "</think>"
QUALITY_SEED = 1234
FILE = "quality.json"
Items = dict[str, dict[str, list[Row]]]
"""The rows of every suite, by split."""


@dataclass(frozen=True)
class QualityTask:
    """One suite ready to be asked: lm-eval's tasks and the settings that the scores are reported with."""

    name: str
    tasks: dict[str, Any]
    count: int
    shots: int
    thinking: bool
    max_tokens: int


def read_items(config: "Config", inputs: Inputs) -> Items:
    """Read and check the rows of every quality suite: quickly, before any server starts."""
    files = {one.path.name: one.path for one in inputs.all("tasks")}
    return {
        name: quality.select_rows(name, files, wanted.limit, _shots(name, wanted.shots))
        for name, wanted in config.quality.items()
    }


def load_quality(config: "Config", items: Items, output: Output) -> list[QualityTask]:
    """Make lm-eval's tasks of the items; importing lm-eval takes a while."""
    loaded = []
    for name, wanted in config.quality.items():
        suite, rows, shots = quality.SUITES[name], items[name], _shots(name, wanted.shots)
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


def _shots(name: str, wanted: int | None) -> int:
    most = quality.SUITES[name].shots
    return most if wanted is None else min(wanted, most)


def measure_quality(bench: Bench, tasks: list[QualityTask], baseline: Path | None = None) -> Row:
    """Ask every suite's items; write ``quality.json``; return the figures by suite.

    ``baseline`` is the folder of an earlier measurement: where it asked the same items, scores are compared in pairs.
    """
    earlier: Row = {}
    if baseline is not None and (baseline / FILE).exists():
        earlier = json.loads((baseline / FILE).read_text(encoding="utf-8"))
    figures, raw = {}, {}
    for task in tasks:
        samples = harness.run(task.name, task.tasks, partial(_answer_all, bench, task))
        chance = harness.chance(task.name, task.tasks, samples)
        settings = {"shots": task.shots, "thinking": task.thinking, "max_tokens": task.max_tokens}
        figures[task.name] = {**quality.summarise(task.name, samples, chance), **settings}
        raw[task.name] = samples
        paired = quality.paired(samples, earlier.get(task.name, {}).get("samples", []), bench.config.seed)
        if paired is not None:
            figures[task.name]["against_baseline"] = paired
    bench.write(FILE, {name: {**figures[name], "samples": raw[name]} for name in figures})
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
        "tokens": answer.tokens,
        "output": answer.text,
    }
