"""One drafter forward over all blocks of one conversation."""

import torch
from speculators.models.dflash.core import DFlashDraftModel

from components.drafter.blocks import attention_mask, slot_positions
from components.drafter.model import window_of


def block_hidden(
    drafter: DFlashDraftModel, features: torch.Tensor, token_ids: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Run every block of one conversation at once.

    Args:
        drafter: with the target's embedding attached.
        features: [length, taps·hidden], the target's tapped hidden states.
        token_ids: int64 [length].
        anchors: int64 [anchors].

    Returns:
        Normalised hidden states of every slot, [anchors, block, hidden]; the head gives logits.
    """
    size, length = drafter.block_size, len(token_ids)
    slots = torch.full((len(anchors), size), drafter.mask_token_id, device=anchors.device)
    slots[:, 0] = token_ids[anchors]
    positions = torch.cat([torch.arange(length, device=anchors.device), slot_positions(anchors, size).flatten()])[None]
    mask = attention_mask(length, anchors, size, window_of(drafter))[None, None]
    context = drafter.hidden_norm(drafter.fc(features.to(drafter.fc.weight.dtype)))[None]
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
    return drafter.norm(hidden)[0].unflatten(0, (len(anchors), size))


def predictions(
    drafter: DFlashDraftModel, features: torch.Tensor, token_ids: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Return the drafted tokens of slots 1 … block−1, by argmax; int64 [anchors, block−1] of target token ids."""
    hidden = block_hidden(drafter, features, token_ids, anchors)[:, 1:]
    drafted = drafter.lm_head(hidden).argmax(-1)
    return drafted if drafter.d2t is None else drafted + drafter.d2t[drafted]
