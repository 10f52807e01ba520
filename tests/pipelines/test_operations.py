"""The commands of docs/operations.md exist, with the options that it gives them."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from components.checkpoint.step_bytes import Model, step_bytes
from components.measure.cost import A10G, FITTED, H200, Request, predict
from pipelines.cli import SHIPPED, app
from pipelines.recipe import load_recipe
from tests.pipelines.planning import OWN

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text()
BLOCKS = re.findall(r"^ *```\n(.*?)^ *```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [line.strip() for block in BLOCKS for line in block.splitlines()]


def parse(words: list[str]) -> None:
    """Let the command line's own parser take a command; nothing runs."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, words)


def test_every_line_is_a_command() -> None:
    assert {line.split()[0] for line in COMMANDS} == {
        "qdflash",
        "kubectl",
        "docker",
        "export",
        "aws",
        "eksctl",
        "helm",
    }


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("qdflash ")])
def test_qdflash_takes_it(line: str) -> None:
    parse(shlex.split(line, comments=True)[1:])


def test_the_parser_refuses_what_is_not_there() -> None:
    for words, fault in (
        (["images", "build"], "base"),
        (["wait", "RUN", "--retry-often", "5"], "retry-often"),
        (["resubmit", "RUN"], "resubmit"),
    ):
        with pytest.raises(Exception, match=fault):
            parse(words)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("kubectl ")])
def test_kubectl_takes_it(line: str, tmp_path: Path) -> None:
    """It reads a command's options before anything else; here that is a server where there is none."""
    done = kubectl(*shlex.split(line)[1:], "--no-such-option", folder=tmp_path)
    assert "unknown flag: --no-such-option" in done.stderr


def kubectl(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("kubectl")
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
    return subprocess.run([program, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_kubectl_would_refuse_it(tmp_path: Path) -> None:
    assert (
        "unknown flag: --names" in kubectl("logs", "POD", "--names", "x", "--no-such-option", folder=tmp_path).stderr
    )
    assert "unknown command" in kubectl("aply", "--no-such-option", folder=tmp_path).stderr


def test_what_is_applied_renders(tmp_path: Path) -> None:
    given = {line.split(" -k ")[1].split()[0] for line in COMMANDS if " -k " in line}
    folders = {folder for folder in given if "//" not in folder}
    assert folders
    for folder in folders:
        done = kubectl("kustomize", str(ROOT / folder), folder=tmp_path)
        assert done.returncode == 0, done.stderr


def test_what_a_run_costs_follows_from_the_recipe_and_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    from cost_shapes import models

    recipe = load_recipe(SHIPPED["qwen3.5-4b-a10g"], OWN["qwen3.5-4b-a10g"])
    rows = {
        cells[1].strip("` "): cells
        for cells in (line.split("|") for line in TEXT.splitlines() if line.startswith("| `"))
        if "GPU hours" not in cells and len(cells) == 6
    }
    shapes = models()
    bf16, w4 = shapes["BF16"], shapes["W4"]
    qad, sequences = recipe.configs["qad"], recipe.configs["sequences"]
    tokens = {"qad": qad.steps * qad.batch * sequences.sequence_length}
    speeds = {"qad": measured("qad-memory", "chunked")}
    for letter, number, model in (("a", "1", bf16), ("b", "2", w4)):
        prompts, regen, drafter = (
            recipe.configs[f"{one}"] for one in (f"prompts_{letter}", f"regen_{letter}", f"drafter_{number}")
        )
        tokens |= {f"regen_{letter}": prompts.count * regen.max_tokens}
        tokens |= {f"drafter_{number}": drafter.epochs * prompts.count * drafter.max_length}
        speeds |= {
            f"regen_{letter}": predicted(model, regen.parallel),
            f"drafter_{number}": measured("drafter-memory", "micro1"),
        }
    for task, count in tokens.items():
        hours = count / speeds[task] / 3600
        assert f"{round(hours)}" in re.findall(r"\d+", rows[task][4]), task
        assert rows[task][3] == " the same " or f"{round(speeds[task]):,}"[:5] in rows[task][3], task
    two = tokens["qad"] / measured("scale-two-gpus", "qad-2") / 3600
    assert re.findall(r"\d+", rows["qad` on two H200"][4]) == [str(round(2 * two)), str(round(two))]
    measure = recipe.configs["measure_baseline"]
    asked = measure.latency["short"].warmups + measure.latency["short"].samples
    for model, minutes in ((bf16, 13), (w4, 6)):
        lengths = [Request(one.input_tokens, one.output_tokens) for one in measure.latency.values()]
        taken = sum(predict(A10G, FITTED, one, model).seconds for one in lengths)
        assert f"{asked} requests of each of" in TEXT
        assert round(asked * taken / 60) == minutes
    rate = measured("sequences-throughput", "cpu-smollm2")
    assert f"{round(rate, -1):,.0f}" in TEXT
    assert 220_000 * 2_100 / rate / 3600 == pytest.approx(0.5, rel=0.1)


def predicted(model: Model, requests: int) -> float:
    """Return tokens a second of an H200 by the cost model's bytes: weights once a step, the rest once a request."""
    moved = step_bytes(model, 2_100)
    weights = moved["target linears"] + moved["target head"]
    step = (weights + requests * (sum(moved.values()) - weights)) / (H200.bandwidth * FITTED.memory)
    return requests / max(step, FITTED.host_step)


def measured(study: str, variant: str) -> float:
    """Return the tokens a second that a study has for a variant."""
    rows = json.loads((ROOT / "docs" / "results" / f"{study}.json").read_text())["rows"]
    found = [one["value"] for one in rows if (one["variant"], one["metric"]) == (variant, "tokens_per_second")]
    assert len(found) == 1
    return float(found[0])


def test_the_recipe_takes_the_nodes_that_are_shown() -> None:
    shown = {line.partition("--set ")[2].strip("'") for line in COMMANDS if "nodes:" in line}
    assert shown
    for override in shown:
        recipe = load_recipe(SHIPPED["qwen3.5-4b-a10g"], [*OWN["qwen3.5-4b-a10g"], override])
        assert recipe.cluster.placement("qad", "train").nodes == 2
