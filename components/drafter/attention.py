"""Who sees whom: by flex_attention on a GPU, which skips what no slot sees, elsewhere by SDPA with the same mask."""

from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from components.drafter.blocks import Blocks

IMPLEMENTATION = "drafter_blocks"
# Lengths that 128 divides and others are compiled apart, for each call with and without gradients. Past its limit
# PyTorch would run flex_attention uncompiled, every score of it in memory.
torch._dynamo.config.recompile_limit = 64


def attention_mask(blocks: Blocks, window: int | None) -> Any:
    """Return which keys each slot sees, by the rule ``Blocks.sees``.

    Returns:
        A flex_attention ``BlockMask`` on a GPU, elsewhere bool [1, 1, slots, tokens + slots].
    """
    device, queries = blocks.anchors.device, blocks.places.numel()
    keys, sees = len(blocks.token_ids) + queries, blocks.sees(window)
    if device.type != "cuda":
        return sees(torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device))[None, None]

    def rule(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(query, key)

    return _compiled_block_mask()(rule, None, None, queries, keys, device)


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as the mask's kind asks; flex_attention runs in the values' type, since autocast leaves it alone."""
    if isinstance(attention_mask, BlockMask):
        query, key = query.to(value.dtype), key.to(value.dtype)
        return flex_attention_forward(module, query, key, value, attention_mask, **options)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


@cache
def _compiled_block_mask() -> Any:
    return torch.compile(create_block_mask)  # otherwise the whole mask would exist at once


AttentionInterface.register(IMPLEMENTATION, attend)
