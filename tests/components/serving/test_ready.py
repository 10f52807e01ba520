"""Readiness: a real server's token; a stand-in plays the busy and the hung server, which a real one seldom is."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from components.serving import ready


class Stuck(BaseHTTPRequestHandler):
    """Counts tokens as it is told to and never completes a request."""

    step = 0
    count = 0
    end = threading.Event()

    def do_GET(self) -> None:
        Stuck.count += Stuck.step
        page = f'vllm:generation_tokens_total{{model_name="x"}} {Stuck.count}\n'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self) -> None:
        Stuck.end.wait(30)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def stuck() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stuck) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        Stuck.end.set()
        server.shutdown()


@pytest.mark.slow
def test_a_real_server_is_ready_once_it_generates(server) -> None:
    port = int(server.url.rpartition(":")[2])
    before = ready.generated(port)
    subprocess.run([sys.executable, "-m", "components.serving.ready", "--port", str(port)], check=True)
    assert ready.generated(port) == before + 1


@pytest.mark.parametrize(("step", "code"), [(1, 0), (0, 1)], ids=["busy", "hung"])
def test_a_busy_server_is_ready_and_a_hung_one_is_not(stuck: int, monkeypatch, capsys, step: int, code: int) -> None:
    monkeypatch.setattr(Stuck, "step", step)
    monkeypatch.setattr(ready, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(sys, "argv", ["ready", "--port", str(stuck)])
    assert ready.main() == code
    assert bool(capsys.readouterr().err) is bool(code)


def test_no_server_is_one_line(capsys, monkeypatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(sys, "argv", ["ready", "--port", str(port)])
    assert ready.main() == 1
    assert capsys.readouterr().err.startswith("not ready: ConnectionRefusedError")
