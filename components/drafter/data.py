"""Conversations as the drafter trains on them: the token ids that the server read and wrote, never re-tokenised."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from components.chats.rows import Row, is_held_out
from components.contract.errors import UserError

MIN_ANSWER = 2
MAX_ID = 2**31
THOUGHT_ENDS = "</think>"


@dataclass(frozen=True)
class Chat:
    """One conversation; positions from ``answer_start`` on are the answer."""

    id: str
    token_ids: torch.Tensor
    answer_start: int


@dataclass(frozen=True)
class Split:
    """Chats for training and for evaluation, and what became of the rest."""

    train: list[Chat]
    held_out: list[Chat]
    too_short: int
    cut: int


def split(rows: Iterable[Row], max_length: int, held_out: float, after_thought_by: Any = None) -> Split:
    """Turn rows into chats; answers of fewer than two tokens are left out, long conversations cut at ``max_length``.

    With the tokenizer ``after_thought_by``, a row's reasoning becomes context: its answer begins after ``</think>``.

    Raises:
        UserError: a row without an id, a prompt or token ids, or with something else in their place, or a side of the
            split without a single chat.
    """
    train: list[Chat] = []
    evaluation: list[Chat] = []
    too_short = cut = 0
    for row in rows:
        if not isinstance(row.get("id"), str):
            raise UserError(f"chats: a row's id is {row.get('id')!r}, not a text; give regenerated chats")
        if "token_ids" not in row or not row.get("prompt_token_ids"):
            raise UserError(f"chats: row {row['id']} has no token ids, or no prompt; give regenerated chats")
        prompt, answer = _ids(row, "prompt_token_ids"), _ids(row, "token_ids")
        if after_thought_by is not None and row.get("reasoning") is not None:
            thought = thought_tokens(answer, after_thought_by)
            prompt, answer = prompt + answer[:thought], answer[thought:]
        kept = max_length - len(prompt)
        cut += len(answer) > kept
        answer = answer[: max(kept, 0)]
        if len(answer) < MIN_ANSWER:
            too_short += 1
            continue
        chat = Chat(row["id"], torch.tensor(prompt + answer), len(prompt))
        (evaluation if is_held_out(row["id"], held_out) else train).append(chat)
    if not train or not evaluation:
        raise UserError(
            f"chats: {len(train)} usable rows to train on and {len(evaluation)} held out "
            f"({too_short} too short); give more chats or another held_out"
        )
    return Split(train, evaluation, too_short, cut)


def _ids(row: Row, field: str) -> list[int]:
    """Return a row's token ids.

    Raises:
        UserError: they are something else.
    """
    ids = row[field]
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int} or max(map(abs, ids), default=0) > MAX_ID:
        raise UserError(f"chats: row {row['id']}: {field} is no list of token ids; give regenerated chats")
    return ids


def thought_tokens(answer: list[int], tokenizer: Any) -> int:
    """Return how many of an answer's tokens its reasoning has, ``</think>`` included; all when it never closes."""
    mark = tokenizer.encode(THOUGHT_ENDS, add_special_tokens=False)
    if len(mark) == 1:
        return answer.index(mark[0]) + 1 if mark[0] in answer else len(answer)
    return bisect_left(range(1, len(answer)), True, key=lambda end: THOUGHT_ENDS in tokenizer.decode(answer[:end])) + 1


def frequent_tokens(chats: Iterable[Chat], count: int, vocabulary: int) -> torch.Tensor:
    """Return the ``count`` most frequent answer tokens, sorted by id; filled up with the lowest unused ids."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for chat in chats:
        counts += torch.bincount(chat.token_ids[chat.answer_start :], minlength=vocabulary)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


def choose_mask_token(tokenizer: object, vocabulary: int, chats: Iterable[Chat], wanted: int | None) -> int:
    """Return a token id that cannot occur: ``wanted`` when it is one, else the first fit.

    Rows of the embedding beyond the tokenizer's last token come first, then special tokens. A token that begins, ends
    or pads text, that the chat template writes, or that occurs in the chats is refused.

    Raises:
        UserError: ``wanted`` can occur, or no token is free.
    """
    occurs = torch.zeros(vocabulary, dtype=torch.bool)
    for chat in chats:
        occurs[chat.token_ids] = True
    occurring = set(occurs.nonzero()[:, 0].tolist())
    names: dict[int, str] = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items()}  # type: ignore[attr-defined]
    template = str(getattr(tokenizer, "chat_template", "") or "")
    used = set(tokenizer.all_special_ids) | occurring | {i for i, name in names.items() if name in template}  # type: ignore[attr-defined]
    beyond = range(len(tokenizer), vocabulary)  # type: ignore[arg-type]
    special = [i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]  # type: ignore[attr-defined]
    free = [i for i in (*beyond, *special) if i not in used and i < vocabulary]
    if wanted is not None:
        if wanted not in free:
            raise UserError(
                f"mask_token {wanted}: it can occur in text, or is no token of the target; "
                f"free ones: {', '.join(map(str, free[:8])) or 'none'}"
            )
        return wanted
    if not free:
        raise UserError(
            "mask token: the vocabulary has no reserved or unused id; the target's tokenizer must gain one"
        )
    return free[0]


def refuse_unknown_tokens(vocabulary: int, chats: Iterable[Chat]) -> None:
    """Refuse chats of another tokenizer.

    Raises:
        UserError: it names the first chat with an id outside the target's vocabulary.
    """
    for chat in chats:
        if bool(((chat.token_ids < 0) | (chat.token_ids >= vocabulary)).any()):
            raise UserError(
                f"chat {chat.id}: a token id is not among the target's {vocabulary}; are they its answers?"
            )


def refuse_mask_token(token: int, chats: Iterable[Chat]) -> None:
    """Refuse a drafter whose mask token occurs in the chats.

    Raises:
        UserError: it names the token and the chat.
    """
    for chat in chats:
        if bool((chat.token_ids == token).any()):
            raise UserError(f"mask token {token}: it occurs in chat {chat.id}; this drafter does not fit these chats")
