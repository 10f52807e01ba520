"""What is known of each running task, read from its log, and how it is shown."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

PLAIN_SECONDS = 30.0
_EVENT = re.compile(r"^\d\d:\d\d:\d\d \S+ (progress(?= done=\d+ total=\d+\b)|phase|failed|waiting) (.*)$")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
_COLOURS = {
    "done": "green",
    "cached": "green",
    "running": "yellow",
    "failed": "red",
    "not run": "dim",
    "waiting": "dim",
}


@dataclass
class Progress:
    """One task: ``state`` is cached, waiting, running, done, failed or not run; times are monotonic seconds."""

    name: str
    state: str
    attempts: int = 0
    done: int = 0
    total: int = 0
    detail: str = ""
    error: str = ""
    exit_code: int = 0
    seconds: float = 0.0
    ended: float = 0.0
    _started: float = field(default=0.0, repr=False)
    told: float = field(default=0.0, repr=False)

    def start(self) -> None:
        """An attempt begins."""
        self.state, self.error, self.detail = "running", "", ""
        self.attempts += 1
        self._started = self.told = time.monotonic()

    def wait_for_retry(self) -> None:
        """The attempt ended with a transient error; another will follow."""
        self.seconds += time.monotonic() - self._started
        self.state = "waiting"

    def end(self, state: str, exit_code: int = 0, error: str = "") -> None:
        """No attempt will follow."""
        self.ended = time.monotonic()
        if self.state == "running":
            self.seconds += self.ended - self._started
        self.state, self.exit_code, self.error = state, exit_code, error

    def elapsed(self) -> float:
        """Seconds over all attempts, the running one included."""
        return self.seconds + (time.monotonic() - self._started if self.state == "running" else 0.0)

    def share(self) -> str:
        """``37/150 eta 40 s`` of the running phase, or the error, or nothing."""
        if self.error:
            return self.error
        if self.state != "running":
            return ""
        count = f"{self.done}/{self.total} " if self.total else ""
        return f"{count}{self.detail}".strip()


class Attempt:
    """The log of a task from where this attempt begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._position = path.stat().st_size
        self._rest = b""

    def header(self, number: int, command: list[str]) -> None:
        """Mark the beginning of an attempt."""
        with self.path.open("a") as log:
            log.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} attempt {number}: {' '.join(command)}\n")

    def read_into(self, state: Progress) -> bool:
        """Take the new lines into ``state``; return whether its progress moved."""
        try:
            log = self.path.open("rb")
        except FileNotFoundError:  # someone tidied up: the task goes on
            return False
        with log:
            log.seek(self._position)
            data = self._rest + log.read()
            self._position = log.tell()
        lines, _, self._rest = data.rpartition(b"\n")
        moved = False
        for line in lines.decode(errors="replace").split("\n"):
            event = _EVENT.match(line)
            if event is None:
                continue
            moved = True
            fields = {name: _plain(value) for name, value in _FIELD.findall(event[2])}
            if event[1] == "failed":
                state.error = fields.get("error", "")
            elif event[1] == "progress":
                state.done, state.total = int(fields["done"]), int(fields["total"])
                state.detail = " ".join(
                    value if name == "what" else f"{name} {value}"
                    for name, value in fields.items()
                    if name not in ("done", "total")
                )
            elif event[1] == "phase":
                state.done = state.total = 0
                state.detail = fields.get("name", "")
            else:
                state.detail = (
                    f"waits: {fields.get('why', '')} (pid {fields.get('pid', '?')} on {fields.get('host', '?')})"
                )
        return moved


class Display:
    """A live table on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._all: dict[str, Progress] = {}

    @contextlib.contextmanager
    def showing(self, progress: dict[str, Progress]) -> Iterator[None]:
        """Show ``progress`` for as long as the block runs."""
        self._all = progress
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=2) as self._live:
            yield
        self._live = None

    def line(self, state: Progress) -> None:
        """A task changed its state."""
        if self._live is None:
            seconds = f" {state.elapsed():.0f} s" if state.state in ("done", "failed", "waiting") else ""
            error = f": {state.error}" if state.error else ""
            word = {"running": "started", "waiting": "will be tried again"}.get(state.state, state.state)
            again = f" (attempt {state.attempts})" if state.attempts > 1 else ""
            self._print(f"{state.name} {word}{again}{seconds}{error}")

    def progress(self, state: Progress) -> None:
        """A running task logged progress."""
        if self._live is None and time.monotonic() - state.told >= PLAIN_SECONDS:
            state.told = time.monotonic()
            self._print(f"{state.name} {state.share()}")

    def _print(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("task", "state"):
            table.add_column(column, no_wrap=True)
        table.add_column("s", justify="right")
        table.add_column("")
        for state in self._all.values():
            colour = _COLOURS[state.state]
            seconds = f"{state.elapsed():.0f}" if state.attempts else ""
            table.add_row(state.name, f"[{colour}]{state.state}[/]", seconds, state.share().replace("[", "\\["))
        return table


def _plain(value: str) -> str:
    return str(json.loads(value)) if value.startswith('"') else value
