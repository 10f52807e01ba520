"""Bytes of a step against the tensors themselves, for packed folders that compressed-tensors made."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.checkpoint.step_bytes import (
    LENGTH_BYTES,
    Model,
    header_length,
    model_of,
    parse_header,
    step_bytes,
)
from components.contract.errors import UserError
from tests.components.tiny_models import HYBRID, SHAPE


def read_model(folder: Path) -> Model:
    data = (folder / "model.safetensors").read_bytes()
    header = data[LENGTH_BYTES : LENGTH_BYTES + header_length(data[:LENGTH_BYTES])]
    return model_of(parse_header(header, str(folder)), json.loads((folder / "config.json").read_text()))


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


def test_a_head_of_eight_bits(llama: Path):
    config = json.loads((llama / "config.json").read_text())
    weights = {"num_bits": 8, "group_size": 64}
    config["quantization_config"]["config_groups"]["group_1"] = {"targets": ["re:.*lm_head"], "weights": weights}
    table = {"lm_head.weight_packed": ("I32", (320, 16)), "lm_head.weight_scale": ("BF16", (320, 1))}
    model = model_of(table, config)
    assert model.head_parameters == 320 * 64
    assert model.head == 320 * 64 + 320 * 2


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


@pytest.mark.parametrize("header", [b'{"weight": {"dtype": "F32"', b"[1, 2,3]", b'{"weight": {"shape": [1]}}', b""])
def test_a_torn_header_is_named(header: bytes):
    with pytest.raises(UserError, match=r"here: .* torn"):
        parse_header(header, "here")
