import random

import drafter_acceptance
import drafter_arms
import drafter_prompts
import drafter_table
import pytest
import torch

from components.chats.rows import is_held_out
from components.checkpoint.load import load_model
from components.drafter import data, evaluate, features
from tests.components.conftest import build_tiny_model


def conversations(count):
    draw = random.Random(0)
    lengths = [draw.randrange(6, 40) for _ in range(count)]
    return [
        data.Chat(f"c{at}", torch.tensor(draw.choices(range(4, 300), k=length)), 3)
        for at, length in enumerate(lengths)
    ]


def test_held_out_prompts_share_no_words_and_no_subject_with_the_others():
    rows = drafter_prompts.prompts(2)
    assert len({row["id"] for row in rows}) == len(rows)
    sides = {True: set(), False: set()}
    for row in rows:
        sides[is_held_out(row["id"], drafter_prompts.HELD_OUT)].add(row["conversations"][0]["content"])
    assert not sides[True] & sides[False]
    assert len(sides[True]) > 200
    for subject in [one for many in drafter_prompts.PARTS["subjects"].values() for one in many if " " in one]:
        composed = [row for row in rows if "smol" not in row["id"] and subject in row["conversations"][0]["content"]]
        assert len({is_held_out(row["id"], drafter_prompts.HELD_OUT) for row in composed}) < 2, subject


def test_features_of_many_conversations_are_those_of_each(tmp_path):
    target = load_model(build_tiny_model(tmp_path), torch.float32)
    compute, chats = features.TargetFeatures(target, [0, 2], final=True), conversations(70)
    look_up = drafter_arms.table(compute, chats)
    for index, chat in enumerate(chats):
        torch.testing.assert_close(look_up(index), compute(chat.token_ids).to(torch.bfloat16), atol=1e-5, rtol=1e-2)


def test_records_add_up_to_the_stage_s_own_figure():
    chats = conversations(9)
    draft = evaluate.bigram(conversations(40), 320, 3)
    found = drafter_arms.records(draft, chats, {chat.id: "kind" for chat in chats}, 4, 8)
    whole = evaluate.accept_length(draft, chats, 4, 8)
    assert sum(record["drafts"] for record in found) == whole["anchors"]
    assert 1 + sum(sum(one["accepted"]) for one in found) / whole["anchors"] == pytest.approx(whole["value"])


def test_arms_that_were_not_measured_are_rows_that_say_so(tmp_path):
    rows = drafter_table.table(steps(tmp_path), lambda name: None)
    found = {row["variant"]: row for row in rows}
    assert found["two-stage"]["value"] is None
    assert "over" in found["two-stage"]["note"]
    assert found["paper, two-stage"]["value"] == 5.03


def test_two_stage_reads_the_packed_target_its_chats_and_stage_1(tmp_path):
    plan = steps(tmp_path)
    assert plan["two-stage"].needs == (plan["target"], plan["chats-b"], plan["stage1"])
    assert plan["stage1"].needs == (plan["model"], plan["chats-a"])
    assert len({step.uri for step in plan.values()}) == len(plan)


def steps(folder):
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")
    return drafter_acceptance.plan(drafter_acceptance.SIZES["h200-smollm2"], folder / "m", str(folder / "store"))
