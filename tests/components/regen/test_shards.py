import threading
import time
from pathlib import Path

import pytest

from components.contract.errors import UserError
from components.regen import shards as module
from components.regen.shards import Writer, shards
from components.store.backend import Store
from components.store.work import Work


class SlowWork(Work):
    """A store whose puts wait until they are let through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Store(str(folder)), "_work/regen/x")
        self.opened = threading.Event()

    def put(self, name: str, data: bytes) -> None:
        assert self.opened.wait(30)
        super().put(name, data)


def rows(*numbers: int) -> list[dict]:
    return [{"id": f"r{number}", "text": "a\u2028b\u0085c"} for number in numbers]


def test_generation_goes_on_while_the_store_is_slow_but_not_for_ever(tmp_path: Path) -> None:
    work = SlowWork(tmp_path)
    with Writer(work, 2) as writer:
        for row in rows(*range(5)):
            writer.add(row)
        assert work.names("rows/") == []
        blocked = threading.Thread(target=writer.add, args=rows(5))  # a third shard would have to wait in memory
        blocked.start()
        blocked.join(0.2)
        assert blocked.is_alive()
        work.opened.set()
        blocked.join(30)
        assert not blocked.is_alive()
    assert list(shards(work)) == [rows(0, 1), rows(2, 3), rows(4, 5)]


def test_what_is_left_is_committed_when_the_run_is_interrupted(tmp_path: Path) -> None:
    work = Work(Store(str(tmp_path)), "_work/regen/x")

    def run() -> None:
        with Writer(work, 4) as writer:
            for row in rows(*range(6)):
                writer.add(row)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert list(shards(work)) == [rows(0, 1, 2, 3), rows(4, 5)]


def test_slow_rows_are_committed_before_a_shard_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.05)
    work = Work(Store(str(tmp_path)), "_work/regen/x")
    with Writer(work, 1000) as writer:
        writer.add(rows(0)[0])
        time.sleep(0.1)
        writer.add(rows(1)[0])
        deadline = time.monotonic() + 30
        while not work.names("rows/") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(shards(work)) == [rows(0, 1)]


def test_an_error_of_the_store_ends_the_run(tmp_path: Path) -> None:
    class FullWork(Work):
        def put(self, name: str, data: bytes) -> None:
            if self.names("rows/"):
                raise UserError("disk full")
            super().put(name, data)

    work = FullWork(Store(str(tmp_path)), "_work/regen/x")

    def run() -> None:
        with Writer(work, 1) as writer:
            for row in rows(*range(50)):
                writer.add(row)
                time.sleep(0.01)
        raise AssertionError("the last commit hid the error")

    with pytest.raises(UserError, match="disk full"):
        run()
    assert list(shards(work)) == [rows(0)]
