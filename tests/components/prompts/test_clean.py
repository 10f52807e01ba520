import pytest

from components.prompts.clean import clean, text_hash, with_system

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
BLANK = {"role": "system", "content": "  "}


def test_trailing_answers_go_and_rows_without_a_question_are_dropped() -> None:
    assert clean({"messages": [USER, ANSWER, USER, ANSWER, ANSWER]}) == [USER, ANSWER, USER]
    assert clean({"messages": [ANSWER]}) == []
    assert clean({"messages": [{"role": "user", "content": "  "}]}) == []
    assert clean({"messages": "Hi"}) is None
    assert clean({"messages": [{"role": "tool", "content": "x"}, USER]}) is None
    assert clean({"messages": [{"role": "user", "content": None}]}) is None


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        ([USER], [{"role": "system", "content": "Default"}, USER]),
        ([BLANK, USER], [{"role": "system", "content": "Default"}, USER]),
        ([SYSTEM, USER], [SYSTEM, USER]),
        ([BLANK, SYSTEM, USER], [SYSTEM, USER]),
        ([SYSTEM, USER, BLANK, USER], [SYSTEM, USER, USER]),
    ],
)
def test_system_messages(turns: list, kept: list) -> None:
    assert with_system(turns, "Default") == kept
    assert with_system(turns, None) == [turn for turn in kept if turn["content"] != "Default"]


def test_texts_are_the_same_up_to_case_space_and_width() -> None:
    def of(text: str) -> str:
        return text_hash([SYSTEM, {"role": "user", "content": text}])

    assert of("What  is\nRAIN? ") == of("what is rain?") == of("ｗｈａｔ is rain?")
    assert of("what is rain") != of("what is rain?")
    assert text_hash([USER, ANSWER, USER]) != text_hash([USER])
