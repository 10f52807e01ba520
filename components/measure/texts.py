"""The first tokens of a long text, without encoding all of it."""

from typing import Any

MOST_CHARACTERS = 16
"""Characters of a text that are encoded for each token wanted; a token of prose has four or five."""


def first_tokens(tokenizer: Any, text: str, count: int) -> list[int]:
    """Return the first ``count`` token ids of a text, fewer when it has fewer."""
    ids: list[int] = tokenizer(text[: MOST_CHARACTERS * count], add_special_tokens=False)["input_ids"]
    return ids[:count]
