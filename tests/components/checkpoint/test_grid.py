import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.checkpoint.grid import read_grid
from components.checkpoint.quantize import dequantize
from components.contract.errors import UserError

MODULE = "model.layers.1.mlp.up_proj"


def test_codes_and_scales_are_the_librarys(packed: tuple[Path, dict[str, torch.Tensor]]):
    folder, dense = packed
    grid = read_grid(folder)
    assert set(grid) == set(dense)
    for module, quantized in grid.items():
        assert quantized.group_size == 32
        assert quantized.codes.dtype == torch.int8
        assert torch.equal(dequantize(quantized.codes, quantized.scales), dense[module])


@pytest.fixture
def damaged(llama: Path, tmp_path: Path) -> Path:
    shutil.copytree(llama, tmp_path / "m")
    return tmp_path / "m"


def edit(folder: Path, **kinds: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for kind, value in kinds.items():
        tensors.pop(f"{MODULE}.{kind}", None)
        if value is not None:
            tensors[f"{MODULE}.{kind}"] = value
    save_file(tensors, folder / "model.safetensors")


def scales(value: float, groups: int = 2) -> torch.Tensor:
    tensor = torch.full((128, groups), 0.1).bfloat16()
    tensor[3, 1] = value
    return tensor


TENSOR_FAULTS = {
    "has zero points": {"weight_zero_point": torch.zeros(16, 2, dtype=torch.int32)},
    "has g_idx": {"weight_g_idx": torch.arange(64)},
    "has an activation scale": {"input_scale": torch.ones(1)},
    "has no weight_scale": {"weight_scale": None},
    "has no weight_shape": {"weight_shape": None},
    "a weight_scale but no weight_packed": {"weight_packed": None},
    "a weight_shape but no weight_packed": {"weight_packed": None, "weight_scale": None},
    "has a weight_packed and a weight; only one": {"weight": torch.ones(128, 64)},
    r"weight_shape is float32 \[2\]; expected int64": {"weight_shape": torch.tensor([128.0, 64.0])},
    r"weight_shape is int64 \[3\]; expected": {"weight_shape": torch.tensor([128, 64, 1])},
    "weight_shape is .* neither below 1": {
        "weight_shape": torch.tensor([0, 64]),
        "weight_packed": torch.zeros(0, 8, dtype=torch.int32),
        "weight_scale": torch.ones(0, 2),
    },
    "zero, negative, infinite or NaN": {"weight_scale": scales(float("nan"))},
    "zero, negative": {"weight_scale": scales(0.0)},
    "zero, negative, infinite": {"weight_scale": scales(-0.1)},
    "infinite or NaN": {"weight_scale": scales(float("inf"))},
    "3 groups do not divide 64": {"weight_scale": scales(0.1, 3)},
    "4 groups do not divide 64 inputs into groups of": {"weight_scale": scales(0.1, 4)},
    "expected a row per output": {"weight_scale": torch.ones(64, 2)},
    r"float8_e4m3fn \[128, 2\]; expected": {"weight_scale": torch.ones(128, 2).to(torch.float8_e4m3fn)},
    r"int32 \[128, 2\]; expected": {"weight_scale": torch.ones(128, 2, dtype=torch.int32)},
    "does not hold 4-bit codes": {"weight_packed": torch.zeros(128, 16, dtype=torch.int32)},
    r"int64 \[128, 8\], which does not hold": {"weight_packed": torch.zeros(128, 8, dtype=torch.int64)},
}


@pytest.mark.parametrize("message", TENSOR_FAULTS)
def test_refuses_tensors_it_would_misread(damaged: Path, message: str):
    edit(damaged, **TENSOR_FAULTS[message])
    with pytest.raises(UserError, match=message) as caught:
        read_grid(damaged)
    assert MODULE in str(caught.value)
    assert "model.safetensors" in str(caught.value)


CONFIG_FAULTS = {
    "asymmetric": {"weights": {"symmetric": False}},
    "8-bit int": {"weights": {"num_bits": 8}},
    "4-bit float": {"weights": {"type": "float"}},
    "strategy is channel": {"weights": {"strategy": "channel", "group_size": -1}},
    "dynamic weight scales": {"weights": {"dynamic": True}},
    "g_idx": {"weights": {"actorder": "group"}},
    "actorder Dynamic": {"weights": {"actorder": "Dynamic"}},
    "input_activations are quantised": {"input_activations": {"num_bits": 8}},
    "format is int-quantized": {"format": "int-quantized"},
}


@pytest.mark.parametrize("message", CONFIG_FAULTS)
def test_refuses_declared_schemes_it_would_misread(damaged: Path, message: str):
    config = json.loads((damaged / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    for key, value in CONFIG_FAULTS[message].items():
        group[key] = group[key] | value if key == "weights" else value
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as caught:
        read_grid(damaged)
    assert "config.json: config group group_0" in str(caught.value)


def test_refuses_other_methods_and_dense_folders(damaged: Path):
    config = json.loads((damaged / "config.json").read_text())
    declared = config["quantization_config"]
    for change, message in (
        ({"quant_method": "awq"}, "quant_method is awq"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set"),
        ({"config_groups": {}}, "no config_groups"),
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config is set"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is set"),
        ({"sparsity_config": "2:4"}, "is not what compressed-tensors writes"),
    ):
        (damaged / "config.json").write_text(json.dumps(config | {"quantization_config": declared | change}))
        with pytest.raises(UserError, match=message):
            read_grid(damaged)
    none = {"sparsity_config": {"format": "dense"}, "transform_config": {"config_groups": {}}}
    (damaged / "config.json").write_text(json.dumps(config | {"quantization_config": declared | none}))
    assert read_grid(damaged)
    del config["quantization_config"]
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no quantization_config"):
        read_grid(damaged)


@pytest.mark.parametrize("groups", [[1], {"g": None}, {"g": {"format": "pack-quantized", "weights": [4]}}, "int4"])
def test_groups_of_another_form_are_refused(damaged: Path, groups: object):
    config = json.loads((damaged / "config.json").read_text())
    config["quantization_config"]["config_groups"] = groups
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantization_config is not what compressed-tensors writes"):
        read_grid(damaged)
