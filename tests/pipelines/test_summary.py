"""What a run prints at its end."""

from pathlib import Path

from rich.console import Console

from components.store.backend import Store
from pipelines import summary
from pipelines.plan import make_plan
from pipelines.progress import Progress
from pipelines.recipe import load_recipe
from tests.pipelines.planning import TINY, commit_all


def test_a_run_says_what_it_made_and_how_to_serve_it(tmp_path: Path, home: Path) -> None:
    store = Store(str(tmp_path / "store"))
    plan = make_plan(load_recipe(TINY), store)
    after = {"accept_length": {"after": {"value": 1.25, "low": 1.125, "high": 1.375}}}
    commit_all(plan, store, tmp_path / "x", {"gptq", "bundle"}, gptq=after)
    console = Console(width=120, record=True)
    progress = {"gptq": Progress("gptq", "done"), "bundle": Progress("bundle", "cached")}
    summary.show(console, plan, store, progress, "tiny --set gptq.damping=0.05")
    text = console.export_text()
    assert "gptq: held-out accept-length, quantised  1.25 [1.125, 1.375]" in text
    assert f"gptq/{next(task.digest for task in plan.tasks if task.name == 'gptq')[:8]}" in text
    assert "serve it: qdflash serve tiny --set gptq.damping=0.05" in text
