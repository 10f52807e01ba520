import json

import pytest
import torch
from safetensors.torch import load_file

from components.contract.errors import UserError
from components.drafter import stage
from tests.components.drafter.runs import run


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))


def test_features_computed_once_or_each_time_train_the_same_drafter(tmp_path, tiny_model, chats):
    cached, first, log = run(tmp_path, tiny_model, chats, "cached")
    online, second, _ = run(tmp_path, tiny_model, chats, "online", cache_features=False)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "curve.jsonl").read_text() == (second / "curve.jsonl").read_text()
    assert cached == online
    assert cached["steps"] in (3, 4)
    assert "what=features" in log
    assert f"progress done=1 total={cached['steps']} what=steps" in log


def test_the_best_evaluation_is_the_one_handed_on(tmp_path, tiny_model, chats):
    metrics, path, _ = run(tmp_path, tiny_model, chats, epochs=3, learning_rate=3e-3, evaluate_every=2)
    scores = json.loads((path / "scores.json").read_text())
    trained = [entry for entry in scores["evaluations"] if entry["step"]]
    best = max(trained, key=lambda entry: entry["accept_length"]["value"])
    assert (metrics["best_step"], scores["final"]) == (best["step"], best["accept_length"])
    assert scores["untrained"] == scores["init"] == scores["evaluations"][0]["accept_length"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"epochs": 0}, "zero training steps"),
        ({"group_size": 48}, "group_size 48 does not divide"),
        ({"mask_token": 10}, "mask_token 10: it can occur"),
        ({"taps": 3}, "a target of 4 layers has no 3 distinct ones"),
        ({"draft_vocabulary": 320}, "the target has 320 tokens"),
        ({"held_out": 1e-9}, "0 held out"),
        ({"heads": 2, "key_value_heads": 4}, "drafter.key_value_heads: 4 do not divide 2 heads"),
    ],
)
def test_what_cannot_train_is_refused_in_one_line(tmp_path, tiny_model, chats, config, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, tiny_model, chats, **config)


def test_a_window_smaller_than_the_block_is_refused():
    with pytest.raises(ValueError, match="slots would not see each other"):
        stage.Config(block_size=16, window=8)


def test_micro_batches_split_the_same_gradient(tmp_path, tiny_model, chats):
    one, first, _ = run(tmp_path, tiny_model, chats, "one", loss="d_pace")
    two, second, _ = run(tmp_path, tiny_model, chats, "two", loss="d_pace", micro_batch=8)
    assert one["steps"] == two["steps"] > 1
    assert_same_training(first, second)
    with pytest.raises(ValueError, match="batch 16 is not a multiple of micro_batch 3"):
        stage.Config(batch=16, micro_batch=3)


@pytest.mark.slow
def test_two_processes_equal_one_and_one_continues_their_state(tmp_path, tiny_model, chats):
    """Noise is that of the order in which fp32 gradients are added, which Adam passes on."""
    settings = {"epochs": 2, "save_every": 4, "evaluate_every": 2, "loss": "kl"}
    _, one, _ = run(tmp_path, tiny_model, chats, "one", **settings)
    metrics, two, _ = run(tmp_path, tiny_model, chats, "two", **settings, processes=2)
    continued, after, log = run(tmp_path, tiny_model, chats, "two", path="after", **settings, processes=1)
    assert_same_training(one, two)
    assert_same_training(two, after)
    assert "progress done=4 " in log
    assert "done=1 " not in log
    assert metrics["steps"] == continued["steps"] > 4
    lines = [(folder / "curve.jsonl").read_text().splitlines() for folder in (two, after)]
    assert lines[0][:6] == lines[1][:6]
    with pytest.raises(ValueError, match="batch 16 is not a multiple of micro_batch 16 on 2 processes"):
        stage.Config(batch=16, micro_batch=16, processes=2)


def assert_same_training(one, other):
    curves = [[json.loads(line) for line in (folder / "curve.jsonl").open()] for folder in (one, other)]
    for ours, theirs in zip(*curves, strict=True):
        assert ours.keys() == theirs.keys()
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    apart = torch.cat([(ours[name] - theirs[name]).float().flatten() for name in ours])
    whole = torch.cat([ours[name].float().flatten() for name in ours])
    assert apart.norm() / whole.norm() < 1e-3
