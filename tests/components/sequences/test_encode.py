import pytest

from components.chats.template import Template, prompt_token_ids
from components.contract.errors import UserError
from components.model.testbed import TEMPLATE, build_tokenizer
from components.sequences import encode
from components.sequences.encode import with_token_ids

# As in Qwen3.5: an answer without a thought has no empty one, which the prompt of thinking: false has.
LEAVES_OUT = TEMPLATE.replace("and loop.last", "and loop.last and message['reasoning_content']")


@pytest.fixture(scope="module", params=[TEMPLATE, LEAVES_OUT], ids=["testbed", "leaves out"])
def tokenizer(request: pytest.FixtureRequest):
    made = build_tokenizer(512, 0)
    made.chat_template = request.param
    return made


def chat(number: int, **answer: str) -> dict:
    turns = [
        {"role": "user", "content": f"What is {number}? ünï"},
        {"role": "assistant", "content": f"It is {number}."},
    ]
    turns[1].update({"reasoning_content": "", **answer})
    return {"id": f"row-{number}", "category": "chat", "conversations": turns}


@pytest.mark.parametrize("thinking", [False, True])
def test_text_becomes_the_ids_that_the_model_would_read_and_write(tokenizer, thinking: bool) -> None:
    template = Template(thinking=thinking)
    thought = {"reasoning_content": "I count."} if thinking else {}
    rows = list(with_token_ids((chat(n, **thought) for n in range(2 * encode.BATCH + 3)), tokenizer, template))
    assert [row["id"] for row in rows] == [f"row-{n}" for n in range(2 * encode.BATCH + 3)]
    for n in (0, 7, encode.BATCH, 2 * encode.BATCH + 2):
        row = rows[n]
        assert row["prompt_token_ids"] == prompt_token_ids(tokenizer, row["conversations"][:1], template)
        answer = f"I count.\n</think>\n\nIt is {n}.<|im_end|>" if thinking else f"It is {n}.<|im_end|>"
        assert tokenizer.decode(row["token_ids"]) == answer
        assert row["token_ids"] == tokenizer(answer, add_special_tokens=False)["input_ids"]
        assert row["token_ids"][-1] == tokenizer.eos_token_id
        assert row["finish_reason"] == "stop"


def test_rows_with_ids_pass_unchanged_between_those_without(tokenizer) -> None:
    ready = {"id": "ready", "prompt_token_ids": [5], "token_ids": [6], "finish_reason": "length", "text": "not read"}
    rows = list(with_token_ids([chat(1), ready, chat(2)], tokenizer, Template()))
    assert rows[1] == ready
    assert [row["id"] for row in rows] == ["row-1", "ready", "row-2"]
    assert rows[0]["token_ids"] != rows[2]["token_ids"]


def test_a_row_that_cannot_be_rendered_is_named(tokenizer) -> None:
    unanswered = {"id": "open", "conversations": [{"role": "user", "content": "Well?"}]}
    with pytest.raises(UserError, match=r"row open: .*last turn"):
        list(with_token_ids([chat(1), unanswered, chat(2)], tokenizer, Template()))
    with pytest.raises(UserError, match="row bare: KeyError"):
        list(with_token_ids([chat(1), {"id": "bare"}], tokenizer, Template()))


def test_a_thought_that_the_prompt_has_closed_is_refused(tokenizer) -> None:
    with pytest.raises(UserError, match=r"row row-3: .*thinking: False"):
        list(with_token_ids([chat(3, reasoning_content="I count.")], tokenizer, Template()))
