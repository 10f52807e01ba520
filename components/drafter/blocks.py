"""Anchored blocks: which positions start one, what each may see, where its slots sit.

A block of ``size`` slots belongs to an anchor position ``a``: slot 0 holds the anchor's token, slot k holds the mask
token and predicts the token at ``a + k`` (same-position labels). Positions count from the start of the conversation.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


def seed_of(*parts: object) -> int:
    """Derive a 63-bit seed from the parts, so that no random state has to be stored."""
    text = ":".join(map(str, parts))
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) >> 1


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; a GPU takes it when it comes to it, and the host does not wait for that."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def candidates(answer_start: int, length: int) -> range:
    """Return the positions that can be an anchor: answer tokens that are followed by another answer token."""
    return range(answer_start, length - 1)


def random_anchors(answer_start: int, length: int, limit: int, seed: int) -> Tensor:
    """Draw up to ``limit`` distinct anchors, sorted; int64 [anchors]."""
    positions = candidates(answer_start, length)
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))[:limit]
    return order.sort().values + positions.start


def strided_anchors(answer_start: int, length: int, limit: int) -> Tensor:
    """Return up to ``limit`` distinct anchors spread evenly over the answer, both ends included; int64 [anchors]."""
    positions = candidates(answer_start, length)
    count = min(limit, len(positions))
    if count == 0:
        return torch.empty(0, dtype=torch.long)
    return torch.linspace(positions.start, positions.stop - 1, count, dtype=torch.float64).round().long()


@dataclass(frozen=True)
class Blocks:
    """Conversations laid end to end, and blocks of ``size`` slots anchored in them; all tensors int64.

    ``token_ids`` [tokens] and their ``positions`` [tokens], each from the start of its own conversation; ``anchors``
    [anchors] as places in ``token_ids``, with the ``starts`` and ``ends`` [anchors] of their conversations.
    """

    size: int
    token_ids: Tensor
    positions: Tensor
    anchors: Tensor
    starts: Tensor
    ends: Tensor

    @property
    def places(self) -> Tensor:
        """Where each slot's own token lies, past the end where there is none; int64 [anchors, size]."""
        return self.anchors[:, None] + torch.arange(self.size, device=self.anchors.device)

    @property
    def slot_positions(self) -> Tensor:
        """The position of every slot in its conversation; int64 [anchors, size]."""
        return self.places - self.starts[:, None]

    def labels(self) -> tuple[Tensor, Tensor]:
        """Return the tokens that slots 1 … size−1 should predict, and which of them exist.

        Returns:
            int64 [anchors, size−1] (0 where there is none) and bool [anchors, size−1].
        """
        places = self.places[:, 1:]
        inside = places < self.ends[:, None]
        return self.token_ids[places.clamp(max=len(self.token_ids) - 1)] * inside, inside

    def sees(self, window: int | None = None) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the rule of what slots see of the keys ``[tokens of the context | anchors × size slots]``.

        A slot of block j sees its own conversation strictly before its anchor, and every slot of its own block in
        both directions, never another block. With a ``window`` W it sees only keys whose distance is below W on
        either side, which is what a served non-causal sliding window does.

        Returns:
            A function of slots (int64, 0 to anchors·size − 1) and keys (int64) of shapes that broadcast, to bool.
        """
        size, anchors, starts = self.size, self.anchors, self.starts
        tokens = torch.full((), len(self.token_ids), device=anchors.device)  # a number would compile for each length

        def rule(query: Tensor, key: Tensor) -> Tensor:
            block, slot, other = query // size, query % size, key - tokens
            context = (key >= starts[block]) & (key < anchors[block])
            own = (other >= 0) & (other // size == block)
            if window is not None:
                context = context & (anchors[block] + slot - key < window)
                own = own & ((other % size - slot).abs() < window)
            return context | own

        return rule

    def to(self, device: torch.device) -> "Blocks":
        """Return the same blocks on another device."""
        tensors = {field.name: sent(getattr(self, field.name), device) for field in fields(self)[1:]}
        return Blocks(self.size, **tensors)


def lay_out(conversations: Sequence[tuple[Tensor, Tensor]], size: int) -> Blocks:
    """Lay conversations, each its token ids and its anchors (int64 [length] and [anchors]), end to end."""
    ids, anchors = zip(*conversations, strict=True)
    lengths, counts = torch.tensor([len(one) for one in ids]), torch.tensor([len(one) for one in anchors])
    ends = lengths.cumsum(0)
    starts = (ends - lengths).repeat_interleave(counts)
    return Blocks(
        size,
        torch.cat(ids),
        torch.cat([torch.arange(len(one)) for one in ids]),
        torch.cat(anchors) + starts,
        starts,
        ends.repeat_interleave(counts),
    )


def decay(inside: Tensor, gamma: float) -> Tensor:
    """Return the loss weight of slots 1 … K: exp(−(k−1)/γ), zero where there is no label (DFlash, loss decay).

    Returns:
        float32, the shape of ``inside`` [anchors, K].
    """
    return inside * torch.exp(-torch.arange(inside.shape[1], dtype=torch.float32, device=inside.device) / gamma)
