"""The benchmarks' items, stored once at pinned revisions in the files that the measure stage reads."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components.chats.rows import Row
from components.contract.digest import file_sha256
from components.contract.errors import UserError
from components.measure.published import PROMPTS
from components.prompts.hub import Hub
from components.store import cache

RECORD = "sources.json"
_PINS = ("revision", "sha256")


@dataclass(frozen=True)
class Source:
    """A data set on the hub at one commit; ``splits`` maps each split to the file it is stored in.

    ``first`` rows are stored, all where it is None.
    """

    id: str
    revision: str
    subset: str | None
    splits: dict[str, str]
    first: int | None = None


SOURCES = {
    "mmlu_pro": [
        Source(
            "TIGER-Lab/MMLU-Pro",
            "b189ec765aa7ed75c8acfea42df31fdae71f97be",
            None,
            {"test": "mmlu_pro.jsonl", "validation": "mmlu_pro_validation.jsonl"},
        )
    ],
    "ifeval": [
        Source("google/IFEval", "966cd89545d6b6acfd7638bc708b98261ca58e84", None, {"train": "ifeval.jsonl"}),
    ],
    "acceptance": [
        Source(
            "openai/gsm8k",
            "740312add88f781978c0658806c59bc2815b9866",
            "main",
            {"test": "acceptance/gsm8k.jsonl"},
            PROMPTS,
        ),
        Source(
            "openai/openai_humaneval",
            "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
            None,
            {"test": "acceptance/humaneval.jsonl"},
            PROMPTS,
        ),
        Source(
            "zai-org/LongBench-v2",
            "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
            None,
            {"train": "acceptance/longbench_v2.jsonl"},
            PROMPTS,
        ),
    ],
    "gpqa": [
        Source("Idavidrein/gpqa", "633f5ee89ab8ad4522a9f850766b73f62147ffdd", "gpqa_diamond", {"train": "gpqa.jsonl"}),
    ],
}
"""What is stored, the gated one last."""


def folder() -> Path:
    """Return where items are stored unless another folder is named."""
    return cache.home() / "benchmarks"


def files(data: Path, suites: list[str]) -> list[Path]:
    """Return the files of quality suites; raises :class:`UserError` for the first that is missing."""
    found = []
    for suite in suites:
        for path in (data / name for source in SOURCES[suite] for name in source.splits.values()):
            if not path.is_file():
                raise UserError(
                    f"{path}: missing; qdflash bench prefetch --suite {suite} stores it, or choose others with --suite"
                )
            found.append(path)
    return found


def fetch(suites: list[str], data: Path) -> Iterator[tuple[Path, int]]:
    """Store what is not there yet, file by file; yield each file and its number of items.

    ``sources.json`` records data set, revision, sha256 and items of every file: one that is as recorded is kept.
    Raises :class:`UserError` for a data set whose terms are not accepted, saying where to accept them.
    """
    record_path = data / RECORD
    record = json.loads(record_path.read_text(encoding="utf-8")) if record_path.exists() else {}
    sources = [source for suite in suites for source in SOURCES[suite]]
    wanted = [(source, split, name) for source in sources for split, name in source.splits.items()]
    for source, split, name in wanted:
        path, known = data / name, record.get(name, {})
        if not (path.is_file() and [known.get(key) for key in _PINS] == [source.revision, file_sha256(path)]):
            rows = _rows(source, split)
            _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            known = {"dataset": source.id, "revision": source.revision}
            known |= {"sha256": file_sha256(path), "items": len(rows)}
            record[name] = known
            _write(record_path, json.dumps(record, indent=1))
        yield path, known["items"]


def _rows(source: Source, split: str) -> list[Row]:
    from datasets import load_dataset

    with Hub(source):
        rows = load_dataset(
            source.id, source.subset, revision=source.revision, split=split, streaming=True, token=None
        )
        return list(rows if source.first is None else rows.take(source.first))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
