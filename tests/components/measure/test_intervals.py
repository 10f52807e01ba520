import itertools
import math

import numpy as np
import pytest

from components.measure.intervals import bootstrap, median_interval, ratio_interval, wilson


def test_bootstrap_of_a_mean_agrees_with_enumerating_every_resample():
    values = np.array([0.0, 1.0, 5.0, 9.0])
    every = sorted(np.mean(pick) for pick in itertools.product(values, repeat=4))
    low, high = bootstrap(4, lambda indices: values[indices].mean(axis=1), seed=3)
    assert low == pytest.approx(np.percentile(every, 2.5), abs=0.6)
    assert high == pytest.approx(np.percentile(every, 97.5), abs=0.6)


def test_median_interval_covers_the_true_median_as_often_as_it_says():
    source = np.random.default_rng(0)
    covered = 0
    for trial in range(100):
        low, high = median_interval(source.normal(10.0, 2.0, size=25).tolist(), seed=trial)
        covered += low <= 10.0 <= high
    assert 88 <= covered <= 99


def test_ratio_interval_weighs_items_by_their_denominator():
    low, high = ratio_interval([10, 0], [10, 1000], seed=0)
    assert low == 0.0
    assert high == 1.0
    assert ratio_interval([3, 3, 3], [6, 6, 6], seed=0) == (0.5, 0.5)


def test_the_same_seed_gives_the_same_interval_and_one_item_has_none():
    assert median_interval([1.0, 4.0, 2.0, 8.0], 1) == median_interval([1.0, 4.0, 2.0, 8.0], 1)
    assert median_interval([3.0], 0) == (None, None)


@pytest.mark.parametrize(("successes", "count"), [(0, 10), (3, 10), (10, 10), (450, 1000)])
def test_wilson_bounds_solve_the_score_equation(successes, count):
    share = successes / count
    for bound in wilson(share, count):
        if 1e-9 < bound < 1 - 1e-9:
            deviation = abs(share - bound) / math.sqrt(bound * (1 - bound) / count)
            assert deviation == pytest.approx(1.959963984540054)
    low, high = wilson(share, count)
    assert low <= share + 1e-12
    assert high >= share - 1e-12
    assert 0 <= low < high <= 1
