import json

import numpy as np
import pytest

from components.contract.errors import UserError
from components.measure.quality import paired, select_rows, summarise


def mmlu(subject, number):
    return {
        "question": f"{subject} {number}?",
        "options": ["one", "two"],
        "answer": "A",
        "category": subject,
        "cot_content": "A: Let's think step by step. The answer is (A).",
    }


@pytest.fixture
def files(tmp_path):
    def write(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    subjects = ["math"] * 5 + ["law"] * 2 + ["physics"]
    return {
        "mmlu_pro.jsonl": write("mmlu_pro.jsonl", [mmlu(subject, n) for n, subject in enumerate(subjects)]),
        "mmlu_pro_validation.jsonl": write(
            "mmlu_pro_validation.jsonl", [mmlu(subject, n) for subject in ("math", "law", "physics") for n in range(2)]
        ),
        "gpqa.jsonl": write("gpqa.jsonl", [{"Question": "?", "Correct Answer": "x"}]),
    }


def test_a_limit_is_spread_evenly_over_subjects(files):
    rows = select_rows("mmlu_pro", files, 5, 2)
    assert sorted(row["category"] for row in rows["test"]) == ["law", "law", "math", "math", "physics"]
    assert len(select_rows("mmlu_pro", files, None, 2)["test"]) == 8


def test_a_line_separator_in_a_text_ends_no_row(files):
    row = mmlu("law", 1) | {"question": "one\u2028two\x85three"}
    files["mmlu_pro.jsonl"].write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert select_rows("mmlu_pro", files, None, 2)["test"] == [row]


def test_what_is_missing_is_named(files):
    with pytest.raises(UserError, match=r"no file called ifeval\.jsonl \(given: gpqa\.jsonl"):
        select_rows("ifeval", files, None, 0)
    with pytest.raises(UserError, match=r"gpqa\.jsonl:1 has no field 'Incorrect Answer 1'"):
        select_rows("gpqa", files, None, 0)
    with pytest.raises(UserError, match="has 2 examples of 'law', fewer than 5 shots"):
        select_rows("mmlu_pro", files, None, 5)
    files["gpqa.jsonl"].write_text('{"torn": ')
    with pytest.raises(UserError, match=r"gpqa\.jsonl:1 is not a JSON row"):
        select_rows("gpqa", files, None, 0)
    files["gpqa.jsonl"].write_text("")
    with pytest.raises(UserError, match=r"gpqa\.jsonl is empty"):
        select_rows("gpqa", files, None, 0)


def sample(task, marks, finish_reason="stop"):
    return {"task": task, "marks": marks, "finish_reason": finish_reason}


def test_scores_count_marks_and_intervals_count_items():
    samples = [sample("a", [True, False]), sample("a", [True, True], "length"), sample("b", [False])]
    found = summarise("ifeval", samples, chance=0.1)
    assert found["score"] == pytest.approx(3 / 5)
    assert found["n"] == 3
    assert found["truncated"] == pytest.approx(1 / 3)
    assert found["low"] < 0.6 < found["high"]
    assert "subject_mean" not in found


def test_a_score_has_power_only_above_chance():
    right, wrong = sample("a", [True]), sample("a", [False])
    assert not summarise("gpqa", [right] * 3 + [wrong] * 7, chance=0.25)["power"]
    assert summarise("gpqa", [right] * 9 + [wrong], chance=0.25)["power"]


def test_subject_mean_weighs_subjects_alike():
    samples = [sample("math", [True])] * 9 + [sample("law", [False])]
    found = summarise("mmlu_pro", samples, chance=0.1)
    assert found["score"] == pytest.approx(0.9)
    assert found["subject_mean"] == pytest.approx(0.5)


def asked(number, marks):
    return {**sample("a", marks), "messages": [{"role": "user", "content": str(number)}]}


def test_scores_on_the_same_items_are_compared_in_pairs():
    baseline = [asked(number, [number % 2 == 0, number < 50]) for number in range(100)]
    better = [asked(number, [True, number < 50]) if number < 20 else baseline[number] for number in range(100)]
    found = paired(better, baseline, 0)
    assert found["value"] == pytest.approx(10 / 200)
    assert (found["n"], found["gained"], found["lost"]) == (100, 10, 0)
    # ten items of a hundred gained half a mark of two: the standard error of a paired mean
    error = np.std([0.5] * 10 + [0.0] * 90) / 10
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert paired(better, baseline[::-1], 0) is None
    assert paired(better, [], 0) is None


def test_a_row_that_is_no_object_is_named(tmp_path):
    (tmp_path / "ifeval.jsonl").write_text('["key", "prompt", "instruction_id_list", "kwargs"]\n')
    with pytest.raises(UserError, match=r"ifeval\.jsonl:1 is not a JSON row"):
        select_rows("ifeval", {"ifeval.jsonl": tmp_path / "ifeval.jsonl"}, None, 0)
