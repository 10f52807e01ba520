import math

import pytest
import torch

from components.drafter.blocks import (
    attention_mask,
    labels,
    random_anchors,
    slot_positions,
    slot_weights,
    strided_anchors,
)


@pytest.mark.parametrize("window", [None, 4, 6, 100])
@pytest.mark.parametrize(("length", "anchors", "size"), [(12, [3, 4, 9], 4), (9, [2], 3), (20, list(range(5, 19)), 5)])
def test_mask_equals_the_rule_applied_pair_by_pair(length, anchors, size, window):
    mask = attention_mask(length, torch.tensor(anchors), size, window)
    queries = [(j, k) for j in range(len(anchors)) for k in range(size)]
    assert mask.shape == (len(queries), length + len(queries))
    for row, (block, slot) in enumerate(queries):
        position = anchors[block] + slot
        near = lambda other: window is None or abs(position - other) < window  # noqa: B023, E731
        for key in range(length):
            assert bool(mask[row, key]) == (key < anchors[block] and near(key))
        for column, (other, other_slot) in enumerate(queries):
            seen = other == block and near(anchors[other] + other_slot)
            assert bool(mask[row, length + column]) == seen


def test_anchors_are_distinct_sorted_and_followed_by_an_answer_token():
    drawn = random_anchors(5, 30, 10, seed=1)
    assert len(drawn) == 10 == len(drawn.unique())
    assert drawn.tolist() == sorted(drawn.tolist())
    assert drawn.min() >= 5
    assert drawn.max() <= 28
    assert not torch.equal(drawn, random_anchors(5, 30, 10, seed=2))
    assert torch.equal(random_anchors(5, 30, 100, seed=3), torch.arange(5, 29))


def test_strided_anchors_spread_over_the_answer():
    assert strided_anchors(10, 27, 16).tolist() == list(range(10, 26))
    spread = strided_anchors(10, 112, 16)
    assert spread[0] == 10
    assert spread[-1] == 110
    gaps = spread.diff()
    assert gaps.min() >= 6
    assert gaps.max() <= 7
    assert strided_anchors(10, 11, 16).tolist() == []


def test_slots_predict_their_own_positions():
    tokens = torch.arange(100, 110)
    wanted, inside = labels(tokens, torch.tensor([2, 7]), 4)
    assert slot_positions(torch.tensor([2, 7]), 4).tolist() == [[2, 3, 4, 5], [7, 8, 9, 10]]
    assert wanted.tolist() == [[103, 104, 105], [108, 109, 0]]
    assert inside.tolist() == [[True, True, True], [True, True, False]]


def test_weights_decay_by_the_published_formula():
    weights = slot_weights(torch.tensor([[True] * 15, [True] * 2 + [False] * 13]), 7.0)
    assert weights[0].tolist() == pytest.approx([math.exp(-(k - 1) / 7) for k in range(1, 16)], rel=1e-6)
    assert weights[0, 14] == pytest.approx(0.135, abs=5e-4)
    assert weights[1, 2:].sum() == 0
