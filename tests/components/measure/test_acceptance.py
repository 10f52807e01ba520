import pytest

from components.measure.acceptance import gain, summarise


def record(name, category, drafts, accepted):
    return {"id": name, "category": category, "drafts": drafts, "accepted": accepted}


RECORDS = [
    record("a", "code", 10, [8, 4, 0]),
    record("b", "code", 30, [15, 3, 0]),
    record("c", "story", 20, [0, 0, 0]),
]


def test_length_is_one_plus_accepted_over_drafts_pooled():
    found = summarise(RECORDS, seed=0)
    assert found["value"] == pytest.approx(1 + 30 / 60)
    assert found["per_position"] == pytest.approx([23 / 60, 7 / 60, 0])
    assert (found["n"], found["drafts"]) == (3, 60)
    assert 1.0 <= found["low"] < found["value"] < found["high"] <= 1 + 12 / 10
    assert found["value"] == pytest.approx(1 + sum(found["per_position"]))


def test_every_kind_has_its_own_figure():
    kinds = summarise(RECORDS, seed=0)["by_kind"]
    assert kinds["code"]["value"] == pytest.approx(1 + 30 / 40)
    assert kinds["code"]["n"] == 2
    assert kinds["story"] == {"value": 1.0, "low": None, "high": None, "n": 1, "drafts": 20}


def test_prompts_without_a_draft_do_not_count():
    with_empty = [*RECORDS, record("d", "empty", 0, [0, 0, 0])]
    assert summarise(with_empty, seed=0) == summarise(RECORDS, seed=0)
    assert summarise([record("d", "empty", 0, [0])], seed=0)["value"] is None


def test_the_gain_over_another_drafter_is_resampled_in_pairs():
    """A drafter that is better by the same amount on every prompt is better for certain, however prompts differ."""
    others = [record(name, "x", 100, [accepted, 0]) for name, accepted in (("a", 10), ("b", 50), ("c", 90))]
    records = [record(other["id"], "x", 100, [other["accepted"][0] + 5, 0]) for other in others]
    found = gain(records, others, seed=0)
    assert found["n"] == 3
    assert [found["value"], found["low"], found["high"]] == pytest.approx([0.05, 0.05, 0.05])
    alone = summarise(records, seed=0)
    assert alone["low"] < summarise(others, seed=0)["value"]
    assert gain([*records, record("d", "x", 0, [0, 0])], [*others, record("d", "x", 9, [9, 9])], seed=0) == found
