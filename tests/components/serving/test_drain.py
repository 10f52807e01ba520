"""What a pod waits for before it is told to stop, by a stand-in for /metrics; test_service.py has a real server."""

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from components.serving import drain, ready


class Metrics(BaseHTTPRequestHandler):
    """Has one request under way or waiting for as many looks as it is told."""

    looks = 0
    busy = 0

    def do_GET(self) -> None:
        running = Metrics.looks < Metrics.busy
        Metrics.looks += 1
        waiting = int(running and Metrics.looks % 2)
        page = f'vllm:num_requests_running{{engine="0"}} {int(running) - waiting}.0\n'
        page += (
            f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0\nvllm:num_requests_waiting_by_reason{{r="x"}} 9.0\n'
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ENDPOINTS_SECONDS", "ARRIVAL_SECONDS"):
        monkeypatch.setattr(drain, name, 0.0)
    monkeypatch.setattr(drain, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(Metrics, "looks", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def run(monkeypatch: pytest.MonkeyPatch, port: int, seconds: float) -> float:
    monkeypatch.setattr(sys, "argv", ["drain", "--port", str(port), "--seconds", str(seconds)])
    began = time.monotonic()
    drain.main()
    return time.monotonic() - began


def test_what_runs_or_waits_is_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Metrics, "busy", 5)
    run(monkeypatch, port, 60)
    assert drain.mark().exists()
    assert Metrics.looks == 7  # twice nothing: what was between the server and its engine is seen


def test_waiting_ends(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Metrics, "busy", 10**9)
    assert 0.3 < run(monkeypatch, port, 0.3) < 5


def test_a_server_that_is_gone_is_not_waited_for_and_one_that_is_silent_is(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> float:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(ready, "total", silent)
        assert drain.is_busy(port)
    assert run(monkeypatch, 9, 60) < 5
