"""What the pipeline's tests share: the shipped recipes, committing what a plan says would be made, plans of probes."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from components.contract.stage import load
from components.store.artifact import commit
from components.store.backend import Store
from pipelines.cluster import Cluster
from pipelines.engine import Engine, Runner
from pipelines.plan import Plan, PlannedTask, make_plan
from pipelines.processes import Processes
from pipelines.progress import Display
from pipelines.recipe import load_recipe
from tests.conftest import Probe

RECIPES = sorted((Path(__file__).parents[2] / "pipelines" / "recipes").glob("*.yaml"))
TINY = next(path for path in RECIPES if path.stem == "tiny")
IMAGES = [
    f"cluster.images.{role}=registry.example/qdflash-{role}@sha256:{role[0].encode().hex() * 32}"
    for role in ("core", "train", "vllm")
]
OWN = {"qwen3.5-4b-a10g": ["files.tasks=[smol/quality/ifeval.jsonl]", "files.selection=[]"]}
"""Overrides of recipes whose quality files this project may not ship."""
Render = Callable[[Path], tuple[Plan, str]]
REGENERATE = os.environ.get("QDFLASH_REGENERATE") == "1"


def plan_of(store: Store, path: Path = TINY, *overrides: str) -> Plan:
    return make_plan(load_recipe(path, [*IMAGES, *OWN.get(path.stem, []), *overrides]), store)


def commit_all(plan: Plan, store: Store, folder: Path, names: set[str] | None = None, **metrics: dict) -> None:
    """Commit an artifact for each task, with the manifest fields that its stage's command line would write.

    ``metrics`` are given by task name.
    """
    folder.mkdir(exist_ok=True)
    (folder / "file").write_text("content")
    for number, task in enumerate(plan.tasks):
        if names is not None and task.name not in names:
            continue
        flags = list(zip(task.argv, task.argv[1:], strict=False))
        inputs: dict[str, list[str]] = {}
        for flag, value in flags:
            if flag == "--input":
                port, _, uri = value.partition("=")
                inputs.setdefault(port, []).append(uri)
        config = next(value for flag, value in flags if flag == "--config")
        manifest = {
            "version": load(task.stage).VERSION,
            "config": json.loads(config),
            "inputs": inputs,
            "salt": next((value for flag, value in flags if flag == "--salt"), None),
            "metrics": metrics.get(task.name, {}),
            "started": number,
            "seconds": 1.5,
            "versions": {},
        }
        commit(store, task.stage, task.digest, folder, manifest)


def states(plan: Plan) -> dict[str, str]:
    return {task.name: task.state for task in plan.tasks}


def named(plan: Plan, state: str) -> set[str]:
    return {task.name for task in plan.tasks if task.state == state}


class Builder:
    """Plans of probe tasks, and their runs."""

    def __init__(
        self,
        probe: Probe,
        store: Store,
        cluster: Cluster | None = None,
        runner: Callable[[Plan], Runner] = lambda _: Processes(),
    ) -> None:
        self.probe, self.store, self.cluster, self.runner = probe, store, cluster or Cluster(), runner
        self.tasks: dict[str, PlannedTask] = {}

    def add(self, name: str, needs=(), soft=(), cpu=1, memory_gb=0.4, state="run", **config) -> PlannedTask:
        inputs = {"before": [self.tasks[one].uri for one in needs]}
        call = self.probe.invocation(self.store, inputs, text=name, **config)
        self.tasks[name] = PlannedTask(
            name,
            "probe",
            "core",
            call.argv,
            tuple(needs),
            tuple(soft),
            cpu,
            memory_gb,
            call.digest,
            call.uri,
            state,
            "",
            (),
        )
        return self.tasks[name]

    def plan(self) -> Plan:
        return Plan("probe", self.store.url, tuple(self.tasks.values()), self.cluster)

    def run(self) -> tuple[int, dict[str, str], str]:
        text, plan = io.StringIO(), self.plan()
        engine = Engine(plan, Display(Console(file=text, width=200)), self.runner(plan))
        code = engine.run()
        return code, {name: one.state for name, one in engine.progress.items()}, text.getvalue()
