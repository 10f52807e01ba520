import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from components.checkpoint.config import read_config
from components.checkpoint.grid import read_grid
from components.checkpoint.quantize import dequantize
from components.checkpoint.tensors import Tensors
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
