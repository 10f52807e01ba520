"""The command that a TrainJob's nodes run, on two nodes of this machine that share nothing but the store."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from components.contract.digest import stage_digest
from components.qad import stage
from components.qad.student import Student
from components.store.artifact import commit, read_manifest
from components.store.backend import Store
from components.store.work import Work
from tests.components.qad.test_parallel import assert_close, result_in, run

CONFIG = {
    "steps": 8,
    "batch": 4,
    "learning_rate": 4.5e-3,
    "optimizer": "adamw",
    "dtype": "float32",
    "evaluate_every": 4,
    "evaluation_sequences": 5,
    "checkpoint_every": 8,
    "state_every": 1,
}
TORCHRUN = Path(sys.executable).with_name("torchrun")


class Cluster:
    """Nodes, each with a state folder of its own; the environment is what Trainer's torch plugin gives to a node."""

    def __init__(self, folder: Path, argv: list[str]) -> None:
        self.folder, self.argv = folder, argv

    def start(self) -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [self._node(number, port) for number in range(2)]

    def _node(self, number: int, port: int) -> subprocess.Popen[str]:
        environment = {
            "QDFLASH_HOME": str(self.folder / f"home-{number}"),
            "QDFLASH_EXIT_CODES": str(self.codes(number)),
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [TORCHRUN, *self.argv], env=os.environ | environment, stderr=subprocess.PIPE, text=True
        )

    def codes(self, number: int) -> Path:
        return self.folder / f"codes-{number}"


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_two_nodes_train_what_one_process_trains_also_after_a_node_was_lost(
    tiny_model, tiny_student, tiny_sequences, tmp_path
):
    folders = tiny_model, tiny_student, tiny_sequences
    store, bound, digests = Store(str(tmp_path / "store")), [], {}
    for port, folder in zip(stage.INPUTS, folders, strict=True):
        artifact, _ = commit(store, "model", port.encode().hex().ljust(64, "0"), folder, {"metrics": {}})
        bound += ["--input", f"{port}={artifact.uri}"]
        digests[port] = [artifact.digest]
    digest = stage_digest("qad", stage.VERSION, stage.Config(**CONFIG), digests)
    argv = ["-m", "components.qad", "--config", json.dumps(CONFIG), *bound, "--output", store.uri(f"qad/{digest}")]
    cluster, work = Cluster(tmp_path, argv), Work(store, f"_work/qad/{digest}")

    nodes = cluster.start()
    while "state" not in work.folders() and all(node.poll() is None for node in nodes):
        time.sleep(0.05)
    os.kill(children(nodes[1].pid)[0], signal.SIGKILL)
    said = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], said
    assert cluster.codes(0).read_text() == "75\n", said[0]
    assert not cluster.codes(1).exists()
    assert read_manifest(store, "qad", digest) is None
    (part,) = (name for name in work.folders() if name.startswith("state-"))
    assert work.get_folder("state", tmp_path / "state")
    state = json.loads((tmp_path / "state/state.json").read_text())
    assert state["parts"] == [part]

    nodes = cluster.start()
    said = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert int(re.search(r"progress done=(\d+)", said[0])[1]) == state["step"]
    assert "started" in said[0]
    assert "started" not in said[1]
    artifact = read_manifest(store, "qad", digest)
    assert store.folders(f"qad/{digest}") == [artifact.manifest["attempt"]]
    assert not store.keys(f"_work/qad/{digest}")
    student = Student.open(tiny_student, torch.float32)
    start = {f"{name}.weight": layer.weight.detach() for name, layer in student.layers.items()}
    one = run(folders, tmp_path / "one", tmp_path / "one-store", 1, CONFIG)
    assert_close(result_in(tmp_path / "store" / "qad" / digest / artifact.manifest["attempt"]), one, start)
