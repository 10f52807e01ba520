import random
from collections import Counter, defaultdict
from itertools import pairwise

import components.measure.bigram as module
from components.measure.bigram import Bigram, replay


def brute_force_table(sequences):
    follows, totals = defaultdict(Counter), Counter()
    for sequence in sequences:
        for previous, following in pairwise(sequence):
            follows[previous][following] += 1
            totals[following] += 1
    best = lambda counter: min(counter, key=lambda token: (-counter[token], token))  # noqa: E731
    return {token: best(counter) for token, counter in follows.items()}, best(totals)


def sequences(seed, vocabulary=12):
    source = random.Random(seed)
    return [[source.randrange(vocabulary) for _ in range(source.randrange(1, 40))] for _ in range(30)]


def test_drafts_follow_the_most_frequent_successor():
    for seed in range(20):
        rows = sequences(seed)
        table, frequent = brute_force_table(rows)
        bigram = Bigram(rows)
        for start in range(14):
            expected, token = [], start
            for _ in range(5):
                token = table.get(token, frequent)
                expected.append(token)
            assert bigram.draft(start, 5) == expected


def test_counting_in_pieces_changes_nothing(monkeypatch):
    rows = sequences(7)
    whole = [Bigram(rows).draft(token, 4) for token in range(12)]
    monkeypatch.setattr(module, "_MERGE_AT", 10)
    assert [Bigram(rows).draft(token, 4) for token in range(12)] == whole


def test_large_token_ids_do_not_overlap():
    assert Bigram([[248_319, 248_318, 248_319]]).draft(248_319, 2) == [248_318, 248_319]


def speculative_decoding(answer, draft, count):
    """Emit ``answer`` block by block as a greedy server would: keep what is a prefix of it, add one token."""
    emitted, drafts, accepted = answer[:1], 0, [0] * count
    while len(emitted) + count <= len(answer):
        block = draft(emitted[-1], count)
        kept = max(k for k in range(count + 1) if answer[: len(emitted) + k] == emitted + block[:k])
        drafts += 1
        for position in range(kept):
            accepted[position] += 1
        emitted = answer[: len(emitted) + kept + 1]
    return drafts, accepted


def test_replay_equals_a_simulated_speculative_decoding():
    accepted_at_all = 0
    for seed in range(30):
        rows = sequences(seed, vocabulary=4)
        bigram = Bigram(rows)
        answer = rows[0] + rows[1]
        for count in (1, 3, 7):
            found = replay(bigram, answer, count)
            assert found == speculative_decoding(answer, bigram.draft, count)
            accepted_at_all += sum(found[1])
    assert accepted_at_all > 100


def test_a_predictable_answer_is_accepted_whole():
    cycle = [1, 2, 3, 4, 5] * 8
    assert replay(Bigram([cycle]), cycle, 4) == (8, [8, 8, 8, 8])


def test_an_answer_shorter_than_a_block_says_nothing():
    assert replay(Bigram([[1, 2, 3]]), [1, 2, 3], 3) == (0, [0, 0, 0])
