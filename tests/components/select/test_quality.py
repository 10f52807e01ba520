import json
import re

import pytest
import torch

from components.checkpoint.load import load_model, load_tokenizer
from components.contract.errors import UserError
from components.select.quality import Quality

PIQA = [
    {"goal": f"item {number} of the list", "sol1": f"take {number}", "sol2": "leave it there", "label": number % 2}
    for number in range(12)
]
SCIQ = [
    {
        "support": "  Water boils at one hundred degrees.",
        "question": f"what is number {number}",
        "distractor1": "ice",
        "distractor2": "a stone",
        "distractor3": f"number {number + 1}",
        "correct_answer": f"number {number}",
    }
    for number in range(8)
]
BOOLQ = [{"passage": f"The sky is {c}.", "question": f"is the sky {c}", "label": 1} for c in ("blue", "red", "grey")]
HELLASWAG = [
    {
        "activity_label": "Cooking",
        "ctx_a": "A man [step] cuts",
        "ctx_b": "he",
        "endings": [*"abcd"],
        "label": str(n % 4),
    }
    for n in range(6)
]


def write(folder, name, rows):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def model(tiny_model):
    return load_model(tiny_model, torch.float32), load_tokenizer(tiny_model)


def likeliest(model, tokenizer, context, choices):
    """By brute force: one sequence at a time, in float64 from its logits."""
    scores = []
    for choice in choices:
        whole = tokenizer(f"{context} {choice}").input_ids
        start = len(tokenizer(context).input_ids)
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([whole])).logits[0].double().log_softmax(-1)
        scores.append(sum(float(log_p[at - 1, whole[at]]) for at in range(start, len(whole))))
    return max(range(len(choices)), key=scores.__getitem__)


def test_accuracy_is_that_of_brute_force(model, tmp_path):
    files = {
        f"{name}.jsonl": write(tmp_path, f"copy-{name}", rows)
        for name, rows in (("piqa", PIQA), ("sciq", SCIQ), ("boolq", BOOLQ), ("hellaswag", HELLASWAG))
    }
    found = Quality(files, 10, tmp_path).accuracy(*model)
    asked = {
        "piqa": [(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]) for row in PIQA[:10]],
        "sciq": [
            (
                f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:",
                [row["distractor1"], row["distractor2"], row["distractor3"], row["correct_answer"]],
                3,
            )
            for row in SCIQ
        ],
        "boolq": [(f"{r['passage']}\nQuestion: {r['question']}?\nAnswer:", ["no", "yes"], r["label"]) for r in BOOLQ],
        "hellaswag": [("Cooking: A man cuts He", [*"abcd"], int(row["label"])) for row in HELLASWAG],
    }
    for name, items in asked.items():
        right = [likeliest(*model, context, choices) == target for context, choices, target in items]
        assert found[name] == pytest.approx(sum(right) / len(right)), name
    assert set(found) == set(asked)


@pytest.mark.parametrize(
    ("name", "rows", "says"),
    [
        ("arc.jsonl", PIQA, "arc.jsonl is none of sciq.jsonl"),
        ("piqa.jsonl", [], "piqa.jsonl is empty"),
        ("piqa.jsonl", [PIQA[0], {"goal": "x"}], "piqa.jsonl line 2: no sol1"),
        ("piqa.jsonl", [PIQA[0], PIQA[1] | {"label": -1}], "piqa.jsonl line 2: label -1 names none of 2 answers"),
        ("hellaswag.jsonl", [HELLASWAG[0] | {"label": ""}], "hellaswag.jsonl line 1: label '' names none of 4"),
        ("hellaswag.jsonl", [HELLASWAG[0] | {"endings": "abcd"}], "hellaswag.jsonl line 1: a field is no text"),
        ("sciq.jsonl", [SCIQ[0] | {"support": None}], "sciq.jsonl line 1: a field is no text"),
    ],
)
def test_wrong_files_are_refused(tmp_path, name, rows, says):
    with pytest.raises(UserError, match=re.escape(says)):
        Quality({name: write(tmp_path, name, rows)}, 10, tmp_path)
