"""The draw itself: the prompts with the smallest keys that are short enough, until each quota is met."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from components.chats.template import Template, render
from components.chats.tokenizer import Tokenizer
from components.contract.errors import UserError, one_line
from components.contract.log import Log
from components.prompts.clean import Turns
from components.prompts.pool import Candidate, Pool
from components.prompts.read import Parts
from components.prompts.statistics import by_category, dropped
from components.store.work import Work

STEP = 100_000
"""Prompts measured before the next are looked up: this bounds memory."""

_BATCH = 512


class Meter:
    """Measures candidates in tokens, rendered and then encoded; what is measured survives a kill."""

    def __init__(self, tokenizer: Tokenizer, template: Template, parts: Parts, work: Work) -> None:
        self._tokenizer, self._template, self._parts, self._work = tokenizer, template, parts, work
        self._step = 0

    def measure(self, candidates: list[Candidate]) -> Iterator[tuple[int, str, int]]:
        """Yield each candidate's number, its conversation as JSON and its length in tokens, part by part.

        Called with the same candidates in the same order after a kill, it reads the lengths that it has.
        """
        names = self._parts.names()
        for part, group in groupby(sorted(candidates, key=lambda one: one[1:]), key=lambda one: one[1]):
            rows, _, positions = zip(*group, strict=True)
            column = self._parts.table(names[part], ["conversation"]).column("conversation").take(list(positions))
            key = f"lengths/{self._step:05d}-{part:05d}"
            known = self._work.get(key)
            if known is not None and len(known) != 4 * len(rows):
                known = None  # damaged: measured anew
            lengths: list[int] = [] if known is None else np.frombuffer(known, np.int32).tolist()
            for start in range(0, len(rows), _BATCH):
                conversations = column.slice(start, _BATCH).to_pylist()
                if known is None:
                    lengths += self._tokenizer.lengths([self._rendered(json.loads(one)) for one in conversations])
                yield from zip(rows[start : start + _BATCH], conversations, lengths[start:], strict=False)
            if known is None:
                self._work.put(key, np.array(lengths, np.int32).tobytes())
        self._step += 1

    def _rendered(self, conversation: Turns) -> str:
        try:
            return str(render(self._tokenizer, conversation, self._template))
        except Exception as error:  # a template may raise anything
            roles = ", ".join(turn["role"] for turn in conversation)
            raise UserError(
                f"the model's chat template refuses a prompt of turns {roles} ({one_line(error, 120)}); "
                "prompts.system: null adds no system turn, template.chat_template is another template"
            ) from error


@dataclass(frozen=True)
class Draw:
    """Draws from a pool what a stage's config asks for. ``place`` names the source in errors."""

    pool: Pool
    parts: Parts
    meter: Meter
    longest: int
    place: str
    log: Log

    def uniform(self, count: int) -> None:
        """Draw ``count`` prompts of any category."""
        if lacking := self._take(None, count):
            raise self._short("count", count, lacking)

    def quotas(self, quotas: dict[str, int], fill: bool) -> dict[str, int]:
        """Draw so many prompts of each category; return how many it lacks, where any.

        With ``fill`` those are drawn from all the categories together, else that is an error.
        """
        lacking = {category: self._take([category], count) for category, count in quotas.items()}
        lacking = {category: count for category, count in lacking.items() if count}
        if lacking and not fill:
            category, count = next(iter(lacking.items()))
            raise self._short(f"quotas.{category}", quotas[category], count)
        if lacking and (left := self._take(list(quotas), sum(lacking.values()))):
            raise self._short("quotas", sum(quotas.values()), left)
        return lacking

    def _take(self, categories: list[str] | None, count: int) -> int:
        """Draw the prompts with the smallest keys, passing over long ones; return how many are not there."""
        left = count
        while left and (candidates := self.pool.first(categories, min(left, STEP))):
            long: list[int] = []
            left -= self.pool.choose(self._short_enough(candidates, long))
            self.pool.reject(long, "too long")
            self.log.progress(count - left, count, of=",".join(categories or ["all"]))
        return left

    def _short_enough(self, candidates: list[Candidate], long: list[int]) -> Iterator[tuple[int, str, int]]:
        for row, conversation, tokens in self.meter.measure(candidates):
            if tokens > self.longest:
                long.append(row)
            else:
                yield row, conversation, tokens

    def _short(self, field: str, asked: int, lacking: int) -> UserError:
        reasons = dropped(by_category(self.parts, self.pool))
        said = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
        return UserError(
            f"{field}: {asked} asked, {self.place} has {asked - lacking} usable prompts (dropped: {said})"
        )
