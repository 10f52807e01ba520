"""What a server is started on: every byte compared first, weights in safetensors only, nobody's code."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.contract.errors import UserError
from components.serving.start import check

FILES = {"config.json": b"{}", "model.safetensors": b"target", "draft/model.safetensors": b"drafter", "a  b.txt": b"x"}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    sums = subprocess.run(["sha256sum", *FILES], cwd=folder, capture_output=True, check=True).stdout
    (folder / "SHA256SUMS").write_bytes(sums)
    return folder


def sums_of(bundle: Path) -> str:
    return hashlib.sha256((bundle / "SHA256SUMS").read_bytes()).hexdigest()


def start(bundle: Path, sums: str | None) -> subprocess.CompletedProcess[str]:
    """Run the entry with a stand-in for vLLM that says how it was called."""
    tools = bundle.parent / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "vllm").write_text('#!/bin/sh\necho "vllm as $$: $@"\n')
    (tools / "vllm").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", **({"QDFLASH_SUMS": sums} if sums else {})}
    argv = [sys.executable, "-m", "components.serving.start", "serve", str(bundle), "--port", "8080"]
    process = subprocess.Popen(argv, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess([str(process.pid)], process.returncode, out, err)


@pytest.mark.parametrize("named", [True, False])
def test_the_process_becomes_vllm_once_every_file_agrees(bundle: Path, named: bool) -> None:
    """The same process id: Kubernetes' signals reach vLLM itself."""
    done = start(bundle, sums_of(bundle) if named else None)
    assert done.returncode == 0, done.stderr
    expected = f"vllm as {done.args[0]}: serve {bundle} --port 8080 --load-format safetensors\n"
    assert done.stdout == expected
    assert (
        done.stderr == f"{bundle}: 4 files agree with the checksums {'of the deployment' if named else 'of its own'}\n"
    )


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_a_lost_file_and_a_stranger_are_named_and_nothing_starts(bundle: Path, name: str) -> None:
    sums, path = sums_of(bundle), bundle / name
    path.write_bytes(FILES[name][:-1] + b"!")
    with pytest.raises(UserError, match=f"{path.name}: altered"):
        check(bundle, sums)
    done = start(bundle, sums)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    path.unlink()
    with pytest.raises(UserError, match=f"{path.name}: missing, but in SHA256SUMS"):
        check(bundle, sums)
    path.write_bytes(FILES[name])
    assert check(bundle, sums) == len(FILES)
    path.with_name("modeling_evil.py").write_text("print('owned')")
    with pytest.raises(UserError, match=r"modeling_evil\.py: not in SHA256SUMS"):
        check(bundle, sums)


def test_who_replaces_files_and_checksums_together_is_found_by_the_deployment_s_own(bundle: Path) -> None:
    """A stolen key of the store can rewrite all of it, its manifest too: what the Helm release names it cannot."""
    sums = sums_of(bundle)
    (bundle / "model.safetensors").write_bytes(b"poison")
    listed = subprocess.run(["sha256sum", *FILES], cwd=bundle, capture_output=True, check=True).stdout
    (bundle / "SHA256SUMS").write_bytes(listed)
    assert check(bundle, None) == len(FILES)
    with pytest.raises(UserError, match="not the checksums that QDFLASH_SUMS names"):
        check(bundle, sums)


def test_no_checksums_no_start(bundle: Path) -> None:
    (bundle / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match="not a bundle, or not all of one"):
        check(bundle, None)
