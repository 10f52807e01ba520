"""Tasks as processes of this machine, with their role's interpreter, each under :mod:`pipelines.guard`."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from pipelines import guard
from pipelines.interpreters import environment, interpreter
from pipelines.plan import PlannedTask


class Process:
    """One attempt of a task."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        """Return the exit code, 128 + n when signal n ended it, or None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code  # below zero: the guard itself was killed

    def terminate(self) -> None:
        """Ask it to end; the guard sees to it that it does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Block until it has ended, after :meth:`terminate`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(guard.GRACE_SECONDS + 10)


class Processes:
    """Starts tasks as processes."""

    def check(self, tasks: Iterable[PlannedTask]) -> None:
        """Raise :class:`UserError` when a role has no interpreter."""
        for role in {task.role for task in tasks}:
            interpreter(role)

    def command(self, task: PlannedTask) -> list[str]:
        """Return what is run."""
        return [interpreter(task.role), *task.argv]

    def start(self, task: PlannedTask, log: Path) -> Process:
        """Start an attempt that appends its output to ``log``."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, str(os.getpid()), *self.command(task)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(task.stage, min(task.cpu, len(os.sched_getaffinity(0)))),
                start_new_session=True,
            )
        return Process(process)
