"""Latency with exact prompt lengths and distinct prompts, alone on the server or several in flight.

Prompts are slices of given texts or of generated sentences; no two share a prefix that a cache could serve. The length
of an ``exact`` answer is forced (``ignore_eos``), so that every sample does the same work; a ``natural`` one is capped
there and may end early, as in the published protocol.
"""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from components.contract.errors import StageError, UserError
from components.measure.intervals import median_interval
from components.measure.speedup import answered
from components.measure.texts import first_tokens
from components.serving.client import Client

_SUBJECTS = "the baker|a young engineer|my neighbour|the river|an old lighthouse|the committee|a curious cat|the train"
_VERBS = "describes|repairs|remembers|follows|measures|carries|forgets|paints|questions|crosses|studies|collects"
_OBJECTS = "a broken clock|the northern road|seven letters|a bowl of plums|the last proof|a map of the coast|the choir"
_PLACES = "before dawn|near the harbour|in the long winter|behind the station|with great care|on the third floor"


def prompt_of_length(tokenizer: Any, count: int, key: str) -> list[int]:
    """Return ``count`` token ids of generated sentences; another ``key`` gives other text from the first words on."""
    source = random.Random(key)
    text = f"{source.randrange(10**9)}:"
    ids: list[int] = []
    while len(ids) < count:
        words = [source.choice(part.split("|")) for part in (_SUBJECTS, _VERBS, _OBJECTS, _PLACES)]
        text += f" {' '.join(words).capitalize()}, {source.randrange(10**4)} times."
        if len(text) >= 2 * count:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[:count]


def slices(tokenizer: Any, texts: Iterable[str], count: int, wanted: int) -> list[list[int]]:
    """Return the first ``count`` token ids of the first ``wanted`` texts that have as many.

    Raises :class:`UserError` when there are fewer such texts.
    """
    found: list[list[int]] = []
    for text in texts:
        ids = first_tokens(tokenizer, text, count)
        if len(ids) == count and ids not in found:
            found.append(ids)
        if len(found) == wanted:
            return found
    raise UserError(f"latency: {len(found)} of the texts have {count} tokens of their own; {wanted} are needed")


def time_one(client: Client, prompt: list[int], output_tokens: int, output: str = "exact") -> dict[str, Any]:
    """Time one streamed request: ``seconds``, ``first`` (time to the first token, s) and ``tokens``.

    A request that the server refuses, or that is not of the lengths asked for, is recorded as ``{failed: why}``.
    Raises when the server is gone.
    """
    try:
        answer = client.stream(prompt, max_tokens=output_tokens, **({"ignore_eos": True} if output == "exact" else {}))
    except StageError as error:
        if not client.is_healthy():
            raise
        return {"failed": str(error)}
    least = output_tokens if output == "exact" else 1
    if not least <= answer.tokens <= output_tokens or answer.prompt_tokens != len(prompt):
        return {"failed": f"{answer.prompt_tokens} tokens in and {answer.tokens} out"}
    return {"seconds": answer.seconds, "first": answer.first_token_seconds, "tokens": answer.tokens}


def summarise(samples: list[dict[str, Any]], seed: int, concurrency: int = 1) -> dict[str, Any]:
    """Return milliseconds: ``median_ms`` with ``low`` and ``high``, ``p95_ms``, and the parts of a request.

    ``ttft_ms`` and ``ttft_p95_ms`` are the time to the first token; ``per_token_ms`` is the median over samples of
    (end - first token) / (tokens - 1). ``tokens`` is the mean answer, ``tokens_per_second`` what the server makes with
    ``concurrency`` requests always in flight (Little's law: concurrency · mean tokens / mean seconds). ``n`` counts
    timed requests, ``failed`` the others; with none timed the figures are None.
    """
    timed = answered(samples)
    counts = {"n": len(timed), "failed": len(samples) - len(timed)}
    if not timed:
        names = "median_ms low high p95_ms ttft_ms ttft_p95_ms per_token_ms tokens tokens_per_second"
        return {**dict.fromkeys(names.split()), **counts}
    total = 1000 * np.array([sample["seconds"] for sample in timed])
    first = 1000 * np.array([sample["first"] for sample in timed])
    tokens = np.array([sample["tokens"] for sample in timed])
    low, high = median_interval(total.tolist(), seed)
    return {
        "median_ms": float(np.median(total)),
        "low": low,
        "high": high,
        "p95_ms": float(np.percentile(total, 95)),
        "ttft_ms": float(np.median(first)),
        "ttft_p95_ms": float(np.percentile(first, 95)),
        "per_token_ms": float(np.median((total - first) / np.maximum(tokens - 1, 1))),
        "tokens": float(tokens.mean()),
        "tokens_per_second": float(1000 * concurrency * tokens.mean() / total.mean()),
        **counts,
    }
