import json
import re
import signal

import pytest
from safetensors.torch import load_file

from components.store.artifact import read_manifest
from components.store.backend import Store
from components.store.work import Work
from tests.components.drafter.runs import artifact_of, command_of, start

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


@pytest.mark.slow
def test_killed_and_continued_equals_uninterrupted(tiny_model, chats, tmp_path):
    folders, results = {"target": tiny_model, "chats": chats}, {}
    for name in ("whole", "killed"):
        store = Store(str(tmp_path / name))
        command, digest = command_of(store, CONFIG, folders)
        if name == "killed":
            process = start(command, tmp_path / f"{name}-home")
            for line in process.stderr:
                found = re.search(r"drafter progress done=(\d+) total=(\d+) .*what=steps", line)
                if found and 0 < int(found[1]) < int(found[2]):
                    break
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            assert "state" in Work(store, f"_work/drafter/{digest}").folders()
            assert read_manifest(store, "drafter", digest) is None
        process = start(command, tmp_path / f"{name}-home")
        log = process.stderr.read()
        assert process.wait() == 0, log
        assert ("evaluated step=0" in log) == (name == "whole")
        results[name] = artifact_of(store, digest)
        assert not store.keys(f"_work/drafter/{digest}")
    (whole, whole_files), (killed, killed_files) = results["whole"], results["killed"]
    assert (whole_files / "model.safetensors").read_bytes() == (killed_files / "model.safetensors").read_bytes()
    for name in ("curve.jsonl", "scores.json", "config.json"):
        assert (whole_files / name).read_text() == (killed_files / name).read_text()
    assert whole.metrics | {"seconds": 0} == killed.metrics | {"seconds": 0}
    losses = [
        json.loads(line)["loss"] for line in (whole_files / "curve.jsonl").read_text().splitlines() if "loss" in line
    ]
    assert losses[-1] < losses[0]
    assert all(weight.isfinite().all() for weight in load_file(whole_files / "model.safetensors").values())
