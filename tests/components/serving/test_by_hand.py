"""A bundle served as its card says, with nothing of this project but its plugins in vLLM's environment."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.bundle import stage
from components.contract.context import Input, Inputs, Output
from components.contract.log import Log
from components.serving.client import Client
from components.store.artifact import commit
from components.store.backend import Store
from components.store.work import Work

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from service_stress import engine

pytestmark = pytest.mark.slow
MANIFEST = {"version": 1, "config": {}, "inputs": {}, "salt": None, "metrics": {}, "versions": {}}


def test_the_card_s_command_serves_the_pair_with_its_window_and_ends_with_its_engine(
    tiny_model, tiny_draft, tmp_path, home
) -> None:
    store, inputs = Store(str(tmp_path / "store")), {}
    for port, source in (("target", tiny_model), ("drafter", tiny_draft)):
        artifact, _ = commit(store, "model", port.encode().hex().ljust(64, "0"), source, MANIFEST)
        inputs[port] = [Input(artifact.uri)]
    out = tmp_path / "bundle"
    out.mkdir()
    serving = {"served_model_name": "by-hand", "profiles": {"cpu": {"max_model_len": 128}}}
    config = stage.Config(serving=serving, window=16)
    stage.run(config, Inputs(inputs), Output(out, tmp_path, Work(store, "_work"), Log("bundle")))

    command = re.search(r"`cpu`:\n\n```sh\n(.+)\n```", (out / "README.md").read_text()).group(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert command.count("--port 8000") == 1
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path)}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["sh", "-c", command.replace("--port 8000", f"--port {port}")],
            cwd=out,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    client = Client(f"http://127.0.0.1:{port}", "by-hand")
    try:
        deadline = time.monotonic() + 240
        while not client.is_healthy():
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        answer = client.complete([10, 11, 12], max_tokens=40, ignore_eos=True)
        assert len(answer.token_ids) == 40
        assert client.metrics().drafts > 0
        os.kill(engine(process.pid), signal.SIGKILL)
        process.wait(20)  # the server ends by itself, so that whatever supervises it starts it again
        assert not client.is_healthy()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
