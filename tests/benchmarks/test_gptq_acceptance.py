import json
import random

import gptq_acceptance
import gptq_table
import numpy as np
import pytest
import served_pairs
import window
from steps import commit_rows

from components.chats.rows import is_held_out, read_rows
from components.contract.context import Input

SIZE = gptq_acceptance.SIZES["cpu-smollm2"]


@pytest.fixture
def steps(tmp_path, home):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    return gptq_acceptance.plan("cpu-smollm2", tmp_path / "m", tmp_path)


def chats(count):
    draw = random.Random(0)
    for at in range(count):
        turn = {"role": "user", "content": f"question {at}"}
        ids = {"prompt_token_ids": [1] * draw.randrange(5, 20), "token_ids": [2] * draw.randrange(5, 30)}
        yield {"id": f"r{at}", "category": "c", "conversations": [turn], "text": f"answer {at}", **ids}


def test_every_method_reads_the_same_drafter_target_and_chats(steps):
    for method in gptq_acceptance.METHODS:
        assert steps[method].needs == (steps["drafter"], steps["target"], steps["chats"])
    assert steps["chats"].needs == (steps["chats-short"], steps["chats-long"])
    assert len({step.uri for step in steps.values()}) == len(steps)


def test_long_prompts_have_their_length_and_a_history_of_their_own_side(steps):
    rows = list(chats(60))
    commit_rows(steps["chats-short"].uri, rows)
    gptq_acceptance.make(steps, "prompts-long", SIZE)
    long = list(read_rows(Input(steps["prompts-long"].uri).path))
    number, least, most = SIZE.long
    assert len({row["id"] for row in long}) == len(long) == number
    of = {row["conversations"][0]["content"]: row for row in rows}
    sides = set()
    for row in long:
        questions = row["conversations"][::2]
        asked = [of[turn["content"]] for turn in questions]
        lengths = [len(one["prompt_token_ids"]) + len(one["token_ids"]) for one in asked[:-1]]
        assert least <= sum(lengths) + len(asked[-1]["prompt_token_ids"]) < most + 49
        assert [turn["content"] for turn in row["conversations"][1::2]] == [one["text"] for one in asked[:-1]]
        assert row["conversations"][-1]["role"] == "user"
        side = is_held_out(row["id"], gptq_acceptance.HELD_OUT)
        assert {is_held_out(one["id"], gptq_acceptance.HELD_OUT) for one in asked} == {side}
        sides.add(side)
    assert sides == {True, False}


def served(variant, count=20, seed=0):
    draw = random.Random(seed)
    for at in range(count):
        drafts = draw.randrange(20, 60)
        accepted = sorted((draw.randrange(drafts) for _ in range(3)), reverse=True)
        times = {"seconds": draw.uniform(0.2, 0.4), "first": 0.05}
        ids = {"prompt_token_ids": [1] * 9, "token_ids": [3] * (drafts + sum(accepted) + 1)}
        yield {"variant": variant, "regime": "short", "id": str(at), "category": "c", "drafts": drafts} | {
            "accepted": accepted,
            **times,
            **ids,
        }


def test_figures_are_those_of_the_rows():
    one, other = list(served("a")), list(served("b", seed=1))
    step = served_pairs.step_ms(one)
    spent = sum(row["seconds"] - 0.05 for row in one)
    assert step["value"] == pytest.approx(1000 * spent / sum(row["drafts"] for row in one))
    assert step["low"] < step["value"] < step["high"]
    alone = [{**row, "drafts": 0, "accepted": []} for row in one]
    assert served_pairs.step_ms(alone)["value"] == pytest.approx(
        1000 * spent / sum(len(row["token_ids"]) - 1 for row in one)
    )
    assert served_pairs.latency_ms(one)["value"] == pytest.approx(1000 * np.median([row["seconds"] for row in one]))

    def length(rows):
        return 1 + sum(sum(row["accepted"]) for row in rows) / sum(row["drafts"] for row in rows)

    ratio = served_pairs.paired(one[:15], other[::-1], served_pairs.acceptance_ratio)
    assert ratio["n"] == 15
    assert ratio["value"] == pytest.approx(length(one[:15]) / length(other[:15]))
    assert ratio["low"] < ratio["value"] < ratio["high"]
    same = served_pairs.paired(one, one, served_pairs.latency_ratio)
    assert (same["value"], same["low"], same["high"]) == (1, 1, 1)


def test_a_window_that_no_server_answered_is_a_row_that_says_so(tmp_path):
    (tmp_path / "windows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in served(window.ALL)))
    rows = window.table(SIZE, tmp_path)
    found = {(row["variant"], row["metric"]): row for row in rows}
    assert found["window none, short prompts", "acceptance_length"]["n"] == 20
    assert found["window 64, short prompts", "acceptance_length"]["value"] is None


def test_drafters_that_were_not_served_are_rows_that_say_so(steps, tmp_path):
    (tmp_path / "served.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*served("bf16"), *served("awq")])
    )
    found = {(row["variant"], row["metric"]): row for row in gptq_table.table(steps, tmp_path)}
    assert found["awq", "acceptance_ratio_to_bf16"]["value"] == 1
    assert found["gptq", "acceptance_length"]["value"] is None
    assert "answered" in found["gptq", "acceptance_length"]["note"]
