"""A lease has one holder; a dead or silent one is replaced, and learns that it was."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from components.contract.errors import TransientError, UserError
from components.store import cache, lease
from components.store.artifact import commit
from components.store.backend import Store
from components.store.lease import Lease
from components.store.work import Work

KEY = "_work/probe/x/_lease.json"


def never() -> bool:
    return False


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "TTL_SECONDS", 1.5)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.1)


def elsewhere(store: Store) -> None:
    """A lease held by a process of another machine that no longer beats."""
    document = {"owner": "o", "host": "far", "machine": "far/1", "pid": 1, "started": "1", "beat": 0}
    store.write(KEY, json.dumps(document).encode())


@pytest.mark.slow
def test_a_live_holder_is_waited_for_beyond_the_time_to_live(store: Store, fast: None):
    first, second, told, taken = Lease(store, KEY), Lease(store, KEY), [], threading.Event()
    assert first.acquire(never, told.append)
    waiter = threading.Thread(target=lambda: (second.acquire(never, told.append), taken.set()))
    waiter.start()
    time.sleep(3.0)
    assert not taken.is_set()
    assert [holder["pid"] for holder in told] == [os.getpid()]
    first.check()
    first.release()
    assert taken.wait(10)
    second.release()
    waiter.join()
    assert store.read(KEY) is None


@pytest.mark.slow
def test_a_silent_holder_is_replaced_after_the_time_to_live(store: Store, fast: None):
    elsewhere(store)
    start = time.monotonic()
    mine = Lease(store, KEY)
    assert mine.acquire(never, lambda holder: None)
    assert 1.5 < time.monotonic() - start < 20
    mine.release()


def test_a_lost_lease_is_noticed_and_not_given_back(store: Store, fast: None):
    mine = Lease(store, KEY)
    assert mine.acquire(never, lambda holder: None)
    elsewhere(store)
    assert mine.lost.wait(20)
    with pytest.raises(TransientError, match="another process took over"):
        mine.check()
    mine.release()
    assert json.loads(store.read(KEY) or b"")["host"] == "far"


@pytest.mark.parametrize("text", [b"", b'{"owner": "o", "ho', b"[]", b"{}"])
def test_a_lease_that_nobody_can_read_is_taken_over_at_once(store: Store, text: bytes):
    store.write(KEY, text)
    mine = Lease(store, KEY)
    assert mine.acquire(never, lambda holder: None)
    mine.release()


def test_finished_work_needs_no_lease(store: Store):
    elsewhere(store)
    assert not Lease(store, KEY).acquire(lambda: True, lambda holder: None)


def test_the_cache_stays_within_its_size_and_keeps_what_is_in_use(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QDFLASH_CACHE_GB", "0.0025")
    store = Store(str(tmp_path / "store"))
    views = []
    for number in range(3):
        folder = tmp_path / f"out{number}"
        folder.mkdir()
        (folder / "file").write_bytes(os.urandom(1_000_000))
        artifact, _ = commit(store, "probe", f"{number}" * 64, folder, {"metrics": {}})
        monkeypatch.setattr(cache, "_hold", lambda root, name: None)
        views.append(cache.fetch(artifact))
        time.sleep(0.02)
    assert [view.exists() for view in views] == [False, True, True]
    blobs = [path.stat().st_size for path in (home / "cache" / "blobs").iterdir()]
    assert sum(blobs) == 2_000_000


def test_a_view_that_a_process_holds_is_not_evicted(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QDFLASH_CACHE_GB", "0.0015")
    store = Store(str(tmp_path / "store"))
    for number in range(2):
        folder = tmp_path / f"out{number}"
        folder.mkdir()
        (folder / "file").write_bytes(os.urandom(1_000_000))
        view = cache.fetch(commit(store, "probe", f"{number}" * 64, folder, {"metrics": {}})[0])
        if number == 0:
            held = view
    assert (held / "file").stat().st_size == 1_000_000


@pytest.mark.parametrize("damage", ["index", "list", "file", "bytes"])
def test_a_damaged_folder_of_work_counts_as_not_there(store: Store, tmp_path: Path, damage: str):
    work = Work(store, "_work/probe/x")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "file").write_text("state")
    work.put_folder("step", tmp_path / "state")
    key = next(key for key in store.keys("_work/probe/x/folders"))
    if damage == "file":
        store.delete(key)
    elif damage == "bytes":
        store.write(key, b"STATE")
    else:
        store.write("_work/probe/x/index/step.json", b'{"copy": ' if damage == "index" else b"[]")
    assert not work.get_folder("step", tmp_path / "back")
    work.put_folder("step", tmp_path / "state")
    assert work.get_folder("step", tmp_path / "back")
    assert (tmp_path / "back" / "file").read_text() == "state"


UPLOAD = """
import sys
from pathlib import Path
from components.store.backend import Store
from components.store.work import Work
Work(Store(sys.argv[1]), "_work/probe/x").put_folder("step", Path(sys.argv[2]))
"""


def test_a_folder_whose_upload_was_killed_never_shows_and_can_be_tidied_away(store: Store, tmp_path: Path):
    """The one before stays: of the new one's two files the first is there, the second on its way."""
    work, state = Work(store, "_work/probe/x"), tmp_path / "state"
    state.mkdir()
    (state / "a").write_text("whole")
    work.put_folder("step", state)
    kept = store.keys("_work/probe/x/folders")
    with (state / "b").open("wb") as large:
        large.truncate(1 << 30)
    process = subprocess.Popen([sys.executable, "-c", UPLOAD, store.url, str(state)])
    while len(store.keys("_work/probe/x/folders")) == len(kept) and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    assert process.wait() < 0
    assert len(store.keys("_work/probe/x/folders")) > len(kept)
    assert work.get_folder("step", tmp_path / "back")
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["a"]
    work.tidy()
    assert store.keys("_work/probe/x/folders") == kept
    if store.is_local:  # a half file is no object
        assert len([path for path in (tmp_path / "store/_work").rglob("*") if path.is_file()]) == len(kept) + 1


def test_a_folder_for_which_there_is_no_room_leaves_nothing(small_disk: Path, tmp_path: Path):
    store, state = Store(str(small_disk / "store")), tmp_path / "state"
    work = Work(store, "_work/probe/x")
    state.mkdir()
    (state / "a").write_bytes(bytes(300 << 10))
    work.put_folder("step", state)
    kept = store.keys("_work/probe/x/folders")
    (state / "b").write_bytes(bytes(500 << 10))
    with pytest.raises(UserError, match="disk full while writing"):
        work.put_folder("step", state)
    assert store.keys("_work/probe/x/folders") == kept
    assert work.get_folder("step", tmp_path / "back")
