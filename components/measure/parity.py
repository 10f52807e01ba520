"""Greedy answers of two servers compared token by token, with a rule for near-ties.

Tie rule: at the first difference each side's token is among the other's two most likely and the two are at most
0.1 nat apart on both sides; at most one prompt in ten may part so. In float32 nothing may part.
"""

from collections.abc import Callable
from typing import Any

from components.contract.errors import UserError

TIE_NATS = 0.1
MAX_PARTED = 0.1
CONTEXT_TOKENS = 8

Answer = dict[str, Any]


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Return the first index at which two token lists differ, or None when they are equal.

    Where one is a proper prefix of the other that is the shorter one's length.
    """
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def is_tie(left: Answer, right: Answer, index: int) -> bool:
    """Say whether the difference at ``index`` is a near-tie.

    An answer holds ``token_ids`` and ``top``: per token the two most likely ``[id, logprob]``, most likely first.
    """
    if index >= min(len(left["token_ids"]), len(right["token_ids"])):
        return False
    here, there = left["token_ids"][index], right["token_ids"][index]
    for answer in (left, right):
        likely = dict(map(tuple, answer["top"][index]))
        if here not in likely or there not in likely or abs(likely[here] - likely[there]) > TIE_NATS:
            return False
    return True


def logprob_gaps(left: Answer, right: Answer) -> list[float]:
    """Return by how many nats the logprobs differ of every token that both sides list after the same tokens."""
    same = first_difference(left["token_ids"], right["token_ids"])
    positions = len(left["top"]) if same is None else same + 1
    gaps = []
    for here, there in zip(left["top"][:positions], right["top"][:positions], strict=False):
        others = dict(map(tuple, there))
        gaps += [abs(value - others[token]) for token, value in here if token in others]
    return gaps


def compare(
    answers: list[Answer], baseline: list[Answer], exact: bool, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Compare answers with the baseline's of the same ``id`` and ``concurrency``; ``decode`` turns ids into text.

    Returns ``compared``, ``equal``, ``ties``, ``broken``, ``exact``, ``passed``, ``logprobs`` (how far apart they are,
    see :func:`logprob_gaps`) and ``differences`` (one entry per prompt that parts: where, both tokens with their
    logprobs, and the text around them). Raises :class:`UserError` when the baseline has no answer to the same prompt.
    """
    gaps: list[float] = []
    partners = {(answer["id"], answer["concurrency"]): answer for answer in baseline}
    differences = []
    for answer in answers:
        partner = partners.get((answer["id"], answer["concurrency"]))
        if partner is None or partner["prompt_token_ids"] != answer["prompt_token_ids"]:
            raise UserError(
                f"parity: the baseline has no answer to prompt {answer['id']} at concurrency {answer['concurrency']}; "
                "measure it with the same prompts, template and answers section"
            )
        gaps += logprob_gaps(answer, partner)
        index = first_difference(answer["token_ids"], partner["token_ids"])
        if index is not None:
            differences.append(_difference(answer, partner, index, decode))
    ties = sum(difference["tie"] for difference in differences)
    broken = len(differences) - ties
    allowed = 0 if exact else MAX_PARTED * len(answers)
    return {
        "compared": len(answers),
        "equal": len(answers) - len(differences),
        "ties": ties,
        "broken": broken,
        "exact": exact,
        "passed": broken == 0 and ties <= allowed,
        "logprobs": {
            "compared": len(gaps),
            "mean_gap": sum(gaps) / len(gaps) if gaps else None,
            "max_gap": max(gaps, default=None),
        },
        "differences": differences,
    }


def _difference(answer: Answer, partner: Answer, index: int, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    sides = {}
    for name, side in (("here", answer), ("baseline", partner)):
        ended = index >= len(side["token_ids"])
        sides[name] = {
            "token": None if ended else side["token_ids"][index],
            "text": decode(side["token_ids"][index : index + CONTEXT_TOKENS]),
            "top": None if ended else side["top"][index],
        }
    return {
        "id": answer["id"],
        "concurrency": answer["concurrency"],
        "position": index,
        "tie": is_tie(answer, partner, index),
        "before": decode(answer["token_ids"][max(0, index - CONTEXT_TOKENS) : index]),
        **sides,
    }
