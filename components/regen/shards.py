"""Finished rows in the store's work area: committed shard by shard while others are generated, read back later."""

import json
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from components.chats.rows import Row
from components.store.work import Work

FLUSH_SECONDS = 30.0
_WAITING = 2


class Writer:
    """Commits rows in the background, inside a ``with`` block; at its end, however it ends, all are committed.

    A shard is put when it is full or 30 s old, so at most that is redone after a kill. No more than two shards wait
    for a slow store; then :meth:`add` waits. An error of the store is raised by a later :meth:`add` or by the end.
    ``committed`` counts the rows that are safe.
    """

    def __init__(self, work: Work, shard_rows: int) -> None:
        self.committed = 0
        self._work, self._shard_rows = work, shard_rows
        self._number = len(work.names("rows/"))
        self._rows: list[Row] = []
        self._since = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "commit")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._thread:
            self._submit()
            while self._pending:
                self._pending.popleft().result()

    def add(self, row: Row) -> None:
        """Take one finished row."""
        self._rows.append(row)
        if len(self._rows) >= self._shard_rows or time.monotonic() - self._since > FLUSH_SECONDS:
            self._submit()

    def _submit(self) -> None:
        rows, self._rows, self._since = self._rows, [], time.monotonic()  # first: SIGTERM may interrupt what follows
        if rows:
            self._pending.append(self._thread.submit(self._put, self._number, rows))
            self._number += 1
        while len(self._pending) > _WAITING or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()

    def _put(self, number: int, rows: list[Row]) -> None:
        # A name of its own: a process that lost its lease and does not know it yet overwrites nobody's rows.
        lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
        self._work.put(f"rows/{number:06d}-{uuid.uuid4().hex[:8]}", "\n".join(lines).encode())
        self.committed += len(rows)


def shards(work: Work) -> Iterator[list[Row]]:
    """Yield the committed rows, shard by shard in the order of their commits; no id comes twice."""
    seen: set[str] = set()
    for name in work.names("rows/"):
        rows = []
        for line in (work.get(name) or b"").decode().split("\n"):  # answers may hold other line separators
            row = json.loads(line)
            if row["id"] not in seen:
                seen.add(row["id"])
                rows.append(row)
        yield rows
