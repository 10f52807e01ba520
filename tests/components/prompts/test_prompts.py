"""The draw of prompts: stable, nested, free of duplicates and of earlier draws."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.chats.rows import read_rows, write_rows
from components.contract.errors import UserError
from components.prompts import sources
from components.prompts.draw import Excluded, clean, draw, text_hash
from components.prompts.stage import Config


def row(text: str, category: str = "facts", **fields: Any) -> dict[str, Any]:
    return {"category": category, "conversations": [{"role": "user", "content": text}], **fields}


def drawn(rows: list[dict[str, Any]], excluded: Excluded | None = None, **config: Any) -> list[dict[str, Any]]:
    return draw(rows, Config(**config), excluded or Excluded(), "files").rows


ROWS = [row(f"Question {number}?", "even" if number % 2 == 0 else "odd", id=f"r{number}") for number in range(60)]


@given(st.permutations(ROWS), st.integers(1, 59), st.integers(0, 5))
def test_a_larger_draw_contains_the_smaller_whatever_the_order_of_rows(rows: list, count: int, seed: int) -> None:
    small, large = drawn(rows, count=count, seed=seed), drawn(ROWS, count=count + 1, seed=seed)
    assert [one for one in large if one in small] == small
    assert len(small) == count


def test_seeds_draw_differently_and_repeat_themselves() -> None:
    assert drawn(ROWS, count=10, seed=1) == drawn(ROWS, count=10, seed=1) != drawn(ROWS, count=10, seed=2)


def test_quotas_are_met_exactly() -> None:
    rows = drawn(ROWS, count=10, quotas={"even": 7, "odd": 3})
    assert sorted(one["category"] for one in rows) == ["even"] * 7 + ["odd"] * 3


def test_quotas_that_do_not_add_up_or_cannot_be_met_are_named() -> None:
    with pytest.raises(ValueError, match="quotas add up to 5"):
        Config(count=6, quotas={"even": 5})
    with pytest.raises(UserError, match=r"quotas\.even: 40 asked, files has 30"):
        drawn(ROWS, count=40, quotas={"even": 40})
    with pytest.raises(UserError, match="count: 61 asked, files has 60"):
        drawn(ROWS, count=61)


def test_the_same_text_or_id_counts_once_and_the_reason_is_counted() -> None:
    rows = [row("What is  RAIN?", id="a"), row("what is rain?", id="b"), row("Other", id="a"), row("New")]
    result = draw(rows, Config(count=2), Excluded(), "files")
    assert {one["conversations"][0]["content"] for one in result.rows} == {"What is  RAIN?", "New"}
    assert result.statistics["dropped"] == {"duplicate": 2}
    assert result.statistics["prompts"] == result.statistics["usable"] == 2


def test_an_earlier_draw_is_excluded_by_id_and_by_text(tmp_path: Path) -> None:
    first = drawn(ROWS, count=20)
    write_rows(tmp_path / "part-0.jsonl", first)
    excluded = Excluded.of([tmp_path])
    renamed = [one | {"id": f"new-{one['id']}"} for one in ROWS]
    for rows in (ROWS, renamed):
        second = drawn(rows, excluded, count=40)
        texts = {text_hash(one["conversations"]) for one in first}
        assert texts.isdisjoint(text_hash(one["conversations"]) for one in second)
        with pytest.raises(UserError, match="has 40 usable"):
            drawn(rows, excluded, count=41)


def test_an_exclusion_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "part-0.jsonl", drawn([row("Elsewhere", id="x")], count=1))
    with pytest.raises(UserError, match="matches none"):
        drawn(ROWS, Excluded.of([tmp_path]), count=1)


def test_trailing_answers_go_and_rows_without_a_question_are_dropped() -> None:
    turn = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Hello"}
    assert clean({"messages": [turn, answer, turn, answer, answer]}) == [turn, answer, turn]
    assert clean({"messages": [answer]}) == []
    assert clean({"messages": [{"role": "user", "content": "  "}]}) == []
    assert clean({"messages": "Hi"}) is None
    assert clean({"messages": [{"role": "tool", "content": "x"}, turn]}) is None


def test_long_conversations_are_dropped() -> None:
    rows = [row("x" * 11), row("y" * 10)]
    assert [one["conversations"][0]["content"][0] for one in drawn(rows, count=1, max_characters=10)] == ["y"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "no prompts in it"), ("\n\n", "no prompts in it"), ('{"a": 1}\n{"a', "row 2 is not JSON"), ("[1]", "row 1")],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"questions\.jsonl.*{said}"):
        list(sources.from_files([path]))


def run_stage(tmp_path: Path, files: list[Path], **config: Any) -> Any:
    """Run the stage through the command line that every engine uses."""
    from components.contract.cli import main
    from components.contract.context import Input
    from components.contract.digest import stage_digest
    from components.store.artifact import read_manifest
    from components.store.backend import Store

    digests = {"files": [Input(str(path)).digest for path in files]}
    digest = stage_digest("prompts", 1, Config(**config), digests)
    argv = ["--config", json.dumps(config), "--output", f"{tmp_path}/store/prompts/{digest}"]
    code = main("prompts", argv + [f"--input=files={path}" for path in files])
    return code, read_manifest(Store(f"{tmp_path}/store"), "prompts", digest)


def test_the_stage_commits_shards_and_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    path = tmp_path / "questions.jsonl"
    write_rows(path, ROWS)
    code, artifact = run_stage(tmp_path, [path], count=12)
    assert code == 0
    assert {entry["path"] for entry in artifact.files} == {"part-00000.jsonl", "statistics.json"}
    assert artifact.metrics["prompts"] == 12


def test_an_empty_file_ends_with_exit_code_2_and_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    path = tmp_path / "empty.jsonl"
    path.touch()
    code, artifact = run_stage(tmp_path, [path], count=1)
    assert (code, artifact) == (2, None)
    assert "empty.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "least"), [("smol", 400), ("tiny", 200)])
def test_the_shipped_prompts_are_distinct_and_of_several_kinds(name: str, least: int) -> None:
    folder = Path(__file__).parents[3] / "pipelines" / "recipes" / name
    rows = [one for one in read_rows(folder) if one]
    result = draw(rows, Config(count=len(rows)), Excluded(), name)
    assert len(rows) >= least
    assert result.statistics["dropped"] == {}
    assert len(result.statistics["categories"]) >= 5
