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


def window_rules(gate) -> list[str]:
    return [rule.metric for rule in gate.config.rules if rule.metric.startswith("measure_window.")]


def test_the_4b_recipe_s_gate_refuses_a_window_that_loses_acceptance() -> None:
    found = tasks(REAL)
    assert found["measure_window"].config.windows == (1024,)
    assert found["drafter_2"].config.window == 1024
    gate = found["gate"]
    assert gate.config.names[: len(gate.inputs["measurements"])] == list(gate.inputs["measurements"])
    assert window_rules(gate) == ["measure_window.window.by_window.1024.keeps"]


def test_every_served_window_has_its_rule_and_full_attention_and_auto_need_none() -> None:
    other = tasks(REAL, "drafter.window=512", "measure_window.windows=[512, 256]")
    assert window_rules(other["gate"]) == ["measure_window.window.by_window.512.keeps"]
    assert window_rules(tasks(SMOL, "bundle.window=16", "measure_window.windows=[16]")["gate"])
    for served in ("null", "auto"):
        assert window_rules(tasks(REAL, f"bundle.window={served}")["gate"]) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bundle.window=auto", r"bundle\.window: auto .* give measure_window\.windows"),
        ("measure_window.seed=1", r"measure_window\.windows: give the windows"),
        ("measure_window.windows=[0]", r"measure_window\.windows\.0"),
        ("bundle.window=none", r"bundle\.window"),
        ("bundle.window=16", r"bundle\.window: 16 is served only after .* measure_window\.windows is not there"),
        ("drafter.window=16", r"drafter\.window: 16 is served only after"),
    ],
)
def test_a_window_that_says_nothing_is_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(SMOL, [override])


def test_a_window_other_than_the_measured_ones_is_refused() -> None:
    with pytest.raises(UserError, match=r"drafter\.window: 512 is served .* measure_window\.windows has 1024"):
        load_recipe(REAL, ["drafter.window=512"])


def test_what_changes_answers_is_served_only_where_it_was_measured() -> None:
    name = "env.VLLM_MARLIN_INPUT_DTYPE"
    served, measured = f"bundle.serving.profiles.a10g.{name}=int8", f"measure.profile.{name}=int8"
    for given in (served, measured):
        with pytest.raises(UserError, match=r"profiles\.a10g\.env\.VLLM_MARLIN_INPUT_DTYPE: changes answers"):
            load_recipe(REAL, [given])
    found = tasks(REAL, served, measured)
    assert found["measure_pair"].config.profile.env == found["bundle"].config.serving.profiles["a10g"].env
