"""The stage as a process of its own, killed with 9 while it writes and while it commits."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from components.contract.invocation import Invocation, invocation
from components.pack.stage import Config
from components.store.artifact import commit, read_manifest
from components.store.backend import Store
from tests.components.pack.conftest import build_model, chosen, quantize, train
from tests.components.qad.conftest import random_sequences

CONFIG = Config(dtype="float32", proof_tokens=1)
WIDE = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 50 million weights, so that writing it takes a while, its student and its latents."""
    root = tmp_path_factory.mktemp("made")
    model = build_model("qwen3", tiny_model, root, **WIDE)
    train(quantize(model, root / "student", 128), root / "latents", 0.3)
    (root / "sequences").mkdir()
    random_sequences(root / "sequences", 320)
    return root


def call(made: Path, folder: Path) -> tuple[Store, Invocation]:
    """Commit the stage's inputs to a store; return it, and how the stage is run on them."""
    folder.mkdir()
    inputs = {port: [one.uri for one in given] for port, given in chosen(made / "latents", folder).items()}
    store = Store(str(folder / "store"))
    for port, source in {"student": "student", "model": "qwen3", "sequences": "sequences"}.items():
        artifact, _ = commit(store, port, port.encode().hex().ljust(64, "0"), made / source, {"metrics": {}})
        inputs[port] = [artifact.uri]
    return store, invocation("pack", store.url, CONFIG, inputs)


def start(stage: Invocation, home: Path) -> subprocess.Popen[str]:
    """Start it with less right to the CPU than who watches it."""
    environment = os.environ | {"QDFLASH_HOME": str(home), "OMP_NUM_THREADS": "1"}
    argv = ["nice", "-n", "19", sys.executable, *stage.argv]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment)


def kill_when(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[1][-2000:]
        time.sleep(0.001)
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_after_a_kill_9_nothing_half_made_is_there_and_the_next_run_gives_the_same_bytes(made: Path, tmp_path: Path):
    store, stage = call(made, tmp_path / "whole")
    process = start(stage, tmp_path / "whole/home")
    assert process.wait() == 0, process.communicate()[1][-2000:]
    whole = read_manifest(store, "pack", stage.digest)
    assert whole is not None

    store, stage = call(made, tmp_path / "killed")
    home = tmp_path / "killed/home"
    kill_when(start(stage, home), lambda: any(home.rglob(".part-*.safetensors")))
    written = {path.name for path in home.rglob("*.safetensors") if path.parts[len(home.parts)] == "tmp"}
    assert not {name for name in written if name.startswith("model")}, "it was done writing"
    assert not store.keys("pack")

    attempts = Path(store.url, "pack", stage.digest)
    kill_when(start(stage, home), lambda: attempts.is_dir() and any(attempts.rglob("*")))
    assert read_manifest(store, "pack", stage.digest) is None

    process = start(stage, home)
    assert process.wait() == 0, process.communicate()[1][-2000:]
    again = read_manifest(store, "pack", stage.digest)
    assert again is not None
    assert again.files == whole.files
    assert not store.keys("_work")
    assert not list((home / "tmp").iterdir())
