"""The one pass over the source: clean each row and keep, in committed parts, only what a draw needs of it.

A part is a parquet file in the stage's work: at most 50,000 rows of the source or 32 MiB of prompts. After a kill the
pass goes on behind the last part of each shard.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.chats.rows import Row
from components.contract.log import Log
from components.prompts.clean import clean, text_hash, with_system
from components.prompts.overlap import HeldOut
from components.prompts.sources import Shard
from components.store.work import Work

PART_ROWS = 50_000
PART_BYTES = 32 << 20

_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "category": pa.string(),
        "text": pa.binary(16),
        "conversation": pa.string(),
        "grams": pa.list_(pa.int64()),
    }
)


@dataclass
class Part:
    """What one stretch of a shard holds. ``grams`` are the held-out n-grams of each prompt, by number."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0
    read: int = 0
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)

    def encode(self, last: bool) -> bytes:
        """Return the part as parquet; ``last`` says that its shard ends with it."""
        about = {"read": self.read, "dropped": [[*key, count] for key, count in self.dropped.items()], "last": last}
        table = pa.Table.from_pylist(self.rows, _SCHEMA.with_metadata({"about": json.dumps(about)}))
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        return sink.getvalue().to_pybytes()


class Parts:
    """The parts in the stage's work, each fetched once into a local folder."""

    def __init__(self, work: Work, folder: Path) -> None:
        self._work, self._folder = work, folder
        folder.mkdir()

    def names(self) -> list[str]:
        """Every part's name, shard by shard and front to back."""
        return self._work.names("read/")

    def put(self, name: str, data: bytes) -> None:
        """Commit a part."""
        self._work.put(name, data)
        self._path(name).write_bytes(data)

    def table(self, name: str, columns: list[str]) -> pa.Table:
        """Return some columns of a part."""
        return pq.read_table(self._fetched(name), columns=columns)

    def about(self, name: str) -> dict[str, Any]:
        """Return ``{read, dropped: [[category, reason, count]], last}`` of a part."""
        return json.loads(pq.read_schema(self._fetched(name)).metadata[b"about"])

    def whole(self, names: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield what :meth:`about` says of each part, up to the first that is damaged: it counts as not there."""
        for name in names:
            try:
                pq.read_table(self._fetched(name))
                yield self.about(name)
            except (pa.ArrowException, OSError, TypeError, KeyError):
                return

    def _fetched(self, name: str) -> Path:
        path = self._path(name)
        if not path.exists():
            path.write_bytes(self._work.get(name) or b"")
        return path

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "-")


def read(
    shards: list[Shard], parts: Parts, system: str | None, manifest: Set[str] | None, held_out: HeldOut, log: Log
) -> None:
    """Read every shard that is not read yet, to its end.

    ``manifest`` holds the ids that may be drawn, None any. A row without an id is named by the hash of its user text.
    """
    done = parts.names()
    rows = 0
    for number, shard in enumerate(shards):
        before = list(parts.whole(name for name in done if name.startswith(f"read/{number:05d}-")))
        start = sum(about["read"] for about in before)
        if not (before and before[-1]["last"]):
            for index, part in enumerate(_stretches(shard.rows(start), system, manifest, held_out), len(before)):
                last = part.read < PART_ROWS and part.size < PART_BYTES
                parts.put(f"read/{number:05d}-{index:05d}", part.encode(last))
                start += part.read
                log.progress(number, len(shards), rows=rows + start, shard=shard.name)
        rows += start
    log.progress(len(shards), len(shards), rows=rows)


def _stretches(
    rows: Iterator[Row], system: str | None, manifest: Set[str] | None, held_out: HeldOut
) -> Iterator[Part]:
    """Yield full parts, then one that is not: it ends the shard, even when it holds no row."""
    part = Part()
    for row in rows:
        _add(part, row, system, manifest, held_out)
        if part.read == PART_ROWS or part.size >= PART_BYTES:
            yield part
            part = Part()
    yield part


def _add(part: Part, row: Row, system: str | None, manifest: Set[str] | None, held_out: HeldOut) -> None:
    part.read += 1
    category = str(row.get("category") or "all")
    turns = clean(row)
    if not turns:
        part.dropped[category, "malformed" if turns is None else "no user turn"] += 1
        return
    text = text_hash(turns)
    row_id = str(row.get("id") or row.get("uuid") or text[:16])
    if "\n" in row_id:
        part.dropped[category, "malformed"] += 1
        return
    if manifest is not None and row_id not in manifest:
        part.dropped[category, "not in the manifest"] += 1
        return
    conversation = json.dumps(with_system(turns, system), ensure_ascii=False, separators=(",", ":"))
    part.rows.append(
        {
            "id": row_id,
            "category": category,
            "text": bytes.fromhex(text)[:16],
            "conversation": conversation,
            "grams": held_out.grams_in(turns),
        }
    )
    part.size += len(conversation)
