import hashlib
import json
import sys
from pathlib import Path

import pytest

from components.chats.rows import read_rows
from components.contract.context import Input, Inputs, Output
from components.contract.errors import UserError
from components.contract.log import Log
from components.regen import stage
from components.regen.answers import row_seed, split_reasoning
from components.regen.shards import Writer
from components.regen.statistics import statistics
from components.store.artifact import commit
from components.store.backend import Store
from components.store.work import Work


def test_seeds_depend_on_id_and_base_seed_alone() -> None:
    seeds = {row_seed(str(number), 0) for number in range(2000)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert row_seed("a", 0) != row_seed("a", 1)
    first = hashlib.sha256(b"0:a").hexdigest()[:8]
    assert row_seed("a", 0) == int(first, 16) // 2


@pytest.mark.parametrize(
    ("text", "prompt", "thinking", "expected"),
    [
        ("Paris.", "…<think>\n\n</think>\n\n", False, (None, "Paris.")),
        ("so\n</think>\n\nParis.", "…<think>\n", True, ("so", "Paris.")),
        ("<think>\nso\n</think>\n\nParis.", "…assistant\n", True, ("so", "Paris.")),
        ("still at i", "…<think>\n", True, ("still at i", "")),
        ("<think>\nstill at i", "…assistant\n", True, ("still at i", "")),
        ("Paris.", "…assistant\n", True, (None, "Paris.")),
        ("a </think> b", "…assistant\n", False, (None, "a </think> b")),
    ],
)
def test_reasoning_is_its_own_field(text: str, prompt: str, thinking: bool, expected: tuple) -> None:
    assert split_reasoning(text, prompt, thinking) == expected


def row(name: str, reason: str = "stop", tokens: int = 3, **fields: object) -> dict:
    return {
        "id": name,
        "category": "chat",
        "conversations": [{"role": "user", "content": name}],
        "prompt_token_ids": [1, 2],
        "token_ids": [5] * tokens,
        "text": "a\u2028b",
        "reasoning": None,
        "finish_reason": reason,
        "sampling": {},
        "seed": 0,
        **fields,
    }


def test_statistics_count_by_category() -> None:
    rows = [row("a"), row("b", "length", 5), row("c", category="code")]
    counted = statistics(rows)
    assert (counted["rows"], counted["generated_tokens"], counted["truncated_share"]) == (3, 11, 0.3333)
    assert counted["finish_reasons"] == {"length": 1, "stop": 2}
    assert counted["categories"]["chat"] == {
        "rows": 2,
        "prompt_tokens": 4,
        "generated_tokens": 8,
        "truncated_share": 0.5,
    }


class Bench:
    """A stage call whose rows are already in the store's work: no model is needed, nor may one be loaded."""

    def __init__(self, tmp_path: Path, ids: list[str]) -> None:
        store = Store(str(tmp_path / "store"))
        source = tmp_path / "prompts"
        source.mkdir()
        lines = [json.dumps({"id": name, "category": "chat", "conversations": []}) for name in ids]
        (source / "part-00000.jsonl").write_text("".join(f"{line}\n" for line in lines))
        manifest = {"version": 1, "config": {}, "inputs": {}, "salt": None, "metrics": {}, "versions": {}}
        artifact, _ = commit(store, "prompts", "1" * 64, source, manifest)
        self.inputs = Inputs(
            {"prompts": [Input(artifact.uri)], "model": [Input(str(tmp_path / "store/model" / ("2" * 64)))]}
        )
        out = tmp_path / "out"
        out.mkdir()
        self.output = Output(out, tmp_path, Work(store, "_work/regen/x"), Log("regen"))

    def commit(self, *rows: dict) -> None:
        with Writer(self.output.work, 16) as writer:
            for one in rows:
                writer.add(one)

    def run(self, **config: object) -> dict:
        return stage.run(stage.Config.model_validate(config), self.inputs, self.output)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))


def test_a_fully_resumed_stage_loads_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "torch"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it would raise
    bench = Bench(tmp_path, ["a", "b", "c"])
    bench.commit(row("b"), row("a", "length"))
    bench.commit(row("c"))
    metrics = bench.run()
    assert [one["id"] for one in read_rows(bench.output.path)] == ["b", "a", "c"]
    assert (metrics["rows"], metrics["written"], metrics["failed"], metrics["tokens_per_second"]) == (3, 3, 0, None)
    assert (metrics["resumed"], metrics["failed_share"]) == (3, 0)
    assert next(read_rows(bench.output.path))["text"] == "a\u2028b"


def test_rows_that_a_process_without_its_lease_wrote_as_well_count_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ["a", "b", "c"])
    with Writer(bench.output.work, 16) as late:
        bench.commit(row("a"), row("b"))
        late.add(row("b", "length"))
        late.add(row("c"))
    assert len(bench.output.work.names("rows/")) == 2
    assert bench.run()["rows"] == 3
    assert sorted(one["id"] for one in read_rows(bench.output.path)) == ["a", "b", "c"]


def test_recorded_failures_are_not_tried_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ["a", "b"])
    bench.commit(row("a"))
    bench.output.work.put(stage.FAILURES, b'{"b": "prompt too long"}')
    metrics = bench.run(max_failed_share=0.5)
    assert (metrics["rows"], metrics["failed"], metrics["failed_share"]) == (1, 1, 0.5)
    assert json.loads((bench.output.path / "statistics.json").read_text())["failures"] == {"b": "prompt too long"}


def test_truncated_answers_are_counted_and_dropped_when_asked(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ["a", "b"])
    bench.commit(row("b"), row("a", "length"))
    metrics = bench.run(truncated="drop")
    assert [one["id"] for one in read_rows(bench.output.path)] == ["b"]
    assert (metrics["rows"], metrics["written"], metrics["truncated_share"]) == (2, 1, 0.5)


@pytest.mark.parametrize(("ids", "message"), [([], "no rows"), (["a", "b", "a"], "id a occurs twice")])
def test_bad_prompts_are_refused(tmp_path: Path, ids: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Bench(tmp_path, ids).run()
