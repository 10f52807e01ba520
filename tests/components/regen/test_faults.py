"""The stage's own command line, broken at each of its writes to the store in turn, then run again.

Store, lease, commit and resume are the real ones; only the engines are replaced, by a generator of answers.
"""

import json
import os
import random
import signal
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from components.chats.rows import read_rows
from components.contract.cli import main
from components.contract.context import Input
from components.contract.digest import stage_digest
from components.regen import replicas, stage
from components.store.artifact import commit
from components.store.backend import Store

IDS = [f"row-{number}" for number in range(22)]
CONFIG = stage.Config(shard_rows=4, parallel=2)
WRITES = ("write", "create", "replace", "upload", "delete")


class Engines:
    """Answers in a random order; every answer is new, so a row that was done again shows."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def answer(self, rows: list[dict]):
        for row in random.sample(rows, len(rows)):
            new = {"prompt_token_ids": [1], "token_ids": [2, 3], "finish_reason": "stop", "text": uuid.uuid4().hex}
            yield {**row, **new}


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    store, source = Store(str(tmp_path / "store")), tmp_path / "prompts"
    source.mkdir()
    rows = [{"id": row_id, "category": "chat", "conversations": []} for row_id in IDS]
    (source / "part-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = {"version": 1, "config": {}, "inputs": {}, "salt": None, "metrics": {}, "versions": {}}
    prompts = commit(store, "prompts", "1" * 64, source, manifest)[0].uri
    model = commit(store, "model", "2" * 64, source, manifest)[0].uri
    digest = stage_digest("regen", stage.VERSION, CONFIG, {"prompts": ["1" * 64], "model": ["2" * 64]})
    return [
        *("--config", CONFIG.model_dump_json(), "--input", f"prompts={prompts}", "--input", f"model={model}"),
        *("--output", store.uri(f"regen/{digest}")),
    ]


def kill(_key: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def preempt(_key: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fill(_key: str) -> None:
    raise OSError(28, "No space left on device")


def disconnect(key: str) -> None:
    raise ConnectionError(f"no answer for {key}")


def run(argv: list[str], at: int | None, fault: Callable[[str], None], after: bool = False) -> int | None:
    """Run the stage in a child, with a fault at its write number ``at``; return its exit code, None when killed."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    left = at

    def broken(name: str, real: Callable) -> Callable:
        def write(self: Store, key: str, *rest: object) -> object:
            nonlocal left
            target = str(rest[0]) if name == "upload" else key
            is_here = left == 0 and "_lease" not in target
            if left is not None and "_lease" not in target:
                left -= 1
            with self._errors(target):
                if is_here and not after:
                    fault(target)
                done = real(self, key, *rest)
                if is_here and after:
                    fault(target)
            return done

        return write

    try:
        replicas.Replicas = Engines
        for name in WRITES:
            setattr(Store, name, broken(name, getattr(Store, name)))
        code = main("regen", argv)
        os._exit(99 if left is not None and left >= 0 and code == 0 else code)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(98)


def kept(argv: list[str], tmp_path: Path) -> dict[str, str]:
    """Return what the store's work area holds: id to text."""
    rows = {}
    for path in sorted(tmp_path.glob("store/_work/regen/*/parts/rows/*")):
        for line in path.read_text().split("\n"):
            row = json.loads(line)
            assert row["id"] not in rows
            rows[row["id"]] = row["text"]
    return rows


CASES = [
    pytest.param(fault, code, after, id=f"{fault.__name__}-{'after' if after else 'before'}", marks=marks)
    for after in (False, True)
    for fault, code in ((kill, None), (preempt, 75), (fill, 2), (disconnect, 75))
    for marks in [() if fault is kill and not after else pytest.mark.slow]
]


@pytest.mark.parametrize(("fault", "code", "after"), CASES)
def test_a_fault_at_any_write_loses_and_repeats_nothing(
    argv: list[str], tmp_path: Path, fault: Callable[[str], None], code: int | None, after: bool
) -> None:
    broken = 0
    while True:
        found = run(argv, broken, fault, after)
        if found == 99:  # there is no such write: all were broken in turn
            break
        saved = kept(argv, tmp_path)
        assert found == code or (found == 0 and fault is preempt), f"write {broken}"
        committed = (Path(argv[-1]) / "_manifest.json").exists()
        assert run(argv, None, fault) == 0
        rows = {row["id"]: row["text"] for row in read_rows(Input(argv[-1]).path)}
        assert sorted(rows) == sorted(IDS), f"write {broken}"
        if not committed:
            assert {row_id: rows[row_id] for row_id in saved} == saved, f"write {broken}"
        assert list(read_rows(Input(argv[-1]).path)) != []
        broken += 1
        Store(argv[-1].rsplit("/", 2)[0]).delete("regen")
        Store(argv[-1].rsplit("/", 2)[0]).delete("_work")
    assert broken >= 12
