"""N engines, each in a process of its own: rows go to whichever has room and come back as they finish.

A row that fails is tried three times. An engine that dies fails the rows it was working on, and a new one starts;
those rows come last and in ever smaller company, so that a row which kills engines takes few others with it.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from components.chats.rows import Row
from components.contract.errors import StageError, TransientError, UserError, is_shortage
from components.regen.engine import Asked, Fault
from components.regen.worker import Died, Ready, work
from components.serving.profiles import Profile

ATTEMPTS = 3
_END_SECONDS = 30.0
_SPAWN = get_context("spawn")
_Try = tuple[Row, int]


@dataclass
class _Replica:
    environment: dict[str, str]
    process: BaseProcess
    connection: Connection
    is_ready: bool = False
    running: dict[str, _Try] = field(default_factory=dict)
    error: str | None = None

    def send(self, row: Row | None, attempt: int = 0) -> None:
        if row is not None:
            self.running[row["id"]] = row, attempt
        try:
            self.connection.send(row)
        except OSError:
            return  # it died; whoever listens next finds out

    def cause(self) -> tuple[str, bool]:
        """Return why it ended, and whether another try may go better."""
        if self.error is None:
            return f"an engine's process ended with code {self.process.exitcode}", True
        return f"an engine failed: {self.error}", is_shortage(self.error) or "EngineDeadError" in self.error


class Replicas:
    """The engines, running inside a ``with`` block.

    Only the first starts at once; the others follow when it is ready, and find what it compiled.
    """

    def __init__(
        self, model: Path, profile: Profile, asked: Asked, count: int = 1, device: Literal["cpu", "cuda"] = "cpu"
    ) -> None:
        self._arguments = model, profile, asked
        self._window = 2 * profile.max_num_seqs
        self._waiting = _environments(count, device)
        self._replicas: list[_Replica] = []

    def __enter__(self) -> "Replicas":
        try:
            self._start(self._waiting.pop())
            while not self._replicas[0].is_ready:
                self._listen()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ready = [replica for replica in self._replicas if replica.is_ready and kind is None]
        for replica in ready:
            replica.send(None)
        for replica in ready:
            replica.process.join(_END_SECONDS)
        self._kill()

    def answer(self, rows: Iterable[Row]) -> Iterator[Row | Fault]:
        """Yield each row's answer, or the :class:`Fault` of its last attempt, as they come.

        A little more than what runs is queued in each engine, so that none waits for this process.

        Raises:
            TransientError: an engine does not start, or ends while idle, for want of memory or a port.
            StageError: the same for another reason.
        """
        fresh, again = iter(rows), deque[_Try]()
        row = next(fresh, None)
        while True:
            for replica in (one for one in self._replicas if one.is_ready):
                while row is not None and len(replica.running) < self._window:
                    replica.send(row, 1)
                    row = next(fresh, None)
                while row is None and again and len(replica.running) < self._company(again[0][1]):
                    replica.send(*again.popleft())
            if row is None and not again and not any(replica.running for replica in self._replicas):
                return
            for outcome, (tried, attempt) in self._listen():
                if isinstance(outcome, Fault) and attempt < ATTEMPTS:
                    again.append((tried, attempt + 1))
                else:
                    yield outcome

    def _company(self, attempt: int) -> int:
        return max(1, self._window // 8 ** (attempt - 1))

    def _listen(self) -> list[tuple[Row | Fault, _Try]]:
        """Wait for news; return each outcome with its row and the number of the attempt."""
        ends: list[Any] = [end for one in self._replicas for end in (one.connection, one.process.sentinel)]
        news = wait(ends)
        heard: list[tuple[Row | Fault, _Try]] = []
        for replica in list(self._replicas):
            heard += self._hear(replica)
            if replica.process.sentinel in news:  # known before hearing: nothing is left in the pipe
                heard += self._replace(replica)
        return heard

    def _hear(self, replica: _Replica) -> Iterator[tuple[Row | Fault, _Try]]:
        try:
            while replica.connection.poll():
                said = replica.connection.recv()
                if isinstance(said, Ready):
                    replica.is_ready = True
                    while self._waiting:
                        self._start(self._waiting.pop())
                elif isinstance(said, Died):
                    replica.error = said.error
                else:
                    row_id = said.row_id if isinstance(said, Fault) else said["id"]
                    yield said, replica.running.pop(row_id)
        except (EOFError, OSError):
            return

    def _replace(self, replica: _Replica) -> Iterator[tuple[Fault, _Try]]:
        replica.process.join()
        error, transient = replica.cause()
        if not replica.running:
            raise TransientError(f"{error}; try again") if transient else StageError(error)
        replica.connection.close()
        self._replicas.remove(replica)
        self._start(replica.environment)
        for row, attempt in replica.running.values():
            yield Fault(row["id"], error, transient), (row, attempt)

    def _start(self, environment: dict[str, str]) -> None:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=work, args=(theirs, *self._arguments, environment), name="replica")
        process.start()
        theirs.close()
        self._replicas.append(_Replica(environment, process, ours))

    def _kill(self) -> None:
        for replica in self._replicas:
            replica.process.kill()
            replica.process.join()
            replica.connection.close()
        self._replicas.clear()


def _environments(count: int, device: str) -> list[dict[str, str]]:
    """Return what each replica adds to its environment: its GPU, or its share of the cores.

    Raises:
        UserError: there are more replicas than GPUs.
    """
    if count == 1:
        return [{}]
    if device == "cpu":
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // count))
        return [{"OMP_NUM_THREADS": threads} for _ in range(count)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [path.name[6:] for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    if len(gpus) < count:
        raise UserError(f"replicas: {count}, but {len(gpus)} GPUs are visible; ask for at most one replica a GPU")
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:count]]
