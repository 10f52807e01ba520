import numpy as np
import pytest

from components.measure.latency import prompt_of_length, summarise
from components.measure.speedup import speedup


def byte_tokenizer(text, add_special_tokens):
    assert not add_special_tokens
    return {"input_ids": list(text.encode())}


@pytest.mark.parametrize("count", [1, 64, 2048])
def test_prompts_have_the_exact_length_and_part_within_the_first_tokens(count):
    prompts = [prompt_of_length(byte_tokenizer, count, f"0/short/{number}") for number in range(20)]
    assert {len(prompt) for prompt in prompts} == {count}
    if count > 1:
        assert len({tuple(prompt[:10]) for prompt in prompts}) == 20
    assert prompt_of_length(byte_tokenizer, count, "0/short/3") == prompts[3]


def test_figures_are_the_samples_own_and_failures_are_counted():
    source = np.random.default_rng(0)
    samples = [
        {"seconds": float(1 + source.random()), "first": float(0.1 + 0.1 * source.random()), "tokens": 11}
        for _ in range(9)
    ]
    found = summarise([*samples, {"failed": "status 500"}], seed=0)
    totals = sorted(1000 * sample["seconds"] for sample in samples)
    assert found["median_ms"] == pytest.approx(totals[4])
    assert totals[0] <= found["low"] <= totals[4] <= found["high"] <= totals[8]
    assert found["p95_ms"] == pytest.approx(totals[7] + 0.6 * (totals[8] - totals[7]))
    assert found["ttft_ms"] == pytest.approx(sorted(1000 * sample["first"] for sample in samples)[4])
    steps = sorted(100 * (sample["seconds"] - sample["first"]) for sample in samples)
    assert found["per_token_ms"] == pytest.approx(steps[4])
    assert (found["n"], found["failed"]) == (9, 1)
    assert found["tokens"] == 11
    assert found["tokens_per_second"] == pytest.approx(9 * 11 / sum(totals) * 1000)
    assert summarise(samples, seed=0, concurrency=4)["tokens_per_second"] == pytest.approx(
        found["tokens_per_second"] * 4
    )


def test_failures_alone_give_no_figure():
    found = summarise([{"failed": "refused"}], seed=0)
    assert found["median_ms"] is None
    assert (found["n"], found["failed"]) == (0, 1)


def timed(source, median, count):
    return [
        {"seconds": median * float(np.exp(0.1 * source.normal())), "first": 0.1, "tokens": 2} for _ in range(count)
    ]


def test_the_interval_of_a_speed_up_covers_the_true_ratio_as_often_as_it_says():
    source, covered, means = np.random.default_rng(0), 0, 0
    for seed in range(60):
        slow = {"short": [*timed(source, 3.0, 30), {"failed": "x"}], "long": timed(source, 4.0, 30)}
        fast = {"short": timed(source, 1.0, 20), "long": timed(source, 2.0, 30)}
        found = speedup(slow, fast, seed)
        covered += found["regimes"]["short"]["low"] <= 3 <= found["regimes"]["short"]["high"]
        means += found["mean"]["low"] <= 2.5 <= found["mean"]["high"]
        ratio = np.median([one["seconds"] for one in slow["short"][:-1]]) / np.median(
            [one["seconds"] for one in fast["short"]]
        )
        assert found["regimes"]["short"]["value"] == pytest.approx(ratio)
        assert found["mean"]["value"] == pytest.approx(np.mean([one["value"] for one in found["regimes"].values()]))
    assert covered >= 51
    assert means >= 51


def test_a_regime_that_was_never_answered_has_no_speed_up():
    assert speedup({"short": [{"failed": "x"}]}, {"short": [{"failed": "x"}]}, 0) == {"regimes": {}, "mean": None}
