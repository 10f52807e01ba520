"""Do two servers sample from the same distribution? A two-sample test on many short continuations.

Speculation must not change what is sampled (Leviathan et al., arXiv 2211.17192, theorem 1). Per prompt both sides draw
continuations of equal length; the statistic is the maximum mean discrepancy (Gretton et al., JMLR 13, 2012, equation
5, the biased estimate) with a kernel that counts equal tokens and equal pairs of neighbours, position by position. Its
null distribution comes from permuting sides within each prompt, which is exact for any kernel and any sample size.
"""

from typing import Any

import numpy as np

from components.contract.digest import StageConfig

PERMUTATIONS = 2000
SIMULATIONS = 200
LEVEL = 0.01
SHARES = (0.05, 0.1, 0.2, 0.4)


class Settings(StageConfig):
    """One way to sample; 0 and 1 switch ``top_k`` and ``top_p`` off."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0


SETTINGS = {
    "temperature 0.7, top-p 0.8, top-k 20": Settings(temperature=0.7, top_p=0.8, top_k=20),
    "temperature 1": Settings(temperature=1.0),
}


def compare(one: list[np.ndarray], other: list[np.ndarray], seed: int) -> dict[str, Any]:
    """Compare continuations [draws, tokens] of two sides, prompt by prompt.

    Returns ``p`` (the share of permutations at least as far apart), ``passed`` (p not below ``level``), ``level``,
    ``prompts``, ``draws`` (continuations of both sides), ``tokens`` a continuation, and ``power``: by share of one
    side's continuations that follow each position's most frequent token instead of being sampled, which is what a
    verifier that accepts too much would do, the share of simulated measurements of this size in which the test finds
    it.
    """
    counts = [len(rows) for rows in one]
    pooled = [_small(np.concatenate(pair)) for pair in zip(one, other, strict=True)]
    grams = [_gram(np.vstack([rows, _likeliest(rows)])) for rows in pooled]
    source = np.random.default_rng(seed)
    null, found = np.zeros(PERMUTATIONS), 0.0
    for here, gram in zip(counts, grams, strict=True):
        weights, drawn = _weights(here, len(gram) - 1), gram[:-1, :-1]
        found += float(weights @ drawn @ weights)
        shuffled = source.permuted(np.tile(weights, (PERMUTATIONS, 1)), axis=1)
        null += np.einsum("ij,ij->i", shuffled @ drawn, shuffled)
    p = float((1 + np.sum(null >= found - 1e-12)) / (1 + PERMUTATIONS))
    critical = float(np.quantile(null, 1 - LEVEL))
    return {
        "p": p,
        "passed": p >= LEVEL,
        "level": LEVEL,
        "prompts": len(pooled),
        "draws": sum(len(rows) for rows in pooled),
        "tokens": int(pooled[0].shape[1]),
        "power": {str(share): _power(counts, grams, share, critical, source) for share in SHARES},
    }


def _power(
    counts: list[int], grams: list[np.ndarray], share: float, critical: float, source: np.random.Generator
) -> float:
    """Return how often the statistic exceeds ``critical`` with ``share`` of one side replaced; both are resampled.

    The last row of a gram matrix belongs to what replaces.
    """
    hits = 0
    for _ in range(SIMULATIONS):
        total = 0.0
        for here, gram in zip(counts, grams, strict=True):
            size = len(gram) - 1
            rows = source.integers(size, size=size)
            rows[np.flatnonzero(source.random(here) < share)] = size
            weights = _weights(here, size)
            total += float(weights @ gram[np.ix_(rows, rows)] @ weights)
        hits += total > critical
    return hits / SIMULATIONS


def _small(rows: np.ndarray) -> np.ndarray:
    """Number the tokens that occur from 0."""
    return np.unique(rows, return_inverse=True)[1].reshape(rows.shape)


def _gram(rows: np.ndarray) -> np.ndarray:
    equal = rows[:, None, :] == rows[None, :, :]
    return equal.sum(axis=2) + (equal[..., 1:] & equal[..., :-1]).sum(axis=2).astype(np.float64)


def _weights(here: int, count: int) -> np.ndarray:
    return np.where(np.arange(count) < here, 1 / here, -1 / (count - here))


def _likeliest(rows: np.ndarray) -> np.ndarray:
    """Return the most frequent token of each position; ties go to the smaller id."""
    return np.array([np.bincount(column).argmax() for column in rows.T])
