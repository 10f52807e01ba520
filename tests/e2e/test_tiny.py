"""The tiny recipe, whole: real S3, real vLLM, real training; stages killed while at work; one knob changed late.

The tests of this module run in order on one state folder, as a user's days would.
"""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.command import QDFLASH, qdflash

KILLED = ("regen_a", "qad", "drafter_2")
ON_CPU = ("--set", "deploy.profile=cpu")
PROGRESS = re.compile(r"^\S+ \S+ progress done=(\d+) total=(\d+)", re.MULTILINE)
STARTED = re.compile(r"^\S+ \S+ started .*pid=(\d+)", re.MULTILINE)

pytestmark = pytest.mark.slow


def plan(environment, *words):
    tasks = json.loads(qdflash(environment, "plan", "tiny", "--json", *words).stdout)["tasks"]
    return {task["name"]: task for task in tasks}


def log_of(environment, task):
    path = Path(environment["QDFLASH_HOME"]) / "logs" / "tiny" / f"{task}.log"
    return path.read_text() if path.exists() else ""


def kill_at_work(environment, task):
    """Run until ``task`` has shown k of n done, 0 < k < n; kill it with -9; return k, n and the log's length."""
    seen = len(log_of(environment, task))
    run = subprocess.Popen(
        [QDFLASH, "run", "tiny"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 900
    try:
        while time.monotonic() < deadline:
            text = log_of(environment, task)[seen:]
            shown = [(int(done), int(total)) for done, total in PROGRESS.findall(text)]
            if shown and 0 < shown[-1][0] < shown[-1][1]:
                os.kill(int(STARTED.findall(text)[-1]), signal.SIGKILL)
                assert run.wait(timeout=300) != 0
                return *shown[-1], seen + len(text)
            assert run.poll() is None, f"the run ended before {task} was seen at work:\n{text[-2000:]}"
            time.sleep(0.05)
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(timeout=120)
    raise AssertionError(f"{task} was not seen at work within 900 s:\n{log_of(environment, task)[-2000:]}")


def test_killed_stages_continue_and_redo_only_work_in_flight(own_home):
    killed = {task: kill_at_work(own_home, task) for task in KILLED}
    result = qdflash(own_home, "run", "tiny")
    assert "report" in result.stdout
    for task, (done, total, length) in killed.items():
        shown = PROGRESS.findall(log_of(own_home, task)[length:])
        assert shown, f"{task} showed no progress after it was killed"
        first, last = int(shown[0][0]), int(shown[-1][0])
        assert first >= done, f"{task} had {done} of {total} done when it was killed and began again at {first}"
        assert last == int(shown[-1][1])


def test_everything_is_committed_whole_and_cached(own_home):
    states = {name: task["state"] for name, task in plan(own_home).items()}
    assert {name for name, state in states.items() if state != "cached"} <= {"deploy"}
    listed = json.loads(qdflash(own_home, "artifacts", "list", "--json").stdout)
    assert len(listed) >= len(states) - 1
    assert qdflash(own_home, "artifacts", "verify").returncode == 0
    started = time.monotonic()
    qdflash(own_home, "run", "tiny")
    assert time.monotonic() - started < 60


def test_the_figures_of_the_run_make_sense(own_home):
    tasks = plan(own_home)

    def metrics(name):
        return json.loads(qdflash(own_home, "artifacts", "show", tasks[name]["digest"], "--json").stdout)["metrics"]

    regenerated = metrics("regen_a")
    assert regenerated["rows"] == regenerated["written"] == 140
    assert metrics("qad")["kl_after"] < metrics("qad")["kl_before"]
    assert 0 < metrics("qad")["codes_changed"] < 1
    pair = metrics("measure_pair")
    assert pair["parity"]["passed"]
    assert pair["parity"]["broken"] == 0
    assert [test["draws"] for test in pair["sampled"]["tests"].values()] == [2 * 2 * 8] * 2
    assert pair["repeated"]["greedy"] == {"compared": 4, "equal": 4}
    assert pair["acceptance_length"]["value"] > 1
    assert metrics("gate")["passed"] is True


def test_a_late_knob_reruns_only_what_depends_on_it(own_home):
    changed = plan(own_home, "--set", "gptq.damping=0.02")
    running = {name for name, task in changed.items() if task["state"] == "run"}
    assert running == {"gptq", "bundle", "measure_pair", "gate", "report", "deploy"}
    assert "damping" in changed["gptq"]["why"]
    qdflash(own_home, "run", "tiny", "--set", "gptq.damping=0.02")
    rerun = plan(own_home, "--set", "gptq.damping=0.02")
    assert {name for name, task in rerun.items() if task["state"] == "run"} <= {"deploy"}


def test_an_early_knob_reruns_everything_below(own_home):
    changed = plan(own_home, "--set", "prompts_a.count=20")
    assert all(
        changed[name]["state"] == "run"
        for name in (
            "prompts_a",
            "regen_a",
            "qad",
            "pack",
            "drafter_1",
            "regen_b",
            "drafter_2",
            "gptq",
            "bundle",
            "gate",
        )
    )
    assert changed["teacher"]["state"] == "cached"


def test_the_confirmation_measures_again_judges_serves_and_times(own_home, tmp_path):
    """What is done on an A10G, here by the cpu profile and with few requests; killed while it serves."""
    words = [sys.executable, "-m", "pipelines.confirm", "tiny", str(tmp_path), "--again", *ON_CPU]
    words += ["--latency", "--regime short=32/16 --warmups 1 --samples 3", "--acceptance", "--count 4 --max-tokens 24"]
    before = plan(own_home, *ON_CPU)
    with subprocess.Popen(words, env=own_home, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as first:
        said = list(itertools.takewhile(lambda line: not line.startswith("$ qdflash bench"), first.stderr))
        first.kill()
    assert said[0].count("--force") == 3, "".join(said)
    after = plan(own_home, *ON_CPU)
    changed = {name for name, task in before.items() if task["digest"] != after[name]["digest"]}
    assert {"measure_baseline", "measure_target", "measure_pair"} <= changed
    assert changed <= {"measure_baseline", "measure_target", "measure_pair", "gate", "report", "deploy"}
    until_free(8080)  # the server ends with it

    done = subprocess.run(words, env=own_home, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--force" not in done.stderr
    found = json.loads((tmp_path / "confirmed.json").read_text())
    assert found["gate"]["passed"]
    assert (found["latency"]["short"]["n"], found["latency"]["short"]["failed"]) == (3, 0)
    assert found["acceptance"]["high"] >= found["floor"] > 1
    here = found["machine"]["name"]
    assert here in (tmp_path / "report.html").read_text()
    columns = [f"{run}/{kind}" for run in (f"{here}, before", here) for kind in ("BF16 baseline", "target + drafter")]
    page = (tmp_path / "compare.html").read_text()
    assert [column for column in columns if column not in page] == []


def until_free(port):
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return
        assert time.monotonic() < deadline, f"something still listens on port {port}"
        time.sleep(0.2)


def test_a_corrupted_artifact_is_named(own_home):
    """Last: it damages the store."""
    bundle = plan(own_home)["gptq"]
    listed = json.loads(qdflash(own_home, "artifacts", "show", bundle["digest"], "--json").stdout)
    code = (
        "import sys; from components.store.backend import Store\n"
        "from pipelines.connect import connect\n"
        "store = connect(); key = sys.argv[1]; data = bytearray(store.read(key)); data[len(data) // 2] ^= 1\n"
        "store.write(key, bytes(data))"
    )
    key = f"gptq/{bundle['digest']}/{listed['attempt']}/model.safetensors"
    subprocess.run([sys.executable, "-c", code, key], env=own_home, check=True, timeout=60)
    result = qdflash(own_home, "artifacts", "verify", bundle["digest"], check=False)
    assert result.returncode == 2
    assert "model.safetensors" in result.stdout + result.stderr
