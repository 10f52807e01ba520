"""The pool of engines, its pipes and processes as they are; only vLLM itself is replaced by a stand-in."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from components.chats.template import Template
from components.contract.errors import StageError, TransientError, UserError
from components.contract.log import Log
from components.regen import replicas as module
from components.regen.engine import Asked, Fault
from components.regen.generate import Progress, generate
from components.regen.replicas import Replicas
from components.regen.shards import Writer, shards
from components.serving.profiles import Profile
from components.store.backend import Store
from components.store.work import Work

STAND_IN = '''
"""Answers rows a few at a time, in its own order; what a row holds says what happens to it."""

import os
import signal
import time
from pathlib import Path

from components.regen import worker
from components.regen.engine import Fault


class Engine:
    def __init__(self, model, profile, asked):
        if (says := Path(model, "start")).exists():
            raise RuntimeError(says.read_text())
        self.log, self.rows, self.most = Path(model, "log"), [], profile.max_num_seqs

    @property
    def busy(self):
        return bool(self.rows)

    def add(self, row):
        self.write(f"try {row['id']} {len(self.rows)}")
        if row["does"] == "refused":
            raise ValueError("too long")
        self.rows.append(row)

    def step(self):
        time.sleep(0.005)
        running = self.rows[: self.most]
        for row in running[::-1]:
            if row["does"] == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            if row["does"] == "raises":
                raise RuntimeError("CUDA out of memory")
            self.rows.remove(row)
            if row["does"] == "fails":
                yield Fault(row["id"], "aborted", transient=True)
            else:
                answer = {"token_ids": [1, 2], "finish_reason": "stop", "text": "a" * row["size"]}
                yield {**row, **answer, "engine": os.getpid()}

    def write(self, line):
        with self.log.open("a") as file:
            file.write(line + "\\n")

    def close(self):
        self.write("closed")


def work(*arguments):
    worker.Engine = Engine
    worker.work(*arguments)
'''


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the stand-in's log, which is what :func:`pool` starts instead of vLLM."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    import stand_in

    monkeypatch.setattr(module, "work", stand_in.work)
    yield tmp_path
    del sys.modules["stand_in"]


def pool(model: Path, count: int = 1, parallel: int = 4) -> Replicas:
    return Replicas(model, Profile(max_num_seqs=parallel), Asked(Template(), {}, "m"), count)


def rows(number: int, size: int = 10, **does: str) -> list[dict]:
    return [{"id": f"r{n}", "does": does.get(f"r{n}", "answers"), "size": size} for n in range(number)]


def tries(model: Path) -> Counter:
    return Counter(line.split()[1] for line in (model / "log").read_text().splitlines() if line.startswith("try"))


def test_every_row_comes_back_once_from_all_engines(model: Path) -> None:
    with pool(model, 3) as engines:
        first = list(engines.answer(rows(40)))
        outcomes = list(engines.answer(rows(800)))
    assert sorted(one["id"] for one in first) == sorted(f"r{n}" for n in range(40))
    assert sorted(one["id"] for one in outcomes) == sorted(f"r{n}" for n in range(800))
    assert len({one["engine"] for one in first + outcomes}) > 1
    assert set(tries(model).values()) == {1, 2}
    assert (model / "log").read_text().count("closed") >= 2


def test_large_rows_in_both_directions_do_not_block(model: Path) -> None:
    many = [{**row, "padding": "x" * 50_000} for row in rows(200, size=50_000)]
    with pool(model, parallel=64) as engines:
        assert len(list(engines.answer(many))) == 200


def test_a_row_fails_after_three_tries(model: Path) -> None:
    with pool(model) as engines:
        outcomes = list(engines.answer(rows(20, r3="refused", r5="fails")))
    faults = {one.row_id: one for one in outcomes if isinstance(one, Fault)}
    assert (faults["r3"].error, faults["r3"].transient) == ("ValueError: too long", False)
    assert (faults["r5"].error, faults["r5"].transient) == ("aborted", True)
    assert len(outcomes) == 20
    assert len(faults) == 2
    assert {row: n for row, n in tries(model).items() if n > 1} == {"r3": 3, "r5": 3}


@pytest.mark.parametrize("death", ["kills", "raises"])
def test_a_row_that_kills_engines_takes_no_other_with_it(model: Path, death: str) -> None:
    with pool(model, 2) as engines:
        outcomes = list(engines.answer(rows(60, r7=death)))
    faults = [one for one in outcomes if isinstance(one, Fault)]
    assert [fault.row_id for fault in faults] == ["r7"]
    assert faults[0].transient
    assert sorted(one["id"] for one in outcomes if not isinstance(one, Fault)) == sorted(
        f"r{n}" for n in range(60) if n != 7
    )
    assert tries(model)["r7"] == 3


@pytest.mark.parametrize(("cause", "kind"), [("CUDA out of memory", TransientError), ("no such layer", StageError)])
def test_an_engine_that_does_not_start_says_why(model: Path, cause: str, kind: type[Exception]) -> None:
    (model / "start").write_text(cause)
    with pytest.raises(StageError, match=cause) as raised, pool(model):
        pass
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    ("does", "kind", "code"),
    [("refused", StageError, 1), ("fails", TransientError, 75)],
)
def test_too_many_failures_end_the_stage_by_their_cause(
    model: Path, tmp_path: Path, does: str, kind: type[StageError], code: int
) -> None:
    work = Work(Store(str(tmp_path / "store")), "_work/x")
    progress = Progress(0, 30, allowed=2)
    some = rows(30, r1=does, r2=does, r3=does, r4="refused" if does == "fails" else "fails")
    with pytest.raises(kind, match="max_failed_share") as raised, pool(model) as engines, Writer(work, 4) as writer:
        generate(engines, some, progress, writer, Log("regen"))
    assert (type(raised.value), raised.value.exit_code) == (kind, code)
    kept = [row["id"] for shard in shards(work) for row in shard]
    assert sorted(kept) == sorted(f"r{n}" for n in (0, *range(5, 30)))


def test_more_replicas_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert module._environments(2, "cuda") == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    with pytest.raises(UserError, match="replicas: 3, but 2 GPUs"):
        module._environments(3, "cuda")
