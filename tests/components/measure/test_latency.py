import numpy as np
import pytest

from components.measure.latency import prompt_of_length, summarise


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


def test_failures_alone_give_no_figure():
    found = summarise([{"failed": "refused"}], seed=0)
    assert found["median_ms"] is None
    assert (found["n"], found["failed"]) == (0, 1)
