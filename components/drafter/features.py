"""What the drafter sees of the target: hidden states of tapped layers, from a forward that stops at the last one.

A drafter that learns from the target's distribution needs the target's last hidden state too, and a whole forward.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from components.contract.errors import UserError
from components.drafter.blocks import sent
from components.drafter.data import Chat
from components.store.work import Work
from components.training.parallel import Ranks
from components.training.room import reserve

Features = Callable[[int], torch.Tensor]
SHARD_TOKENS = 2048
DIGEST_BYTES = 32


def target_layer_ids(layers: int, taps: int) -> list[int]:
    """Return the tapped decoder layers, counted from 0: round(1 + i·(L−4)/(n−1)), the middle layer for one tap.

    The rule of the published drafters (DFlash; Python's rounding, halves to even).

    Raises:
        UserError: the target is too shallow for that many distinct layers.
    """
    if taps == 1:
        return [layers // 2]
    ids = [round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps)]
    if len(set(ids)) < taps:
        raise UserError(f"taps {taps}: a target of {layers} layers has no {taps} distinct ones (the rule gives {ids})")
    return ids


class _LastTapReached(Exception):
    """Ends a target forward early."""


class TargetFeatures:
    """Computes features with the target; a conversation at a time, so they do not depend on any batching.

    With ``final`` the normalised last hidden state, from which the head makes logits, follows the tapped ones.
    """

    def __init__(self, target: torch.nn.Module, taps: Sequence[int], final: bool = False) -> None:
        self._decoder, self._taps, self._final = target.get_decoder(), list(taps), final
        self._three_axes = "mrope_section" in (getattr(self._decoder.config, "rope_parameters", None) or {})
        self.width = (len(self._taps) + final) * target.get_output_embeddings().weight.shape[1]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [length, taps·hidden (+ hidden)] in the target's dtype for int64 ``token_ids`` [length]."""
        return self.batch(token_ids[None])[0]

    @torch.no_grad()
    def batch(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [rows, length, taps·hidden (+ hidden)] for int64 ``token_ids`` [rows, length], padded at the end."""
        caught: dict[int, torch.Tensor] = {}

        def catch(tap: int) -> Callable[..., None]:
            def hook(
                _module: torch.nn.Module, _inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]
            ) -> None:
                caught[tap] = output[0] if isinstance(output, tuple) else output
                if len(caught) == len(self._taps) and not self._final:
                    raise _LastTapReached

            return hook

        device, (rows, length) = self._decoder.device, token_ids.shape
        given = {}
        if self._three_axes:  # unless told, transformers asks the GPU for positions, and waits for all before them
            given["position_ids"] = torch.arange(length, device=device).expand(3, rows, length)
        last = []
        hooks = [self._decoder.layers[tap].register_forward_hook(catch(tap)) for tap in self._taps]
        try:
            states = self._decoder(input_ids=sent(token_ids, device), use_cache=False, **given)
            last.append(states.last_hidden_state)
        except _LastTapReached:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([*(caught[tap] for tap in self._taps), *last], dim=-1)


def cached(
    compute: TargetFeatures,
    chats: Sequence[Chat],
    path: Path,
    work: Work,
    progress: Callable[[int, int], None],
    ranks: Ranks = Ranks(),  # noqa: B008
) -> Features:
    """Compute every conversation's features once into a memory-mapped bfloat16 file; return the look-up by index.

    Shards of conversations are stored in ``work`` as they are done, so that a killed run does not repeat them; ranks
    share them out, and those of one machine the file. A stored shard begins with its sha256; one that is damaged is
    computed anew.
    """
    starts = np.cumsum([0] + [len(chat.token_ids) for chat in chats])
    shape = (int(starts[-1]), compute.width)
    if ranks.local == 0:
        whole = np.memmap(path, np.int16, "w+", shape=shape)
        reserve(path, 0, whole.nbytes, "the target's features; free space or take fewer chats")
    ranks.meet()
    store = np.memmap(path, np.int16, "r+", shape=shape)

    def fill(first: int, last: int) -> None:
        name = f"features/{first}-{last}"
        part = work.get(name) or b""
        data = part[DIGEST_BYTES:]
        if part[:DIGEST_BYTES] != sha256(data).digest():
            shard = torch.cat([compute(chat.token_ids).to(torch.bfloat16) for chat in chats[first:last]])
            data = shard.view(torch.int16).cpu().numpy().tobytes()
            work.put(name, sha256(data).digest() + data)
        store[starts[first] : starts[last]] = np.frombuffer(data, np.int16).reshape(-1, compute.width)

    shards = list(enumerate(_shards(starts)))
    for _, (first, last) in shards[ranks.rank :: ranks.world]:
        fill(first, last)
        progress(last, len(chats))
    ranks.meet()
    elsewhere = [shard for index, shard in shards if index % ranks.world // ranks.per_node != ranks.node]
    for first, last in elsewhere[ranks.local :: ranks.per_node]:
        fill(first, last)
    store.flush()
    ranks.meet()

    def look_up(index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(store[starts[index] : starts[index + 1]])).view(torch.bfloat16)

    return look_up


def _shards(starts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of conversations that hold at least ``SHARD_TOKENS`` tokens, but for the last one."""
    first = 0
    for last in range(1, len(starts)):
        if starts[last] - starts[first] >= SHARD_TOKENS or last == len(starts) - 1:
            yield first, last
            first = last


def online(compute: TargetFeatures, chats: Sequence[Chat]) -> Features:
    """Return a look-up that runs the target each time: for data whose features do not fit a disk."""
    return lambda index: compute(chats[index].token_ids).to(torch.bfloat16)
