"""Prompts of the study ``drafter-acceptance``: the demo's, and more composed from templates and subjects.

A held-out prompt shares neither its words nor the subject it is composed of with a prompt that is trained on.
"""

import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import study

from components.chats.rows import Row, is_held_out

HELD_OUT = 0.2
DEMO = study.ROOT / "pipelines" / "recipes" / "smol" / "prompts.jsonl"
PARTS = json.loads(Path(__file__).with_suffix(".json").read_text())


def prompts(answers: int) -> list[Row]:
    """Return each held-out prompt once and each other one ``answers`` times, under ids of the same split."""
    rows = []
    for row, held_out in _distinct():
        names = (f"{row['id']}-{number}" for number in count())
        ids = (name for name in names if is_held_out(name, HELD_OUT) == held_out)
        rows += [{**row, "id": name} for name in islice(ids, 1 if held_out else answers)]
    return rows


def _distinct() -> Iterator[tuple[Row, bool]]:
    """Yield every prompt and whether it is held out: the demo's by their ids, the others by their subjects."""
    demo = [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()]
    yield from ((row, is_held_out(row["id"], HELD_OUT)) for row in demo)
    known = {row["conversations"][0]["content"] for row in demo}
    for category, parts in PARTS["composed"].items():
        for at, subject in enumerate(PARTS["subjects"][parts["subjects"]]):
            for number, template in enumerate(parts["templates"]):
                text = template.format(subject, *subject.split())
                if text in known:
                    continue
                row = {"id": f"{category}-{at}-{number}", "category": category}
                yield row | {"conversations": [{"role": "user", "content": text}]}, is_held_out(subject, HELD_OUT)
