"""Overlap with the texts that models are measured on, by word n-grams.

As in "Language Models are Few-Shot Learners" (arXiv 2005.14165, appendix C): an n-gram has 13 words, or all of a
shorter text's down to 8, and one that many different prompts hold is boilerplate and says nothing. A text of fewer
words counts only as a whole: a prompt that consists of it.
"""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from components.chats.rows import prompts_of, read_lines
from components.contract.errors import UserError
from components.prompts.clean import Turns

LONGEST, SHORTEST = 13, 8
BOILERPLATE = 10
"""Prompts that may hold an n-gram before it counts as boilerplate."""

_WORD = re.compile(r"\w+")


class HeldOut:
    """The distinct n-grams of held-out texts, each numbered by where it first begins among all their words."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._words: list[str] = []
        self._lengths: dict[int, int] = {}
        self._whole: dict[tuple[str, ...], int] = {}
        self._heads: dict[str, list[int]] = defaultdict(list)
        for text in texts:
            if words := _words(text):
                self._add(words)

    @classmethod
    def of(cls, paths: Iterable[Path]) -> "HeldOut":
        """Read the texts of prompts artifacts and JSONL files; one without any is an error."""

        def some(path: Path) -> Iterator[str]:
            texts = texts_of(path)
            if (first := next(texts, None)) is None:
                raise UserError(f"held_out {path.name}: no texts in it; it is a prompts artifact or a JSONL file")
            return itertools.chain([first], texts)

        return cls(itertools.chain.from_iterable(map(some, paths)))

    def _add(self, words: list[str]) -> None:
        base = len(self._words)
        if len(words) < SHORTEST:
            if tuple(words) not in self._whole:
                self._words += words
                self._whole[tuple(words)] = base
            return
        self._words += words
        length = min(LONGEST, len(words))
        new = False
        for start in range(len(words) - length + 1):
            known = self._heads[" ".join(words[start : start + SHORTEST])]
            if not any(self._lengths[gram] == length and self._is_at(gram, words, start) for gram in known):
                known.append(base + start)
                self._lengths[base + start] = length
                new = True
        if not new:
            del self._words[base:]

    def _is_at(self, gram: int, words: list[str], start: int) -> bool:
        length = self._lengths[gram]
        return words[start : start + length] == self._words[gram : gram + length]

    def grams_in(self, turns: Turns) -> list[int]:
        """Return the numbers of the n-grams that the user turns hold, ascending."""
        words = _words("\n".join(turn["content"] for turn in turns if turn["role"] == "user"))
        if len(words) < SHORTEST:
            gram = self._whole.get(tuple(words))
            return [] if gram is None else [gram]
        found = set()
        for start in range(len(words) - SHORTEST + 1):
            for gram in self._heads.get(" ".join(words[start : start + SHORTEST]), ()):
                if self._is_at(gram, words, start):
                    found.add(gram)
        return sorted(found)


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a prompts artifact (its user turns) or of a JSONL file (every string value of its rows)."""
    if path.is_dir():
        for row in prompts_of(path):
            yield from (turn["content"] for turn in row["conversations"] if turn["role"] == "user")
        return
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            yield from _strings(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UserError(f"held_out {path.name}: line {number} is not JSON") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(_strings, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_strings, value))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
