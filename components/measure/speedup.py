"""How many times faster one server answers than another, from timed samples alone: no server and no client."""

from typing import Any

import numpy as np

from components.measure.intervals import percentiles, resampled

Sample = dict[str, Any]


def speedup(slow: dict[str, list[Sample]], fast: dict[str, list[Sample]], seed: int) -> dict[str, Any]:
    """Return how many times faster ``fast`` is than ``slow``, both as timed samples by regime.

    ``regimes`` {regime: {value, low, high}}: the ratio of medians, both sides resampled for the interval; ``mean``
    {value, low, high}: the mean of these ratios, which is the published statistic (11.13, 6.96 and 2.84 make 6.98). A
    regime that either side never answered is left out.
    """
    values: dict[str, float] = {}
    drawn: dict[str, np.ndarray] = {}
    for name in slow:
        sides = [np.array([sample["seconds"] for sample in answered(many)]) for many in (slow[name], fast[name])]
        if not all(len(side) for side in sides):
            continue
        values[name] = float(np.median(sides[0]) / np.median(sides[1]))
        medians = [_medians(side, seed + 2 * len(drawn) + number) for number, side in enumerate(sides)]
        drawn[name] = medians[0] / medians[1]
    regimes = {name: {"value": value, **_interval(drawn[name])} for name, value in values.items()}
    if not values:
        return {"regimes": {}, "mean": None}
    mean = float(np.mean(list(values.values())))
    return {"regimes": regimes, "mean": {"value": mean, **_interval(np.mean(list(drawn.values()), axis=0))}}


def answered(samples: list[Sample]) -> list[Sample]:
    """Return the samples that did not fail."""
    return [sample for sample in samples if "failed" not in sample]


def _medians(seconds: np.ndarray, seed: int) -> np.ndarray:
    return resampled(len(seconds), lambda indices: np.median(seconds[indices], axis=1), seed)


def _interval(drawn: np.ndarray) -> dict[str, float | None]:
    return dict(zip(("low", "high"), percentiles(drawn), strict=True))
