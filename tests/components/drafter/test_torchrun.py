"""The whole stage as a TrainJob's node runs it: two processes that torchrun starts, over gloo."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.store.artifact import read_manifest
from components.store.backend import Store
from components.store.work import Work
from tests.components.drafter.runs import SMALL, artifact_of, command_of, run, start
from tests.components.drafter.test_stage import assert_same_training

CONFIG = SMALL | {"epochs": 2, "batch": 4, "evaluate_every": 4, "save_every": 2, "anchors": 8}


def torchrun(command: list[str], home: Path) -> subprocess.Popen[str]:
    """Start ``python -m components.drafter …`` as two processes of one machine."""
    launcher = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node=2"]
    environment = {"QDFLASH_HOME": str(home), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launcher, *command[1:]], env=os.environ | environment, stderr=subprocess.PIPE, text=True)


def rank_1(launcher: subprocess.Popen[str]) -> int:
    """Return the process of the second rank."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())


@pytest.mark.slow
def test_two_processes_train_what_one_trains_also_when_one_goes_on_after_a_kill(
    tiny_model, chats, tmp_path, monkeypatch
):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    folders = {"target": tiny_model, "chats": chats}
    metrics, one, _ = run(tmp_path, tiny_model, chats, **CONFIG)

    store = Store(str(tmp_path / "whole"))
    command, digest = command_of(store, CONFIG, folders)
    both = torchrun(command, tmp_path / "whole-home")
    log = both.stderr.read()
    assert both.wait() == 0, log
    artifact, two = artifact_of(store, digest)
    assert artifact.metrics["steps"] == metrics["steps"] > 20
    assert len(re.findall(r"drafter started", log)) == 1
    assert not store.keys(f"_work/drafter/{digest}")
    assert store.folders(f"drafter/{digest}") == [artifact.manifest["attempt"]]
    assert_same_training(one, two)

    store = Store(str(tmp_path / "killed"))
    command, digest = command_of(store, CONFIG, folders)
    both, work = torchrun(command, tmp_path / "killed-home"), Work(store, f"_work/drafter/{digest}")
    while not any(name.startswith("best-") for name in work.folders()) and both.poll() is None:
        time.sleep(0.05)
    os.kill(rank_1(both), signal.SIGKILL)
    log = both.communicate(timeout=120)[1]
    assert both.returncode == 1, log
    assert read_manifest(store, "drafter", digest) is None
    assert "state" in work.folders()
    alone = start(command, tmp_path / "killed-home")
    log = alone.stderr.read()
    assert alone.wait() == 0, log
    assert "evaluated step=0 " not in log
    assert int(re.search(r"progress done=(\d+) total=\d+ .*what=steps", log)[1]) >= CONFIG["save_every"]
    assert_same_training(one, artifact_of(store, digest)[1])
