"""One ``vllm serve`` process on a loopback port, for as long as a ``with`` block lasts."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import TracebackType

import httpx

from components.contract.errors import StageError, TransientError, is_shortage
from components.serving.arguments import arguments, environment
from components.serving.client import Client
from components.serving.lifetime import end_with_parent
from components.serving.profiles import CPU, Profile

START_TIMEOUT_SECONDS = 900.0
STOP_TIMEOUT_SECONDS = 15.0
_POLL_SECONDS = 0.5
_CAUSE = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .+")
_AFTERMATH = ("Engine core initialization failed", "died unexpectedly", "WorkerProc initialization failed")


class Server:
    """A vLLM server that starts with a ``with`` block and is gone, with its children, when the block ends.

    A start takes a minute or more, in which the caller can do something else; :meth:`wait` ends once the server is
    ready and ``client`` can talk to it. Its output goes to ``log_path``.
    """

    def __init__(
        self,
        model: Path,
        draft: Path | None = None,
        profile: Profile = CPU,
        *,
        log_path: Path,
        served_model_name: str = "qdflash",
        timeout: float = START_TIMEOUT_SECONDS,
    ) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self.argv = arguments(profile, model, draft, served_model_name=served_model_name, port=port)
        self.client = Client(self.url, served_model_name)
        self.start_seconds = 0.0
        self._started = 0.0
        self._environment = environment(profile)
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Server":
        self._started = time.monotonic()
        executable = Path(sys.executable).with_name("vllm")
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [str(executable), *self.argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the server, which is also the id of its process group."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def stop(self) -> None:
        """End the server and everything it started."""
        self.client.close()
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self) -> None:
        """Return once the server generates, ``start_seconds`` after its start.

        Raises:
            TransientError: it found no memory or port.
            StageError: it ended, or was not ready in time; the cause is from its log.
        """
        assert self._process is not None, "the server was not started"
        while not self.client.is_healthy():
            if self._process.poll() is not None:
                raise self._failure(f"ended with code {self._process.returncode}")
            if time.monotonic() > self._started + self._timeout:
                raise self._failure(f"not ready after {self._timeout:.0f} s")
            time.sleep(_POLL_SECONDS)
        try:
            self.client.complete([1, 2, 3, 4], max_tokens=4, ignore_eos=True)
        except (StageError, httpx.HTTPError) as error:
            raise self._failure(f"does not generate ({error})") from error
        self.start_seconds = round(time.monotonic() - self._started, 3)

    def _failure(self, what: str) -> StageError:
        cause = cause_of(self.log_path.read_text(errors="replace"))
        kind = TransientError if is_shortage(cause) else StageError
        return kind(f"vLLM server {what}: {cause} (log: {self.log_path})")


def cause_of(log: str) -> str:
    """Return the line of a server log that says why it failed: the last exception that is not an aftermath."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in reversed(lines):
        found = _CAUSE.search(line)
        if found and not any(phrase in line for phrase in _AFTERMATH):
            return found.group()
    return lines[-1] if lines else "its log is empty"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
