"""A stand-in for the node's kubelet, for one container of the chart: starts it, probes it, restarts it, stops it.

What it does by: the container of ``manifests/base/serving-runtime.yaml``, which is the chart's own (a test compares
them). No isolation, no image: the command runs as a process of this machine, with the bundle where the test has it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
GRACE_BEYOND_DRAIN = 30  # terminationGracePeriodSeconds of the chart is so much longer than drainSeconds


class Kubelet:
    """Runs one serving container until :meth:`stop`; ``restarts`` counts as Kubernetes does.

    ``args`` follow the runtime's ``serve /mnt/models``, whose folder is ``bundle``; the home folder and the log are
    beside it. ``drain`` is the chart's drainSeconds.
    """

    def __init__(self, bundle: Path, args: list[str], port: int, environment: dict[str, str], drain: int) -> None:
        runtime = yaml.safe_load((ROOT / "manifests" / "base" / "serving-runtime.yaml").read_text())
        self.container: dict[str, Any] = runtime["spec"]["containers"][0]
        self._moved = {"/mnt/models": str(bundle), "8080": str(port), "python": sys.executable}
        given = self.container["args"]
        given[given.index("--shutdown-timeout") + 1] = str(drain)
        self._hook = self._move(self.container["lifecycle"]["preStop"]["exec"]["command"])
        self._hook[self._hook.index("--seconds") + 1] = str(drain)
        self._argv = [*self._move(self.container["command"]), *args, *given]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        home = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(bundle.parent)}
        self._environment = {**os.environ, **home, **environment}
        self._log, self._grace = bundle.parent / "log", drain + GRACE_BEYOND_DRAIN
        self.restarts = -1
        self.start()

    @property
    def pid(self) -> int:
        """Process id of the container's first process, and of its group."""
        return self.process.pid

    def start(self) -> None:
        """Start the container, again where it has ended."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._argv, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        self.restarts += 1

    def probe(self, name: str) -> bool:
        """Run a probe's command once, within its time-out."""
        about = self.container[name]
        try:
            done = subprocess.run(
                self._move(about["exec"]["command"]),
                env=self._environment,
                capture_output=True,
                timeout=about["timeoutSeconds"],
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def until_ready(self) -> float:
        """Probe by startupProbe until it passes; return the seconds it took."""
        about, began = self.container["startupProbe"], time.monotonic()
        for _ in range(about["failureThreshold"] * about["periodSeconds"]):
            if self.probe("startupProbe"):
                return time.monotonic() - began
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            time.sleep(1)
        raise AssertionError(self._log.read_text()[-2000:])

    def until_restarted(self) -> tuple[str, float]:
        """Watch the process and its liveness until one says that it is gone, and start it again.

        Returns what said so, ``ended N`` or ``livenessProbe``, and after how many seconds.
        """
        about, began, failures = self.container["livenessProbe"], time.monotonic(), 0
        due = began + about["periodSeconds"]
        while True:
            if self.process.poll() is not None:
                found = f"ended {self.process.returncode}"
                break
            if time.monotonic() >= due:
                failures = 0 if self.probe("livenessProbe") else failures + 1
                due += about["periodSeconds"]
                if failures >= about["failureThreshold"]:
                    found = "livenessProbe"
                    break
            time.sleep(0.1)
        seconds = time.monotonic() - began
        if found == "livenessProbe":
            self.terminate()
        self.stop()
        self.start()
        return found, seconds

    def terminate(self) -> tuple[int, float]:
        """Stop it as a deleted pod is: preStop, SIGTERM, SIGKILL after the grace period. Return code and seconds."""
        began = time.monotonic()
        subprocess.run(self._hook, env=self._environment, check=True)
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self._grace - (time.monotonic() - began))
        self.stop()
        return self.process.returncode, time.monotonic() - began

    def stop(self) -> None:
        """Kill whatever of it still runs: a container's processes end with its first one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def _move(self, argv: list[str]) -> list[str]:
        return [self._moved.get(word, word) for word in argv]
