import random

import pytest

from components.contract.errors import UserError
from components.measure.parity import compare, first_difference, is_tie, logprob_gaps


def answer(ids, tops=None, *, name="a", concurrency=1, prompt=(1, 2)):
    tops = tops or [[[token, -0.1], [token + 1000, -3.0]] for token in ids]
    return {
        "id": name,
        "concurrency": concurrency,
        "prompt_token_ids": list(prompt),
        "token_ids": list(ids),
        "top": tops,
    }


def decode(ids):
    return "".join(f"<{token}>" for token in ids)


def with_top(ids, index, top):
    made = answer(ids)
    made["top"][index] = top
    return made


def test_first_difference_agrees_with_brute_force():
    source = random.Random(0)
    for _ in range(500):
        left = [source.randrange(3) for _ in range(source.randrange(6))]
        right = [source.randrange(3) for _ in range(source.randrange(6))]
        longest = max(len(left), len(right))
        padded = [(left[i : i + 1], right[i : i + 1]) for i in range(longest)]
        expected = next((i for i, (one, other) in enumerate(padded) if one != other), None)
        assert first_difference(left, right) == expected


def tied(gap_here, gap_there, second_here=8, second_there=7):
    here = with_top([5, 7, 9], 1, [[7, -0.7], [second_here, -0.7 - gap_here]])
    there = with_top([5, 8, 1], 1, [[8, -0.7], [second_there, -0.7 - gap_there]])
    return here, there


@pytest.mark.parametrize(
    ("gaps", "tie"), [((0.05, 0.09), True), ((0.05, 0.11), False), ((0.11, 0.05), False), ((0.0, 0.0), True)]
)
def test_a_tie_needs_a_small_gap_on_both_sides(gaps, tie):
    here, there = tied(*gaps)
    assert is_tie(here, there, 1) is tie
    assert is_tie(there, here, 1) is tie


def test_a_tie_needs_each_token_among_the_others_two_best():
    assert not is_tie(*tied(0.01, 0.01, second_here=99), 1)
    assert not is_tie(*tied(0.01, 0.01, second_there=99), 1)


def test_an_answer_that_ends_early_is_no_tie():
    assert not is_tie(answer([5]), answer([5, 6]), 1)


def named(pairs):
    return [{**here, "id": str(i)} for i, (here, _) in enumerate(pairs)], [
        {**there, "id": str(i)} for i, (_, there) in enumerate(pairs)
    ]


def test_at_most_one_prompt_in_ten_may_part_on_a_tie():
    same = (answer([1, 2]), answer([1, 2]))
    one_in_ten = compare(*named([tied(0.05, 0.05)] + [same] * 9), False, decode)
    assert one_in_ten["passed"]
    assert (one_in_ten["compared"], one_in_ten["equal"], one_in_ten["ties"], one_in_ten["broken"]) == (10, 9, 1, 0)
    assert not compare(*named([tied(0.05, 0.05)] + [same] * 8), False, decode)["passed"]


def test_one_broken_prompt_fails_and_is_shown_in_context():
    found = compare(*named([tied(0.05, 0.5)] + [(answer([1]), answer([1]))] * 30), False, decode)
    assert not found["passed"]
    assert found["broken"] == 1
    (difference,) = found["differences"]
    assert difference["position"] == 1
    assert difference["before"] == "<5>"
    assert (difference["here"]["token"], difference["baseline"]["token"]) == (7, 8)
    assert difference["here"]["text"] == "<7><9>"
    assert difference["baseline"]["text"] == "<8><1>"


def test_exact_allows_no_tie():
    pairs = named([tied(0.0, 0.0)] + [(answer([1]), answer([1]))] * 30)
    assert compare(*pairs, False, decode)["passed"]
    assert not compare(*pairs, True, decode)["passed"]


def test_concurrencies_are_compared_with_their_own_kind():
    here = [answer([1], concurrency=1), answer([2], concurrency=8)]
    found = compare(here, list(reversed(here)), True, decode)
    assert found["equal"] == 2


def test_a_baseline_on_other_prompts_is_refused():
    with pytest.raises(UserError, match="no answer to prompt a at concurrency 1"):
        compare([answer([1])], [answer([1], name="b")], False, decode)
    with pytest.raises(UserError, match="prompt a"):
        compare([answer([1])], [answer([1], prompt=(3,))], False, decode)


def test_logprobs_are_compared_wherever_both_sides_stand_after_the_same_tokens():
    here = answer([5, 7, 9], [[[5, -0.1], [6, -3.0]], [[7, -0.5], [8, -0.6]], [[9, -0.1], [1, -2.0]]])
    there = answer([5, 8, 9], [[[5, -0.2], [4, -3.0]], [[8, -0.5], [7, -0.9]], [[9, -9.0], [1, -9.0]]])
    assert logprob_gaps(here, there) == pytest.approx([0.1, 0.4, 0.1])
    found = compare([here], [there], False, decode)["logprobs"]
    assert (found["compared"], found["max_gap"], found["mean_gap"]) == (3, pytest.approx(0.4), pytest.approx(0.2))
    assert logprob_gaps(here, here) == [0.0] * 6
