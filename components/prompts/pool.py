"""Which rows may be drawn, in which order: an index of all of them in a database file, so memory stays constant.

Of several rows that are the same only one counts, and which one does not depend on what is drawn: so a larger draw
contains the smaller one.
"""

import contextlib
import errno
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from components.chats.rows import Row
from components.prompts.clean import text_hash
from components.prompts.overlap import BOILERPLATE
from components.prompts.read import Parts

_TABLES = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -65536;
PRAGMA temp_store = FILE;
CREATE TABLE rows (part INT, position INT, id TEXT, text BLOB, category TEXT, key BLOB, state TEXT);
CREATE TABLE grams (row INT, gram INT);
CREATE TABLE earlier (draw INT, id TEXT, text BLOB);
CREATE TABLE chosen (key BLOB PRIMARY KEY, id TEXT, category TEXT, conversation TEXT, tokens INT) WITHOUT ROWID;
"""

_SAME_ID = "PARTITION BY id ORDER BY text, key, part, position"
_SAME_TEXT = "PARTITION BY text, category ORDER BY key, part, position"
_SAME_TEXT_ELSEWHERE = "PARTITION BY text ORDER BY supply, category"

Candidate = tuple[int, int, int]
"""A row's number in the index, its part and its position there."""


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn SQLite's word for a full disk into the operating system's."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
            raise
        raise OSError(errno.ENOSPC, str(error)) from error


class Pool:
    """Rows of the index. A row's ``state`` is NULL while it may be drawn, else ``drawn`` or why it is not."""

    def __init__(self, folder: Path) -> None:
        os.environ["SQLITE_TMPDIR"] = str(folder)  # its sorts belong beside it, not into a /tmp that may be memory
        self._database = sqlite3.connect(folder / "pool.sqlite", isolation_level=None)
        self._database.executescript(_TABLES)

    def fill(self, parts: Parts, seed: int) -> None:
        """Index the rows of all parts; a row's key is the sha256 of seed and id."""
        self._run("BEGIN")
        for number, name in enumerate(parts.names()):
            table = parts.table(name, ["id", "text", "category", "grams"])
            start = self._one("SELECT coalesce(max(rowid), 0) + 1 FROM rows")
            ids, texts, categories, grams = (column.to_pylist() for column in table.columns)
            keys = [hashlib.sha256(f"{seed}:{row_id}".encode()).digest() for row_id in ids]
            self._database.executemany(
                f"INSERT INTO rows (part, position, id, text, category, key) VALUES ({number}, ?, ?, ?, ?, ?)",
                zip(range(len(ids)), ids, texts, categories, keys, strict=True),
            )
            self._database.executemany(
                "INSERT INTO grams VALUES (?, ?)",
                ((start + position, gram) for position, found in enumerate(grams) for gram in found),
            )
        self._run("COMMIT")

    def exclude(self, draw: int, rows: Iterable[Row]) -> bool:
        """Take out what an earlier draw holds, by id and by user text; return whether any row matched."""
        self._run("BEGIN")
        self._database.executemany(
            "INSERT INTO earlier VALUES (?, ?, ?)",
            ((draw, row["id"], bytes.fromhex(text_hash(row["conversations"]))[:16]) for row in rows),
        )
        self._run("COMMIT")
        matches = "rows.{0} IN (SELECT {0} FROM earlier WHERE draw = ?)"
        where = " OR ".join(matches.format(column) for column in ("id", "text"))
        found = self._one(f"SELECT EXISTS (SELECT 1 FROM rows WHERE {where})", draw, draw)
        self._run(f"UPDATE rows SET state = 'excluded' WHERE state IS NULL AND ({where})", draw, draw)
        return bool(found)

    def keep_one_of_each(self) -> None:
        """Leave one row per id and one per user text.

        A text that several categories hold belongs to the one with the fewest distinct texts, so that it goes where
        prompts are scarce.
        """
        self._drop_all_but_first(_SAME_ID, "duplicate")
        self._drop_all_but_first(_SAME_TEXT, "duplicate")
        self._run(
            "CREATE TABLE supplies AS SELECT category, count(*) AS supply FROM rows WHERE state IS NULL GROUP BY 1"
        )
        self._drop_all_but_first(_SAME_TEXT_ELSEWHERE, "duplicate of another category", "NATURAL JOIN supplies")

    def _drop_all_but_first(self, window: str, reason: str, join: str = "") -> None:
        ranked = (
            f"SELECT rows.rowid AS row, row_number() OVER ({window}) AS place FROM rows {join} WHERE state IS NULL"
        )
        self._run(
            f"UPDATE rows SET state = ? WHERE rowid IN (SELECT row FROM ({ranked}) WHERE place > 1)",
            reason,
        )

    def drop_overlaps(self) -> None:
        """Take out prompts that hold a held-out n-gram which is not boilerplate."""
        told = (
            "SELECT gram FROM grams JOIN rows ON rows.rowid = grams.row WHERE state IS NULL "
            "GROUP BY gram HAVING count(*) <= ?"
        )
        self._run(
            f"UPDATE rows SET state = 'overlaps held-out text' WHERE state IS NULL "
            f"AND rowid IN (SELECT row FROM grams WHERE gram IN ({told}))",
            BOILERPLATE,
        )

    def first(self, categories: list[str] | None, count: int) -> list[Candidate]:
        """Return the ``count`` rows with the smallest keys that may be drawn, of some categories or of all."""
        where = "" if categories is None else f"AND category IN ({', '.join('?' * len(categories))})"
        query = f"SELECT rowid, part, position FROM rows WHERE state IS NULL {where} ORDER BY key LIMIT ?"
        return self._run(query, *(categories or ()), count).fetchall()

    def choose(self, rows: Iterable[tuple[int, str, int]]) -> int:
        """Draw rows, each given by its number, its conversation as JSON and its length in tokens; return how many."""
        count = 0
        self._run("BEGIN")
        for row, conversation, tokens in rows:
            self._run(
                "INSERT INTO chosen SELECT key, id, category, ?, ? FROM rows WHERE rowid = ?",
                conversation,
                tokens,
                row,
            )
            self._run("UPDATE rows SET state = 'drawn' WHERE rowid = ?", row)
            count += 1
        self._run("COMMIT")
        return count

    def reject(self, rows: Iterable[int], reason: str) -> None:
        """Take rows out, by their numbers."""
        self._run("BEGIN")
        self._database.executemany("UPDATE rows SET state = ? WHERE rowid = ?", ((reason, row) for row in rows))
        self._run("COMMIT")

    def count(self) -> list[tuple[str, str | None, int]]:
        """Return (category, state, rows) for each pair that occurs; state None: could be drawn, was not."""
        return self._run("SELECT category, state, count(*) FROM rows GROUP BY 1, 2 ORDER BY 1, 2").fetchall()

    def lacks(self, ids: Iterable[str]) -> list[str]:
        """Return those ids that no row has, sorted."""
        self._run("CREATE TABLE asked (id TEXT PRIMARY KEY) WITHOUT ROWID")
        self._database.executemany("INSERT INTO asked VALUES (?)", ((one,) for one in ids))
        return [one for (one,) in self._run("SELECT id FROM asked EXCEPT SELECT id FROM rows ORDER BY 1")]

    def chosen(self) -> Iterator[tuple[str, str, str, int]]:
        """Yield (id, category, conversation as JSON, tokens) of what was drawn, in the order of the keys."""
        yield from self._run("SELECT id, category, conversation, tokens FROM chosen ORDER BY key")

    def _run(self, query: str, *values: Any) -> sqlite3.Cursor:
        return self._database.execute(query, values)

    def _one(self, query: str, *values: Any) -> Any:
        return self._run(query, *values).fetchone()[0]
