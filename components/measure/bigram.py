"""The simplest drafter there is: the most frequent next token, K times in a row.

It sets the floor that a trained drafter has to clear on the same prompts and the same greedy answers. Greedy
verification accepts a drafted token exactly when it is the target's own next token, so the acceptance of any drafter
that looks at past tokens only can be replayed from the answers, without serving it.
"""

from collections.abc import Iterable, Sequence

import numpy as np

_MERGE_AT = 4_000_000


class Bigram:
    """Most frequent successor of each token; ties go to the smaller id, unseen tokens to the most frequent token."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        pairs, counts = _count_pairs(sequences)
        previous, following = pairs >> 32, pairs & 0xFFFFFFFF
        order = np.lexsort((following, -counts, previous))
        first = np.unique(previous[order], return_index=True)[1]
        chosen = order[first]
        self._next = dict(zip(previous[chosen].tolist(), following[chosen].tolist(), strict=True))
        tokens, inverse = np.unique(following, return_inverse=True)
        totals = np.bincount(inverse, weights=counts) if len(tokens) else np.zeros(0)
        self._frequent = int(tokens[np.argmax(totals)]) if len(tokens) else 0

    def draft(self, token: int, count: int) -> list[int]:
        """Return ``count`` tokens after ``token``, each the most frequent successor of the one before."""
        drafted = []
        for _ in range(count):
            token = self._next.get(token, self._frequent)
            drafted.append(token)
        return drafted


def replay(bigram: Bigram, answer: Sequence[int], count: int) -> tuple[int, list[int]]:
    """Replay speculative decoding of a greedy ``answer`` with ``count`` drafted tokens a step.

    The first token comes from the prefill; every later step drafts after the newest token, keeps the drafted tokens
    that agree with the answer and gets one more from the target. Only steps whose ``count`` tokens the answer covers
    are counted, since nothing is known beyond its end. Returns the number of drafts and, per position, how many were
    accepted there.
    """
    drafts, accepted = 0, [0] * count
    position = 0
    while position + count < len(answer):
        drafts += 1
        length = 0
        for drafted, token in zip(bigram.draft(answer[position], count), answer[position + 1 :], strict=False):
            if drafted != token:
                break
            accepted[length] += 1
            length += 1
        position += length + 1
    return drafts, accepted


def _count_pairs(sequences: Iterable[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    waiting: list[np.ndarray] = []
    held = 0
    for sequence in sequences:
        ids = np.asarray(sequence, dtype=np.int64)
        waiting.append(ids[:-1] << 32 | ids[1:])
        held += max(len(ids) - 1, 0)
        if held >= _MERGE_AT:
            pairs, counts = _merge(pairs, counts, waiting)
            waiting, held = [], 0
    return _merge(pairs, counts, waiting)


def _merge(pairs: np.ndarray, counts: np.ndarray, waiting: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    fresh = np.concatenate([pairs, *waiting])
    weights = np.concatenate([counts, *(np.ones(len(part), dtype=np.int64) for part in waiting)])
    merged, inverse = np.unique(fresh, return_inverse=True)
    totals = np.zeros(len(merged), dtype=np.int64)
    np.add.at(totals, inverse, weights)
    return merged, totals
