import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from components.store.artifact import read_manifest
from components.store.backend import Store
from components.store.work import Work
from tests.components.drafter.runs import artifact_of, command_of, run, start

CONFIG = {
    "layers": 1,
    "block_size": 4,
    "taps": 1,
    "group_size": 32,
    "held_out": 0.2,
    "anchors": 8,
    "epochs": 4,
    "batch": 4,
    "dtype": "float32",
    "evaluate_every": 5,
    "save_every": 1,
}


@pytest.fixture
def one_thread():
    """As the stage's process has: sums are added up in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_killed_and_continued_equals_uninterrupted(tiny_model, chats, tmp_path, monkeypatch, one_thread):
    """Killed after two evaluations: what is then the best checkpoint must outlive the process too."""
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    metrics, whole, _ = run(tmp_path, tiny_model, chats, **CONFIG)
    store = Store(str(tmp_path / "killed"))
    command, digest = command_of(store, CONFIG, {"target": tiny_model, "chats": chats})
    process = start(command, tmp_path / "killed-home")
    for line in process.stderr:
        if "evaluated step=10 " in line:
            break
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    folders = Work(store, f"_work/drafter/{digest}").folders()
    assert "state" in folders
    assert any(name.startswith("best-") for name in folders)
    assert read_manifest(store, "drafter", digest) is None
    process = start(command, tmp_path / "killed-home")
    log = process.stderr.read()
    assert process.wait() == 0, log
    assert "evaluated step=0" not in log
    artifact, continued = artifact_of(store, digest)
    assert not store.keys(f"_work/drafter/{digest}")
    assert (whole / "model.safetensors").read_bytes() == (continued / "model.safetensors").read_bytes()
    for name in ("curve.jsonl", "scores.json", "config.json"):
        assert (whole / name).read_text() == (continued / name).read_text()
    assert json.loads(json.dumps(metrics)) == artifact.metrics
    losses = [json.loads(line)["loss"] for line in (whole / "curve.jsonl").read_text().splitlines() if "loss" in line]
    assert losses[-1] < losses[0]
    assert all(weight.isfinite().all() for weight in load_file(whole / "model.safetensors").values())
