"""The drafter's loss over the blocks of one conversation."""

from typing import Literal

import torch
from speculators.models.dflash.core import DFlashDraftModel
from torch.nn.functional import cross_entropy, kl_div

from components.drafter.blocks import labels, slot_positions, slot_weights
from components.drafter.forward import block_hidden

Kind = Literal["cross_entropy", "kl"]
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
    kind: Kind = "cross_entropy",
) -> torch.Tensor:
    """Return Σ w·loss over one conversation's slots, in nats and not yet divided; divide by Σw of the whole batch.

    Weights are exp(−(k−1)/γ) (DFlash, position decay). ``cross_entropy`` asks slot k for the token at its own
    position; a token outside a trimmed vocabulary cannot be drafted: its slot adds no loss but keeps its weight in the
    denominator. ``kl`` asks for the distribution p that the target had there, KL(p ‖ drafter), both over the tokens
    that can be drafted; ``features`` then end with the target's last hidden state. The head runs over chunks of
    slots, in float32 from the logits on.
    """
    states, last = features.split([drafter.fc.in_features, features.shape[1] - drafter.fc.in_features], dim=1)
    wanted, inside = labels(token_ids, anchors, drafter.block_size)
    weights = slot_weights(inside, gamma)
    before = slot_positions(anchors, drafter.block_size)[:, :-1]
    if kind == "cross_entropy" and drafter.t2d is not None:
        inside = inside & drafter.t2d[wanted]
        wanted = (drafter.t2d.cumsum(0) - 1)[wanted]
    hidden = block_hidden(drafter, states, token_ids, anchors)[:, 1:][inside]
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, ids, places, weight in zip(
        *(part.split(HEAD_ROWS) for part in (hidden, wanted[inside], before[inside], weights[inside])), strict=True
    ):
        logits = drafter.lm_head(rows).float()
        if kind == "cross_entropy":
            loss = cross_entropy(logits, ids, reduction="none")
        else:
            with torch.no_grad():
                target = drafter.lm_head(last[places].to(rows.dtype)).float().log_softmax(-1)
            loss = kl_div(logits.log_softmax(-1), target, reduction="none", log_target=True).sum(-1)
        total = total + (weight * loss).sum()
    return total
