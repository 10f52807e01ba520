"""A memory limit that the kernel keeps: a cgroup of its own, v2 or v1, for one process."""

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LIMITS = {"memory.max": "memory.swap.max", "memory.limit_in_bytes": "memory.memsw.limit_in_bytes"}
"""File of the limit and file that keeps swap from stretching it: version 2, version 1."""


@contextmanager
def limited(size: int) -> Iterator[Path]:
    """Yield a new cgroup whose processes may hold ``size`` bytes of memory together.

    Raises :class:`OSError` where none can be made: a test that needs one then fails.
    """
    group, limit = _make()
    try:
        (group / limit).write_text(str(size))
        with suppress(OSError):
            (group / LIMITS[limit]).write_text("0" if limit == "memory.max" else str(size))
        yield group
    finally:
        group.rmdir()


def run(group: Path, command: list[str], **options: object) -> tuple[int, int, str]:
    """Run a command inside the cgroup; return its exit code (negative: signal), peak RSS in bytes, and stderr."""
    inside = ["/bin/sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *command]
    process = subprocess.Popen(inside, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss * 1024, said


def _make() -> tuple[Path, str]:
    tried = []
    for parent in _parents():
        group = parent / f"qdflash-test-{uuid.uuid4().hex[:8]}"
        try:
            with suppress(OSError):  # version 2 hands a controller to children only when told to
                (parent / "cgroup.subtree_control").write_text("+memory")
            group.mkdir()
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        for limit in LIMITS:
            if (group / limit).exists():
                return group, limit
        tried.append(f"{parent}: no memory controller")
        group.rmdir()
    raise OSError(f"no memory cgroup can be made here ({'; '.join(tried) or 'none is mounted'}); run as root")


def _parents() -> Iterator[Path]:
    """Yield where a cgroup may be made: below this process's own, beside it, below the mount's root."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        root, mount = fields.split()[3:5]
        system, _, options = kind.split()[:3]
        name = "" if system == "cgroup2" else "memory"
        if system == "cgroup2" or (system == "cgroup" and "memory" in options.split(",")):
            here = Path(mount) / os.path.relpath(own.get(name, "/"), root)
            yield from dict.fromkeys((here, here.parent, Path(mount)))
