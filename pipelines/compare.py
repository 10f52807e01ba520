"""``qdflash compare``: the report page of two runs, side by side."""

from pathlib import Path

from components.contract.context import Input
from components.contract.errors import UserError
from components.report.collect import TaskRecord, collect
from components.report.page import render_runs
from components.store.artifact import read_manifest
from components.store.backend import Store
from pipelines.artifacts import find
from pipelines.plan import make_plan
from pipelines.recipe import Recipe

SAMPLES = 6


def run_of(store: Store, text: str, recipe: Recipe | None) -> dict[str, TaskRecord]:
    """Return the tasks of a run: what is committed of a recipe, or what a report's artifact was made from.

    Raises :class:`UserError` when a task of the recipe is not made yet, or the artifact is no report.
    """
    if recipe is not None:
        tasks = [task for task in make_plan(recipe, store).tasks if task.stage not in ("report", "deploy")]
        if missing := [task.name for task in tasks if not read_manifest(store, task.stage, task.digest)]:
            raise UserError(
                f"{text}: {', '.join(missing)} not made yet; qdflash run {text}, or name an earlier run's report "
                "(qdflash artifacts list report)"
            )
        return collect({task.name: Input(store.uri(f"{task.stage}/{task.digest}")) for task in tasks})
    artifact = find(store, text)
    if artifact.stage != "report":
        raise UserError(f"{text}: a {artifact.stage}, no report; qdflash artifacts list report names a run's")
    uris = artifact.manifest["inputs"]["stages"]
    return collect(dict(zip(artifact.manifest["config"]["names"], map(Input, uris), strict=True)))


def write(runs: dict[str, dict[str, TaskRecord]], page: Path) -> None:
    """Write the page of several runs by name."""
    html, _ = render_runs(" and ".join(runs), runs, SAMPLES)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html, encoding="utf-8")
