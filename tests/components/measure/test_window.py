"""The window suite: the rule that chooses, and real servers with and without a window."""

import io
import json

import pytest

from components.contract.context import Input, Inputs, Output
from components.contract.errors import GateError, UserError
from components.contract.log import Log
from components.gate import stage as gate
from components.measure import window
from components.measure.stage import Answers, Config, Regime, run
from components.serving.profiles import CPU
from components.store.artifact import commit
from components.store.backend import Store
from components.store.work import Work

LENGTHS = {"short": 4, "long": 96}
MANIFEST = {"version": 1, "config": {}, "inputs": {}, "salt": None, "metrics": {}, "versions": {}}


def measured(short, long, milliseconds):
    """One candidate: acceptance lengths with ± 0.1, and its time at long prompts."""
    return {
        "lengths": {
            name: {
                "acceptance_length": {"value": value, "low": value - 0.1},
                "latency": {"median_ms": milliseconds if name == "long" else 1.0},
            }
            for name, value in (("short", short), ("long", long))
        }
    }


@pytest.mark.parametrize(
    ("candidates", "chosen", "keeps"),
    [
        ({"256": (3.0, 3.0, 70), "1024": (3.0, 3.0, 80)}, 256, {"256", "1024"}),
        ({"256": (3.0, 2.8, 70), "1024": (3.0, 2.95, 80)}, 1024, {"1024"}),
        ({"256": (2.8, 3.0, 70), "1024": (3.2, 3.1, 80)}, 1024, {"1024"}),
        ({"256": (2.0, 2.0, 70)}, None, set()),
        ({"256": (3.0, 3.0, 120)}, None, {"256"}),
    ],
)
def test_the_fastest_that_keeps_the_acceptance_everywhere_is_chosen(candidates, chosen, keeps):
    by_window = {"none": measured(3.0, 3.0, 100)} | {name: measured(*one) for name, one in candidates.items()}
    found = window.choose(by_window, "long")
    assert found["chosen"] == chosen
    assert {name for name in candidates if found["by_window"][name]["keeps"]} == keeps


def test_a_window_keeps_nothing_that_was_not_measured():
    by_window = {"none": measured(3.0, 3.0, 100), "256": measured(3.0, 3.0, 50)}
    by_window["none"]["lengths"]["long"]["acceptance_length"]["low"] = None
    assert window.choose(by_window, "long")["chosen"] is None


@pytest.mark.parametrize(("acceptance", "kept"), [(2.95, True), (2.85, False)])
def test_the_gate_refuses_a_window_below_full_attention_s_interval(acceptance, kept, tmp_path, home):
    """Full attention has 3.0 ± 0.1. The rule is the one that every recipe with a window has."""
    by_window = {"none": measured(3.0, 3.0, 100), "1024": measured(3.0, acceptance, 50)}
    store = Store(str(tmp_path / "store"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "samples.jsonl").touch()
    manifest = MANIFEST | {"metrics": {"window": window.choose(by_window, "long")}}
    artifact, _ = commit(store, "measure", "6" * 64, tmp_path / "files", manifest)
    metric = "measure_window.window.by_window.1024.keeps"
    config = gate.Config(names=["measure_window"], rules=[{"name": "window", "metric": metric, "at_least": 1}])
    output = Output(tmp_path, tmp_path, Work(store, "_work/g"), Log("gate", io.StringIO()))
    verdict = gate.run(config, Inputs({"measurements": [Input(artifact.uri)]}), output)
    assert verdict["passed"] is kept
    if not kept:
        with pytest.raises(GateError, match=f"gate not met: window: {metric} is False, must be at least 1"):
            gate.check(verdict)


def prompts(count):
    return [
        {"id": str(at), "category": "c", "prompt": "?", "prompt_token_ids": [5, 6, 7, 8 + at]} for at in range(count)
    ]


def test_windows_need_a_drafter(tiny_model, tmp_path, home):
    store = Store(str(tmp_path / "store"))
    artifact, _ = commit(store, "model", "6" * 64, tiny_model, MANIFEST)
    output = Output(tmp_path, tmp_path, Work(store, "_work/m"), Log("measure", io.StringIO()))
    with pytest.raises(UserError, match="no drafter input is bound"):
        run(Config(windows=[16]), Inputs({"model": [Input(artifact.uri)]}), output)


def test_a_window_that_no_block_fits_into_is_refused_before_a_server_starts(tiny_model, tiny_draft, tmp_path):
    output = Output(tmp_path, tmp_path, Work(Store(str(tmp_path / "store")), "_work"), Log("m", io.StringIO()))
    with pytest.raises(UserError, match="window 3 is smaller than the drafter's block size 4"):
        window.measure(Config(windows=[16, 3]), tiny_model, tiny_draft, prompts(1), None, output)
    assert not list(tmp_path.glob("server-*.log"))


@pytest.mark.slow
def test_prompts_of_every_length_are_drafted_for(tiny_model, tiny_draft, tmp_path):
    """Full attention alone, since every window starts a server; that windows are right is test_served's."""
    from transformers import AutoTokenizer

    config = Config(
        profile=CPU.model_copy(update={"dtype": "float32", "max_model_len": 256}),
        answers=Answers(max_tokens=16),
        latency={name: Regime(input_tokens=length, output_tokens=16) for name, length in LENGTHS.items()},
    )
    (tmp_path / "out").mkdir()
    output = Output(tmp_path / "out", tmp_path, Work(Store(str(tmp_path / "store")), "_work"), Log("m", io.StringIO()))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    found = window.measure(config, tiny_model, tiny_draft, prompts(3), tokenizer, output)
    assert found["chosen"] is None
    for regime, length in LENGTHS.items():
        figures = found["by_window"]["none"]["lengths"][regime]
        assert figures["acceptance_length"]["n"] == figures["latency"]["n"] == 3
        assert figures["latency"]["low"] <= figures["latency"]["median_ms"] <= figures["latency"]["high"]
        lines = (output.path / "none" / regime / "samples.jsonl").read_text().splitlines()
        asked = [json.loads(line)["prompt_token_ids"] for line in lines]
        assert [ids[-4:] for ids in asked] == [prompt["prompt_token_ids"] for prompt in prompts(3)]
        assert {len(ids) for ids in asked} == {length}
        assert len({tuple(ids) for ids in asked}) == 3
