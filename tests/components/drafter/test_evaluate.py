import random
from collections import Counter

import pytest
import torch

from components.drafter import evaluate
from components.drafter.blocks import strided_anchors
from components.drafter.data import Chat

VOCABULARY, SIZE = 12, 5


def chats(count: int, seed: int) -> list[Chat]:
    draw = random.Random(seed)
    return [
        Chat(f"c{i}", torch.tensor([draw.randrange(VOCABULARY - 2) for _ in range(draw.randrange(8, 40))]), 4)
        for i in range(count)
    ]


def successors(rows: list[Chat]) -> dict[int, int]:
    """By counting pairs in plain Python; ties go to the lower id, tokens never seen to the commonest token."""
    pairs, tokens = Counter(), Counter()
    for chat in rows:
        ids = chat.token_ids.tolist()
        for at in range(chat.answer_start, len(ids)):
            pairs[ids[at - 1], ids[at]] += 1
            tokens[ids[at]] += 1
    frequent = min(tokens, key=lambda token: (-tokens[token], token))
    table = {}
    for token in range(VOCABULARY):
        followed = {following: count for (previous, following), count in pairs.items() if previous == token}
        table[token] = min(followed, key=lambda one: (-followed[one], one)) if followed else frequent
    return table


@pytest.mark.parametrize("seed", range(5))
def test_bigram_is_the_count_in_plain_python(seed):
    rows = chats(4, seed)
    table = successors(rows)
    text = Chat("t", torch.arange(VOCABULARY), 1)
    drafted = evaluate.bigram(rows, VOCABULARY, 3)(0, text, torch.arange(VOCABULARY))
    for token in range(VOCABULARY):
        chain = [table[token], table[table[token]], table[table[table[token]]]]
        assert drafted[token].tolist() == chain


def test_accept_length_is_the_walk_in_plain_python():
    rows, limit = chats(12, 7), 9
    draft = evaluate.bigram(rows, VOCABULARY, SIZE - 1)
    score = evaluate.accept_length(draft, rows, SIZE, limit)
    table, depths, per_chat = successors(rows), [], []
    for chat in rows:
        ids = chat.token_ids.tolist()
        own = []
        for anchor in strided_anchors(chat.answer_start, len(ids), limit).tolist():
            token, depth = ids[anchor], 0
            while depth < SIZE - 1 and anchor + depth + 1 < len(ids):
                token = table[token]
                if token != ids[anchor + depth + 1]:
                    break
                depth += 1
            own.append(depth)
        per_chat.append(own)
        depths += own
    assert 0 < sum(depths) < len(depths) * (SIZE - 1)
    assert score["value"] == pytest.approx(1 + sum(depths) / len(depths))
    assert score["anchors"] == len(depths)
    assert score["per_position"] == pytest.approx(
        [sum(depth >= k for depth in depths) / len(depths) for k in range(1, SIZE)]
    )
    draw = random.Random(0)
    means = sorted(
        1 + sum(map(sum, picked)) / sum(map(len, picked))
        for picked in (draw.choices(per_chat, k=len(per_chat)) for _ in range(4000))
    )
    assert score["low"] == pytest.approx(means[100], abs=0.06)
    assert score["high"] == pytest.approx(means[3900], abs=0.06)
    assert score == evaluate.accept_length(draft, rows, SIZE, limit)


def test_a_drafter_that_knows_the_text_gets_the_whole_block_but_at_the_end():
    text = Chat("t", torch.arange(10), 2)

    def oracle(_index: int, chat: Chat, anchors: torch.Tensor) -> torch.Tensor:
        return torch.stack([chat.token_ids[(anchors + k).clamp(max=9)] for k in (1, 2, 3)], dim=1)

    score = evaluate.accept_length(oracle, [text], 4, 100)
    assert score["anchors"] == 7
    assert score["value"] == pytest.approx(1 + (5 * 3 + 2 + 1) / 7)
