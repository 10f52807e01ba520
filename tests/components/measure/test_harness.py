"""lm-eval's own tasks on local files: what is asked, and how answers of known quality are marked."""

import json
import random

import pytest

from components.contract.errors import UserError
from components.measure import harness
from components.measure.quality import select_rows, summarise

pytestmark = pytest.mark.slow


def mmlu(subject, number):
    return {
        "question": f"What is {number} + {number}?",
        "options": [str(2 * number + wrong) for wrong in range(10)],
        "answer": "A",
        "category": subject,
        "cot_content": f"A: Let's think step by step. It is {2 * number}. The answer is (A).",
    }


def gpqa(number):
    wrong = {f"Incorrect Answer {n}": f"wrong {number} {n}" for n in (1, 2, 3)}
    return {"Question": f"Which is right, {number}?", "Correct Answer": f"right {number}", **wrong}


def ifeval(key, kind, prompt, **settings):
    return {"key": key, "prompt": prompt, "instruction_id_list": [kind], "kwargs": [settings]}


IFEVAL = [
    ifeval(1, "punctuation:no_comma", "Write a sentence without commas."),
    ifeval(2, "keywords:existence", "Mention a cat.", keywords=["cat"]),
    ifeval(3, "length_constraints:number_words", "Write at least 5 words.", relation="at least", num_words=5),
]
ROWS = {
    "mmlu_pro": [mmlu(subject, n) for subject in ("math", "computer science") for n in range(3)],
    "mmlu_pro_validation": [mmlu(subject, n) for subject in ("math", "computer science") for n in range(10, 15)],
    "ifeval": IFEVAL,
    "gpqa": [gpqa(n) for n in range(6)],
}


@pytest.fixture
def files(tmp_path):
    written = {}
    for name, rows in ROWS.items():
        path = written[f"{name}.jsonl"] = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return written


def evaluate(name, files, scratch, reply, shots=0):
    """Run a suite with ``reply(messages)`` as the model; return the samples, the figures and what was asked."""
    scratch.mkdir(exist_ok=True)
    tasks = harness.load_tasks(name, select_rows(name, files, None, shots), shots, scratch)
    asked = []

    def answer_all(items):
        asked.extend(items)
        return [{"text": reply(messages), "finish_reason": "stop"} for messages, _ in items]

    samples = harness.run(name, tasks, answer_all)
    return samples, summarise(name, samples, harness.chance(name, tasks, samples)), asked


def test_mmlu_pro_asks_five_shots_as_turns_and_reads_the_letter(files, tmp_path):
    def reply(messages):
        return "So the answer is (A)." if "What is 1 + 1?" in messages[-1]["content"] else "the answer is B"

    samples, figures, asked = evaluate("mmlu_pro", files, tmp_path / "x", reply, shots=5)
    messages, settings = asked[0]
    assert [turn["role"] for turn in messages] == ["system"] + ["user", "assistant"] * 5 + ["user"]
    assert "about computer science" in messages[0]["content"]
    assert messages[-1]["content"].endswith("Answer: Let's think step by step.")
    assert settings["until"] == ["Question:"]
    assert figures["score"] == pytest.approx(2 / 6)
    assert figures["chance"] == pytest.approx(0.1)
    assert {sample["task"] for sample in samples} == {"mmlu_pro_math", "mmlu_pro_computer_science"}
    assert {sample["extracted"] for sample in samples} == {"A", "B"}


def test_gpqa_shuffles_the_choices_in_the_same_way_every_time(files, tmp_path):
    def reply(messages):
        line = next(line for line in messages[-1]["content"].splitlines() if "right" in line and line.startswith("("))
        return f"Perhaps (A)? No: {line[:3]}"

    _, figures, asked = evaluate("gpqa", files, tmp_path / "x", reply)
    assert figures["score"] == 1.0
    assert figures["chance"] == 0.25
    random.seed(99)
    _, _, again = evaluate("gpqa", files, tmp_path / "y", lambda messages: "(B)")
    assert again == asked
    assert (
        len({next(line for line in m[-1]["content"].splitlines() if "right" in line[:11])[:3] for m, _ in asked}) > 1
    )


def test_ifeval_marks_instructions_and_takes_other_answers_as_chance(files, tmp_path):
    def reply(messages):
        return "My cat sleeps, eats, purrs." if "cat" in messages[-1]["content"] else "One, two."

    samples, figures, asked = evaluate("ifeval", files, tmp_path / "x", reply)
    assert [messages[-1]["content"] for messages, _ in asked] == [row["prompt"] for row in IFEVAL]
    assert [sample["marks"] for sample in samples] == [[False], [True], [False]]
    # Item 1 fails on both others' answers, item 2 has no cat in theirs, item 3 has five words in item 2's only.
    assert figures["chance"] == pytest.approx(1 / 6)
    assert not figures["power"]


def test_a_failed_request_ends_the_run(files, tmp_path):
    def reply(messages):
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        evaluate("ifeval", files, tmp_path / "x", reply)


def test_instructions_that_need_missing_language_data_are_refused(files, tmp_path, monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    row = ifeval(7, "length_constraints:number_sentences", "Two sentences.", relation="at least", num_sentences=2)
    files["ifeval.jsonl"].write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"item 7 \(length_constraints:number_sentences\).*NLTK_DATA"):
        evaluate("ifeval", files, tmp_path / "x", lambda messages: "")


def test_an_unknown_subject_is_refused(files, tmp_path):
    for name in ("mmlu_pro.jsonl", "mmlu_pro_validation.jsonl"):
        files[name].write_text(json.dumps(mmlu("astrology", 1)))
    with pytest.raises(UserError, match="'astrology' is not one of MMLU-Pro's subjects"):
        evaluate("mmlu_pro", files, tmp_path / "x", lambda messages: "")
