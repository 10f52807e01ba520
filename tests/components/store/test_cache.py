"""The cache, used by several processes at once."""

import multiprocessing
import os

from components.store import cache
from components.store.artifact import commit
from components.store.backend import Store

FILES = 60


def test_processes_that_fetch_at_once_do_not_trip_over_each_other(tmp_path, monkeypatch):
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


def fetch_all(artifacts):
    for artifact in artifacts:
        assert len(list(cache.fetch(artifact).iterdir())) == FILES
