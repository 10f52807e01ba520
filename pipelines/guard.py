"""Runs one task's process so that nothing of it outlives the engine: ``guard.py ENGINE_PID COMMAND…``.

The guard is a subreaper between the engine and the task. When the engine dies, however it does, the guard is told
(parent-death signal) and ends the task: SIGTERM, a grace period, SIGKILL. When the task dies, its surviving
descendants (a model server and its workers) come to the guard and are ended too. When the guard dies, the kernel kills
the task.
Exits as the task did; 128 + n when a signal n ended it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_SECONDS = 20.0
LEFTOVER_SECONDS = 2.0
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_HANDLED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_prctl = ctypes.CDLL(None).prctl


def main(engine: int, command: list[str]) -> int:
    """Run ``command`` to its end and return its exit code."""
    inherited = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != engine:
        return 75

    def prepare() -> None:
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited)

    task = subprocess.Popen(command, process_group=0, preexec_fn=prepare)
    code = _wait(task.pid)
    _end_descendants()
    return code


def _wait(task: int) -> int:
    kill_at = None
    while True:
        while (ended := _reap()) is not None:
            if ended[0] == task:
                return ended[1]
        received = signal.sigtimedwait(_HANDLED, 0.5)
        if received is not None and received.si_signo != signal.SIGCHLD and kill_at is None:
            kill_at = time.monotonic() + GRACE_SECONDS
            _kill_group(task, signal.SIGTERM)
        if kill_at is not None and time.monotonic() > kill_at:
            _kill_group(task, signal.SIGKILL)


def _reap() -> tuple[int, int] | None:
    """Collect one ended child: (pid, exit code), or None when none has ended."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    if pid == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return pid, code if code >= 0 else 128 - code


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _end_descendants() -> None:
    """End what the task left behind; the kernel hands orphans to the guard until there are none."""
    kill_at = time.monotonic() + LEFTOVER_SECONDS
    while True:
        while _reap() is not None:
            pass
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        if time.monotonic() > kill_at:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), sys.argv[2:]))
