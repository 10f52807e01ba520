"""Bytes of a step against the tensors themselves, for packed folders that compressed-tensors made."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.checkpoint.step_bytes import Model, model_of, read_model, step_bytes
from components.contract.errors import UserError
from tests.components.tiny_models import HYBRID, SHAPE


def test_every_stored_byte_has_its_place(packed: tuple[Path, dict[str, torch.Tensor]], kind: str):
    folder, dense = packed
    tensors = load_file(folder / "model.safetensors")
    model = read_model(folder)
    assert model.linears + model.head + model.unread == sum(one.nbytes for one in tensors.values())
    head = next(one for name, one in tensors.items() if "lm_head" in name or (kind != "llama" and "embed" in name))
    assert model.head == head.nbytes == 2 * model.head_parameters
    plain = sum(
        one.numel() for name, one in tensors.items() if name.endswith(("in_proj_a.weight", "in_proj_b.weight"))
    )
    assert model.parameters == sum(one.numel() for one in dense.values() if one.ndim == 2) + plain
    assert model.unread >= sum(one.nbytes for name, one in tensors.items() if "visual" in name)


def test_caches_by_the_formulas_of_the_config(packed: tuple[Path, dict[str, torch.Tensor]], kind: str):
    model = read_model(packed[0])
    hybrid = "qwen3_5" in kind
    attending = 1 if hybrid else SHAPE["num_hidden_layers"]
    width = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    assert model.key_value == attending * 2 * width * 2
    assert model.attention == attending * 4 * SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    elements = HYBRID["linear_num_value_heads"] * HYBRID["linear_key_head_dim"] * HYBRID["linear_value_head_dim"]
    assert model.state == (elements * 4 if hybrid else 0)


def test_a_head_of_eight_bits_and_a_sharded_folder(llama: Path, tmp_path: Path):
    folder = shutil.copytree(llama, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "group_size": 64}
    config["quantization_config"]["config_groups"]["group_1"] = {"targets": ["re:.*lm_head"], "weights": weights}
    table = {"lm_head.weight_packed": ("I32", (320, 16)), "lm_head.weight_scale": ("BF16", (320, 1))}
    model = model_of(table, config)
    assert model.head_parameters == 320 * 64
    assert model.head == 320 * 64 + 320 * 2
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert read_model(folder) == read_model(llama)


def test_a_step_of_a_pair_counts_the_head_twice_and_a_state_for_every_token():
    target = Model(1000, 300, 7, 500, 150, key_value=2, state=10, attention=1)
    drafter = Model(40, 0, 0, 20, 0, key_value=3, state=0, attention=1, window=100, block_size=4)
    assert step_bytes(target, 250) == {
        "target linears": 1000,
        "target head": 300,
        "target KV": 500,
        "target state": 20,
    }
    assert step_bytes(target, 250, drafter) == {
        "target linears": 1000,
        "target head": 300,
        "target KV": 500,
        "target state": 50,
        "drafter linears": 40,
        "drafter head": 300,
        "drafter KV": 300,
    }


@pytest.mark.parametrize("damage", ["truncate", "garbage", "none"])
def test_a_torn_folder_is_one_line(llama: Path, tmp_path: Path, damage: str):
    folder = shutil.copytree(llama, tmp_path / "model")
    file = folder / "model.safetensors"
    if damage == "none":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:100] if damage == "truncate" else b"\x08" + bytes(7) + b"[1, 2,3]")
    with pytest.raises(UserError, match=r"torn|not a model folder"):
        read_model(folder)
