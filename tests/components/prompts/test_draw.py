"""The draw against a brute-force one in memory, and what a draw must never do."""

import hashlib
import json
import runpy
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from components.chats.rows import read_rows, write_rows
from components.chats.template import Template
from components.chats.tokenizer import Tokenizer
from components.contract.context import Input, Inputs, Output
from components.contract.errors import UserError
from components.contract.log import Log
from components.prompts.clean import text_hash
from components.prompts.draw import Meter
from components.prompts.stage import Config, run
from components.store.artifact import Artifact, commit
from components.store.backend import Store
from components.store.work import Work

Row = dict[str, Any]


def row(text: str, category: str = "facts", **fields: Any) -> Row:
    return {"category": category, "conversations": [{"role": "user", "content": text}], **fields}


class Source:
    """Draws in this process from rows in memory."""

    def __init__(self, tokenizer_folder: Path, folder: Path) -> None:
        self._tokenizer, self._folder = tokenizer_folder, folder

    def draw(
        self, rows: list[Row], exclude: Sequence[list[Row]] = (), held_out: str = "", **config: Any
    ) -> tuple[list[Row], dict[str, Any]]:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        store = Store(str(folder / "store"))
        model, _ = commit(store, "model", "0" * 64, self._tokenizer, {"metrics": {}})
        write_rows(folder / "rows.jsonl", rows)
        bound = {"model": [Input(model.uri)], "files": [Input(str(folder / "rows.jsonl"))]}
        bound["exclude"] = [Input(self._committed(store, number, one).uri) for number, one in enumerate(exclude)]
        if held_out:
            (folder / "held_out.jsonl").write_text(held_out)
            bound["held_out"] = [Input(str(folder / "held_out.jsonl"))]
        out, scratch = folder / "out", folder / "scratch"
        out.mkdir()
        scratch.mkdir()
        output = Output(out, scratch, Work(store, "_work/prompts/x"), Log("prompts", (folder / "log").open("w")))
        statistics = run(Config(**({"system": None} | config)), Inputs(bound), output)
        assert json.loads((out / "statistics.json").read_text()) == json.loads(json.dumps(statistics))
        drawn = list(read_rows(out))
        assert (out / "ids.txt").read_text().splitlines() == [one["id"] for one in drawn]
        return drawn, statistics

    def _committed(self, store: Store, number: int, rows: list[Row]) -> Artifact:
        part = self._folder / f"earlier-{number}"
        part.mkdir(exist_ok=True)
        write_rows(part / "part-00000.jsonl", rows)
        return commit(store, "prompts", f"{number:064x}", part, {"metrics": {}})[0]


@pytest.fixture
def source(tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    return Source(tokenizer_folder, tmp_path)


def brute_force(rows: list[Row], quotas: dict[str, int], seed: int, longest: int) -> list[str]:
    """The ids that a draw must give, in order. One token is one byte, and the template adds 53 of them."""

    def key(one: Row) -> bytes:
        return hashlib.sha256(f"{seed}:{one['id']}".encode()).digest()

    def text(one: Row) -> str:
        return " ".join(one["conversations"][0]["content"].lower().split())

    first_of_id: dict[str, Row] = {}
    for one in rows:
        kept = first_of_id.get(one["id"])
        if kept is None or hashlib.sha256(text(one).encode()).digest() < hashlib.sha256(text(kept).encode()).digest():
            first_of_id[one["id"]] = one
    by_category: dict[str, dict[str, Row]] = defaultdict(dict)
    for one in sorted(first_of_id.values(), key=key):
        by_category[one["category"]].setdefault(text(one), one)
    owner: dict[str, str] = {}
    for category in sorted(by_category, key=lambda name: (len(by_category[name]), name)):
        for words in by_category[category]:
            owner.setdefault(words, category)
    usable = [
        one
        for category, found in by_category.items()
        for words, one in found.items()
        if owner[words] == category and len(one["conversations"][0]["content"]) + OVERHEAD <= longest
    ]
    drawn: list[Row] = []
    left = Counter(quotas)
    for one in sorted(usable, key=key):
        if left[one["category"]] > 0:
            left[one["category"]] -= 1
            drawn.append(one)
    return [one["id"] for one in drawn]


OVERHEAD = len("user\n") + len("\n") + len("assistant\n") + len("\n\n\n\n") + len("<think></think>") + 3
"""Tokens that the template adds: its special tokens count one each, all else one a byte."""


ROWS = st.lists(
    st.tuples(
        st.integers(0, 25).map(lambda number: f"r{number}"),
        st.sampled_from(["A", "a ", "b", "c  c", "C C", "d", "e", "f", "gg", "hhh", "i" * 30]),
        st.sampled_from(["code", "math", "chat"]),
    ).map(lambda made: row(made[1], made[2], id=made[0])),
    min_size=6,
    max_size=40,
)
ANY_FOLDER = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY_FOLDER
@given(rows=ROWS, seed=st.integers(0, 3), data=st.data())
def test_the_draw_is_the_brute_force_one(source: Source, rows: list[Row], seed: int, data: Any) -> None:
    longest = OVERHEAD + 10
    everything = brute_force(rows, dict.fromkeys(("code", "math", "chat"), 99), seed, longest)
    drawn, statistics = source.draw(rows, count=len(everything), seed=seed, max_prompt_tokens=longest)
    assert [one["id"] for one in drawn] == everything
    assert statistics["read"] == len(rows) == statistics["usable"] + sum(statistics["dropped"].values())
    supply = Counter(one["category"] for one in drawn)
    quotas = {name: data.draw(st.integers(0, supply[name])) for name in supply}
    if sum(quotas.values()):
        some, found = source.draw(
            rows, count=sum(quotas.values()), quotas=quotas, seed=seed, max_prompt_tokens=longest
        )
        assert [one["id"] for one in some] == brute_force(rows, quotas, seed, longest)
        assert {name: one["drawn"] for name, one in found["categories"].items() if one["drawn"]} == {
            name: count for name, count in quotas.items() if count
        }


SIXTY = [row(f"Question {number}?", "even" if number % 2 == 0 else "odd", id=f"r{number}") for number in range(60)]


@ANY_FOLDER
@given(rows=st.permutations(SIXTY), count=st.integers(1, 59), seed=st.integers(0, 5))
def test_a_larger_draw_contains_the_smaller_whatever_the_order_of_rows(
    source: Source, rows: list[Row], count: int, seed: int
) -> None:
    small, large = source.draw(rows, count=count, seed=seed)[0], source.draw(SIXTY, count=count + 1, seed=seed)[0]
    assert [one for one in large if one in small] == small
    assert len(small) == count


@ANY_FOLDER
@given(data=st.data())
def test_filled_quotas_contain_smaller_ones(source: Source, data: Any) -> None:
    def drawn(quotas: dict[str, int]) -> list[Row]:
        rows, found = source.draw(rows_, count=sum(quotas.values()), quotas=quotas, shortfall="fill")
        assert len(rows) == sum(quotas.values())
        supply = Counter(one["category"] for one in rows_)
        assert found["missing"] == {
            name: asked - supply[name] for name, asked in quotas.items() if asked > supply[name]
        }
        return rows

    rows_ = SIXTY + [row(f"Rare {number}?", "rare", id=f"s{number}") for number in range(5)]
    small = {name: data.draw(st.integers(1, 15)) for name in ("even", "odd", "rare")}
    large = {name: count + data.draw(st.integers(0, 5)) for name, count in small.items()}
    after = drawn(large)
    assert all(one in after for one in drawn(small))


def test_seeds_draw_differently_and_repeat_themselves(source: Source) -> None:
    first, again, other = (source.draw(SIXTY, count=10, seed=seed)[0] for seed in (1, 1, 2))
    assert first == again != other


def test_quotas_that_do_not_add_up_or_cannot_be_met_are_named(source: Source) -> None:
    with pytest.raises(ValueError, match="quotas add up to 5"):
        Config(count=6, quotas={"even": 5})
    with pytest.raises(UserError, match=r"quotas\.even: 40 asked, files rows\.jsonl has 30"):
        source.draw(SIXTY, count=40, quotas={"even": 40})
    with pytest.raises(UserError, match=r"count: 61 asked, files rows\.jsonl has 60"):
        source.draw(SIXTY, count=61)
    with pytest.raises(UserError, match=r"quotas: 61 asked, files rows\.jsonl has 60"):
        source.draw(SIXTY, count=61, quotas={"even": 40, "odd": 21}, shortfall="fill")


def test_a_quota_is_met_after_the_length_cap_whenever_the_source_can(source: Source) -> None:
    """A third of the prompts is too long, and the quota is all that is left: no oversampling factor would do."""
    rows = [row("x" * (50 if number % 3 else 200) + str(number), "code", id=str(number)) for number in range(300)]
    short = {one["id"] for one in rows if len(one["conversations"][0]["content"]) < 100}
    drawn, statistics = source.draw(rows, count=len(short), quotas={"code": len(short)}, max_prompt_tokens=150)
    assert {one["id"] for one in drawn} == short
    assert statistics["dropped"] == {"too long": 100}
    assert statistics["prompt_tokens"]["longest"] <= 150
    assert statistics["prompt_tokens"]["histogram"] == {"128": 200}


def test_the_cap_counts_rendered_tokens_and_includes_its_own_length(source: Source) -> None:
    rows = [row("y" * 30, id="a"), row("y" * 31, id="b")]
    drawn, statistics = source.draw(rows, count=1, max_prompt_tokens=OVERHEAD + 30)
    assert [one["id"] for one in drawn] == ["a"]
    assert statistics["prompt_tokens"]["longest"] == OVERHEAD + 30
    thinking, _ = source.draw(
        rows, count=1, max_prompt_tokens=OVERHEAD + 30 - len("\n\n</think>\n"), template={"thinking": True}
    )
    assert [one["id"] for one in thinking] == ["a"]


def test_the_same_text_or_id_counts_once_and_the_reason_is_counted(source: Source) -> None:
    rows = [row("What is  RAIN?", id="a"), row("what is rain?", id="b"), row("ｗhat is rain?", id="c"), row("New")]
    drawn, statistics = source.draw(rows, count=2)
    assert len({text_hash(one["conversations"]) for one in drawn}) == 2
    assert statistics["dropped"] == {"duplicate": 2}
    assert statistics["categories"]["facts"] == {"drawn": 2, "usable": 2, "dropped": {"duplicate": 2}}


def test_a_text_of_two_categories_goes_where_prompts_are_scarce(source: Source) -> None:
    shared = [f"Shared {number}" for number in range(5)]
    rows = [row(text, "code", id=f"c{text}") for text in shared]
    rows += [row(text, "chat", id=f"h{text}") for text in [*shared, *(f"Chat {number}" for number in range(20))]]
    drawn, statistics = source.draw(rows, count=25, quotas={"chat": 20, "code": 5})
    assert Counter(one["category"] for one in drawn) == {"chat": 20, "code": 5}
    assert statistics["categories"]["chat"]["dropped"] == {"duplicate of another category": 5}


@pytest.mark.parametrize("renamed", [False, True], ids=["by id", "by text"])
def test_an_earlier_draw_is_excluded(source: Source, renamed: bool) -> None:
    first, _ = source.draw(SIXTY, count=20)
    rows = [one | {"id": f"new-{one['id']}"} for one in SIXTY]
    if not renamed:
        rows = [row(f"Other words {number}", id=one["id"]) for number, one in enumerate(SIXTY)]
    second, statistics = source.draw(rows, exclude=[first], count=40)
    numbers = {one["id"].removeprefix("new-") for one in second}
    assert numbers.isdisjoint(one["id"] for one in first)
    assert statistics["dropped"] == {"excluded": 20}
    with pytest.raises(UserError, match="has 40 usable"):
        source.draw(rows, exclude=[first], count=41)


def test_each_exclusion_must_match_something(source: Source) -> None:
    first, _ = source.draw(SIXTY, count=20)
    elsewhere = [row("Elsewhere", id="x")]
    with pytest.raises(UserError, match=f"prompts/{1:064x}: matches no row of files rows.jsonl"):
        source.draw(SIXTY, exclude=[first, elsewhere], count=1)


def test_what_is_no_draw_or_holds_no_text_is_refused(source: Source) -> None:
    for bad in ({"id": "x"}, {"conversations": []}, {"id": "x", "conversations": "Hi"}):
        with pytest.raises(UserError, match="a row is no prompt"):
            source.draw(SIXTY, exclude=[[bad]], count=1)
    with pytest.raises(UserError, match="no texts in it"):
        source.draw(SIXTY, held_out="\n", count=1)
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Config(count=3, quotas={"even": 5, "odd": -2})


def test_a_template_that_refuses_a_prompt_is_named(tokenizer_folder: Path) -> None:
    files = {"tokenizer.json": (tokenizer_folder / "tokenizer.json").read_text()}
    tokenizer = Tokenizer(files | {"chat_template.jinja": "{{ raise_exception('no ' + messages[0].role) }}"})
    meter = Meter(tokenizer, Template(), parts=None, work=None)
    with pytest.raises(
        UserError, match=r"refuses a prompt of turns system, user \(.*no system\); prompts\.system: null"
    ):
        meter._rendered([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}])


def test_overlapping_prompts_are_dropped_and_counted(source: Source) -> None:
    question = "Which of these seven rivers flows through the largest number of European capital cities today?"
    rows = [row(f"Please answer. {question.upper()} Thanks {number}", id=f"q{number}") for number in range(3)]
    drawn, statistics = source.draw([*rows, *SIXTY], held_out=json.dumps({"question": question}), count=60)
    assert statistics["dropped"] == {"overlaps held-out text": 3}
    assert not {one["id"] for one in rows} & {one["id"] for one in drawn}


@pytest.mark.parametrize(("distinct", "dropped"), [(10, 10), (11, 0)])
def test_what_more_than_ten_distinct_prompts_hold_is_boilerplate(source: Source, distinct: int, dropped: int) -> None:
    """Repeats of one prompt do not make its words boilerplate."""
    order = "Answer the following question and put the final result into a box at the very end."
    rows = [row(f"{order} Number {number}", id=f"{copy}-{number}") for number in range(distinct) for copy in range(3)]
    _, statistics = source.draw([*rows, *SIXTY], held_out=json.dumps({"prompt": f"{order} Seven?"}), count=60)
    assert statistics["dropped"].get("overlaps held-out text", 0) == dropped
    assert statistics["dropped"]["duplicate"] == 2 * distinct


def test_the_published_system_rule(source: Source) -> None:
    system = {"role": "system", "content": "Be brief."}
    blank = {"role": "system", "content": " "}
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    rows = [
        {"id": "a", "messages": [blank, user, answer]},
        {"id": "b", "messages": [system, user | {"content": "Yo"}]},
    ]
    drawn, _ = source.draw(rows, count=2, system="You are a helpful assistant.")
    by_id = {one["id"]: one["conversations"] for one in drawn}
    assert by_id["a"] == [{"role": "system", "content": "You are a helpful assistant."}, user]
    assert by_id["b"][0] == system
    assert source.draw(rows, count=2)[0] != drawn


@pytest.mark.parametrize(("name", "least"), [("smol", 400), ("tiny", 200)])
def test_the_shipped_prompts_are_distinct_and_of_several_kinds(source: Source, name: str, least: int) -> None:
    rows = list(read_rows(Path(__file__).parents[3] / "pipelines" / "recipes" / name))
    _, statistics = source.draw(rows, count=len(rows))
    assert len(rows) >= least
    assert statistics["dropped"] == {}
    assert len(statistics["categories"]) >= 5


def test_the_composed_prompts_are_those_of_their_parts_and_share_no_subject_with_the_held_out_ones() -> None:
    folder = Path(__file__).parents[3] / "pipelines" / "recipes" / "smol-h200"
    trained, held_out = runpy.run_path(str(folder / "compose.py"))["compose"]()
    assert parquet.read_table(folder / "prompts.parquet").to_pylist() == trained
    assert parquet.read_table(folder / "held_out.parquet").to_pylist() == held_out
    of = [{row["id"].rpartition("-")[0] for row in rows} for rows in (trained, held_out)]  # category and subject
    assert min(map(len, of)) > 20
    assert of[0].isdisjoint(of[1])
    subjects = json.loads((folder / "parts.json").read_text())["subjects"]["topics"]
    assert len({subject.casefold() for subject in subjects}) == len(subjects)
