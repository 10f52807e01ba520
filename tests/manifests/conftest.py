"""The overlays, rendered by kubectl itself from a copy that has what a user adds: keys of the store, image digests."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

MANIFESTS = Path(__file__).parents[2] / "manifests"
OVERLAYS = sorted(path.name for path in (MANIFESTS / "overlays").iterdir())
KUBECTL = Path(sys.executable).with_name("kubectl")
KEYS = "AWS_ACCESS_KEY_ID=reader\nAWS_SECRET_ACCESS_KEY=of-these-tests\n"

Objects = list[dict[str, Any]]
Build = Callable[[str], Objects]


def kustomize(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of manifests/ as a user would have it."""
    copy = tmp_path_factory.mktemp("manifests") / "manifests"
    shutil.copytree(MANIFESTS, copy, ignore=shutil.ignore_patterns("store.env"))
    (copy / "overlays" / "seaweedfs" / "store.env").write_text(KEYS)
    for overlay in OVERLAYS:
        path = copy / "overlays" / overlay / "kustomization.yaml"
        digests = [
            {"name": f"qdflash-{role}", "newName": f"registry.example/qdflash-{role}", "digest": f"sha256:{'d' * 64}"}
            for role in ("core", "train", "vllm")
        ]
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"images": digests}))
    return copy


@pytest.fixture(scope="session")
def build(tree: Path) -> Build:
    """Return the objects of one overlay."""

    @cache
    def built(overlay: str) -> Objects:
        done = kustomize(tree / "overlays" / overlay)
        assert done.returncode == 0, done.stderr
        return list(yaml.load_all(done.stdout, yaml.CSafeLoader))

    return built
