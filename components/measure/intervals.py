"""95 % intervals: percentile bootstrap over independent items, and Wilson's for shares.

Bootstrap: Efron & Tibshirani, "An Introduction to the Bootstrap", section 13.3. Wilson: JASA 22 (1927), 209-212.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2000
Z = 1.959963984540054
Interval = tuple[float | None, float | None]


def resampled(count: int, statistic: Callable[[np.ndarray], np.ndarray], seed: int) -> np.ndarray:
    """Return ``statistic`` over resamples of ``count`` items: it maps indices [resamples, count] to one value each."""
    return statistic(np.random.default_rng(seed).integers(count, size=(RESAMPLES, count)))


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentiles."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def bootstrap(count: int, statistic: Callable[[np.ndarray], np.ndarray], seed: int) -> Interval:
    """Return the 2.5 and 97.5 percentiles of ``statistic`` over resamples (see :func:`resampled`).

    Fewer than two items have no spread to resample: (None, None).
    """
    return (None, None) if count < 2 else percentiles(resampled(count, statistic, seed))


def median_interval(values: Sequence[float], seed: int) -> Interval:
    """Return the bootstrap interval of the median."""
    array = np.asarray(values, dtype=np.float64)
    return bootstrap(len(array), lambda indices: np.median(array[indices], axis=1), seed)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> Interval:
    """Return the bootstrap interval of Σ numerators / Σ denominators, resampling the pairs.

    Every denominator must be positive.
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    return bootstrap(len(above), lambda indices: above[indices].sum(axis=1) / below[indices].sum(axis=1), seed)


def difference_interval(
    one: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]], seed: int
) -> Interval:
    """Return the paired bootstrap interval of Σa / Σb − Σc / Σd for ``one`` = (a, b) and ``other`` = (c, d).

    Item i of all four belongs together and is resampled together.
    """
    a, b, c, d = (np.asarray(values, dtype=np.float64) for values in (*one, *other))
    return bootstrap(
        len(a),
        lambda i: a[i].sum(axis=1) / b[i].sum(axis=1) - c[i].sum(axis=1) / d[i].sum(axis=1),
        seed,
    )


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share observed on ``count`` independent items."""
    spread = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    centre = share + Z * Z / (2 * count)
    scale = 1 + Z * Z / count
    low = (centre - spread) / scale if share > 0 else 0.0  # exactly: the difference would leave a rounding error
    high = (centre + spread) / scale if share < 1 else 1.0
    return low, high
