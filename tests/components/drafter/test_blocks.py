import math

import pytest
import torch

from components.drafter.attention import attention_mask
from components.drafter.blocks import decay, lay_out, random_anchors, strided_anchors


@pytest.mark.parametrize("window", [None, 4, 6, 100])
@pytest.mark.parametrize(
    ("size", "conversations"),
    [
        (4, [(12, [3, 4, 9])]),
        (3, [(9, [2])]),
        (5, [(20, list(range(5, 19)))]),
        (4, [(12, [3, 9]), (7, []), (9, [1, 7])]),
    ],
)
def test_mask_equals_the_rule_applied_pair_by_pair(size, conversations, window):
    """Keys and queries are named by conversation and position; conversations lie end to end."""
    laid_out = [(torch.arange(length), torch.tensor(anchors, dtype=torch.long)) for length, anchors in conversations]
    mask = attention_mask(lay_out(laid_out, size), window)[0, 0]
    context = [(one, at) for one, (length, _) in enumerate(conversations) for at in range(length)]
    blocks = [(one, anchor) for one, (_, anchors) in enumerate(conversations) for anchor in anchors]
    slots = [(block, slot) for block in range(len(blocks)) for slot in range(size)]
    assert mask.shape == (len(slots), len(context) + len(slots))
    for row, (block, slot) in enumerate(slots):
        conversation, anchor = blocks[block]
        near = lambda other: window is None or abs(anchor + slot - other) < window  # noqa: B023, E731
        for column, (one, at) in enumerate(context):
            assert bool(mask[row, column]) == (one == conversation and at < anchor and near(at))
        for column, (other, other_slot) in enumerate(slots, len(context)):
            assert bool(mask[row, column]) == (other == block and near(anchor + other_slot))


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
    blocks = lay_out([(tokens, torch.tensor([2, 7])), (tokens[:3], torch.tensor([0, 1]))], 4)
    wanted, inside = blocks.labels()
    assert blocks.slot_positions.tolist() == [[2, 3, 4, 5], [7, 8, 9, 10], [0, 1, 2, 3], [1, 2, 3, 4]]
    assert blocks.token_ids[blocks.anchors].tolist() == [102, 107, 100, 101]
    assert blocks.positions.tolist() == [*range(10), *range(3)]
    assert wanted.tolist() == [[103, 104, 105], [108, 109, 0], [101, 102, 0], [102, 0, 0]]
    assert inside.tolist() == [[True] * 3, [True, True, False], [True, True, False], [True, False, False]]


def test_weights_decay_by_the_published_formula():
    weights = decay(torch.tensor([[True] * 15, [True] * 2 + [False] * 13]), 7.0)
    assert weights[0].tolist() == pytest.approx([math.exp(-(k - 1) / 7) for k in range(1, 16)], rel=1e-6)
    assert weights[0, 14] == pytest.approx(0.135, abs=5e-4)
    assert weights[1, 2:].sum() == 0
