"""Greedy answers to a fixed set of prompts: token ids, the two best candidates per token, and the drafts they took."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from typing import Any

from components.chats.rows import Row
from components.chats.template import Template, prompt_token_ids
from components.contract.errors import StageError, UserError
from components.measure.sampling import Settings
from components.serving.client import Client, Completion
from components.serving.metrics import Metrics

SETTLE_SECONDS = 10.0
_POLL_SECONDS = 0.02

Prompt = dict[str, Any]


def select(
    rows: Iterable[Row], tokenizer: Any, template: Template, *, count: int, seed: int, longest: int | None
) -> list[Prompt]:
    """Return up to ``count`` distinct prompts, spread evenly over the categories in an order that ``seed`` gives.

    Each is ``{id, category, prompt, prompt_token_ids}`` with at most ``longest`` tokens. Raises
    :class:`UserError` when no prompt is left.
    """
    chosen: list[Prompt] = []
    seen: set[tuple[int, ...]] = set()
    for row in _spread(rows, seed):
        if len(chosen) == count:
            break
        ids = prompt_token_ids(tokenizer, row["conversations"], template)
        if tuple(ids) in seen or (longest is not None and len(ids) > longest):
            continue
        seen.add(tuple(ids))
        last = row["conversations"][-1]["content"]
        chosen.append({"id": row["id"], "category": row["category"], "prompt": last, "prompt_token_ids": ids})
    if not chosen:
        raise UserError("measure: no prompt to ask; the prompts input is empty or none fits into max_model_len")
    return chosen


def ask(client: Client, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    """Ask for one greedy answer."""
    return _record(client.complete(prompt["prompt_token_ids"], max_tokens=max_tokens, logprobs=2))


def ask_alone(client: Client, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    """Ask for one greedy answer on an idle server and attribute the drafts counted meanwhile to it.

    Adds ``drafts`` and ``accepted`` (per draft position). Raises :class:`StageError` when another client uses the
    server, since its drafts would be counted too.
    """
    before = settled(client)
    completion = client.complete(prompt["prompt_token_ids"], max_tokens=max_tokens, logprobs=2)
    counted = settled(client, before.generation_tokens + len(completion.token_ids)) - before
    return {**_record(completion), "drafts": counted.drafts, "accepted": list(counted.accepted_per_position)}


def ask_sampled(
    client: Client, prompt: Prompt, count: int, tokens: int, settings: Settings, salt: str
) -> dict[str, Any]:
    """Draw ``count`` continuations of ``tokens`` tokens; the seed comes from ``salt`` and the prompt's id."""
    seed = int.from_bytes(hashlib.sha256(f"{salt}:{prompt['id']}".encode()).digest()[:4]) >> 1
    drawn = client.continuations(
        prompt["prompt_token_ids"], count, max_tokens=tokens, ignore_eos=True, seed=seed, **settings.model_dump()
    )
    if {len(ids) for ids in drawn} != {tokens}:
        raise UserError(f"{client.url}: continuations are not {count} of {tokens} token ids; vLLM is expected")
    return {"token_ids": drawn}


def settled(client: Client, generated: int | None = None) -> Metrics:
    """Wait for an idle server whose token counter reads ``generated`` (the counters trail the answer a little)."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        metrics = client.metrics()
        idle = metrics.running == 0 and metrics.waiting == 0
        if idle and generated in (None, metrics.generation_tokens):
            return metrics
        if time.monotonic() > deadline or (generated is not None and metrics.generation_tokens > generated):
            raise StageError(f"{client.url}: the server is not ours alone; acceptance needs an otherwise idle server")
        time.sleep(_POLL_SECONDS)


def _record(completion: Completion) -> dict[str, Any]:
    if not completion.token_ids:
        raise UserError("the server returns no token ids (vLLM does); parity and acceptance cannot be measured on it")
    top = [
        [[token, round(value, 6)] for token, value in sorted(position.items(), key=lambda pair: -pair[1])[:2]]
        for position in completion.logprobs
    ]
    return {
        "token_ids": completion.token_ids,
        "top": top,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "seconds": round(completion.seconds, 6),
    }


def _spread(rows: Iterable[Row], seed: int) -> Iterator[Row]:
    by_category: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_category[row["category"]].append(row)
    for group in by_category.values():
        group.sort(key=lambda row: hashlib.sha256(f"{seed}:{row['id']}".encode()).digest())
    rounds = zip_longest(*(by_category[category] for category in sorted(by_category)))
    return (row for row in chain.from_iterable(rounds) if row is not None)
