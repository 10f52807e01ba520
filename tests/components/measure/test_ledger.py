import io
import json
import os
import signal
import threading
import time

import pytest

from components.contract.context import Output
from components.contract.errors import StageError
from components.contract.log import Log
from components.measure.ledger import Ledger
from components.store.backend import Store
from components.store.work import Work


@pytest.fixture
def output(tmp_path):
    log = Log("measure", io.StringIO())
    return Output(
        path=tmp_path / "out", scratch=tmp_path, work=Work(Store(str(tmp_path / "store")), "_work/m/d"), log=log
    )


def test_an_answered_item_is_not_asked_again(output):
    first = Ledger(output, 2)
    assert first.item("a/1", lambda: {"value": 1}) == {"value": 1}
    again = Ledger(output, 2)
    assert again.item("a/1", lambda: pytest.fail("asked twice")) == {"value": 1}
    assert again.item("a/2", lambda: {"value": 2}) == {"value": 2}


def test_a_failure_is_raised_and_keeps_what_was_answered(output):
    def ask(number):
        if number == 5:
            raise StageError("refused")
        return {"value": number}

    asks = {str(number): (lambda number=number: ask(number)) for number in range(8)}
    with pytest.raises(StageError, match="refused"):
        Ledger(output, 8).items(asks, concurrency=1)
    asked = []
    resumed = {str(number): (lambda number=number: asked.append(number) or {"value": number}) for number in range(8)}
    records = Ledger(output, 8).items(resumed, concurrency=1)
    assert records == [{"value": number} for number in range(8)]
    assert asked[0] == 5
    assert asked == sorted(asked)


def test_items_are_in_flight_together_and_come_back_in_order(output):
    lock, running, most = threading.Lock(), 0, 0

    def ask(number):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return {"value": number}

    records = Ledger(output, 12).items({str(n): (lambda n=n: ask(n)) for n in range(12)}, concurrency=4)
    assert [record["value"] for record in records] == list(range(12))
    assert most == 4


def test_resumed_items_count_as_progress(output):
    Ledger(output, 3).item("a", dict)
    stream = io.StringIO()
    output.log._stream = stream
    resumed = Ledger(output, 2)
    resumed.item("a", lambda: pytest.fail("asked twice"))
    resumed.item("b", dict)
    assert "progress done=2 total=2" in stream.getvalue()
    assert all(json.loads(output.work.get(name)) == {} for name in output.work.names())


def test_an_interruption_asks_nothing_more(output):
    def ask(number):
        if number == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
        return {"value": number}

    def interrupted(*_):
        raise StageError("terminated")

    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        with pytest.raises(StageError, match="terminated"):
            Ledger(output, 9).items({str(n): (lambda n=n: ask(n)) for n in range(9)}, concurrency=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(output.work.names()) < 9
