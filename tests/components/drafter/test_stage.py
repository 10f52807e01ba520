import io
import json

import pytest

from components.contract.context import Input, Inputs, Output
from components.contract.errors import UserError
from components.contract.log import Log
from components.drafter import stage
from components.store.backend import Store
from components.store.work import Work
from tests.components.drafter.runs import commit

SMALL = {
    "layers": 1,
    "block_size": 4,
    "taps": 1,
    "group_size": 32,
    "held_out": 0.2,
    "anchors": 4,
    "epochs": 1,
    "batch": 16,
    "dtype": "float32",
    "save_every": 1,
}


def run(tmp_path, tiny_model, chats, name="run", **config):
    store = Store(str(tmp_path / "store"))
    bound = {}
    for port, folder in {"target": tiny_model, "chats": chats}.items():
        artifact, _ = commit(store, "model", port.encode().hex().ljust(64, "0"), folder, {"metrics": {}})
        bound[port] = [Input(artifact.uri)]
    path, scratch = tmp_path / name, tmp_path / f"{name}-scratch"
    path.mkdir()
    scratch.mkdir()
    log = io.StringIO()
    output = Output(path=path, scratch=scratch, work=Work(store, f"_work/d/{name}"), log=Log("drafter", log))
    metrics = stage.run(stage.Config(**SMALL | config), Inputs(bound), output)
    return metrics, path, log.getvalue()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))


def test_features_computed_once_or_each_time_train_the_same_drafter(tmp_path, tiny_model, chats):
    cached, first, log = run(tmp_path, tiny_model, chats, "cached")
    online, second, _ = run(tmp_path, tiny_model, chats, "online", cache_features=False)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "curve.jsonl").read_text() == (second / "curve.jsonl").read_text()
    assert cached | {"seconds": 0} == online | {"seconds": 0}
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
    ],
)
def test_what_cannot_train_is_refused_in_one_line(tmp_path, tiny_model, chats, config, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, tiny_model, chats, **config)


def test_a_window_smaller_than_the_block_is_refused():
    with pytest.raises(ValueError, match="slots would not see each other"):
        stage.Config(block_size=16, window=8)
