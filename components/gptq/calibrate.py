"""What the drafter's linears see: Hessians of their inputs over the training blocks of many conversations."""

from collections.abc import Iterable, Sequence

import torch
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian
from speculators.models.dflash.core import DFlashDraftModel
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from components.chats.rows import Row
from components.contract.errors import UserError
from components.drafter.blocks import candidates, lay_out, seed_of, strided_anchors
from components.drafter.data import Chat
from components.drafter.features import Features
from components.drafter.forward import block_hidden


def choose(chats: Iterable[Chat], conversations: int) -> list[Chat]:
    """Return up to ``conversations`` chats in an order that depends on their ids alone, not on the file's."""
    return sorted(chats, key=lambda chat: (seed_of("gptq", chat.id), chat.id))[:conversations]


def draw(chats: Iterable[Chat], conversations: int, mix: dict[str, int], category: dict[str, str]) -> list[Chat]:
    """Return exactly ``conversations`` chats, or of each category in ``mix`` exactly as many as it says.

    ``category`` is each chat's by its id. The order is :func:`choose`'s.

    Raises:
        UserError: fewer are usable, with the numbers.
    """
    usable = choose(chats, len(category))
    chosen: set[str] = set()
    for name, count in mix.items() or [(None, conversations)]:
        of_one = [chat.id for chat in usable if name is None or category[chat.id] == name]
        if len(of_one) < count:
            of = f" of category {name}" if name else ""
            raise UserError(
                f"chats: {len(of_one)} usable rows{of}, {count} are to calibrate on; give more or ask fewer"
            )
        chosen.update(of_one[:count])
    return [chat for chat in usable if chat.id in chosen]


def with_room(chats: Iterable[Chat], anchors: int) -> list[Chat]:
    """Return the chats whose answer has places for that many anchors: the others could not give as many blocks."""
    return [chat for chat in chats if len(candidates(chat.answer_start, len(chat.token_ids))) >= anchors]


def whole(rows: Iterable[Row], longest: int) -> tuple[list[Row], int]:
    """Return the rows whose prompt and answer have at most ``longest`` tokens together, and how many have more."""
    every = list(rows)
    kept = [row for row in every if len(row.get("prompt_token_ids", ())) + len(row.get("token_ids", ())) <= longest]
    return kept, len(every) - len(kept)


class Calibration:
    """Conversations with up to ``anchors`` blocks each, spread evenly over the answer."""

    def __init__(self, chats: Sequence[Chat], features: Features, anchors: int, dtype: torch.dtype) -> None:
        self._chats, self._features, self._dtype = chats, features, dtype
        self._anchors = [strided_anchors(chat.answer_start, len(chat.token_ids), anchors) for chat in chats]

    @property
    def blocks(self) -> int:
        """How many blocks there are in all."""
        return sum(map(len, self._anchors))

    def check_rank(self, drafter: DFlashDraftModel, linears: dict[str, nn.Linear]) -> None:
        """Demand at least as many slots as the widest linear has inputs.

        With fewer the Hessian has no full rank, and the damping, not the data, decides the codes.

        Raises:
            UserError: with the numbers.
        """
        name = max(linears, key=lambda one: linears[one].in_features if one != "fc" else 0)
        slots, width = self.blocks * drafter.block_size, linears[name].in_features
        if slots < width:
            raise UserError(
                f"chats: {len(self._chats)} usable rows give {self.blocks} blocks of {drafter.block_size} slots = "
                f"{slots} inputs, fewer than the {width} columns of {name}; give more chats, conversations or anchors"
            )

    @torch.no_grad()
    def hessians(self, drafter: DFlashDraftModel, linears: dict[str, nn.Linear]) -> dict[str, Tensor]:
        """Return 2·Σxxᵀ over every input row of each linear, context and slots alike; float32 [in, in] by name.

        One drafter forward a conversation holds all its blocks, under the training mask.
        """
        sums = {name: make_empty_hessian(linear) for name, linear in linears.items()}

        def hook(name: str) -> RemovableHandle:
            def accumulate(module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
                with torch.autocast(inputs[0].device.type, enabled=False):  # which would multiply in bfloat16
                    accumulate_hessian(inputs[0], module, sums[name], torch.zeros(()))

            return linears[name].register_forward_hook(accumulate)

        hooks = [hook(name) for name in linears]
        try:
            for index, (chat, anchors) in enumerate(zip(self._chats, self._anchors, strict=True)):
                blocks = lay_out([(chat.token_ids, anchors)], drafter.block_size).to(drafter.device)
                with torch.autocast(drafter.device.type, self._dtype, enabled=self._dtype != torch.float32):
                    block_hidden(drafter, self._features(index).to(drafter.device), blocks)
        finally:
            for one in hooks:
                one.remove()
        return sums
