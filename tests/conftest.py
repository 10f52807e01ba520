"""Fixtures that every part of the suite shares. A missing engine is a failure, never a skip."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import components
from components.contract.invocation import Invocation, invocation
from components.contract.stage import load
from components.store.backend import Store
from pipelines import seaweed

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real SeaweedFS on free ports for the whole session: its AWS_* environment, bucket ``qdflash``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QDFLASH_HOME", str(tmp_path_factory.mktemp("seaweed")))
        environment = seaweed.up()
        pid = seaweed.status()["pid"]
    yield environment
    os.kill(pid, signal.SIGKILL)  # the graceful stop takes 15 s and these data go nowhere


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of this test's own, also for the processes it starts."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("QDFLASH_HOME", str(folder))
    return folder


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store of either kind; the environment holds its credentials."""
    return open_store(request, tmp_path, monkeypatch)


def open_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Open the store of the kind that a fixture's parameter names."""
    if request.param == "folder":
        return Store(str(tmp_path / "store"))
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    return Store(f"s3://{seaweed.BUCKET}/{tmp_path.name}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


PROBE = '''
"""A stage for tests: commits ``steps`` small parts of work, one line of trace each."""

import os
import subprocess
import time
from pathlib import Path

from components.contract import errors
from components.contract.digest import StageConfig, runtime
from components.contract.stage import Port
from pydantic import Field

ROLE = "core"
VERSION = 1
INPUTS = {"before": Port("anything", optional=True, many=True)}
OUTPUTS = {"text.txt": "the text and what the inputs held"}


class Config(StageConfig):
    text: str = Field("hello", description="what to write")
    steps: int = Field(2, description="parts of work", ge=0)
    seconds: float = runtime(0.0, "pause per part")
    size: int = Field(0, description="bytes of a second file")
    fail: str = Field("", description="name of an error to raise at the end")
    orphan: bool = Field(False, description="leave a process of an own session behind")
    hold: bool = runtime(False, "wait at the end until the file $PROBE_TRACE.go is there")
    number: float = Field(1.0, description="a number")


def trace(line):
    with open(os.environ["PROBE_TRACE"], "a") as file:
        file.write(line + "\\n")


def run(config, inputs, output):
    if config.orphan:
        trace(f"orphan {subprocess.Popen(['sleep', '600'], start_new_session=True).pid}")
    for step in range(config.steps):
        if output.work.get(str(step)) is None:
            time.sleep(config.seconds)
            trace(f"{config.text} {step}")
            output.work.put(str(step), b"done")
        output.log.progress(step + 1, config.steps)
    while config.hold and not Path(os.environ["PROBE_TRACE"] + ".go").exists():
        time.sleep(0.05)
    if config.fail == "FailOnce":
        if output.work.get("failed") is None:
            output.work.put("failed", b"")
            raise errors.TransientError("probe: not now; try again")
    elif config.fail == "Import":
        import a_package_of_another_role  # noqa: F401
    elif config.fail == "Bug":
        raise ValueError("a bug")
    elif config.fail:
        raise getattr(errors, config.fail)("probe: told to fail; do not tell it to")
    read = [(one.path / "text.txt").read_text() for one in inputs.all("before")]
    (output.path / "text.txt").write_text(" ".join([config.text, *read]))
    if config.size:
        (output.path / "sub").mkdir()
        (output.path / "sub" / "big.bin").write_bytes(os.urandom(config.size))
    return {"length": len(config.text)}
'''


@dataclass
class Probe:
    """The test-only stage ``probe``: real processes of the real command line."""

    trace_path: Path

    def invocation(
        self, store: Store, inputs: dict[str, list[str]] | None = None, salt: str | None = None, **config: Any
    ) -> Invocation:
        call = invocation("probe", store.url, load("probe").Config(**config), inputs or {}, salt)
        return Invocation(call.stage, ("-m", "probe", *call.argv[2:]), call.digest, call.uri)

    def start(self, argv: tuple[str, ...]) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, *argv], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, argv: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, check=False)

    def trace(self) -> list[str]:
        return self.trace_path.read_text().splitlines() if self.trace_path.exists() else []


@pytest.fixture
def probe(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    """Put the stage where this process and its children import it as ``components.probe``."""
    folder = tmp_path / "path"
    package = folder / "components" / "probe"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "stage.py").write_text(PROBE)
    (folder / "probe.py").write_text(
        f"import components\ncomponents.__path__.append({str(folder / 'components')!r})\n"
        "from components.contract.cli import main\nraise SystemExit(main('probe'))\n"
    )
    project = Path(components.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{project}{os.pathsep}{folder}")
    monkeypatch.setenv("PROBE_TRACE", str(tmp_path / "trace"))
    monkeypatch.setattr(components, "__path__", [*components.__path__, str(folder / "components")])
    yield Probe(tmp_path / "trace")
    for name in [name for name in sys.modules if name.startswith("components.probe")]:
        del sys.modules[name]
