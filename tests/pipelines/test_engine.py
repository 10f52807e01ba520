"""The engine with real processes: order, failures, retries, kills, and nothing left behind."""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from components.contract.log import Log
from components.store.artifact import read_manifest
from components.store.backend import Store
from pipelines import engine as engine_module
from pipelines.engine import Engine
from pipelines.processes import Processes
from pipelines.progress import Attempt, Display, Progress
from tests.conftest import Probe
from tests.pipelines.planning import Builder


@pytest.fixture(autouse=True)
def this_python_and_short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QDFLASH_PYTHON_CORE", sys.executable)
    monkeypatch.setattr(engine_module, "PAUSE_SECONDS", 0.1)


@pytest.fixture
def builder(probe: Probe, tmp_path: Path) -> Builder:
    return Builder(probe, Store(str(tmp_path / "store")))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_order_and_cached_tasks(builder: Builder, home: Path):
    builder.add("a", steps=1)
    builder.add("b", needs=["a"], steps=1)
    builder.add("c", needs=["b"], steps=1)
    builder.add("old", state="cached")
    code, states, text = builder.run()
    assert (code, states) == (0, {"a": "done", "b": "done", "c": "done", "old": "cached"})
    assert builder.probe.trace() == ["a 0", "b 0", "c 0"]
    artifact = read_manifest(builder.store, "probe", builder.tasks["c"].digest)
    assert artifact is not None
    assert builder.store.read(artifact.key("text.txt")) == b"c b a"
    assert [line.split()[1:3] for line in text.splitlines()][:2] == [["a", "started"], ["a", "done"]]
    log = (home / "logs" / "probe" / "a.log").read_text()
    assert log.startswith("=== ")
    assert "attempt 1" in log
    assert "progress done=1 total=1" in log


def test_a_failure_stops_what_needs_it_and_nothing_else(builder: Builder):
    builder.add("good", steps=1)
    builder.add("bad", fail="GateError", steps=0)
    builder.add("below", needs=["bad"])
    builder.add("lower", needs=["below"])
    builder.add("report", needs=["good"], soft=["bad", "lower"], steps=1)
    code, states, text = builder.run()
    assert code == 3
    expected = {"good": "done", "bad": "failed", "below": "not run", "lower": "not run", "report": "done"}
    assert states == expected
    assert "bad failed" in text
    assert "probe: told to fail; do not tell it to" in text


def test_a_transient_failure_is_tried_again(builder: Builder, home: Path):
    builder.add("once", fail="FailOnce", steps=1)
    code, states, text = builder.run()
    assert (code, states) == (0, {"once": "done"})
    assert "will be tried again" in text
    assert builder.probe.trace() == ["once 0"]
    assert (home / "logs" / "probe" / "once.log").read_text().count("=== ") == 2


@pytest.mark.slow
def test_retries_end(builder: Builder, home: Path):
    builder.add("never", fail="TransientError", steps=0)
    code, states, _ = builder.run()
    assert (code, states) == (75, {"never": "failed"})
    assert (home / "logs" / "probe" / "never.log").read_text().count("=== ") == 1 + engine_module.RETRIES


@pytest.mark.slow
def test_tasks_run_beside_each_other_only_where_cpus_and_memory_allow(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(engine_module, "_memory_gb", lambda: 8.0)
    for name, cpu, memory in (
        ("a", 1, 1.0),
        ("b", 1, 1.0),
        ("wide", 2, 1.0),
        ("large", 1, 7.5),
        ("too large", 9, 99.0),
    ):
        builder.add(name, cpu=cpu, memory_gb=memory, steps=1, seconds=0.5)
    most: list[set[str]] = []
    engine = Engine(builder.plan(), Display(Console(file=io.StringIO())), Processes())
    collect = engine._collect
    monkeypatch.setattr(engine, "_collect", lambda: (most.append(set(engine._running)), collect()))
    assert engine.run() == 0
    assert {"a", "b"} in most
    for running in most:
        assert "too large" not in running or len(running) == 1
        assert "wide" not in running or len(running) == 1
        assert len(running) <= 2


def test_a_blocked_task_is_an_error_before_anything_starts(builder: Builder):
    builder.add("a", steps=1)
    builder.add("b", state="blocked")
    with pytest.raises(engine_module.UserError, match="b: "):
        builder.run()
    assert builder.probe.trace() == []


@pytest.mark.slow
def test_what_a_killed_task_leaves_behind_is_ended(builder: Builder):
    builder.add("a", orphan=True, steps=0, fail="Bug")
    code, states, _ = builder.run()
    assert (code, states) == (1, {"a": "failed"})
    orphan = int(builder.probe.trace()[0].split()[1])
    assert not alive(orphan)


ENGINE = """
import sys, pickle
import components
from rich.console import Console
components.__path__.append(sys.argv[2])
from pipelines.engine import Engine
from pipelines.processes import Processes
from pipelines.progress import Display
plan = pickle.load(open(sys.argv[1], "rb"))
raise SystemExit(Engine(plan, Display(Console()), Processes()).run())
"""


def start_engine(builder: Builder, tmp_path: Path) -> subprocess.Popen[str]:
    import pickle

    (tmp_path / "plan").write_bytes(pickle.dumps(builder.plan()))
    argv = [sys.executable, "-c", ENGINE, str(tmp_path / "plan"), str(tmp_path / "path" / "components")]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def stage_pid(home: Path, task: str) -> int:
    log = home / "logs" / "probe" / f"{task}.log"
    wait_for(lambda: log.exists() and "pid=" in log.read_text())
    return int(log.read_text().rsplit("pid=", 1)[1].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ending_the_engine_ends_everything_and_the_next_run_continues(
    number: signal.Signals, builder: Builder, home: Path, tmp_path: Path
):
    builder.add("a", steps=5, seconds=0.4, orphan=True)
    process = start_engine(builder, tmp_path)
    wait_for(lambda: len(builder.probe.trace()) >= 3)
    child = stage_pid(home, "a")
    orphan = int(builder.probe.trace()[0].split()[1])
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == (-9 if number == signal.SIGKILL else 75)
    assert "Traceback" not in output
    wait_for(lambda: not alive(child) and not alive(orphan), 30)
    assert read_manifest(builder.store, "probe", builder.tasks["a"].digest) is None
    code, states, _ = builder.run()
    assert (code, states) == (0, {"a": "done"})
    steps = [line for line in builder.probe.trace() if line.startswith("a ")]
    assert set(steps) == {f"a {step}" for step in range(5)}
    assert len(steps) <= 6


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_signal_while_a_task_is_started_ends_it_and_starts_no_other(early: bool, builder: Builder):
    class Interrupted(Processes):
        def start(self, task, log):
            if early:
                signal.raise_signal(signal.SIGINT)
            job = super().start(task, log)
            if not early:
                signal.raise_signal(signal.SIGINT)
            return job

    builder.runner = lambda _: Interrupted()
    builder.add("a", steps=600, seconds=0.1)
    builder.add("b", steps=600, seconds=0.1)
    began = time.monotonic()
    code, states, _ = builder.run()
    assert (code, states) == (75, {"a": "failed", "b": "not run"})
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_killing_the_task_or_its_guard_fails_the_run_and_the_next_one_continues(
    builder: Builder, home: Path, tmp_path: Path
):
    builder.add("a", steps=4, seconds=0.5)
    for victim in ("task", "guard"):
        process = start_engine(builder, tmp_path)
        seen = len(builder.probe.trace())
        wait_for(lambda: len(builder.probe.trace()) > seen)  # noqa: B023
        child = stage_pid(home, "a")
        guard = int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(child if victim == "task" else guard, signal.SIGKILL)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 75
        assert "signal 9; run again to continue" in output
        wait_for(lambda: not alive(child), 10)  # noqa: B023
    code, states, _ = builder.run()
    assert (code, states) == (0, {"a": "done"})
    steps = [line for line in builder.probe.trace() if line.startswith("a ")]
    assert set(steps) == {f"a {step}" for step in range(4)}
    assert len(steps) <= 6


def test_a_task_that_is_killed_when_it_has_committed_is_done(builder: Builder):
    task = builder.add("a", steps=1)
    then_die = (
        "import os, runpy\n"
        "try: runpy.run_module('probe', run_name='__main__')\n"
        "except SystemExit: os.kill(os.getpid(), 9)\n"
    )
    builder.tasks["a"] = replace(task, argv=("-c", then_die, *task.argv[2:]))
    code, states, _ = builder.run()
    assert (code, states) == (0, {"a": "done"})


def test_whatever_a_name_holds_comes_back_from_the_log(tmp_path: Path):
    attempt, state = Attempt(tmp_path / "task.log"), Progress("task", "running")
    names = ['"a\\q".jsonl', "two\n12:00:00 prompts progress foo", "a\u2028b", "x y", "[/b]"]
    for number, name in enumerate(names, 1):
        with attempt.path.open("a") as log:
            Log("prompts", log).progress(number, number, shard=name)
        assert attempt.read_into(state)
        assert (state.done, state.detail) == (number, f"shard {name}")
    with attempt.path.open("a") as log:
        log.write("12:00:00 library progress of its own\n")
    assert not attempt.read_into(state)
    attempt.path.unlink()
    assert not attempt.read_into(state)


def test_progress_says_what_it_counts(tmp_path: Path):
    attempt, state = Attempt(tmp_path / "x.log"), Progress("gptq", "running")
    with attempt.path.open("a") as log:
        Log("gptq", log).progress(22, 47, what="features", loss=0.5)
    attempt.read_into(state)
    assert state.share() == "22/47 features loss 0.5"


def test_a_damaged_copy_of_a_local_file_is_mended(builder: Builder, tmp_path: Path):
    (tmp_path / "file").write_text("right")
    builder.store.write("_files/x/file", b"wrong")
    builder.tasks["a"] = replace(builder.add("a"), files_to_upload=((tmp_path / "file", "_files/x/file"),))
    assert builder.run()[0] == 0
    assert builder.store.read("_files/x/file") == b"right"
