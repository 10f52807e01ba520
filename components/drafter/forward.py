"""One drafter forward over all blocks of a few conversations."""

import torch
from speculators.models.dflash.core import DFlashDraftModel
from torch import Tensor

from components.drafter.attention import attention_mask
from components.drafter.blocks import Blocks
from components.drafter.model import window_of


def block_hidden(drafter: DFlashDraftModel, features: Tensor, blocks: Blocks) -> Tensor:
    """Run every block at once.

    Args:
        drafter: with the target's embedding attached.
        features: [tokens, taps·hidden], the target's tapped hidden states.
        blocks: on the drafter's device.

    Returns:
        Normalised hidden states of every slot, [anchors, block, hidden]; the head gives logits.
    """
    slots = torch.full_like(blocks.places, drafter.mask_token_id)
    slots[:, 0] = blocks.token_ids[blocks.anchors]
    positions = torch.cat([blocks.positions, blocks.slot_positions.flatten()])[None]
    mask = attention_mask(blocks, window_of(drafter))
    if not torch.is_autocast_enabled(features.device.type):
        features = features.to(drafter.fc.weight.dtype)
    context = drafter.hidden_norm(drafter.fc(features))[None]
    hidden = drafter.embed_tokens(slots.flatten())[None].to(context.dtype)
    rotary = drafter.rotary_emb(hidden, positions)
    for layer in drafter.layers:
        hidden = layer(
            hidden_states=hidden,
            target_hidden=context,
            attention_mask=mask,
            position_embeddings=rotary,
            use_cache=False,
        )
    return drafter.norm(hidden)[0].unflatten(0, slots.shape)


def predictions(drafter: DFlashDraftModel, features: Tensor, blocks: Blocks) -> Tensor:
    """Return the drafted tokens of slots 1 … block−1, by argmax; int64 [anchors, block−1] of target token ids."""
    hidden = block_hidden(drafter, features, blocks)[:, 1:]
    drafted = drafter.lm_head(hidden).argmax(-1)
    return drafted if drafter.d2t is None else drafted + drafter.d2t[drafted]
