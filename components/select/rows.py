"""Rows of SciQ, BoolQ, PIQA and HellaSwag, as the data sets have them. Read without torch, so that a plan can too."""

from itertools import islice
from pathlib import Path

from components.chats.rows import Row, parse_row, read_lines
from components.contract.errors import UserError

_FIELDS = {
    "sciq": ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer"),
    "boolq": ("passage", "question", "label"),
    "piqa": ("goal", "sol1", "sol2", "label"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
}


def task_rows(file: str, path: Path, items: int) -> list[Row]:
    """Return the first ``items`` rows of ``<task>.jsonl``, which lies at ``path``.

    Raises:
        UserError: it is no task's, is empty, or a row lacks a field, or has one that is no text or names no answer.
    """
    name = file.removesuffix(".jsonl")
    if name not in _FIELDS:
        raise UserError(f"select.tasks: {file} is none of {', '.join(f'{task}.jsonl' for task in _FIELDS)}")
    try:
        rows = [parse_row(line) for line in islice(filter(str.strip, read_lines(path)), items)]
    except ValueError as error:
        raise UserError(f"select.tasks: {file}: not JSON lines ({error})") from error
    for number, row in enumerate(rows, 1):
        if fault := _fault(name, row):
            raise UserError(f"select.tasks: {file} line {number}: {fault}")
    if not rows:
        raise UserError(f"select.tasks: {file} is empty")
    return rows


def _fault(task: str, row: Row) -> str | None:
    """Say what is wrong with a row, or None. A split without answers has labels of −1 or none."""
    if missing := [field for field in _FIELDS[task] if field not in row]:
        return f"no {missing[0]}; rows as the data set has them"
    texts = [row[field] for field in _FIELDS[task] if field not in ("label", "endings")]
    endings = row.get("endings") if task == "hellaswag" else ["no", "yes"]
    if not isinstance(endings, list) or not all(isinstance(text, str) for text in (*texts, *endings)):
        return "a field is no text; rows as the data set has them"
    if "label" in _FIELDS[task] and str(row["label"]) not in map(str, range(len(endings))):
        return f"label {row['label']!r} names none of {len(endings)} answers; a split with answers is needed"
    return None
