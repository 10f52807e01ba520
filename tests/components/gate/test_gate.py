"""The gate against hand-written evidence, and its exit code through the real command line."""

import json

import pytest
from pydantic import ValidationError

from components.contract.cli import main
from components.contract.digest import stage_digest
from components.contract.errors import GateError
from components.gate import stage
from components.gate.rules import Rule, judge
from components.store import Store, commit, read_manifest

EVIDENCE = {
    "pair": {"acceptance_length": {"low": 1.4, "bigram": {"high": 1.3}}, "parity": {"broken": 0}},
    "baseline": {"quality": {"mmlu": {"score": 0.5, "power": False}, "ifeval": {"score": 0.8, "power": True}}},
    "target": {"quality": {"mmlu": {"score": 0.1}, "ifeval": {"score": 0.7}}},
}


@pytest.mark.parametrize(
    ("rule", "status"),
    [
        ({"metric": "pair.acceptance_length.low", "above": "pair.acceptance_length.bigram.high"}, "pass"),
        ({"metric": "pair.acceptance_length.low", "above": 1.4}, "fail"),
        ({"metric": "pair.acceptance_length.low", "at_least": 1.4}, "pass"),
        ({"metric": "pair.parity.broken", "at_most": 0}, "pass"),
        ({"metric": "pair.parity.broken", "below": 0}, "fail"),
        ({"metric": "pair.parity.nothing", "at_most": 0}, "missing"),
        ({"metric": "pair.parity.broken", "at_most": "pair.nothing"}, "missing"),
        ({"metric": "pair.acceptance_length", "at_least": 1}, "missing"),
        ({"metric": "pair.parity.broken", "at_most": "pair.acceptance_length", "times": 2}, "missing"),
        ({"metric": "target.quality.ifeval.score", "at_least": "baseline.quality.ifeval.score", "times": 0.9}, "fail"),
        ({"metric": "target.quality.ifeval.score", "at_least": "baseline.quality.ifeval.score", "times": 0.8}, "pass"),
        (
            {
                "metric": "target.quality.mmlu.score",
                "at_least": "baseline.quality.mmlu.score",
                "needs": "baseline.quality.mmlu.power",
            },
            "no power",
        ),
        ({"metric": "target.quality.ifeval.score", "at_least": 0.9, "needs": "baseline.quality.ifeval.power"}, "fail"),
    ],
)
def test_each_kind_of_rule(rule, status):
    assert judge(Rule(name="r", **rule), EVIDENCE)["status"] == status


def test_a_gate_that_is_not_met_names_rule_value_and_bound():
    rule = {"name": "r", "metric": "pair.x", "value": 1 / 3, "demand": "above 1", "status": "fail"}
    with pytest.raises(GateError, match=r"r: pair\.x is 0\.333333, must be above 1$"):
        stage.check({"passed": False, "failed": ["r"], "rules": [rule]})


def test_a_rule_needs_exactly_one_bound():
    with pytest.raises(ValidationError, match="exactly one"):
        Rule(name="r", metric="pair.x", at_least=1, at_most=2)
    with pytest.raises(ValidationError, match="exactly one"):
        Rule(name="r", metric="pair.x")


def test_a_rule_on_an_unknown_task_is_refused_when_the_config_is_read():
    with pytest.raises(ValidationError, match="names no task"):
        stage.Config(names=["pair"], rules=[{"name": "r", "metric": "pear.x", "at_least": 1}])


def test_a_gate_without_rules_is_refused():
    with pytest.raises(ValidationError, match="rules"):
        stage.Config(names=["pair"], rules=[])


@pytest.mark.parametrize(("broken", "code"), [(0, 0), (2, 3)])
def test_the_verdict_is_committed_and_the_exit_code_stays_when_memoised(tmp_path, capsys, monkeypatch, broken, code):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    store = Store(str(tmp_path / "store"))
    measured = tmp_path / "measured"
    measured.mkdir()
    (measured / "parity.json").write_text("{}")
    manifest = {"config": {}, "inputs": {}, "metrics": {"parity": {"broken": broken}}, "seconds": 1, "versions": {}}
    pair, _ = commit(store, "measure", "a" * 64, measured, manifest)
    config = stage.Config(names=["pair"], rules=[Rule(name="parity", metric="pair.parity.broken", at_most=0)])
    digest = stage_digest("gate", stage.VERSION, config, {"measurements": [pair.digest]})
    argv = ["--config", config.model_dump_json(), "--input", f"measurements={pair.uri}"]
    argv += ["--output", store.uri(f"gate/{digest}")]
    for _ in range(2):
        assert main("gate", argv) == code
        verdict = read_manifest(store, "gate", digest)
        assert verdict.metrics["passed"] is (code == 0)
    errors = capsys.readouterr().err
    assert "cached" in errors
    assert ("parity: pair.parity.broken is 2" in errors) is (code == 3)
    assert json.loads(store.read(verdict.key("verdict.json"))) == verdict.metrics
