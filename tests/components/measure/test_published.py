"""The published acceptance protocol on rows in the data sets' own schemas."""

import json

import pytest

from components.contract.errors import UserError
from components.measure import published

ROWS = {
    "gsm8k": {"question": "How many {cats}?", "answer": "#### 3"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "", "entry_point": ""},
    "longbench_v2": {"_id": "x", "question": "Why?", "choice_A": "a", "answer": "A", "context": "é" * 9000},
}  # fmt: skip


class Bytes:
    """One token a byte."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": list(text.encode())}

    def decode(self, ids):
        return bytes(ids).decode()


@pytest.fixture
def folder(tmp_path):
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 70)
    return tmp_path


def test_questions_are_as_published_and_documents_are_cut_at_a_token(folder):
    found = published.rows(folder, Bytes())
    assert len({row["id"] for row in found}) == len(found) == 3 * 64
    asked = {row["category"]: row["conversations"][0]["content"] for row in found}
    assert asked["gsm8k"] == (
        "How many {cats}?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert asked["humaneval"].endswith("passes the tests:\n```python\ndef f():\n\n```")
    assert asked["longbench_v2"] == "é" * 4096 + "\n\nWhy?"


def test_a_row_of_another_schema_is_named(folder):
    (folder / "humaneval.jsonl").write_text(json.dumps(ROWS["humaneval"]) + '\n{"text": "def g()"}\n')
    with pytest.raises(UserError, match=r"humaneval\.jsonl:2 has no field 'prompt'"):
        published.rows(folder, Bytes())
