"""What a run ends with: seconds per task, the measurements side by side, where the page lies, how to serve."""

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from components.report.collect import TaskRecord
from components.report.page import training
from components.store import cache
from components.store.artifact import Artifact, read_manifest
from components.store.backend import Store
from pipelines.plan import Plan
from pipelines.progress import Progress

_MEASUREMENTS = {"measure_baseline": "BF16 baseline", "measure_target": "target", "measure_pair": "pair"}


def show(console: Console, plan: Plan, store: Store, progress: dict[str, Progress], called: str) -> None:
    """Print the summary of a run; parts that were not made are left out.

    ``called`` names recipe and overrides on a command line.
    """
    made = {task.name: read_manifest(store, task.stage, task.digest) for task in plan.tasks}
    console.print(_tasks(made, progress))
    trained = training({name: TaskRecord.of(name, artifact) for name, artifact in made.items() if artifact})
    if trained:
        console.print(_trained(trained))
    measured = {label: made[name] for name, label in _MEASUREMENTS.items() if made.get(name)}
    if measured:
        console.print(_measurements({label: artifact.metrics for label, artifact in measured.items() if artifact}))
        console.print(
            "In brackets 95 % intervals. On a CPU a drafter rarely pays: drafting and verifying a block costs about "
            "what its tokens save. Its speed shows on a GPU, where a step waits for weights.",
            style="dim",
        )
    for task in plan.tasks:
        artifact = made[task.name]
        if artifact and task.stage == "report":
            page = copy_report(artifact, plan.recipe)
            console.print(f"report: {page}", markup=False, soft_wrap=True, highlight=False)
        if artifact and task.stage == "bundle":
            console.print(f"serve it: qdflash serve {called}", markup=False, soft_wrap=True, highlight=False)


def copy_report(artifact: Artifact, recipe: str) -> Path:
    """Copy the report page to ``<home>/reports/<recipe>/index.html`` and return that path."""
    page = cache.home() / "reports" / recipe / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.unlink(missing_ok=True)
    shutil.copyfile(cache.fetch(artifact) / "index.html", page)
    return page


def _tasks(made: dict[str, Artifact | None], progress: dict[str, Progress]) -> Table:
    table = Table(title="tasks", title_justify="left", box=None)
    for column in ("task", "state"):
        table.add_column(column, no_wrap=True)
    table.add_column("this run, s", justify="right")
    table.add_column("when made, s", justify="right")
    table.add_column("artifact", no_wrap=True)
    for name, state in progress.items():
        artifact = made[name]
        seconds, address = "", ""
        if artifact:
            seconds, address = f"{artifact.manifest['seconds']:.1f}", f"{artifact.stage}/{artifact.digest[:8]}"
        table.add_row(name, state.state, f"{state.seconds:.1f}" if state.attempts else "", seconds, address)
    return table


def _trained(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="trained", title_justify="left", box=None, show_header=False)
    for row in rows:
        table.add_row(row["what"], escape(row["value"]))
    return table


def _measurements(metrics: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="measured", title_justify="left", box=None)
    table.add_column("")
    for label in metrics:
        table.add_column(label, justify="right")
    for title, cells in _rows(metrics):
        table.add_row(title, *cells)
    return table


def _rows(metrics: dict[str, dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """One row per figure that any of the measurements has."""
    rows = []
    for suite in _names(metrics, "quality"):
        cells = [_figure(one.get("quality", {}).get(suite), "score", 3) for one in metrics.values()]
        rows.append((f"quality: {suite}", cells))
    rows.append(("acceptance length", [_figure(one.get("acceptance_length"), "value", 3) for one in metrics.values()]))
    for title, other in (("  of a bigram drafter", "bigram"), ("  gained over it", "gain_over_bigram")):
        cells = [_figure((one.get("acceptance_length") or {}).get(other), "value", 3) for one in metrics.values()]
        rows.append((title, cells))
    for regime in _names(metrics, "latency"):
        cells = [_figure(one.get("latency", {}).get(regime), "median_ms", 0) for one in metrics.values()]
        rows.append((f"latency: {regime}, ms", cells))
    speeds = [f"{one['tokens_per_second']:.1f}" if "tokens_per_second" in one else "" for one in metrics.values()]
    rows.append(("tokens/s, one request at a time", speeds))
    rows.append(("parity with the column before", [_parity(one.get("parity")) for one in metrics.values()]))
    rows.append(("samples like the column before", [_sampled(one.get("sampled")) for one in metrics.values()]))
    return [(title, cells) for title, cells in rows if any(cells)]


def _names(metrics: dict[str, dict[str, Any]], group: str) -> list[str]:
    return list(dict.fromkeys(name for one in metrics.values() for name in one.get(group, {})))


def _figure(figure: dict[str, Any] | None, key: str, digits: int) -> str:
    """``0.412 [0.380, 0.441] n=200``."""
    if not figure or figure.get(key) is None:
        return ""
    interval = ""
    if figure.get("low") is not None and figure.get("high") is not None:
        interval = f" \\[{figure['low']:.{digits}f}, {figure['high']:.{digits}f}]"
    powerless = " no power" if figure.get("power") is False else ""
    return f"{figure[key]:.{digits}f}{interval} n={figure['n']}{powerless}"


def _parity(parity: dict[str, Any] | None) -> str:
    if not parity:
        return ""
    verdict = "holds" if parity["passed"] else "BROKEN"
    return (
        f"{verdict}: {parity['equal']} equal, {parity['ties']} ties, {parity['broken']} broken of {parity['compared']}"
    )


def _sampled(sampled: dict[str, Any] | None) -> str:
    if not sampled:
        return ""
    verdict = "holds" if sampled["passed"] else "BROKEN"
    values = ", ".join(f"{test['p']:.3f}" for test in sampled["tests"].values())
    return f"{verdict}: p = {values}"
