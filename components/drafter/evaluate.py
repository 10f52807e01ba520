"""Teacher-forced acceptance on held-out chats, for any drafter, with a bootstrap interval over conversations.

At an anchor the accept-length is 1 + the number of leading slots whose argmax equals the stored token: what greedy
verification of the stored text would accept, plus the token that the target itself adds. The stored rows were sampled,
so a drafter is judged on what the target said, not on its most likely token. Slots past a chat's end count as misses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from speculators.models.dflash.core import DFlashDraftModel

from components.drafter import forward
from components.drafter.blocks import lay_out, strided_anchors
from components.drafter.data import Chat
from components.drafter.features import Features
from components.training.parallel import Ranks

Draft = Callable[[int, Chat, torch.Tensor], torch.Tensor]
RESAMPLES = 1000


def neural(drafter: DFlashDraftModel, features: Features, dtype: torch.dtype) -> Draft:
    """Return the drafter as a function of (index of the chat, chat, anchors) to drafted tokens [anchors, K]."""

    @torch.no_grad()
    def draft(index: int, chat: Chat, anchors: torch.Tensor) -> torch.Tensor:
        device = drafter.device
        blocks = lay_out([(chat.token_ids, anchors)], drafter.block_size).to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            drafted = forward.predictions(drafter, features(index).to(device), blocks)
        return drafted.cpu()

    return draft


def bigram(chats: Sequence[Chat], vocabulary: int, slots: int) -> Draft:
    """Return the bigram drafter: the answer token most often seen after the last one, chained; ties to the lower id.

    A token never seen is followed by the most frequent answer token.
    """
    pairs = torch.cat(
        [
            chat.token_ids[chat.answer_start - 1 : -1] * vocabulary + chat.token_ids[chat.answer_start :]
            for chat in chats
        ]
    )
    seen, counts = pairs.unique(return_counts=True)
    previous, following = seen // vocabulary, seen % vocabulary
    score = counts * vocabulary + (vocabulary - 1 - following)
    best = torch.zeros(vocabulary, dtype=torch.long).scatter_reduce(0, previous, score, "amax")
    fallback = int(torch.bincount(pairs % vocabulary).argmax())
    successor = torch.where(best > 0, vocabulary - 1 - best % vocabulary, fallback)

    def draft(_index: int, chat: Chat, anchors: torch.Tensor) -> torch.Tensor:
        chain = [successor[chat.token_ids[anchors]]]
        while len(chain) < slots:
            chain.append(successor[chain[-1]])
        return torch.stack(chain, dim=1)

    return draft


def accept_length(
    draft: Draft,
    chats: Sequence[Chat],
    size: int,
    limit: int,
    seed: int = 0,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> dict[str, Any]:
    """Score a drafter with blocks of ``size`` at up to ``limit`` anchors a chat; ranks share the chats out.

    Returns:
        ``value`` with ``low`` and ``high`` (95 % percentile bootstrap over chats), ``per_position`` (share of anchors
        at which the first k slots are all right), ``anchors`` and ``chats``.
    """
    hits = torch.zeros(len(chats), size - 1)
    anchors_of = torch.zeros(len(chats))
    for index in range(ranks.rank, len(chats), ranks.world):
        chat = chats[index]
        anchors = strided_anchors(chat.answer_start, len(chat.token_ids), limit)
        wanted, inside = lay_out([(chat.token_ids, anchors)], size).labels()
        right = (draft(index, chat, anchors) == wanted) & inside
        hits[index] = right.int().cumprod(1).sum(0)
        anchors_of[index] = len(anchors)
    found = torch.tensor(ranks.sum(*torch.cat([hits.flatten(), anchors_of]).tolist()))
    hits, anchors_of = found[: hits.numel()].view_as(hits), found[hits.numel() :]
    accepted = hits.sum(1)
    picks = torch.randint(len(chats), (RESAMPLES, len(chats)), generator=torch.Generator().manual_seed(seed))
    resampled = 1 + accepted[picks].sum(1) / anchors_of[picks].sum(1)
    low, high = torch.quantile(resampled, torch.tensor([0.025, 0.975])).tolist()
    return {
        "value": 1 + float(accepted.sum() / anchors_of.sum()),
        "low": low,
        "high": high,
        "per_position": (hits.sum(0) / anchors_of.sum()).tolist(),
        "anchors": int(anchors_of.sum()),
        "chats": len(chats),
    }
