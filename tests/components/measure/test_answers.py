import hashlib

import pytest

from components.chats.template import Template
from components.contract.errors import UserError
from components.measure.answers import select


class Tokenizer:
    """Renders a conversation as its last message and encodes bytes."""

    def apply_chat_template(self, conversation, **_):
        return conversation[-1]["content"]

    def __call__(self, text, add_special_tokens):
        return {"input_ids": list(text.encode())}


def rows(**counts):
    return [
        {"id": f"{kind}-{n}", "category": kind, "conversations": [{"role": "user", "content": f"{kind} question {n}"}]}
        for kind, count in counts.items()
        for n in range(count)
    ]


def chosen(many, **changes):
    settings = {"count": 6, "seed": 0, "longest": None} | changes
    return select(many, Tokenizer(), Template(), **settings)


def test_prompts_are_spread_over_the_categories():
    kinds = [prompt["category"] for prompt in chosen(rows(code=50, math=50, story=1))]
    assert sorted(kinds) == ["code", "code", "code", "math", "math", "story"]


def test_the_choice_depends_on_ids_and_seed_not_on_order():
    many = rows(code=40, math=40)
    assert chosen(many) == chosen(list(reversed(many)))
    assert {p["id"] for p in chosen(many)} != {p["id"] for p in chosen(many, seed=1)}
    first = min(
        (row["id"] for row in many if row["category"] == "code"),
        key=lambda i: hashlib.sha256(f"0:{i}".encode()).digest(),
    )
    assert chosen(many)[0]["id"] == first


def test_copies_and_prompts_that_do_not_fit_are_left_out():
    copies = [{**row, "id": f"copy-{row['id']}"} for row in rows(code=3)]
    assert len(chosen(rows(code=3) + copies)) == 3
    long = [{"id": "long", "category": "code", "conversations": [{"role": "user", "content": "x" * 100}]}]
    assert [prompt["id"] for prompt in chosen(long + rows(code=1), longest=50)] == ["code-0"]
    with pytest.raises(UserError, match="no prompt to ask"):
        chosen(long, longest=50)


def test_a_prompt_carries_the_ids_it_is_asked_with():
    (prompt,) = chosen(rows(code=1))
    assert prompt == {
        "id": "code-0",
        "category": "code",
        "prompt": "code question 0",
        "prompt_token_ids": list(b"code question 0"),
    }
