from pathlib import Path

import pytest
import torch

from components.checkpoint.config import read_config
from components.checkpoint.grid import read_grid
from components.checkpoint.quantize import dequantize
from components.checkpoint.tensors import Tensors
from components.store.artifact import commit
from components.store.backend import Store
from pipelines.artifacts import export


@pytest.mark.slow
def test_a_dense_export_is_codes_times_scales(llama: Path, home: Path, tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    artifact, _ = commit(store, "pack", "0" * 64, llama, {"metrics": {}})
    export(artifact, tmp_path / "bf16", dense=True)
    written, stored, grid = Tensors(tmp_path / "bf16"), Tensors(llama), read_grid(llama)
    assert "quantization_config" not in read_config(tmp_path / "bf16")
    for name in written:
        if quantized := grid.pop(name.removesuffix(".weight"), None):
            assert torch.equal(written[name], dequantize(quantized.codes, quantized.scales))
        else:
            assert torch.equal(written[name], stored[name])
    assert not grid
