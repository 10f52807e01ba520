"""The drafter stage, in this process or as one of its own, on folders that stand in for committed artifacts."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from components.contract.context import Input, Inputs, Output
from components.contract.digest import stage_digest
from components.contract.log import Log
from components.drafter import stage
from components.store.artifact import Artifact, commit, read_manifest
from components.store.backend import Store
from components.store.work import Work

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


def run(folder, target, chats, work="run", path="", init=None, **config):
    """Run the stage here, small; return its metrics, its output and its log. ``work`` names what a run continues."""
    store = Store(str(folder / "store"))
    bound = {}
    for port, place in {"target": target, "chats": chats, "init": init}.items():
        if place:
            name = f"{port} {work}" if port == "init" else port
            artifact, _ = commit(store, "model", name.encode().hex().ljust(64, "0"), place, {"metrics": {}})
            bound[port] = [Input(artifact.uri)]
    path = folder / (path or work)
    scratch = path.with_name(f"{path.name}-scratch")
    path.mkdir()
    scratch.mkdir()
    log = io.StringIO()
    output = Output(path=path, scratch=scratch, work=Work(store, f"_work/d/{work}"), log=Log("drafter", log))
    metrics = stage.run(stage.Config(**SMALL | config), Inputs(bound), output)
    return metrics, path, log.getvalue()


def command_of(store: Store, config: dict[str, Any], folders: dict[str, Path]) -> tuple[list[str], str]:
    """Commit the folders and return the stage's command line and digest."""
    bound, digests = [], {}
    for port, folder in folders.items():
        artifact, _ = commit(store, "model", port.encode().hex().ljust(64, "0"), folder, {"metrics": {}})
        bound += ["--input", f"{port}={artifact.uri}"]
        digests[port] = [artifact.digest]
    digest = stage_digest("drafter", stage.VERSION, stage.Config(**config), digests)
    argv = ["--config", json.dumps(config), *bound, "--output", store.uri(f"drafter/{digest}")]
    return [sys.executable, "-m", "components.drafter", *argv], digest


def start(command: list[str], home: Path) -> subprocess.Popen[str]:
    """Start the stage; its log is on ``stderr``."""
    environment = os.environ | {"QDFLASH_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def drafter_stage(folder: Path, config: dict[str, Any], folders: dict[str, Path]) -> tuple[Artifact, Path]:
    """Run the stage to its end; return the artifact and where its files lie."""
    store = Store(str(folder / "store"))
    command, digest = command_of(store, config, folders)
    process = start(command, folder / "home")
    log = process.stderr.read()
    assert process.wait() == 0, log
    return artifact_of(store, digest)


def artifact_of(store: Store, digest: str) -> tuple[Artifact, Path]:
    """Return the committed drafter and where its files lie."""
    artifact = read_manifest(store, "drafter", digest)
    assert artifact is not None
    return artifact, Path(store.uri(f"drafter/{digest}/{artifact.manifest['attempt']}"))
