"""What the planner's tests share: the shipped recipes, and committing what a plan says would be made."""

import json
import os
from pathlib import Path

from components.contract.stage import load
from components.store.artifact import commit
from components.store.backend import Store
from pipelines.plan import Plan

RECIPES = sorted((Path(__file__).parents[2] / "pipelines" / "recipes").glob("*.yaml"))
TINY = next(path for path in RECIPES if path.stem == "tiny")
REGENERATE = os.environ.get("QDFLASH_REGENERATE") == "1"


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
