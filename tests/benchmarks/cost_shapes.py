"""The tensors of Qwen3.5-4B and of its published drafter, by name and shape, dense and packed."""

import json
from typing import Any

import study

from components.checkpoint.step_bytes import Model, Table, model_of

CONFIG = study.ROOT / "tests/components/qwen3_5_4b.json"
DENSE = ("in_proj_a", "in_proj_b", "embed_tokens")


def read_config() -> dict[str, Any]:
    """Return the config of Qwen3.5-4B."""
    config: dict[str, Any] = json.loads(CONFIG.read_text())
    return config


def dense_table(config: dict[str, Any]) -> Table:
    """Return the BF16 tensors of Qwen3.5's text model that a config describes; every fourth layer attends."""
    text = config["text_config"]
    width, mlp, vocabulary = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    queries = text["num_attention_heads"] * text["head_dim"]
    keys = text["num_key_value_heads"] * text["head_dim"]
    heads = text["linear_num_value_heads"]
    values = heads * text["linear_value_head_dim"]
    mixed = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + values
    attends: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (2 * queries, width),  # half of it gates the output
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "self_attn.q_norm.weight": (text["head_dim"],),
        "self_attn.k_norm.weight": (text["head_dim"],),
    }
    recurs: dict[str, tuple[int, ...]] = {
        "linear_attn.in_proj_qkv.weight": (mixed, width),
        "linear_attn.in_proj_z.weight": (values, width),
        "linear_attn.in_proj_a.weight": (heads, width),
        "linear_attn.in_proj_b.weight": (heads, width),
        "linear_attn.conv1d.weight": (mixed, 1, text["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (text["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (width, values),
    }
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocabulary, width), "norm.weight": (width,)}
    for layer in range(text["num_hidden_layers"]):
        own = attends if layer % 4 == 3 else recurs
        found |= {f"layers.{layer}.{name}": shape for name, shape in (own | _mlp(width, mlp)).items()}
    return {f"model.language_model.{name}": ("BF16", shape) for name, shape in found.items()}


def drafter_table(width: int) -> Table:
    """Return the published drafter's tensors: 5 layers and taps, 32 heads of 128, 8 for keys, an MLP of 9,728."""
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (32 * 128, width),
        "self_attn.k_proj.weight": (8 * 128, width),
        "self_attn.v_proj.weight": (8 * 128, width),
        "self_attn.o_proj.weight": (width, 32 * 128),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        **_mlp(width, 9728),
    }
    found: dict[str, tuple[int, ...]] = {"fc.weight": (width, 5 * width), "hidden_norm.weight": (width,)}
    found |= {f"layers.{index}.{name}": shape for index in range(5) for name, shape in layer.items()}
    return {name: ("BF16", shape) for name, shape in (found | {"norm.weight": (width,)}).items()}


def _mlp(width: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }


def packed(table: Table, group_size: int, head: bool = False) -> Table:
    """Return the table with its linears packed to INT4; ``head`` unties and packs the output head too."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in table.items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module.rpartition(".")[2] not in DENSE:
            found |= _packed(module, shape, group_size)
        else:
            found[name] = (dtype, shape)
        if head and module.endswith("embed_tokens"):
            found |= _packed("lm_head", shape, 128)
    return found


def _packed(module: str, shape: tuple[int, ...], group_size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    rows, columns = shape
    return {
        f"{module}.weight_packed": ("I32", (rows, columns // 8)),
        f"{module}.weight_scale": ("BF16", (rows, columns // group_size)),
        f"{module}.weight_shape": ("I64", (2,)),
    }


def models() -> dict[str, Model]:
    """Return every target and drafter of the figures."""
    config = read_config()
    target, drafter = dense_table(config), drafter_table(config["text_config"]["hidden_size"])
    block = {"block_size": 16}
    return {
        "BF16": model_of(target, config),
        "W4": model_of(packed(target, 32), config),
        "W4, INT4 head": model_of(packed(target, 32, head=True), config),
        "BF16 drafter": model_of(drafter, block),
        "W4 drafter": model_of(packed(drafter, 128), block),
    }
