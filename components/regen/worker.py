"""The process of one replica: an engine at the far end of a pipe.

It reads prompt rows (None: no more) and writes :class:`Ready`, then finished rows and
:class:`~components.regen.engine.Fault`, and :class:`Died` when the engine fails.
"""

import os
import queue
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from components.chats.rows import Row
from components.contract.errors import one_line
from components.regen.engine import Asked, Engine, Fault
from components.serving import lifetime
from components.serving.profiles import Profile


@dataclass(frozen=True)
class Ready:
    """The engine takes rows."""


@dataclass(frozen=True)
class Died:
    """The engine failed; ``error`` is one line."""

    error: str


def work(connection: Connection, model: Path, profile: Profile, asked: Asked, environment: dict[str, str]) -> None:
    """Answer rows until there are none or the parent is gone; this ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    os.environ.update({**environment, lifetime.VARIABLE: "1"})
    lifetime.register()
    try:
        engine = Engine(model, profile, asked)
        connection.send(Ready())
        rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(connection, rows), daemon=True).start()
        _answer(engine, rows, connection)
        engine.close()
    except Exception as error:
        connection.send(Died(one_line(error)))
        raise
    os._exit(0)  # the interpreter's own exit takes minutes once vLLM ran on a CPU


def _read(connection: Connection, rows: queue.SimpleQueue[Row | None]) -> None:
    """Keep the pipe empty, so that parent and replica never wait for each other to read."""
    try:
        while (row := connection.recv()) is not None:
            rows.put(row)
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone
    rows.put(None)


def _answer(engine: Engine, rows: queue.SimpleQueue[Row | None], connection: Connection) -> None:
    while True:
        while not engine.busy or not rows.empty():
            row = rows.get()
            if row is None:
                return
            try:
                engine.add(row)
            except Exception as error:  # the row's fault; if the engine is dead, the next step says so
                connection.send(Fault(row["id"], one_line(error, 300)))
        for outcome in engine.step():
            connection.send(outcome)
