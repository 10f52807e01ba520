"""Quality suites: which rows are asked, and the score, interval and chance level of what came back."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from components.chats.rows import parse_row, read_lines
from components.contract.errors import UserError
from components.measure.intervals import difference_interval, wilson

Row = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    """One of lm-eval's tasks: where it lives there, the score that counts, and the published protocol's settings."""

    folder: str
    split: str
    fields: tuple[str, ...]
    metric: str
    filter: str
    max_tokens: int
    thinking: bool
    shots: int = 0


_WRONG = tuple(f"Incorrect Answer {number}" for number in (1, 2, 3))
SUITES = {
    "mmlu_pro": Suite(
        folder="mmlu_pro",
        split="test",
        fields=("question", "options", "answer", "category"),
        metric="exact_match",
        filter="custom-extract",
        max_tokens=2048,
        thinking=False,
        shots=5,
    ),
    "ifeval": Suite(
        folder="ifeval",
        split="train",
        fields=("key", "prompt", "instruction_id_list", "kwargs"),
        metric="inst_level_strict_acc",
        filter="none",
        max_tokens=1280,
        thinking=False,
    ),
    "gpqa": Suite(
        folder="gpqa/cot_zeroshot",
        split="train",
        fields=("Question", "Correct Answer", *_WRONG),
        metric="exact_match",
        filter="flexible-extract",
        max_tokens=12288,
        thinking=True,
    ),
}


def select_rows(name: str, files: dict[str, Path], limit: int | None, shots: int) -> dict[str, list[Row]]:
    """Read a suite's rows by split: ``limit`` of them (None: all), MMLU-Pro's spread evenly over its subjects.

    ``files`` maps file names to paths: ``<suite>.jsonl``, and ``mmlu_pro_validation.jsonl`` for its few shots. Raises
    :class:`UserError` naming a file, field or few-shot example that is missing.
    """
    suite = SUITES[name]
    rows = _read(files, f"{name}.jsonl", suite.fields)
    if name != "mmlu_pro":
        return {suite.split: rows[:limit]}
    by_subject: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_subject[row["category"]].append(row)
    rows = [row for group in zip_longest(*by_subject.values()) for row in group if row is not None][:limit]
    examples = _read(files, "mmlu_pro_validation.jsonl", (*suite.fields, "cot_content"))
    held = Counter(row["category"] for row in examples)
    for subject in sorted({row["category"] for row in rows}):
        if held[subject] < shots:
            raise UserError(
                f"mmlu_pro_validation.jsonl: has {held[subject]} examples of {subject!r}, fewer than {shots} shots"
            )
    return {suite.split: rows, "validation": examples}


def summarise(name: str, samples: list[Row], chance: float) -> Row:
    """Return ``score``, ``low``, ``high``, ``n``, ``chance``, ``power`` and ``truncated`` (share cut at the cap).

    A sample holds ``marks`` (one truth value an item, several for IFEval's instructions), ``task`` and
    ``finish_reason``. The score is the mean over all marks; the interval is Wilson's with one trial an item, which
    is wide enough for marks that hang together. ``power`` says whether the interval lies above ``chance``. MMLU-Pro
    adds ``subject_mean``, the unweighted mean over subjects.
    """
    marks = [mark for sample in samples for mark in sample["marks"]]
    score = sum(marks) / len(marks)
    low, high = wilson(score, len(samples))
    figures = {
        "score": score,
        "low": low,
        "high": high,
        "n": len(samples),
        "chance": chance,
        "power": low > chance,
        "truncated": sum(sample["finish_reason"] == "length" for sample in samples) / len(samples),
    }
    if name == "mmlu_pro":
        subjects: dict[str, list[bool]] = defaultdict(list)
        for sample in samples:
            subjects[sample["task"]].extend(sample["marks"])
        figures["subject_mean"] = sum(sum(marks) / len(marks) for marks in subjects.values()) / len(subjects)
    return figures


def paired(samples: list[Row], baseline: list[Row], seed: int) -> Row | None:
    """Return how much higher the score is than the baseline's, both on the same items; None when they are not.

    ``value`` is the difference of the scores, ``low`` and ``high`` its interval with items resampled in pairs; of the
    ``n`` items ``gained`` have more right marks than with the baseline and ``lost`` fewer.
    """
    if [_item(sample) for sample in samples] != [_item(sample) for sample in baseline] or not samples:
        return None
    here, there = ([sum(sample["marks"]) for sample in side] for side in (samples, baseline))
    counts = [len(sample["marks"]) for sample in samples]
    low, high = difference_interval((here, counts), (there, counts), seed)
    return {
        "value": (sum(here) - sum(there)) / sum(counts),
        "low": low,
        "high": high,
        "n": len(samples),
        "gained": sum(one > other for one, other in zip(here, there, strict=True)),
        "lost": sum(one < other for one, other in zip(here, there, strict=True)),
    }


def _item(sample: Row) -> tuple[str, Any]:
    return sample["task"], sample["messages"]


def _read(files: dict[str, Path], name: str, fields: tuple[str, ...]) -> list[Row]:
    if name not in files:
        given = ", ".join(sorted(files)) or "none"
        raise UserError(
            f"quality: the tasks input has no file called {name} (given: {given}); qdflash bench prefetch stores it, "
            "and says whose terms to accept where it is gated"
        )
    rows = []
    for number, line in enumerate(read_lines(files[name]), 1):
        try:
            row = parse_row(line)
        except ValueError as error:
            raise UserError(f"quality: {name}:{number} is not a JSON row ({error})") from error
        if missing := [field for field in fields if field not in row]:
            raise UserError(f"quality: {name}:{number} has no field {missing[0]!r}; see the data set's own schema")
        rows.append(row)
    if not rows:
        raise UserError(f"quality: {name} is empty")
    return rows
