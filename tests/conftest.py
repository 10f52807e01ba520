"""Fixtures that every part of the suite shares. A missing engine is a failure, never a skip."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.store.backend import Store
from pipelines import seaweed

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real SeaweedFS on free ports for the whole session: its AWS_* environment, bucket ``qdflash``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QDFLASH_HOME", str(tmp_path_factory.mktemp("seaweed")))
        environment = seaweed.up()
        pid = seaweed.status()["pid"]
    yield environment
    os.kill(pid, signal.SIGKILL)  # the graceful stop takes 15 s and these data go nowhere


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of this test's own, also for the processes it starts."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("QDFLASH_HOME", str(folder))
    return folder


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store of either kind; the environment holds its credentials."""
    if request.param == "folder":
        return Store(str(tmp_path / "store"))
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    return Store(f"s3://{seaweed.BUCKET}/{tmp_path.name}")
