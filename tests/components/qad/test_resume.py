import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.contract.digest import stage_digest
from components.qad import stage
from components.store.artifact import commit, read_manifest
from components.store.backend import Store
from components.store.work import Work

CONFIG = {
    "steps": 16,
    "batch": 4,
    "learning_rate": 3e-2,
    "optimizer": "adamw",
    "dtype": "float32",
    "evaluate_every": 5,
    "checkpoint_every": 4,
    "state_every": 1,
}


def arguments(store, folders):
    bound, digests = [], {}
    for port, folder in zip(stage.INPUTS, folders, strict=True):
        artifact, _ = commit(store, "model", port.encode().hex().ljust(64, "0"), folder, {"metrics": {}})
        bound += ["--input", f"{port}={artifact.uri}"]
        digests[port] = [artifact.digest]
    digest = stage_digest("qad", stage.VERSION, stage.Config(**CONFIG), digests)
    argv = ["--config", json.dumps(CONFIG), *bound, "--output", store.uri(f"qad/{digest}")]
    return [sys.executable, "-m", "components.qad", *argv], digest


def start(command, home):
    environment = os.environ | {"QDFLASH_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def curve_of(folder):
    lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


@pytest.mark.slow
def test_killed_and_continued_equals_uninterrupted(tiny_model, tiny_student, tiny_sequences, tmp_path):
    folders, results = (tiny_model, tiny_student, tiny_sequences), {}
    for name in ("whole", "killed"):
        store = Store(str(tmp_path / name))
        command, digest = arguments(store, folders)
        if name == "killed":
            process = start(command, tmp_path / f"{name}-home")
            work = Work(store, f"_work/qad/{digest}")
            while "checkpoints/step-4" not in work.folders() and process.poll() is None:
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            assert work.get_folder("state", tmp_path / "state")
            stopped = json.loads((tmp_path / "state/state.json").read_text())["step"]
            assert 0 < stopped < CONFIG["steps"]
            assert read_manifest(store, "qad", digest) is None
        process = start(command, tmp_path / f"{name}-home")
        log = process.stderr.read()
        assert process.wait() == 0, log
        if name == "killed":
            assert int(re.search(r"progress done=(\d+)", log)[1]) == stopped
        artifact = read_manifest(store, "qad", digest)
        results[name] = artifact, tmp_path / name / "qad" / digest / artifact.manifest["attempt"]
        assert not store.keys(f"_work/qad/{digest}")
    whole, killed = ({one["path"]: one["sha256"] for one in results[name][0].files} for name in ("whole", "killed"))
    checkpoints = {f"checkpoints/step-{step}/latents.safetensors" for step in range(4, 17, 4)}
    for files in (whole, killed):
        assert {path for path in files if not path.startswith("tensorboard/")} == checkpoints | {"curve.jsonl"}
        assert any(path.startswith("tensorboard/events") for path in files)
    assert {path: whole[path] for path in checkpoints} == {path: killed[path] for path in checkpoints}
    assert curve_of(results["whole"][1]) == curve_of(results["killed"][1])


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_and_one_process_continues_it(
    tiny_model, tiny_student, tiny_sequences, tmp_path
):
    store = Store(str(tmp_path / "store"))
    command, digest = arguments(store, (tiny_model, tiny_student, tiny_sequences))
    two = [json.dumps(CONFIG | {"processes": 2}) if part == json.dumps(CONFIG) else part for part in command]
    process, work = start(two, tmp_path / "home"), Work(store, f"_work/qad/{digest}")
    while "checkpoints/step-4" not in work.folders() and process.poll() is None:
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 1
    os.kill(int(ranks[0]), signal.SIGKILL)
    log = process.stderr.read()
    assert process.wait() == 75, log
    assert work.get_folder("state", tmp_path / "state")
    stopped = json.loads((tmp_path / "state/state.json").read_text())["step"]
    assert stopped >= 3
    process = start(command, tmp_path / "home")
    log = process.stderr.read()
    assert process.wait() == 0, log
    assert int(re.search(r"progress done=(\d+)", log)[1]) == stopped
    assert read_manifest(store, "qad", digest) is not None
