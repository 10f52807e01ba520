"""Weights for a pod: verified, held once, and placed again after a restart."""

import subprocess
import sys
from pathlib import Path

import pytest

from components.contract.errors import UserError
from components.serving.weights import place
from components.store import Artifact, Store, commit

MANIFEST = {"config": {}, "inputs": {}, "metrics": {}, "seconds": 1, "versions": {}}


@pytest.fixture
def bundle(tmp_path: Path, home: Path) -> Artifact:
    folder = tmp_path / "made"
    (folder / "draft").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "draft" / "model.safetensors").write_bytes(b"weights")
    return commit(Store(str(tmp_path / "store")), "bundle", "b" * 64, folder, MANIFEST)[0]


def test_a_folder_holds_the_bundle_and_nothing_else_also_when_placed_again(bundle: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "components.serving.weights", bundle.uri, str(folder)], check=True
        )
        assert done.returncode == 0
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert found == {"config.json", "draft/model.safetensors"}
        assert (folder / "draft" / "model.safetensors").read_bytes() == b"weights"
        assert (folder / "config.json").stat().st_nlink > 1
        (folder / "left-over").write_text("x")


def test_a_changed_byte_is_not_served(bundle: Artifact, tmp_path: Path) -> None:
    bundle.store.write(bundle.key("draft/model.safetensors"), b"Weights")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        place(bundle.uri, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_an_absent_bundle_is_one_line(bundle: Artifact, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "components.serving.weights", bundle.uri.replace("b" * 64, "c" * 64), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing is committed there" in done.stderr
    assert done.stderr.count("\n") == 1
