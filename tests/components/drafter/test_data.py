import pytest
import torch

from components.checkpoint.load import load_tokenizer
from components.contract.errors import UserError
from components.drafter import data


def row(name: str, prompt: int, answer: int) -> dict:
    return {"id": name, "prompt_token_ids": [5] * prompt, "token_ids": [7] * answer}


def test_split_cuts_long_chats_and_leaves_out_short_answers():
    rows = [row(f"r{i}", 4, 6) for i in range(40)] + [row("long", 4, 90), row("one", 4, 1), row("prompt", 30, 9)]
    split = data.split(rows, 20, 0.3)
    every = {chat.id: chat for chat in [*split.train, *split.held_out]}
    assert len(every) == 41
    assert len(every["long"].token_ids) == 20
    assert (split.too_short, split.cut) == (2, 2)
    assert not {chat.id for chat in split.train} & {chat.id for chat in split.held_out}


@pytest.mark.parametrize("one_token", [True, False])
def test_reasoning_can_be_context_only(tiny_model, one_token):
    tokenizer = load_tokenizer(tiny_model)
    if one_token:
        tokenizer.add_tokens([data.THOUGHT_ENDS], special_tokens=True)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    thought, text, open_thought = encode("<think>\nhm\n</think>"), encode("\n\nyes, it is"), encode("<think>\nhm, so")
    rows = [
        {"id": f"r{i}", "prompt_token_ids": [5, 6], "token_ids": answer, "reasoning": reasoning}
        for i in range(20)
        for answer, reasoning in [(thought + text, "hm"), (open_thought, "hm, so"), (text, None)][i % 3 :][:1]
    ]
    whole, after = data.split(rows, 99, 0.3), data.split(rows, 99, 0.3, tokenizer)
    starts = {chat.id: chat.answer_start for chat in [*after.train, *after.held_out]}
    assert {chat.answer_start for chat in whole.train} == {2}
    assert starts == {f"r{i}": 2 + len(thought) * (i % 3 == 0) for i in range(20) if i % 3 != 1}
    assert (whole.too_short, after.too_short) == (0, 7)
    for chat in after.train:
        assert chat.token_ids[chat.answer_start :].tolist() == text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "0 usable rows"),
        ([row("a", 3, 5)], "held out"),
        ([row(f"r{i}", 3, 1) for i in range(20)], "20 too short"),
        ([{"id": "x", "conversations": []}], "row x has no token ids"),
        ([row("x", 0, 5)], "row x has no token ids, or no prompt"),
        ([row("x", 3, 5) | {"id": 7}], "a row's id is 7, not a text"),
        ([{"prompt_token_ids": [5], "token_ids": [7, 8]}], "a row's id is None"),
    ],
)
def test_chats_that_cannot_train_are_refused(rows, message):
    with pytest.raises(UserError, match=message):
        data.split(rows, 20, 0.3)


@pytest.mark.parametrize(
    "ids", ["hello", [4.5, 6.0], ["a"], [2**70, 1], [-(2**70), 1], [[1, 2], [3, 4]], {"0": 1}, [None]]
)
@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids"])
def test_what_is_no_list_of_token_ids_is_named(ids, field):
    with pytest.raises(UserError, match=rf"row x: {field} is no list of token ids"):
        data.split([row("x", 3, 5) | {field: ids}], 20, 0.3)


def test_frequent_tokens_are_those_of_the_answers():
    chats = [data.Chat("a", torch.tensor([9, 9, 9, 4, 4, 2, 6]), 3)]
    assert data.frequent_tokens(chats, 2, 10).tolist() == [2, 4]
    assert data.frequent_tokens(chats, 5, 10).tolist() == [0, 1, 2, 4, 6]


def test_the_mask_token_cannot_occur(tiny_model):
    tokenizer, chats = load_tokenizer(tiny_model), [data.Chat("a", torch.tensor([5, 6, 2]), 1)]
    mask = tokenizer.convert_tokens_to_ids("<|mask|>")
    vocabulary = len(tokenizer)
    assert data.choose_mask_token(tokenizer, vocabulary, chats, None) == mask
    assert data.choose_mask_token(tokenizer, vocabulary + 8, chats, None) == vocabulary
    for taken in (6, tokenizer.eos_token_id, tokenizer.pad_token_id, vocabulary + 8):
        with pytest.raises(UserError, match=f"mask_token {taken}"):
            data.choose_mask_token(tokenizer, vocabulary + 8, chats, taken)
    used = [data.Chat("b", torch.tensor([5, mask, 2]), 1)]
    with pytest.raises(UserError, match="no reserved or unused id"):
        data.choose_mask_token(tokenizer, vocabulary, used, None)
    with pytest.raises(UserError, match="occurs in chat b"):
        data.refuse_mask_token(mask, used)


@pytest.mark.parametrize("token", [-1, 7])
def test_chats_of_another_tokenizer_are_refused(token):
    data.refuse_unknown_tokens(7, [data.Chat("a", torch.tensor([0, 6]), 1)])
    with pytest.raises(UserError, match="chat b: a token id is not among the target's 7"):
        data.refuse_unknown_tokens(7, [data.Chat("b", torch.tensor([0, token]), 1)])
