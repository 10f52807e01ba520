"""1.4 million rows in 2 GiB: the published draw of 400,000 by quotas, from shards made in the data set's schema.

``pytest -s`` prints the peak resident memory at a tenth of the rows and at all of them.
"""

import json
import random
import sys
from collections.abc import Iterator

import pytest

from tests.components.prompts import cgroup, nemotron
from tests.components.prompts.conftest import Stage, read

LIMIT = 2 << 30
SHARD_ROWS = 60_000
ROWS = {"stem": 355_000, "math": 239_467, "code": 175_000, "chat": 627_720}
DISTINCT = {"stem": 355_000, "math": 102_616, "code": 33_884, "chat": 545_844}
QUOTAS = {"stem": 166_116, "math": 100_000, "code": 33_884, "chat": 100_000}


def test_the_limit_is_real() -> None:
    with cgroup.limited(LIMIT) as group:
        code, _, _ = cgroup.run(group, [sys.executable, "-c", "print(len(bytearray(b'x') * (3 << 30)))"])
    assert code == -9


@pytest.mark.slow
def test_the_published_draw_needs_no_more_memory_for_ten_times_the_rows(stage: Stage) -> None:
    tenth = draw(stage, 10)
    whole = draw(stage, 1)
    print(f"\npeak RSS: {tenth / 2**20:.0f} MiB at a tenth of the rows, {whole / 2**20:.0f} MiB at 1,397,187 rows")
    assert whole < 1.25 * tenth
    artifact = stage.artifact(inputs(stage, 1), config(1))
    found = artifact.metrics
    assert {name: one["drawn"] for name, one in found["categories"].items()} == QUOTAS
    assert {name: one["usable"] for name, one in found["categories"].items()} == DISTINCT
    assert found["read"] == sum(ROWS.values()) == found["usable"] + sum(found["dropped"].values())
    rows = read(artifact)
    assert len({row["id"] for row in rows}) == len(rows) == 400_000


def draw(stage: Stage, part: int) -> int:
    """Draw under the limit; return the peak RSS in bytes."""
    with cgroup.limited(LIMIT) as group:
        argv = stage.argv(config(part), inputs(stage, part))
        code, peak, said = cgroup.run(group, [sys.executable, "-m", "components.prompts", *argv])
    assert code == 0, said[-2000:]
    return peak


def config(part: int) -> dict:
    quotas = {split: count // part for split, count in QUOTAS.items()}
    return {"count": sum(quotas.values()), "quotas": quotas}


def inputs(stage: Stage, part: int) -> dict[str, list[str]]:
    """Make the shards of a ``part``-th of the data set, and a file of held-out questions, once."""
    folder = stage.folder / f"part-{part}"
    held_out = stage.folder / "held_out.jsonl"
    if not folder.exists():
        for split, rows in ROWS.items():
            nemotron.write(folder, split, list(shards(split, rows // part, DISTINCT[split] // part)))
        generator = random.Random(1)
        held_out.write_text(
            "".join(json.dumps({"question": " ".join(words(generator, 60))}) + "\n" for _ in range(10_000))
        )
    return {"files": [str(path) for path in sorted((folder / "data").iterdir())], "held_out": [str(held_out)]}


def shards(split: str, rows: int, distinct: int) -> Iterator[Iterator[dict]]:
    """Yield shards of prompts of 22 to 61 words; from number ``distinct`` on, texts repeat."""

    def row(number: int) -> dict:
        generator = random.Random(f"{split}/{number % distinct}")
        text = " ".join([*words(generator, generator.randrange(20, 60)), split, str(number % distinct)])
        return nemotron.row(text, split, row_id=f"{split}-{number}", answer=FILLER)

    for start in range(0, rows, SHARD_ROWS):
        yield map(row, range(start, min(start + SHARD_ROWS, rows)))


FILLER = "A long answer that no draw looks at. " * 20
WORDS = [f"word{number}" for number in range(5000)]


def words(generator: random.Random, count: int) -> list[str]:
    return generator.choices(WORDS, k=count)
