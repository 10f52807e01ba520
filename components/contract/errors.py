"""The failures a stage can end with, each with the exit code that retry policies read."""

import errno
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DONE = 0
BUG = 1
USER = 2
GATE = 3
TRANSIENT = 75

_SHORTAGE = re.compile(
    r"address already in use|out of memory|less than (desired|requested)|cannot allocate memory", re.IGNORECASE
)


class StageError(Exception):
    """A failure whose message is one line: what, where, and what to do."""

    exit_code = BUG


class UserError(StageError):
    """The user must change something: a field, a credential, an input (exit 2)."""

    exit_code = USER


class GateError(StageError):
    """A gate is not met (exit 3)."""

    exit_code = GATE


class TransientError(StageError):
    """Trying again may succeed: store unreachable, process preempted (exit 75)."""

    exit_code = TRANSIENT


def one_line(error: BaseException, limit: int = 600) -> str:
    """Return ``error`` as one printable line, with its type when it is not one of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, StageError):
        text = f"{type(error).__name__}: {text}"
    return text[:limit]


def of_machine(error: BaseException, home: Path | None = None) -> UserError | None:
    """Say what the user can change about a full memory or a refused file operation, or None when it is a bug of ours.

    A full disk is also found behind what a library made of it: torch and safetensors raise errors of their own, which
    name no file. ``home`` is where the stage writes then.
    """
    if (full := next(filter(_is_full, causes(error)), None)) is not None:
        where = "" if home is None or getattr(full, "filename", None) else f", under {home}"
        return UserError(f"disk full: {full}{where}; free space and run again")
    if (short := next(filter(_is_short, causes(error)), None)) is not None:
        return UserError(
            f"out of memory: {one_line(short, 200)}; give the stage less at a time (micro_batch where it has one, "
            "shorter sequences, fewer requests), or a larger machine"
        )
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return UserError(f"not writable or not readable: {error}; correct its rights or choose another place")
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return UserError(f"{error}; remove what is in the way or choose another path")
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from or beside, newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"(os error {errno.ENOSPC})" in str(error)  # how Rust's libraries say it


def _is_short(error: BaseException) -> bool:
    """Recognise torch's GPU and CPU allocators without importing torch."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "DefaultCPUAllocator: can't allocate memory" in str(error)


def of_environment(error: ModuleNotFoundError, role: str) -> UserError | None:
    """Say which environment has the package that this interpreter lacks, or None when the module is one of ours."""
    if error.name is None or error.name.partition(".")[0] in ("components", "pipelines"):
        return None
    return UserError(f"{sys.executable} has no {error.name}; run make setup, and this by .venv/{role}/bin/python")


def is_shortage(text: str) -> bool:
    """Say whether an engine's message names a lack of memory or of a port: trying again may succeed."""
    return _SHORTAGE.search(text) is not None
