"""``qdflash serve`` on a bundle that someone tampered with, and on its owner's own changes; vLLM is a stand-in."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from components.bundle import stage
from components.contract.context import Inputs, Output
from components.contract.errors import UserError
from components.contract.log import Log
from components.serving.arguments import arguments
from components.serving.profiles import read_serving
from components.store.backend import Store
from components.store.work import Work
from pipelines.serve import command
from tests.components.bundle.test_bundle import SPECULATORS_LAYOUT, TARGET, folder, put

LIST_ANEW = "sed -i '/  serving.yaml$/d' SHA256SUMS && sha256sum serving.yaml >> SHA256SUMS"
"""As docs/serving.md has it."""


@pytest.fixture
def bundle(tmp_path: Path, home: Path) -> Path:
    store, out = Store(str(tmp_path / "store")), tmp_path / "bundle"
    out.mkdir()
    target = put(store, "t", "pack", folder(tmp_path / "t", TARGET, model__safetensors="weights"), {})
    drafter = put(store, "d", "gptq", folder(tmp_path / "d", SPECULATORS_LAYOUT, model__safetensors="drafts"), {})
    output = Output(out, tmp_path, Work(store, "_work"), Log("bundle"))
    stage.run(stage.Config(), Inputs({"target": [target], "drafter": [drafter]}), output)
    for path in out.rglob("*.*"):  # the files are links into the store's cache
        shutil.copy(path, tmp_path / "copy")
        path.unlink()
        shutil.copy(tmp_path / "copy", path)
    return out


@pytest.fixture(autouse=True)
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role whose vLLM says how it was called."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("python", "vllm"):
        said = "import json, os, sys; print(json.dumps([sys.argv, dict(os.environ)]))"
        (tools / name).write_text(f"#!{sys.executable}\n{said}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("QDFLASH_PYTHON_VLLM", str(tools / "python"))


def serve(bundle: Path, profile: str = "cpu") -> str:
    """Return the command line that the command would become."""
    return " ".join(command(bundle, profile, 8000, draft=True)[0])


def test_the_command_becomes_vllm_as_serving_yaml_says(bundle: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    asked = [sys.executable, "-m", "pipelines.cli", "serve", str(bundle), "--profile", "a10g", "--port", str(port)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    argv, environment = json.loads(done.stdout.splitlines()[-1])
    serving = read_serving(bundle)
    names = {"served_model_name": serving.served_model_name, "port": port}
    expected = arguments(serving.profiles["a10g"], bundle, bundle / "draft", **names)
    assert argv[1:] == [*expected[1:], "--load-format", "safetensors"]
    assert environment["QDFLASH_END_WITH_PARENT"] == "1"
    assert "--speculative-config" not in command(bundle, "a10g", port, draft=False)[0]


def test_a_tampered_bundle_is_not_served(bundle: Path) -> None:
    weights = bundle / "draft" / "model.safetensors"
    weights.write_text("poison")
    with pytest.raises(UserError, match=r"draft/model\.safetensors: altered"):
        serve(bundle)
    (bundle / "draft").rename(bundle.parent / "elsewhere")
    with pytest.raises(UserError, match=r"draft/config\.json: missing, but in SHA256SUMS"):
        serve(bundle)
    (bundle.parent / "elsewhere").rename(bundle / "draft")
    weights.write_text("drafts")
    (bundle / "pytorch_model.bin").write_text("pickled")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: not in SHA256SUMS; take it out"):
        serve(bundle)
    (bundle / "pytorch_model.bin").unlink()
    assert serve(bundle)
    for listing in (b"\xff\xfe", b"no sums"):
        (bundle / "SHA256SUMS").write_bytes(listing)
        with pytest.raises(UserError, match="SHA256SUMS: not lines of a sha256 and a name"):
            serve(bundle)
    (bundle / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match="SHA256SUMS: missing"):
        serve(bundle)


def test_a_serving_file_changed_by_hand_is_served_once_its_owner_lists_it(bundle: Path) -> None:
    path = bundle / "serving.yaml"
    path.write_text(path.read_text().replace("max_model_len: 2048", "max_model_len: 1024"))
    with pytest.raises(UserError, match=r"serving\.yaml: altered: .* SHA256SUMS; give the recipe's bundle\.serving"):
        serve(bundle)
    assert LIST_ANEW in Path("docs/serving.md").read_text()
    subprocess.run(["sh", "-c", LIST_ANEW], cwd=bundle, check=True)
    assert "--max-model-len 1024" in serve(bundle)

    path.write_text(path.read_text().replace("num_speculative_tokens: 3", "num_speculative_tokens: 9"))
    subprocess.run(["sh", "-c", LIST_ANEW], cwd=bundle, check=True)
    with pytest.raises(
        UserError, match=r"cpu\.num_speculative_tokens is 9; the drafter's block size 4 allows at most 3"
    ):
        serve(bundle)


@pytest.mark.parametrize("text", ["", "[]", "profiles:\n  cpu:\n", "profiles: {cpu: {max_model_len: 8k}}", "\tx: 1"])
def test_a_serving_file_that_holds_no_profiles_is_one_line(bundle: Path, text: str) -> None:
    (bundle / "serving.yaml").write_text(text)
    with pytest.raises(UserError, match=r"serving\.yaml: "):
        serve(bundle)


def test_an_unknown_profile_and_a_folder_that_is_no_bundle(bundle: Path) -> None:
    with pytest.raises(UserError, match="choose one of a10g, a10g-emulated, a10g-throughput, cpu, h200"):
        serve(bundle, "a100")
    with pytest.raises(UserError, match="missing; this folder is not a bundle"):
        serve(bundle / "draft")
