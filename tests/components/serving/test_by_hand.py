"""A bundle served as its card says, with nothing of this project but its plugins in vLLM's environment; and killed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.bundle import stage
from components.contract.context import Input, Inputs, Output
from components.contract.log import Log
from components.serving.client import Client
from components.serving.lifetime import ENGINE_DIED
from components.store.artifact import commit
from components.store.backend import Store
from components.store.work import Work

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from service_stress import engine

pytestmark = pytest.mark.slow
MANIFEST = {"version": 1, "config": {}, "inputs": {}, "salt": None, "metrics": {}, "versions": {}}


@pytest.fixture
def bundle(tiny_model: Path, tiny_draft: Path, tmp_path: Path, home: Path) -> Path:
    store, inputs = Store(str(tmp_path / "store")), {}
    for port, source in (("target", tiny_model), ("drafter", tiny_draft)):
        artifact, _ = commit(store, "model", port.encode().hex().ljust(64, "0"), source, MANIFEST)
        inputs[port] = [Input(artifact.uri)]
    out = tmp_path / "bundle"
    out.mkdir()
    serving = {"served_model_name": "by-hand", "profiles": {"cpu": {"max_model_len": 128}}}
    config = stage.Config(serving=serving, window=16)
    stage.run(config, Inputs(inputs), Output(out, tmp_path, Work(store, "_work"), Log("bundle")))
    return out


@contextlib.contextmanager
def started(command: list[str], folder: Path, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen]:
    """A server in a process group of its own, all of which ends with the block."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen, log: Path, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_card_s_command_serves_the_pair_with_its_window_and_ends_with_its_engine(bundle, tmp_path) -> None:
    command = re.search(r"`cpu`:\n\n```sh\n(.+)\n```", (bundle / "README.md").read_text()).group(1)
    port, log = free_port(), tmp_path / "log"
    assert command.count("--port 8000") == 1
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["sh", "-c", command.replace("--port 8000", f"--port {port}")]
    with started(words, bundle, {"PATH": path, "HOME": str(tmp_path)}, log) as process:
        client = Client(f"http://127.0.0.1:{port}", "by-hand")
        wait_for(client.is_healthy, process, log)
        answer = client.complete([10, 11, 12], max_tokens=40, ignore_eos=True)
        assert len(answer.token_ids) == 40
        assert client.metrics().drafts > 0
        os.kill(engine(process.pid), signal.SIGKILL)
        assert process.wait(20) == ENGINE_DIED  # by itself, so that whatever restarts on failure starts it again
        assert not client.is_healthy()


def test_qdflash_serve_killed_with_9_leaves_no_engine_behind(bundle, tmp_path) -> None:
    log = tmp_path / "log"
    words = [str(Path(sys.prefix).parent / "core/bin/qdflash"), "serve", str(bundle), "--port", str(free_port())]
    with started(words, tmp_path, dict(os.environ), log) as process:
        wait_for(lambda: "Initializing a V1 LLM engine" in log.read_text(), process, log)
        left = Path(f"/proc/{engine(process.pid)}")
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while left.exists() and left.joinpath("stat").read_text().rpartition(") ")[2][0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.1)
