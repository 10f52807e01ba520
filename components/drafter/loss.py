"""The drafter's loss over the blocks of one conversation."""

import torch
from speculators.models.dflash.core import DFlashDraftModel
from torch.nn.functional import cross_entropy

from components.drafter.blocks import labels, slot_weights
from components.drafter.forward import block_hidden

HEAD_ROWS = 4096


def weight_sum(token_ids: torch.Tensor, anchors: torch.Tensor, size: int, gamma: float) -> float:
    """Return Σw of one conversation's blocks: what its loss adds to the global denominator."""
    return float(slot_weights(labels(token_ids, anchors, size)[1], gamma).double().sum())


def weighted_loss(
    drafter: DFlashDraftModel,
    features: torch.Tensor,
    token_ids: torch.Tensor,
    anchors: torch.Tensor,
    gamma: float,
) -> torch.Tensor:
    """Return Σ w·CE over one conversation, not yet divided; the caller divides by Σw of the whole batch.

    Labels are the tokens at the slots' own positions, weights exp(−(k−1)/γ) (DFlash, position decay). A label outside
    a trimmed vocabulary cannot be drafted: its slot adds no loss but keeps its weight in the denominator. The head
    runs over chunks of slots, in float32 from the logits on.
    """
    wanted, inside = labels(token_ids, anchors, drafter.block_size)
    weights = slot_weights(inside, gamma)
    if drafter.t2d is not None:
        inside = inside & drafter.t2d[wanted]
        wanted = (drafter.t2d.cumsum(0) - 1)[wanted]
    hidden = block_hidden(drafter, features, token_ids, anchors)[:, 1:][inside]
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, ids, weight in zip(
        hidden.split(HEAD_ROWS), wanted[inside].split(HEAD_ROWS), weights[inside].split(HEAD_ROWS), strict=True
    ):
        total = total + (weight * cross_entropy(drafter.lm_head(rows).float(), ids, reduction="none")).sum()
    return total
