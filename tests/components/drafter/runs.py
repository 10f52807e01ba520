"""The drafter stage as a process of its own, on folders that stand in for committed artifacts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from components.contract.digest import stage_digest
from components.drafter import stage
from components.store.artifact import Artifact, commit, read_manifest
from components.store.backend import Store


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
