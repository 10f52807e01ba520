"""The failures a stage can end with, each with the exit code that retry policies read."""

DONE = 0
BUG = 1
USER = 2
GATE = 3
TRANSIENT = 75


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
