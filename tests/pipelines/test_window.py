"""The drafter's window in a recipe: a task that compares windows, the bundle that goes by it, and the gate's rule."""

import pytest

from components.contract.errors import UserError
from pipelines.dag import build
from pipelines.recipe import load_recipe

SMOL, REAL = "pipelines/recipes/smol.yaml", "pipelines/recipes/qwen3.5-4b-a10g.yaml"


def tasks(path: str, *overrides: str) -> dict:
    return {task.name: task for task in build(load_recipe(path, overrides))}


def test_windows_are_compared_where_a_recipe_asks_for_it_and_auto_goes_by_them() -> None:
    assert "measure_window" not in tasks(SMOL)
    fixed = tasks(SMOL, "measure_window.windows=[16]", "bundle.window=16")
    assert fixed["measure_window"].inputs.keys() == {"model", "drafter", "prompts"}
    assert "windows" not in fixed["bundle"].inputs
    auto = tasks(SMOL, "measure_window.windows=[16, 32]", "bundle.window=auto")
    assert auto["bundle"].inputs["windows"] == ("measure_window",)
    assert list(auto).index("measure_window") < list(auto).index("bundle")
    assert auto["measure_window"].config.profile == auto["measure_pair"].config.profile


def test_the_4b_recipe_s_gate_refuses_a_window_that_loses_acceptance() -> None:
    found = tasks(REAL)
    assert found["measure_window"].config.windows == (1024,)
    assert found["drafter_2"].config.window == 1024
    gate = found["gate"]
    assert gate.config.names[: len(gate.inputs["measurements"])] == list(gate.inputs["measurements"])
    rules = [rule for rule in gate.config.rules if rule.metric.startswith("measure_window.")]
    assert [rule.metric for rule in rules] == ["measure_window.window.by_window.1024.keeps"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bundle.window=auto", r"bundle\.window: auto .* give measure_window\.windows"),
        ("measure_window.seed=1", r"measure_window\.windows: give the windows"),
        ("measure_window.windows=[0]", r"measure_window\.windows\.0"),
        ("bundle.window=none", r"bundle\.window"),
    ],
)
def test_a_window_that_says_nothing_is_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(SMOL, [override])
