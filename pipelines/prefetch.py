"""The benchmarks' items, stored once at pinned revisions in the files that the measure stage reads."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components.contract.digest import file_sha256
from components.contract.errors import UserError
from components.measure.quality import SUITES
from components.prompts.sources import Hub
from components.store import cache

RECORD = "sources.json"
_PINS = ("revision", "sha256")


@dataclass(frozen=True)
class Source:
    """A data set on the hub at one commit; ``splits`` maps each split to the file it is stored in."""

    id: str
    revision: str
    subset: str | None
    splits: dict[str, str]


SOURCES = {
    "mmlu_pro": Source(
        "TIGER-Lab/MMLU-Pro",
        "b189ec765aa7ed75c8acfea42df31fdae71f97be",
        None,
        {"test": "mmlu_pro.jsonl", "validation": "mmlu_pro_validation.jsonl"},
    ),
    "ifeval": Source("google/IFEval", "966cd89545d6b6acfd7638bc708b98261ca58e84", None, {"train": "ifeval.jsonl"}),
    "gpqa": Source(
        "Idavidrein/gpqa", "633f5ee89ab8ad4522a9f850766b73f62147ffdd", "gpqa_diamond", {"train": "gpqa.jsonl"}
    ),
}


def folder() -> Path:
    """Return where items are stored unless another folder is named."""
    return cache.home() / "benchmarks"


def chosen(suites: list[str] | None) -> list[str]:
    """Return the suites asked for, all when none is; raises :class:`UserError` for an unknown one."""
    for suite in suites or ():
        if suite not in SUITES:
            raise UserError(f"--suite {suite}: unknown; choose of {', '.join(SUITES)}")
    return suites or list(SUITES)


def files(data: Path, suites: list[str]) -> list[Path]:
    """Return the files of the suites; raises :class:`UserError` for the first that is missing."""
    found = []
    for suite in suites:
        for path in (data / name for name in SOURCES[suite].splits.values()):
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
    from datasets import load_dataset

    data.mkdir(parents=True, exist_ok=True)
    record_path = data / RECORD
    record = json.loads(record_path.read_text(encoding="utf-8")) if record_path.exists() else {}
    wanted = [(SOURCES[suite], split, name) for suite in suites for split, name in SOURCES[suite].splits.items()]
    for source, split, name in wanted:
        path, known = data / name, record.get(name, {})
        if not (path.is_file() and [known.get(key) for key in _PINS] == [source.revision, file_sha256(path)]):
            with Hub(source):
                rows = list(
                    load_dataset(
                        source.id, source.subset, revision=source.revision, split=split, streaming=True, token=None
                    )
                )
            _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            known = {
                "dataset": source.id,
                "revision": source.revision,
                "sha256": file_sha256(path),
                "items": len(rows),
            }
            record[name] = known
            _write(record_path, json.dumps(record, indent=1))
        yield path, known["items"]


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
