import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from components.checkpoint.config import read_config
from components.checkpoint.grid import read_grid
from components.checkpoint.quantize import dequantize
from components.checkpoint.tensors import Tensors
from components.checkpoint.write import write_config
from components.contract.errors import UserError
from components.store.artifact import commit
from components.store.backend import Store
from pipelines.artifacts_cli import app


@pytest.mark.slow
def test_a_dense_export_is_codes_times_scales(llama: Path, home: Path, tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    bundle = shutil.copytree(llama, tmp_path / "bundle")
    for name in ("draft/model.safetensors", "serving.yaml", "tokenizer.json"):
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_text(name)
    commit(store, "bundle", "0" * 64, bundle, {"metrics": {}})
    asked = CliRunner().invoke(app, ["export", "0000", str(tmp_path / "bf16"), "--dense", "--store", store.url])
    assert asked.exit_code == 0, asked.output
    assert asked.stderr == "left out, as it is not of the dense model: draft/, serving.yaml\n"
    assert {path.name for path in (tmp_path / "bf16").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    written, stored, grid = Tensors(tmp_path / "bf16"), Tensors(llama), read_grid(llama)
    assert "quantization_config" not in read_config(tmp_path / "bf16")
    for name in written:
        if quantized := grid.pop(name.removesuffix(".weight"), None):
            assert torch.equal(written[name], dequantize(quantized.codes, quantized.scales))
        else:
            assert torch.equal(written[name], stored[name])
    assert not grid


@pytest.mark.slow
def test_what_is_not_unpacked_is_said_in_a_line_and_leaves_nothing(
    llama: Path, home: Path, tmp_path: Path, small_disk: Path
):
    store = Store(str(tmp_path / "store"))
    undeclared = shutil.copytree(llama, tmp_path / "undeclared")
    config = read_config(undeclared)
    del config["quantization_config"]
    write_config(undeclared, config)
    commit(store, "ptq", "0" * 64, undeclared, {"metrics": {}})
    commit(store, "ptq", "1" * 64, llama, {"metrics": {}})
    for digest, folder, says in (
        ("0000", tmp_path / "dense", "config.json: no quantization_config"),
        ("1111", small_disk / "dense", "not unpacked: disk full: "),
    ):
        asked = CliRunner().invoke(app, ["export", digest, str(folder), "--dense", "--store", store.url])
        assert isinstance(asked.exception, UserError)
        assert says in str(asked.exception)
        assert not list(folder.parent.glob("*dense*"))
