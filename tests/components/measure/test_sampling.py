"""The two-sample test against enumeration and against simulated servers whose distributions are known."""

from itertools import combinations

import numpy as np
import pytest

from components.measure import sampling

VOCABULARY, TOKENS = 40, 6


def server(seed, prompts=4, draws=32, share=0.0):
    """Draw from the same Markov chains for every seed; ``share`` of the draws follow the likeliest token instead."""
    chains = np.random.default_rng(0).dirichlet(np.full(VOCABULARY, 0.1), size=(prompts, VOCABULARY))
    source = np.random.default_rng(seed)
    drawn = np.zeros((prompts, draws, TOKENS), dtype=np.int64)
    for prompt, chain in enumerate(chains):
        for draw in range(draws):
            follows, token = source.random() < share, 0
            for position in range(TOKENS):
                token = chain[token].argmax() if follows else source.choice(VOCABULARY, p=chain[token])
                drawn[prompt, draw, position] = token
    return list(drawn)


def test_p_is_the_share_of_splits_that_are_as_far_apart():
    rows = np.array([[1, 1], [1, 2], [1, 1], [3, 2], [3, 3], [3, 2]])

    def apart(chosen):
        other = [row for row in range(6) if row not in chosen]
        pairs = {(a, b): sum(x == y for x, y in zip(rows[a], rows[b], strict=True)) + (rows[a] == rows[b]).all()
                 for a in range(6) for b in range(6)}  # fmt: skip
        within = sum(pairs[a, b] for side in (chosen, other) for a in side for b in side) / 9
        return within - 2 * sum(pairs[a, b] for a in chosen for b in other) / 9

    every = [apart(chosen) for chosen in combinations(range(6), 3)]
    exact = np.mean([one >= apart((0, 1, 2)) - 1e-9 for one in every])
    found = sampling.compare([rows[:3]], [rows[3:]], seed=0)
    assert found["p"] == pytest.approx(exact, abs=0.03)


def test_equal_servers_are_rarely_told_apart(monkeypatch):
    monkeypatch.setattr(sampling, "SIMULATIONS", 1)  # the power is not looked at
    found = [sampling.compare(server(2 * n), server(2 * n + 1), seed=n)["p"] for n in range(1, 13)]
    assert np.mean(found) == pytest.approx(0.5, abs=0.25)
    assert min(found) >= sampling.LEVEL / 2


def test_the_power_it_states_is_the_power_it_has(monkeypatch):
    stated = sampling.compare(server(1), server(2), seed=0)["power"]
    assert list(stated.values()) == sorted(stated.values())
    assert stated["0.4"] > 0.9
    share = next(share for share, power in stated.items() if power > 0.5)
    monkeypatch.setattr(sampling, "SIMULATIONS", 1)
    pairs = [(server(2 * n, share=float(share)), server(2 * n + 1)) for n in range(16)]
    found = [not sampling.compare(*pair, seed=0)["passed"] for pair in pairs]
    assert np.mean(found) == pytest.approx(stated[share], abs=0.3)
