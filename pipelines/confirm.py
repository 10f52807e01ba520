"""``python -m pipelines.confirm RECIPE FOLDER``: does a finished run's pair do on this machine what its report says?

Measures baseline, target and pair here, where that was done on another machine or ``--again``, and judges them by the
recipe's gate. Then serves the bundle as the chart's container does, times it by the published protocol, and leaves in
FOLDER: the report page, ``compare.html`` with the column measured before beside this one's, and ``confirmed.json``.
The same command goes on after a kill. ``docs/a10g.md`` is the runbook.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from components.contract.errors import GATE, GateError, StageError, UserError, one_line
from components.deploy.values import MODELS
from components.serving.lifetime import VARIABLE as END_WITH_PARENT
from components.serving.lifetime import end_with_parent
from components.serving.start import VARIABLE
from components.store import cache
from components.store.artifact import Artifact, read_manifest
from pipelines.compare import run_of, write
from pipelines.connect import connect
from pipelines.interpreters import interpreter
from pipelines.options import recipe_at
from pipelines.plan import make_plan
from pipelines.serve import demand_free

MEASURES = ("measure_baseline", "measure_target", "measure_pair")
DESCRIBE = "import json; from components.measure.machine import describe; print(json.dumps(describe()))"


def confirm(
    recipe: str, sets: list[str], folder: Path, again: bool, latency: list[str], acceptance: list[str]
) -> dict[str, Any]:
    """Measure, judge, serve and time; return ``machine``, ``gate``, ``floor`` and the served pair's figures.

    ``again`` measures what a machine of this name has measured too. ``latency`` and ``acceptance`` are more arguments
    of ``qdflash bench``. Raises :class:`GateError` when the gate refuses the pair, or it is served with an acceptance
    length below its floor (on the run's own held-out prompts, the ones that the floor comes from).
    """
    folder.mkdir(parents=True, exist_ok=True)
    here = json.loads(subprocess.run([interpreter("vllm"), "-c", DESCRIBE], stdout=subprocess.PIPE, check=True).stdout)
    made = measured(recipe, sets, folder, again, here["name"])
    deploy = made["deploy"]
    values = yaml.safe_load(deploy.store.read(deploy.key("values.yaml")) or b"")
    with served(values, cache.fetch(made["bundle"]), folder / "server.log") as url:
        qdflash("bench", "latency", url, "--natural", "-o", str(folder / "latency"), *latency)
        qdflash("bench", "acceptance", url, "-o", str(folder / "acceptance"), *as_measured(made), *acceptance)
    timed, accepted = (
        json.loads((folder / kind / "result.json").read_text())["figures"][0] for kind in ("latency", "acceptance")
    )
    floor = values["bundle"].get("acceptanceFloor")
    found = {"machine": here, "gate": made["gate"].metrics, "floor": floor, "latency": timed, "acceptance": accepted}
    (folder / "confirmed.json").write_text(json.dumps(found, indent=1))
    own = not {"--published", "--prompts"} & {*acceptance}
    if own and floor is not None and accepted["high"] is not None and accepted["high"] < floor:
        raise GateError(f"served, its acceptance length is {accepted['value']:.3f}, below the measured {floor:.3f}")
    return found


def as_measured(made: dict[str, Artifact]) -> list[str]:
    """Return the arguments by which ``qdflash bench acceptance`` asks the prompts that the pair was measured on."""
    thinking = made["measure_pair"].manifest["config"]["template"]["thinking"]
    return ["--prompts", str(cache.fetch(made["prompts_eval"])), *(["--thinking"] if thinking else [])]


def measured(recipe: str, sets: list[str], folder: Path, again: bool, machine: str) -> dict[str, Artifact]:
    """Measure and judge on this ``machine``, write both pages; return what the recipe then has, by task.

    Raises :class:`UserError` without a bundle, :class:`GateError` when the gate refuses it.
    """
    before = committed(recipe, sets)
    if "bundle" not in before:
        raise UserError(
            f"{recipe}: its bundle is not in this store; run the recipe, or name its store by QDFLASH_STORE"
        )
    begun = folder / "before.json"  # a call that goes on after a kill finds measurements and report of this machine
    if not begun.exists():
        found = {name: before[name] for name in MEASURES if name in before}
        about = {
            "report": before["report"].uri if "report" in before else None,
            "machine": " and ".join(sorted({one.metrics["machine"]["name"] for one in found.values()})),
            "again": {name: one.uri for name, one in found.items() if again},
        }
        begun.write_text(json.dumps(about))
    first = json.loads(begun.read_text())
    forced = elsewhere(before, machine)
    forced += [name for name, uri in first["again"].items() if name in before and before[name].uri == uri]
    only = [word for name in (*MEASURES, "gate", "report", "deploy") for word in ("--only", name)]
    anew = [word for name in sorted({*forced}) for word in ("--force", name)]
    code = qdflash("run", recipe, *[word for one in sets for word in ("--set", one)], *only, *anew, allowed=(0, GATE))
    made = committed(recipe, sets)
    report = made["report"]
    (folder / "report.html").write_bytes(report.store.read(report.key("index.html")) or b"")
    if first["report"] not in (None, report.uri):
        runs = {f"{first['machine']}, before": first["report"], machine: report.uri}
        write({name: run_of(report.store, uri, None) for name, uri in runs.items()}, folder / "compare.html")
    if code == GATE:
        raise GateError(f"the gate refuses the pair on {machine}: {', '.join(made['gate'].metrics['failed'])}")
    return made


def committed(recipe: str, sets: list[str]) -> dict[str, Artifact]:
    """Return what a recipe has in the store, by task."""
    store = connect(None)
    tasks = make_plan(recipe_at(recipe, sets), store).tasks
    found = {task.name: read_manifest(store, task.stage, task.digest) for task in tasks}
    return {name: artifact for name, artifact in found.items() if artifact}


def elsewhere(found: dict[str, Artifact], here: str) -> list[str]:
    """Return the measurements that were taken on another machine than the one called ``here``."""
    return [name for name in MEASURES if name in found and found[name].metrics["machine"]["name"] != here]


def qdflash(*argv: str, allowed: tuple[int, ...] = (0,)) -> int:
    """Run a command of ours and say so; return its code. Raises :class:`StageError` for one that is not allowed."""
    print("$ qdflash " + " ".join(argv), file=sys.stderr, flush=True)
    code = subprocess.run([sys.executable, "-m", "pipelines.cli", *argv], check=False).returncode
    if code not in allowed:
        raise StageError(f"qdflash {argv[0]}: ended with code {code}; what it said is above")
    return code


@contextlib.contextmanager
def served(values: dict[str, Any], bundle: Path, log: Path) -> Iterator[str]:
    """Serve the bundle on loopback by the chart's container command; ready when the block begins, with its URL."""
    serving, python = values["serving"], interpreter("vllm")
    demand_free(serving["port"])
    argv = [word.replace(MODELS, str(bundle)).replace("0.0.0.0", "127.0.0.1") for word in serving["args"]]
    environment = {**os.environ, **serving["env"], VARIABLE: values["bundle"]["sums"], END_WITH_PARENT: "1"}
    environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"
    port = str(serving["port"])
    command = [python, "-m", "components.serving.start", *argv]
    print(f"$ {VARIABLE}={environment[VARIABLE]} {' '.join(command)}", file=sys.stderr, flush=True)
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
    try:
        ready = [python, "-m", "components.serving.ready", "--port", port]
        while subprocess.run(ready, capture_output=True, check=False).returncode:
            if server.poll() is not None:
                raise StageError(f"the server ended with code {server.returncode}; see {log}")
            time.sleep(2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def main(argv: list[str] | None = None) -> int:
    """Confirm a recipe's pair; errors are one line on stderr and an exit code (see components.contract.errors)."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.confirm", description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a field; repeatable"
    )
    parser.add_argument("--again", action="store_true", help="measure again what such a machine has measured as well")
    parser.add_argument("--latency", default="", help="more arguments of qdflash bench latency")
    parser.add_argument("--acceptance", default="", help="more arguments of qdflash bench acceptance")
    asked = parser.parse_args(argv)
    try:
        found = confirm(
            asked.recipe, asked.set, asked.folder, asked.again, asked.latency.split(), asked.acceptance.split()
        )
    except StageError as error:
        print(f"qdflash: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    print(f"confirmed on {found['machine']['name']}: {asked.folder / 'confirmed.json'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
