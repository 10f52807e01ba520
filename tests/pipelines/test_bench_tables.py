"""What ``qdflash bench`` prints of results that the measure stage's own functions made."""

import io

import numpy as np
import pytest
from rich.console import Console

from components.measure import acceptance, parity, quality, sampling
from pipelines import bench_tables

SERVERS = [{"url": f"http://127.0.0.1:{port}", "model": "pair", "root": "/[models]/pair"} for port in (1, 2)]


def said(kind, figures, comparison):
    result = {"kind": kind, "servers": SERVERS, "figures": figures, "comparison": comparison}
    out = io.StringIO()
    bench_tables.show(Console(file=out, width=200), result)
    return result, out.getvalue()


def answer(name, ids):
    top = [[[token, -0.5], [token + 1, -3.0]] for token in ids]
    return {"id": name, "concurrency": 1, "prompt_token_ids": [1], "token_ids": ids, "top": top}


def greedy(other):
    return parity.compare([answer("p", [5, 6, 7])], [answer("p", other)], True, lambda ids: f"[{ids}]")


def drawn(low):
    return [np.random.default_rng(seed).integers(low, low + 3, size=(40, 4)) for seed in range(3)]


@pytest.mark.parametrize("holds", [True, False])
def test_parity_is_a_verdict_and_what_differs_first(holds):
    sample = sampling.compare(drawn(0), drawn(0) if holds else drawn(2), 0)
    figures = {
        "alone_and_together": greedy([5, 6, 7]),
        "repeated": {"greedy": {"compared": 4, "equal": 4}, "seeded": {"compared": 4, "equal": 3}},
    }
    comparison = {
        "greedy": greedy([5, 6, 7] if holds else [5, 9, 7]),
        "sampled": {"passed": holds, "tests": {"temperature 1": sample}},
    }
    result, text = said("parity", [figures, figures], comparison)
    assert "asked again, seeded" in text
    assert "Name a second one" in said("parity", [figures], None)[1]
    assert "Name a second one" not in text
    assert "3 of 4 the same" in text
    assert "240 continuations of 4 tokens" in text
    faults = bench_tables.faults(result)
    if holds:
        assert faults == []
        assert "BROKEN" not in text
    else:
        assert len(faults) == 2
        assert faults[0].startswith("with the other server: 1 of 1 answers differ, prompt p at token 1 after '[[5]]'")
        assert "temperature 1" in faults[1]
        assert text.count("BROKEN") == 2
        assert "'[[6, 7]]', not '[[9, 7]]'" in text  # brackets are no markup


def test_acceptance_by_category_and_position():
    records = [{"category": kind, "drafts": 10, "accepted": [6, 2]} for kind in ("code", "code", "math")]
    figures = acceptance.summarise(records, 0)
    _, text = said("acceptance", [figures, figures], {"gain": acceptance.gain(records, records, 0)})
    assert "1.800 [1.800, 1.800]" in text
    assert "0.600 0.200" in text
    for label in ("code", "math", "mean of the categories", "the other: all prompts", "gained over the other"):
        assert label in text


def test_quality_names_departures_and_pairs():
    samples = [
        {"task": "t", "messages": [n], "marks": [n % 2 == 0], "finish_reason": "length" if n < 2 else "stop"}
        for n in range(10)
    ]
    figures = quality.summarise("gpqa", samples, 0.25) | {"shots": 0, "thinking": True, "max_tokens": 64}
    paired = quality.paired(samples, [{**one, "marks": [False]} for one in samples], 0)
    _, text = said("quality", [{"gpqa": figures}, {"gpqa": figures}], {"paired": {"gpqa": paired}})
    assert "0.500 [0.237, 0.763] no power" in text
    assert "20.0%" in text
    assert "0 shots, thinking on, 64 tokens" in text
    assert "5 gained, 0 lost" in text
