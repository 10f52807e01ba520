"""How far a quantised drafter's logits are from the original's, on the same blocks."""

from collections.abc import Sequence
from typing import Any

import torch
from speculators.models.dflash.core import DFlashDraftModel

from components.drafter.blocks import lay_out, strided_anchors
from components.drafter.data import Chat
from components.drafter.features import Features
from components.drafter.forward import block_hidden


@torch.no_grad()
def logits_apart(
    before: DFlashDraftModel,
    after: DFlashDraftModel,
    chats: Sequence[Chat],
    features: Features,
    anchors: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Compare two drafters at every drafted slot of up to ``anchors`` blocks a chat.

    Returns:
        ``kl``, the mean over slots of KL(before ‖ after) in nats; ``top1_agreement``, the share of slots with the same
        first choice; ``slots``, how many there were.
    """
    apart, agreed, slots = 0.0, 0, 0
    for index, chat in enumerate(chats):
        places = strided_anchors(chat.answer_start, len(chat.token_ids), anchors)
        blocks = lay_out([(chat.token_ids, places)], before.block_size).to(before.device)
        _, inside = blocks.labels()
        seen = features(index).to(before.device)
        said = []
        for drafter in (before, after):
            with torch.autocast(before.device.type, dtype, enabled=dtype != torch.float32):
                hidden = block_hidden(drafter, seen, blocks)[:, 1:][inside]
                logits = drafter.lm_head(hidden.to(drafter.lm_head.weight.dtype))
            said.append(logits.float().log_softmax(-1))
        one, other = said
        apart += float((one.exp() * (one - other)).sum(-1).double().sum())
        agreed += int((one.argmax(-1) == other.argmax(-1)).sum())
        slots += len(one)
    return {"kl": apart / slots, "top1_agreement": agreed / slots, "slots": slots}
