"""A wheelhouse: the packages of a lock as wheels, served on loopback while an image is built from them."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from tests import loopback
from tests.e2e import machine

CODE = "setuptools==84.2.1"
"""What this project's own code is built with."""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def fetch(lock: Path, folder: Path) -> Path:
    """Fetch the wheels of ``lock`` into ``folder`` as pip is configured to, and return it."""
    wheel = [machine.VENVS / "train/bin/python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-cache-dir"]
    for wanted in (["-r", lock], [CODE]):  # apart: a lock may have another setuptools
        done = subprocess.run([*wheel, "--wheel-dir", folder, *wanted], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yield where a build finds the wheels of ``folder``."""
    with loopback.serving(partial(_Quiet, directory=str(folder))) as (_, url):
        yield f"{url}/"
