"""The drafter's loss over the blocks of a few conversations."""

from typing import Literal

import torch
from speculators.models.dflash.core import DFlashDraftModel
from torch import Tensor

from components.drafter import head
from components.drafter.blocks import Blocks, decay, sent
from components.drafter.forward import block_hidden

Kind = Literal["cross_entropy", "kl", "d_pace"]
SMOOTHING = 0.5


class Objective:
    """Σ w·loss over the slots of blocks, in nats, to be divided by the global batch's Σ w.

    ``cross_entropy`` asks slot k for the token at its own position, with weight exp(−(k−1)/γ) (DFlash, position
    decay); a token outside a trimmed vocabulary cannot be drafted: its slot adds no loss but keeps its weight in the
    denominator. ``d_pace`` asks for the same with weights :func:`d_pace` instead. ``kl`` asks for the distribution p
    that the target had there, KL(p ‖ drafter), both over the tokens that can be drafted, with the decaying weights;
    features then end with the target's last hidden state.

    Blocks are on the CPU: what depends on them alone is settled there, so that the host never waits for a GPU here and
    has asked for the next forward when this one ends.
    """

    def __init__(self, drafter: DFlashDraftModel, gamma: float, kind: Kind = "cross_entropy") -> None:
        self.drafter, self._gamma, self._kind = drafter, gamma, kind
        self._can_draft = None if drafter.t2d is None else drafter.t2d.cpu()

    def weight(self, blocks: Blocks) -> float:
        """Return what these blocks add to the denominator: Σw, for ``d_pace`` the number of labels."""
        inside = blocks.labels()[1]
        return float((inside if self._kind == "d_pace" else decay(inside, self._gamma)).double().sum())

    def __call__(self, features: Tensor, blocks: Blocks) -> Tensor:
        """Return the sum, not yet divided, for ``features`` [tokens, width] on the drafter's device."""
        drafter, device = self.drafter, features.device
        states, last = features.split([drafter.fc.in_features, features.shape[1] - drafter.fc.in_features], dim=1)
        wanted, inside = blocks.labels()
        drafted = inside
        if self._kind != "kl" and self._can_draft is not None:
            drafted = inside & self._can_draft[wanted]
            wanted = (self._can_draft.cumsum(0) - 1)[wanted]
        block, slot = drafted.nonzero(as_tuple=True)
        hidden = block_hidden(drafter, states, blocks.to(device)).flatten(0, 1)
        hidden = hidden.index_select(0, sent(block * blocks.size + slot + 1, device))
        if self._kind == "kl":
            places = sent(blocks.places[:, :-1][drafted], device)
            losses = head.divergence(hidden, drafter.lm_head.weight, last, places)
        else:
            losses = head.cross_entropy(hidden, drafter.lm_head.weight, sent(wanted[drafted], device))
        if self._kind == "d_pace":
            at = sent(block, device), sent(slot, device)
            confidence = torch.zeros(inside.shape, device=device).index_put(at, torch.exp(-losses.detach()))
            weights = d_pace(confidence, sent(inside, device))[at]
        else:
            weights = sent(decay(inside, self._gamma)[drafted], device)
        return (weights * losses).sum()


def d_pace(confidence: Tensor, inside: Tensor) -> Tensor:
    """Return D-PACE weights: of slot k Σ_{j≥k} Π_{i≤j} ((1 − α)·q_i + α), α = 0.5: how much it can still earn.

    Args:
        confidence: [anchors, K], the probability q that the drafter gives slots' labels.
        inside: bool [anchors, K], which slots have one; others earn nothing.
    """
    smooth = torch.where(inside, (1 - SMOOTHING) * confidence + SMOOTHING, 1.0)
    earned = smooth.cumprod(1) * inside
    return earned.flip(1).cumsum(1).flip(1) * inside
