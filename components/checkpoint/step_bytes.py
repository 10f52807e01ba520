"""What one decoding step moves through a GPU's memory, by part, from safetensors headers and ``config.json`` alone.

At batch 1 a step is bound by memory: every matrix is read once for a few rows of activations, so the bytes of a step
over the bandwidth bound its time from below (``components/measure/cost.py``). Nothing here imports torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from components.contract.errors import UserError

Table = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name to its safetensors dtype and shape."""

LENGTH_BYTES = 8
CACHE_BYTES = 2
STATE_BYTES = 4
DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
_UNREAD = (".weight_shape", ".weight_zero_point", "d2t", "t2d")


@dataclass(frozen=True)
class Model:
    """One model as a decoding step sees it.

    ``linears`` and ``head`` are bytes that a forward pass reads, ``unread`` what is stored beside them (the embedding
    table of which a token reads one row, a vision tower, an MTP module). A drafter without a head of its own has
    ``head`` 0. ``parameters`` and ``head_parameters`` count matrix elements. ``key_value`` is the bytes of one token
    of context over all layers that attend, ``state`` the bytes of the recurrent states of all that do not;
    ``attention`` is the FLOPs of one query on one key: 2 for q·k and 2 for the weighted sum, per element of a head.
    ``window`` is the attention window in tokens. ``block_size`` is a drafter's, 1 for any other model.
    """

    linears: int
    head: int
    unread: int
    parameters: int
    head_parameters: int
    key_value: int
    state: int
    attention: int
    window: int | None = None
    block_size: int = 1


def header_length(start: bytes) -> int:
    """Return the length of a safetensors header from the file's first 8 bytes."""
    return int.from_bytes(start, "little")


def parse_header(text: bytes, where: str) -> Table:
    """Return the tensors that a safetensors header lists; ``where`` names the file in errors."""
    try:
        entries = json.loads(text)
        return {
            name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: its header is not a safetensors header; the file is torn") from error


def model_of(table: Table, config: dict[str, Any]) -> Model:
    """Return the model of a table of tensors; caches are BF16, recurrent states fp32, as vLLM keeps Qwen3.5's.

    A model without ``lm_head`` reads its embedding table as the head (tied).
    """
    text = config.get("transformer_layer_config") or config.get("text_config") or config
    own_head = any(_is(name, "lm_head") for name in table)
    body_bits, head_bits = _bits(config)
    sums = dict.fromkeys(("linears", "head", "unread", "parameters", "head_parameters"), 0)
    key_value = state = attention = 0
    for name, (dtype, shape) in table.items():
        size = math.prod(shape) * DTYPE_BYTES.get(dtype, 1)
        head = _is(name, "lm_head" if own_head else "embed_tokens")
        outside = name.startswith("mtp.") or "visual." in name or _is(name, "embed_tokens")
        if name.endswith(_UNREAD) or (outside and not head):
            sums["unread"] += size
            continue
        sums["head" if head else "linears"] += size
        columns = shape[-1]
        if name.endswith(".weight_packed"):
            columns = columns * 32 // (head_bits if head else body_bits)
        if len(shape) == 2 and name.endswith((".weight", ".weight_packed")):
            sums["head_parameters" if head else "parameters"] += shape[0] * columns
            if _is(name, "k_proj") or _is(name, "v_proj"):
                key_value += shape[0] * CACHE_BYTES
            if _is(name, "o_proj"):
                attention += 4 * columns
        if name.endswith("linear_attn.A_log"):
            state += shape[0] * text["linear_key_head_dim"] * text["linear_value_head_dim"] * STATE_BYTES
    windowed = "sliding_attention" in (text.get("layer_types") or [])
    return Model(
        **sums,
        key_value=key_value,
        state=state,
        attention=attention,
        window=text.get("sliding_window") if windowed else None,
        block_size=config.get("block_size", 1),
    )


def step_bytes(target: Model, context: int, drafter: Model | None = None) -> dict[str, int]:
    """Return the bytes that one decoding step moves, by part; parts of no bytes are left out.

    The target verifies a block of ``block_size`` tokens in one pass, and the drafter fills the next one in another,
    which reads the head once more. A recurrent state is read once and written for every verified token, since the
    engine must be able to go back to any of them (vLLM's ``fused_recurrent_gated_delta_rule``).

    Args:
        target: The target.
        context: Tokens in the KV cache.
        drafter: The drafter; None decodes token by token.
    """
    verified = drafter.block_size if drafter else 1
    parts = {
        "target linears": target.linears,
        "target head": target.head,
        "target KV": target.key_value * context,
        "target state": target.state * (1 + verified),
    }
    if drafter:
        parts |= {
            "drafter linears": drafter.linears,
            "drafter head": drafter.head or target.head,
            "drafter KV": drafter.key_value * min(context, drafter.window or context),
        }
    return {part: size for part, size in parts.items() if size}


def _is(name: str, module: str) -> bool:
    return f".{name}".rpartition(".")[0].endswith(f".{module}")


def _bits(config: dict[str, Any]) -> tuple[int, int]:
    """Return the bits of a packed code in the body and in the head."""
    quantization = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    body = head = 4
    for group in (quantization.get("config_groups") or {}).values():
        if all(target.endswith("lm_head") for target in group.get("targets") or [""]):
            head = group["weights"]["num_bits"]
        else:
            body = group["weights"]["num_bits"]
    return body, head
