"""Answered items as work parts: what was asked once is never asked again, also after a kill."""

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any

from components.contract.context import Output

Record = dict[str, Any]
Ask = Callable[[], Record]


class Ledger:
    """Records by name, kept in the stage's work; counts progress towards ``total`` items."""

    def __init__(self, output: Output, total: int = 0) -> None:
        self._output, self._total, self._done = output, total, 0
        self._known = set(output.work.names())
        self._lock = Lock()

    def expect(self, count: int) -> None:
        """Add ``count`` items to those that progress counts towards."""
        self._total += count

    def item(self, name: str, ask: Ask) -> Record:
        """Return the record called ``name``, asking for it only when there is none yet."""
        part = _part(name)
        if part in self._known:
            data = self._output.work.get(part)
            assert data is not None, f"work part {part} vanished"
            record = json.loads(data)
        else:
            record = ask()
            self._output.work.put(part, json.dumps(record).encode())
        with self._lock:
            self._done += 1
            self._output.log.progress(self._done, self._total, item=name[:40])
        return record

    def forget(self, names: Iterable[str]) -> None:
        """Drop the records of these names, so that a later run asks for them again."""
        for part in map(_part, names):
            self._output.work.delete(part)
            self._known.discard(part)

    def items(self, asks: dict[str, Ask], concurrency: int) -> list[Record]:
        """Return the records of ``asks`` in order, asking up to ``concurrency`` at the same time.

        The first failure, or an interruption, is raised once the requests in flight have ended; what was answered is
        kept.
        """
        with ThreadPoolExecutor(concurrency) as pool:
            futures = [pool.submit(self.item, name, ask) for name, ask in asks.items()]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        for future in futures:
            if not future.cancelled() and (error := future.exception()):
                raise error
        return [future.result() for future in futures]


def _part(name: str) -> str:
    return f"items/{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
