"""A committed model artifact that prompts can be measured with, and the stage through its real command line."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.chats.rows import read_rows
from components.contract.cli import main
from components.contract.context import Input
from components.contract.digest import stage_digest
from components.prompts.stage import VERSION, Config
from components.store.artifact import Artifact, commit, read_manifest
from components.store.backend import Store
from tests.components.byte_tokenizer import byte_tokenizer
from tests.components.prompts import nemotron

SPLITS = ["stem", "chat", "multilingual_de"]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer files of a model folder: one token a byte."""
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@dataclass
class Stage:
    """Runs the stage by its command line, on a store of its own."""

    folder: Path
    model: str

    @property
    def store(self) -> Store:
        return Store(str(self.folder / "store"))

    def digest(self, config: dict[str, Any], inputs: dict[str, list[str]]) -> str:
        digests = {port: [Input(uri).digest for uri in uris] for port, uris in inputs.items()}
        return stage_digest("prompts", VERSION, Config(**config), digests)

    def argv(self, config: dict[str, Any], inputs: dict[str, list[str]]) -> list[str]:
        bound = {"model": [self.model], **inputs}
        uri = f"{self.store.url}/prompts/{self.digest(config, bound)}"
        pairs = [f"--input={port}={one}" for port, uris in bound.items() for one in uris]
        return ["--config", json.dumps(config), "--output", uri, *pairs]

    def start(
        self, config: dict[str, Any], inputs: dict[str, list[str]], code: str = "", **environment: str
    ) -> subprocess.Popen[str]:
        """Start the stage; ``code`` runs before it in its process."""
        main = f"{code}\nfrom components.contract.cli import main\nraise SystemExit(main('prompts'))"
        command = [sys.executable, "-c", main, *self.argv(config, inputs)]
        values = {**os.environ, **environment}
        return subprocess.Popen(command, env=values, stderr=subprocess.PIPE, text=True)

    def committed(self, config: dict[str, Any], inputs: dict[str, list[str]]) -> Artifact | None:
        return read_manifest(self.store, "prompts", self.digest(config, {"model": [self.model], **inputs}))

    def run(self, inputs: dict[str, list[str]], config: dict[str, Any]) -> Artifact:
        """Run the stage in this process; it commits."""
        assert main("prompts", self.argv(config, inputs)) == 0
        return self.artifact(inputs, config)

    def artifact(self, inputs: dict[str, list[str]], config: dict[str, Any]) -> Artifact:
        artifact = self.committed(config, inputs)
        assert artifact is not None
        return artifact

    def ends(self, inputs: dict[str, list[str]], config: dict[str, Any], **environment: str) -> tuple[int, str]:
        """Run the stage in a process of its own; return its exit code and its last line."""
        process = self.start(config, inputs, **environment)
        _, said = process.communicate(timeout=120)
        assert (self.committed(config, inputs) is None) == (process.returncode != 0)
        return process.returncode, said.strip().splitlines()[-1]


@pytest.fixture
def stage(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The stage with a committed model in its store."""
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    store = Store(str(tmp_path / "store"))
    artifact, _ = commit(store, "model", "0" * 64, tokenizer_folder, {"metrics": {}})
    return Stage(tmp_path, artifact.uri)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two shards of each split with a duplicate across them; one shard has a column more."""
    folder = tmp_path / "repository"
    for split in SPLITS:
        rows = [nemotron.row(f"{split} question {number}?", split) for number in range(40)]
        copy = nemotron.row(f"{split}  QUESTION 3?", split, row_id=f"copy-{split}")
        paths = nemotron.write(folder, split, [rows[:25], [*rows[25:], copy]])
    table = pq.read_table(paths[1])
    pq.write_table(table.append_column("language", pa.array(["de"] * len(table))), paths[1])
    nemotron.card(folder, SPLITS)
    return folder


def read(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the rows of a prompts artifact."""
    return list(read_rows(Input(artifact.uri).path))
