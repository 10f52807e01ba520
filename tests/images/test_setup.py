"""The set-up script and the locks it installs from."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))

spec = importlib.util.spec_from_file_location("qdflash_setup", ROOT / "images" / "setup.py")
assert spec is not None
assert spec.loader is not None
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


def pins(path: Path) -> dict[str, str]:
    lines = (line for line in path.read_text().splitlines() if line and not line.lstrip().startswith("#"))
    return {line.split("==")[0].split("[")[0].lower(): line.split("==")[1] for line in lines}


def test_every_role_has_its_locks() -> None:
    names = {path.stem for path in LOCKS}
    assert names == {"core", "train-cpu", "train-gpu", "vllm-cpu", "vllm-gpu", "charts", "dev"}
    assert names == {path.stem for path in (ROOT / "locks").glob("*.in")}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_a_lock_pins_what_it_was_asked_for_and_names_no_place(path: Path) -> None:
    locked = pins(path)
    for name, version in pins(path.with_suffix(".in")).items():
        assert locked[name] == version, name
    assert not re.search(r"https?://|file:|--(extra-)?index|--find-links|@ ", path.read_text())


def test_cpu_locks_hold_no_cuda_packages() -> None:
    for name in ("train-cpu", "vllm-cpu"):
        locked = pins(ROOT / "locks" / f"{name}.txt")
        assert locked["torch"].endswith("+cpu")
        assert not [package for package in locked if package.startswith(("nvidia-cu", "triton-"))]


def test_of_two_locks_the_first_decides(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("# made\nPackaging==1.0\n    # via x\n")
    second.write_text("packaging==2.0\npytest==9\n")
    assert setup.merged(first, second) == "Packaging==1.0\npytest==9\n"


def test_pip_find_links_reach_uv_and_missing_folders_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "https://packages.invalid/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} {tmp_path}/gone https://wheels.invalid/cpu")
    assert setup.environment()["UV_FIND_LINKS"] == f"{tmp_path},https://wheels.invalid/cpu"
    monkeypatch.setenv("UV_FIND_LINKS", "mine")
    assert setup.environment()["UV_FIND_LINKS"] == "mine"


def test_a_stamp_is_written_last_and_saves_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    failing = True

    def run(*command: str | Path) -> None:
        commands.append(tuple(map(str, command)))
        if "--editable" in commands[-1] and failing:
            raise setup.subprocess.CalledProcessError(1, command)
        if "venv" in commands[-1]:
            (tmp_path / "core" / "bin").mkdir(parents=True)

    monkeypatch.setattr(setup, "VENV", tmp_path)
    monkeypatch.setattr(setup, "run", run)
    monkeypatch.setattr(setup, "bootstrap", lambda: Path("uv"))
    with pytest.raises(setup.subprocess.CalledProcessError):
        setup.make("core", "core")
    assert not (tmp_path / "core" / ".stamp").exists()
    failing = False
    setup.make("core", "core")
    made = len(commands)
    setup.make("core", "core")
    assert len(commands) == made
