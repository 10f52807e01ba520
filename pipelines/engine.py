"""The engine of one machine: a plan's tasks in dependency order, within the machine's CPUs and memory.

A :class:`Runner` starts them, as processes (:mod:`pipelines.processes`) or in :mod:`pipelines.containers`. A task's
output goes to ``<home>/logs/<recipe>/<task>.log``. The engine keeps no state of its own: what is committed in the
store is done, everything else runs or resumes the next time.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Protocol

from components.contract.errors import BUG, DONE, TRANSIENT, UserError
from components.contract.stage import load
from components.store import cache
from components.store.artifact import read_manifest
from components.store.backend import Store
from pipelines.plan import Plan, PlannedTask
from pipelines.progress import Attempt, Display, Progress

RETRIES = 2
PAUSE_SECONDS = 5.0
TICK_SECONDS = 0.2


class Job(Protocol):
    """One attempt of a task."""

    def poll(self) -> int | None:
        """Return the exit code, 128 + n when signal n ended it, or None while it runs."""

    def terminate(self) -> None:
        """Ask it to end, and see to it that it does; return at once."""

    def wait(self) -> None:
        """Block until it has ended, after :meth:`terminate`."""


class Runner(Protocol):
    """Starts tasks."""

    def check(self, tasks: Iterable[PlannedTask]) -> None:
        """Raise :class:`UserError` for what would keep one of ``tasks`` from running here."""

    def command(self, task: PlannedTask) -> list[str]:
        """Return what is run, for the log."""

    def start(self, task: PlannedTask, log: Path) -> Job:
        """Start an attempt that appends its output to ``log``."""


class Engine:
    """Executes one plan. After :meth:`run`, ``progress`` holds every task's end state, seconds and error."""

    def __init__(self, plan: Plan, display: Display, runner: Runner) -> None:
        self.plan = plan
        self._runner = runner
        self.progress = {task.name: Progress(task.name, _initial(task)) for task in plan.tasks}
        self._display = display
        self._tasks = {task.name: task for task in plan.tasks}
        self._running: dict[str, tuple[Job, Attempt]] = {}
        self._retry_at: dict[str, float] = {}
        self._cpus = len(os.sched_getaffinity(0))
        self._memory_gb = _memory_gb()
        self._stopping = False

    def run(self) -> int:
        """Run every task that can run; return 0 or the exit code of the first task that failed.

        A failed task keeps only those from running that need it. SIGINT and SIGTERM end the tasks and the run.
        Raises :class:`UserError` before anything starts when a task is blocked or cannot run here.
        """
        if obstacles := self.plan.obstacles():
            raise UserError("cannot start: " + "; ".join(obstacles))
        self._runner.check([task for task in self.plan.tasks if self.progress[task.name].state == "waiting"])
        with self._signals(), self._display.showing(self.progress):
            try:
                while self._running or self._waiting():
                    self._collect()
                    if not self._stopping:
                        self._start_ready()
                    elif not self._running:
                        break
                    time.sleep(TICK_SECONDS)
            finally:
                self._end_all()
                for state in self.progress.values():
                    if state.state == "waiting":
                        state.end("not run")
        return self._exit_code()

    def _waiting(self) -> bool:
        return any(one.state == "waiting" for one in self.progress.values())

    def _start_ready(self) -> None:
        for task in self.plan.tasks:
            state = self.progress[task.name]
            if self._stopping or state.state != "waiting" or time.monotonic() < self._retry_at.get(task.name, 0.0):
                continue
            needed = [self.progress[name].state for name in task.needs]
            if any(one in ("failed", "not run") for one in needed):
                state.end("not run", error="something it needs failed")
                self._display.line(state)
            elif all(one in ("done", "cached") for one in needed) and self._soft(task) and self._fits(task):
                self._start(task)

    def _soft(self, task: PlannedTask) -> bool:
        return not any(self.progress[name].state in ("waiting", "running") for name in task.soft_needs)

    def _fits(self, task: PlannedTask) -> bool:
        """Say whether the task's share is free; one that asks for more than the machine has runs alone.

        Tasks with GPUs run one at a time: nothing here says which GPU is whose.
        """
        if not self._running:
            return True
        running = [self._tasks[name] for name in self._running]
        if self._gpus(task) and any(self._gpus(one) for one in running):
            return False
        cpus = sum(one.cpu for one in running) + task.cpu
        memory = sum(one.memory_gb for one in running) + task.memory_gb
        return cpus <= self._cpus and memory <= self._memory_gb

    def _gpus(self, task: PlannedTask) -> int:
        return self.plan.cluster.placement(task.name, task.role).gpus or 0

    def _start(self, task: PlannedTask) -> None:
        store = Store(self.plan.store)
        for path, key in task.files_to_upload:
            store.upload(path, key)  # also when one is there: it may be damaged
        state = self.progress[task.name]
        state.start()
        attempt = Attempt(self.log_path(task.name))
        attempt.header(state.attempts, self._runner.command(task))
        job = self._runner.start(task, attempt.path)
        self._running[task.name] = job, attempt
        if self._stopping:  # by a signal that came while it was started
            job.terminate()
        self._display.line(state)

    def _collect(self) -> None:
        """Read what the running tasks logged and take note of those that ended."""
        for name, (job, attempt) in list(self._running.items()):
            code = job.poll()
            state = self.progress[name]
            if attempt.read_into(state):
                self._display.progress(state)
            if code is None:
                continue
            del self._running[name]
            if code == DONE or self._killed_after_commit(name, code):
                state.end("done")
            elif code == TRANSIENT and state.attempts <= RETRIES and not self._stopping:
                state.wait_for_retry()
                self._retry_at[name] = time.monotonic() + PAUSE_SECONDS * state.attempts
            else:
                self._failed(state, code)
            self._display.line(state)

    def _killed_after_commit(self, name: str, code: int) -> bool:
        task = self._tasks[name]
        module = load(task.stage)
        if code <= 128 or hasattr(module, "check") or not getattr(module, "MEMOISED", True):
            return False  # not killed, or its exit code would have been the answer
        return read_manifest(Store(self.plan.store), task.stage, task.digest) is not None

    def _failed(self, state: Progress, code: int) -> None:
        if code > 128:
            state.error = state.error or f"ended by signal {code - 128}; run again to continue"
            code = TRANSIENT
        state.end("failed", code, state.error or f"exit code {code}; see {self.log_path(state.name)}")

    def log_path(self, task: str) -> Path:
        """Return where a task's output goes."""
        return cache.home() / "logs" / self.plan.recipe / f"{task}.log"

    def _exit_code(self) -> int:
        failed = sorted((one for one in self.progress.values() if one.state == "failed"), key=lambda one: one.ended)
        if failed:
            return failed[0].exit_code
        return TRANSIENT if self._stopping else DONE

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(_number: int, _frame: FrameType | None) -> None:
            self._stopping = True
            for job, _ in self._running.values():
                job.terminate()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """End what still runs when the loop is left by an error of ours."""
        for job, _ in self._running.values():
            job.terminate()
        for job, _ in self._running.values():
            job.wait()


def _initial(task: PlannedTask) -> str:
    """A cached task whose stage checks its metrics (the gate) runs all the same: its exit code counts every time."""
    if task.state == "cached":
        return "waiting" if task.selected and hasattr(load(task.stage), "check") else "cached"
    return {"run": "waiting"}.get(task.state, "not run")


def _memory_gb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise UserError(f"/proc/meminfo: no MemTotal; the local engine needs Linux (exit {BUG})")
