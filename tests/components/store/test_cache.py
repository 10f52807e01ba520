"""The cache, used by several processes at once, and damaged under their hands."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from components.contract.errors import UserError
from components.store import cache
from components.store.artifact import commit
from components.store.backend import Store

FILES = 60


@pytest.mark.parametrize("gigabytes", ["200", "0.0003"], ids=["roomy", "room for one or two of four"])
def test_processes_that_fetch_at_once_do_not_trip_over_each_other(gigabytes, tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_CACHE_GB", gigabytes)
    store, folder = Store(str(tmp_path / "store")), tmp_path / "folder"
    folder.mkdir()
    artifacts = []
    for name in "0123":
        for number in range(FILES):
            (folder / str(number)).write_bytes(os.urandom(3000))
        artifacts.append(commit(store, "probe", name * 64, folder, {"metrics": {}})[0])
    for attempt in range(10):
        monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / f"home-{attempt}"))
        orders = (artifacts, artifacts[2:] + artifacts[:2])
        fetchers = [multiprocessing.get_context("fork").Process(target=fetch_all, args=(order,)) for order in orders]
        for fetcher in fetchers:
            fetcher.start()
        for fetcher in fetchers:
            fetcher.join()
        assert [fetcher.exitcode for fetcher in fetchers] == [0, 0]


def test_a_limit_that_is_no_number_is_named_although_all_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("x")
    artifact, _ = commit(Store(str(tmp_path / "store")), "probe", "0" * 64, tmp_path / "out", {"metrics": {}})
    cache.fetch(artifact)
    monkeypatch.setenv("QDFLASH_CACHE_GB", "x")
    with pytest.raises(UserError, match="QDFLASH_CACHE_GB=x"):
        cache.fetch(artifact)


def fetch_all(artifacts):
    for artifact in artifacts:
        assert len(list(cache.fetch(artifact).iterdir())) == FILES


def _overwrite(file: Path) -> None:
    os.chmod(file, 0o600)
    file.write_bytes(b"X" * file.stat().st_size)


def _truncate(file: Path) -> None:
    os.chmod(file, 0o600)
    os.truncate(file, 3)


@pytest.mark.parametrize("damage", [_overwrite, _truncate, Path.unlink])
@pytest.mark.parametrize("where", ["views", "blobs"])
def test_a_damaged_copy_is_fetched_again(
    damage: Callable[[Path], None], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"the right bytes")
    artifact = commit(Store(str(tmp_path / "store")), "probe", "0" * 64, folder, {"metrics": {}})[0]
    cache.keep(artifact, folder)
    assert (cache.fetch(artifact) / "file").read_bytes() == b"the right bytes"
    [file] = [path for path in (tmp_path / "home" / "cache" / where).rglob("*") if path.is_file()]
    damage(file)
    assert (cache.fetch(artifact) / "file").read_bytes() == b"the right bytes"
    assert cache.fetch_file(artifact, "file").read_bytes() == b"the right bytes"


def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QDFLASH_HOME", "")
    assert cache.home() == Path(".qdflash").absolute()
