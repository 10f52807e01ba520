"""Composes this recipe's prompts from ``parts.json``: ``python pipelines/recipes/smol-h200/compose.py``.

Every template meets every subject. A held-out prompt shares no subject with a prompt that is trained on.
"""

import itertools
import json
import re
from pathlib import Path

import pyarrow
from pyarrow import parquet

from components.chats.rows import Row, is_held_out

HERE = Path(__file__).parent
HELD_OUT = 0.06
"""Expected share of the subjects that are held out."""


def compose() -> tuple[list[Row], list[Row]]:
    """Return the prompts to train on and the held-out ones, each in the order of ``parts.json``."""
    parts = json.loads((HERE / "parts.json").read_text(encoding="utf-8"))
    trained: list[Row] = []
    held_out: list[Row] = []
    for category, one in parts["composed"].items():
        templates = [text for template in one["templates"] for text in _filled(template, parts["fillers"])]
        for (at, subject), (number, template) in itertools.product(
            enumerate(parts["subjects"][one["subjects"]]), enumerate(templates)
        ):
            given = subject.split() if one["subjects"] == "amounts" else [subject]
            turn = {"role": "user", "content": template.format(*given)}
            row = {"id": f"{category}-{at}-{number}", "category": category, "conversations": [turn]}
            (held_out if is_held_out(subject, HELD_OUT) else trained).append(row)
    return trained, held_out


def _filled(template: str, fillers: dict[str, list[str]]) -> list[str]:
    """Return the template once for each filler of the kind that it names, or as it is."""
    name = re.search(r"{([a-z]+)}", template)
    return [template.replace(name[0], filler) for filler in fillers[name[1]]] if name else [template]


if __name__ == "__main__":
    for name, rows in zip(("prompts", "held_out"), compose(), strict=True):
        parquet.write_table(pyarrow.Table.from_pylist(rows), HERE / f"{name}.parquet", compression="zstd")
        print(f"{name}.parquet: {len(rows)} prompts")
