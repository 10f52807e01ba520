"""The draw itself: clean rows, drop what must not be asked twice, and take those whose hash comes first."""

import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.chats.rows import Row, read_rows
from components.contract.errors import UserError


@dataclass
class Excluded:
    """Prompts of earlier draws, by id and by the hash of their user text."""

    ids: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, folders: Iterable[Path]) -> "Excluded":
        """Read the prompts of earlier artifacts."""
        excluded = cls()
        for folder in folders:
            for row in read_rows(folder):
                excluded.ids.add(row["id"])
                excluded.texts.add(text_hash(row["conversations"]))
        return excluded

    def __bool__(self) -> bool:
        return bool(self.ids)


@dataclass(frozen=True)
class Drawn:
    """The prompts, in the order of their hashes, and the statistics beside them."""

    rows: list[Row]
    statistics: dict[str, Any]


def draw(rows: Iterable[Row], config: Any, excluded: Excluded, place: str) -> Drawn:
    """Return ``config.count`` prompts: those with the smallest sha256 of seed and id, overall or in each category.

    Only the first of several rows with the same normalised user text or the same id counts, whatever is drawn: so a
    draw with a larger count contains the smaller one. Raises :class:`UserError` naming ``place`` when it holds too
    few usable prompts, and when ``excluded`` matches none of its rows (a sign of the wrong exclusion).
    """
    dropped: Counter[str] = Counter()
    pools: dict[str, _Smallest] = {}
    usable = 0
    for row in _fresh(rows, config.max_characters, excluded, dropped):
        usable += 1
        category = row["category"] if config.quotas else ""
        wanted = config.quotas.get(category, 0) if config.quotas else config.count
        key = hashlib.sha256(f"{config.seed}:{row['id']}".encode()).hexdigest()
        pools.setdefault(category, _Smallest(wanted)).add(key, row)
    if usable == 0 and not dropped:
        raise UserError(
            f"{place}: no rows there; a JSONL row is {{id?, category?, conversations: [{{role, content}}]}}"
        )
    if excluded and not dropped["excluded"]:
        raise UserError(f"{place}: the excluded draw matches none of its rows; is it of another data set?")
    for category, wanted in (config.quotas or {"": config.count}).items():
        found = len(pools[category].rows()) if category in pools else 0
        if found < wanted:
            what = f"quotas.{category}" if category else "count"
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"
            raise UserError(f"{what}: {wanted} asked, {place} has {found} usable prompts (dropped: {reasons})")
    chosen = sorted((pair for pool in pools.values() for pair in pool.rows()), key=lambda pair: pair[0])
    result = [row for _, row in chosen]
    return Drawn(
        result,
        {
            "prompts": len(result),
            "categories": dict(sorted(Counter(row["category"] for row in result).items())),
            "usable": usable,
            "dropped": dict(sorted(dropped.items())),
        },
    )


def _fresh(rows: Iterable[Row], longest: int, excluded: Excluded, dropped: Counter[str]) -> Iterator[Row]:
    """Yield cleaned rows that were not met before; count the others by reason."""
    ids: set[str] = set()
    texts: set[str] = set()
    for row in rows:
        conversation = clean(row)
        if conversation is None:
            dropped["malformed"] += 1
            continue
        if not conversation:
            dropped["no user turn"] += 1
            continue
        if sum(len(turn["content"]) for turn in conversation) > longest:
            dropped["too long"] += 1
            continue
        text = text_hash(conversation)
        row_id = str(row.get("id") or text[:16])
        if text in texts or row_id in ids:
            dropped["duplicate"] += 1
            continue
        texts.add(text)
        ids.add(row_id)
        if row_id in excluded.ids or text in excluded.texts:
            dropped["excluded"] += 1
            continue
        yield {"id": row_id, "category": str(row.get("category") or "all"), "conversations": conversation}


def clean(row: Row) -> list[dict[str, str]] | None:
    """Return the row's turns without trailing assistant turns; empty without a user turn, None when malformed."""
    turns = row.get("conversations") or row.get("messages")
    if not isinstance(turns, list):
        return None
    kept = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            return None
        if turn.get("role") not in ("system", "user", "assistant"):
            return None
        kept.append({"role": turn["role"], "content": turn["content"]})
    while kept and kept[-1]["role"] != "user":
        kept.pop()
    return kept if kept and kept[-1]["content"].strip() else []


def text_hash(conversation: list[dict[str, str]]) -> str:
    """Return the sha256 of the user turns' text in lower case with runs of white space made one."""
    users = (turn["content"] for turn in conversation if turn["role"] == "user")
    return hashlib.sha256(re.sub(r"\s+", " ", "\n".join(users)).strip().lower().encode()).hexdigest()


class _Smallest:
    """Keeps the ``limit`` rows with the smallest keys; memory stays a small multiple of that."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: list[tuple[str, Row]] = []

    def add(self, key: str, row: Row) -> None:
        self._rows.append((key, row))
        if len(self._rows) > 4 * self._limit + 1000:
            self._rows = self.rows()

    def rows(self) -> list[tuple[str, Row]]:
        return heapq.nsmallest(self._limit, self._rows, key=lambda pair: pair[0])
