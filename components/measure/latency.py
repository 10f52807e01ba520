"""Batch-1 latency with exact prompt lengths, forced answer lengths and distinct prompts.

Prompts are slices of generated sentences, so that no two share a prefix that a cache could serve; the answer's length
is forced (``ignore_eos``), so that every sample does the same work.
"""

import random
from typing import Any

import numpy as np

from components.contract.errors import StageError
from components.measure.intervals import median_interval
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


def time_one(client: Client, prompt: list[int], output_tokens: int) -> dict[str, Any]:
    """Time one streamed request: ``seconds``, ``first`` (time to the first token, s) and ``tokens``.

    A request that the server refuses or cuts short is recorded as ``{failed: why}``. Raises when the server is gone.
    """
    try:
        answer = client.stream(prompt, max_tokens=output_tokens, ignore_eos=True)
    except StageError as error:
        if not client.is_healthy():
            raise
        return {"failed": str(error)}
    if len(answer.token_ids) != output_tokens or len(answer.prompt_token_ids) != len(prompt):
        return {"failed": f"{len(answer.prompt_token_ids)} tokens in and {len(answer.token_ids)} out"}
    return {"seconds": answer.seconds, "first": answer.first_token_seconds, "tokens": output_tokens}


def summarise(samples: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return milliseconds: ``median_ms`` with ``low`` and ``high``, ``p95_ms``, and the parts of a request.

    ``ttft_ms`` and ``ttft_p95_ms`` are the time to the first token; ``per_token_ms`` is the median over samples of
    (end - first token) / (tokens - 1). ``n`` counts timed requests, ``failed`` the others; with none timed the figures
    are None.
    """
    timed = [sample for sample in samples if "failed" not in sample]
    counts = {"n": len(timed), "failed": len(samples) - len(timed)}
    if not timed:
        names = ("median_ms", "low", "high", "p95_ms", "ttft_ms", "ttft_p95_ms", "per_token_ms")
        return {**dict.fromkeys(names), **counts}
    total = 1000 * np.array([sample["seconds"] for sample in timed])
    first = 1000 * np.array([sample["first"] for sample in timed])
    steps = np.array([max(sample["tokens"] - 1, 1) for sample in timed])
    low, high = median_interval(total.tolist(), seed)
    return {
        "median_ms": float(np.median(total)),
        "low": low,
        "high": high,
        "p95_ms": float(np.percentile(total, 95)),
        "ttft_ms": float(np.median(first)),
        "ttft_p95_ms": float(np.percentile(first, 95)),
        "per_token_ms": float(np.median((total - first) / steps)),
        **counts,
    }
