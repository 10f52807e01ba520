"""``python -m pipelines.trainjob --spec JSON -- -m components.STAGE …``: a task that trains on several nodes."""

import argparse
import json
import os
import signal
import sys
from types import FrameType

from components.contract import errors, executor
from components.contract.arguments import parser
from components.contract.errors import StageError
from components.contract.log import Log
from components.contract.stage import load
from components.store.artifact import split_uri
from components.store.backend import Store
from pipelines.deployment.api import Namespace
from pipelines.trainjob.launcher import Launcher
from pipelines.trainjob.spec import NAMESPACE


def main(argv: list[str] | None = None) -> int:
    """Launch, follow, and return the stage's exit code."""
    log = Log("trainjob")
    signal.signal(signal.SIGTERM, _terminated)
    made = argparse.ArgumentParser(prog="python -m pipelines.trainjob", description=__doc__)
    made.add_argument(
        "--spec", required=True, type=json.loads, help="the TrainJob's spec, as the plan was compiled to"
    )
    made.add_argument("command", nargs=argparse.REMAINDER, help="-- -m components.STAGE and what follows it")
    given = made.parse_args(argv)
    stage = given.command[2].removeprefix("components.")
    module = load(stage)
    call = parser(stage, module).parse_args(given.command[3:])
    try:
        store, _, digest = split_uri(call.output)
        namespace = Namespace(os.environ.get(NAMESPACE, "qdflash"))
        artifact = Launcher(namespace, Store(store), stage, digest, given.spec, log).run()
        if call.executor_output:
            executor.write(call.executor_output, call.executor_artifact, module, artifact)
    except StageError as error:
        log.event("failed", error=errors.one_line(error))
        return error.exit_code
    except KeyboardInterrupt:
        log.event("failed", error="interrupted; run again to continue")
        return errors.TRANSIENT
    log.event("done", uri=artifact.uri)
    return errors.DONE


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not keep the TrainJob from being deleted
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
