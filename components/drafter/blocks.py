"""Anchored blocks: which positions start one, what each may see, where its slots sit.

A block of ``size`` slots belongs to an anchor position ``a``: slot 0 holds the anchor's token, slot k holds the mask
token and predicts the token at ``a + k`` (same-position labels). Positions count from the start of the conversation.
"""

import hashlib

import torch


def seed_of(*parts: object) -> int:
    """Derive a 63-bit seed from the parts, so that no random state has to be stored."""
    text = ":".join(map(str, parts))
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) >> 1


def candidates(answer_start: int, length: int) -> range:
    """Return the positions that can be an anchor: answer tokens that are followed by another answer token."""
    return range(answer_start, length - 1)


def random_anchors(answer_start: int, length: int, limit: int, seed: int) -> torch.Tensor:
    """Draw up to ``limit`` distinct anchors, sorted; int64 [anchors]."""
    positions = candidates(answer_start, length)
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))[:limit]
    return order.sort().values + positions.start


def strided_anchors(answer_start: int, length: int, limit: int) -> torch.Tensor:
    """Return up to ``limit`` distinct anchors spread evenly over the answer, both ends included; int64 [anchors]."""
    positions = candidates(answer_start, length)
    count = min(limit, len(positions))
    if count == 0:
        return torch.empty(0, dtype=torch.long)
    return torch.linspace(positions.start, positions.stop - 1, count, dtype=torch.float64).round().long()


def slot_positions(anchors: torch.Tensor, size: int) -> torch.Tensor:
    """Return the absolute position of every slot; int64 [anchors, size]."""
    return anchors[:, None] + torch.arange(size, device=anchors.device)


def attention_mask(length: int, anchors: torch.Tensor, size: int, window: int | None = None) -> torch.Tensor:
    """Say what each slot sees among the keys ``[length context positions | anchors × size slots]``.

    A slot of block j sees the context strictly before its anchor, and every slot of its own block in both directions,
    never another block. With a ``window`` W it sees only keys whose distance is below W on either side, which is what
    a served non-causal sliding window does.

    Returns:
        bool [anchors·size, length + anchors·size]; True where the query may look.
    """
    positions = slot_positions(anchors, size).flatten()
    block = torch.arange(len(anchors), device=anchors.device).repeat_interleave(size)
    context = torch.arange(length, device=anchors.device)
    sees_context = context[None, :] < anchors.repeat_interleave(size)[:, None]
    sees_slots = block[:, None] == block[None, :]
    if window is not None:
        sees_context &= positions[:, None] - context[None, :] < window
        sees_slots &= (positions[:, None] - positions[None, :]).abs() < window
    return torch.cat([sees_context, sees_slots], dim=1)


def labels(token_ids: torch.Tensor, anchors: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that slots 1 … size−1 should predict, and which of them exist.

    Returns:
        int64 [anchors, size−1] (0 where there is none) and bool [anchors, size−1].
    """
    positions = slot_positions(anchors, size)[:, 1:]
    inside = positions < len(token_ids)
    return token_ids[positions.clamp(max=len(token_ids) - 1)] * inside, inside


def slot_weights(inside: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the loss weight of slots 1 … K: exp(−(k−1)/γ), zero where there is no label (DFlash, loss decay).

    Returns:
        float32, the shape of ``inside`` [anchors, K].
    """
    decay = torch.exp(-torch.arange(inside.shape[1], dtype=torch.float32, device=inside.device) / gamma)
    return inside * decay
