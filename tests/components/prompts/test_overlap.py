"""Held-out n-grams against a brute-force search over words."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.chats.rows import write_rows
from components.contract.errors import UserError
from components.prompts.overlap import HeldOut, texts_of

TEXT = st.lists(st.sampled_from(["a", "B", "c.", "D!", "é"]), min_size=1, max_size=24).map(" ".join)


def turns(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "a b c"}, {"role": "user", "content": text}]


def overlaps(prompt: str, texts: list[str]) -> bool:
    """13 words in a row, or all of a text of 8 to 12 words, or a prompt that is the same few words as a text."""
    here = re.findall(r"\w+", prompt.casefold())
    for text in texts:
        there = re.findall(r"\w+", text.casefold())
        size = min(len(there), 13)
        if len(there) < 8:
            if here == there:
                return True
            continue
        mine = {tuple(here[start : start + size]) for start in range(len(here) - size + 1)}
        if mine & {tuple(there[start : start + size]) for start in range(len(there) - size + 1)}:
            return True
    return False


@given(prompt=TEXT, texts=st.lists(TEXT, max_size=4), take=st.integers(0, 24))
def test_grams_are_found_where_a_brute_force_search_finds_them(prompt: str, texts: list[str], take: int) -> None:
    if texts:
        prompt = f"{' '.join(texts[0].split()[:take])} {prompt}"
    assert bool(HeldOut(texts).grams_in(turns(prompt))) == overlaps(prompt, texts)


def test_an_n_gram_of_many_texts_has_one_number() -> None:
    """A standing instruction of every held-out prompt must not count once for each of them."""
    order = "Answer the following question and put the final result into a box at the end"
    held_out = HeldOut(f"{order} {number}" for number in range(50))
    assert held_out.grams_in(turns(order)) == [0, 1, 2]


def test_numbers_of_grams_do_not_depend_on_the_process() -> None:
    """They are stored, and a run that goes on after a kill has another hash seed."""
    import subprocess
    import sys

    code = (
        "from components.prompts.overlap import HeldOut\n"
        "texts = [' '.join(f'w{n + k}' for n in range(20)) for k in (0, 50, 0, 90)]\n"
        "print(HeldOut(texts).grams_in([{'role': 'user', 'content': texts[3] + ' . ' + texts[1]}]))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert said == {f"{[*range(20, 28), *range(40, 48)]}\n"}


def test_texts_come_from_user_turns_and_from_every_string_of_a_file(tmp_path: Path) -> None:
    part = tmp_path / "prompts"
    part.mkdir()
    write_rows(part / "part-00000.jsonl", [{"id": "a", "category": "c", "conversations": turns("Hello there")}])
    assert list(texts_of(part)) == ["Hello there"]
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"question": "Q", "options": ["A", {"deep": "B"}], "answer": 3}) + "\n\n")
    assert list(texts_of(path)) == ["Q", "A", "B"]
    path.write_text('{"question": ')
    with pytest.raises(UserError, match=r"tasks\.jsonl: line 1 is not JSON"):
        list(texts_of(path))
