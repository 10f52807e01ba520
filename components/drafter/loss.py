"""The drafter's loss over the blocks of a few conversations."""

from typing import Literal

import torch
from speculators.models.dflash.core import DFlashDraftModel
from torch import Tensor

from components.drafter import head
from components.drafter.blocks import Blocks, decay
from components.drafter.forward import block_hidden

Kind = Literal["cross_entropy", "kl", "d_pace"]
SMOOTHING = 0.5


def weight_sum(blocks: Blocks, gamma: float, kind: Kind = "cross_entropy") -> float:
    """Return what these blocks add to the global batch's denominator: Σw, for ``d_pace`` the number of labels."""
    inside = blocks.labels()[1]
    return float((inside if kind == "d_pace" else decay(inside, gamma)).double().sum())


def weighted_loss(
    drafter: DFlashDraftModel,
    features: Tensor,
    blocks: Blocks,
    gamma: float,
    kind: Kind = "cross_entropy",
) -> Tensor:
    """Return Σ w·loss over the slots, in nats and not yet divided; divide by the whole batch's :func:`weight_sum`.

    ``cross_entropy`` asks slot k for the token at its own position, with weight exp(−(k−1)/γ) (DFlash, position
    decay); a token outside a trimmed vocabulary cannot be drafted: its slot adds no loss but keeps its weight in the
    denominator. ``d_pace`` asks for the same with weights :func:`d_pace` instead. ``kl`` asks for the distribution p
    that the target had there, KL(p ‖ drafter), both over the tokens that can be drafted, with the decaying weights;
    ``features`` then end with the target's last hidden state.
    """
    states, last = features.split([drafter.fc.in_features, features.shape[1] - drafter.fc.in_features], dim=1)
    wanted, inside = blocks.labels()
    drafted = inside
    if kind != "kl" and drafter.t2d is not None:
        drafted = inside & drafter.t2d[wanted]
        wanted = (drafter.t2d.cumsum(0) - 1)[wanted]
    hidden, weight = block_hidden(drafter, states, blocks)[:, 1:][drafted], drafter.lm_head.weight
    if kind == "kl":
        losses = head.divergence(hidden, weight, last, blocks.places[:, :-1][drafted])
    else:
        losses = head.cross_entropy(hidden, weight, wanted[drafted])
    if kind == "d_pace":
        confidence = torch.zeros(inside.shape, device=losses.device)
        confidence[drafted] = torch.exp(-losses.detach())
        weights = d_pace(confidence, inside)
    else:
        weights = decay(inside, gamma)
    return (weights[drafted] * losses).sum()


def d_pace(confidence: Tensor, inside: Tensor) -> Tensor:
    """Return D-PACE weights: of slot k Σ_{j≥k} Π_{i≤j} ((1 − α)·q_i + α), α = 0.5: how much it can still earn.

    Args:
        confidence: [anchors, K], the probability q that the drafter gives slots' labels.
        inside: bool [anchors, K], which slots have one; others earn nothing.
    """
    smooth = torch.where(inside, (1 - SMOOTHING) * confidence + SMOOTHING, 1.0)
    earned = smooth.cumprod(1) * inside
    return earned.flip(1).cumsum(1).flip(1) * inside
