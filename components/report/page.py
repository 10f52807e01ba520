"""Fill the page's template from the tasks' records."""

import dataclasses
from importlib.resources import files
from typing import Any

import jinja2

from components.report import plots
from components.report.collect import TaskRecord

Tasks = dict[str, TaskRecord]
COLUMNS = {"measure_baseline": "BF16 baseline", "measure_target": "W4A16 target", "measure_pair": "target + drafter"}

TERMS = {
    "target, drafter, pair": "The target is the model that is served. The drafter proposes a block of tokens, which "
    "the target verifies in one pass; what it accepts is what it would have said alone. The pair is both.",
    "W4A16": "Weights of 4 bits in groups that share a scale, activations of 16 bits.",
    "acceptance length": "Tokens that one verifying pass of the target yields: the accepted ones and one of its own. "
    "1 means that nothing drafted was accepted; a bigram drafter, a table of token pairs, is the bar to clear.",
    "accept-length, held-out": "The same, predicted in training: on stored answers instead of a running server.",
    "greedy parity": "Whether speculation changes what the target answers at temperature 0. Equal: the same tokens. "
    "Tie: they part where two tokens are about equally likely. Broken: neither, which must not be.",
    "KL to the teacher": "How far the quantised model's next-token distribution is from the BF16 model's, in nats; 0 "
    "is none. QAD, quantization-aware distillation, lowers it by moving weights on their 4-bit grid.",
    "codes changed": "The share of 4-bit weights that QAD moved to another value.",
    "no power": "The baseline's own interval includes guessing: the score can show no difference and gates nothing.",
    "bytes moved per step": "What a decoding step reads and writes of a GPU's memory; at batch 1 it bounds the time.",
}
"""What a reader meets on the page, in words."""


def render(title: str, tasks: Tasks, samples: int) -> tuple[str, list[str]]:
    """Return the HTML of a run and the names of the sections it has."""
    return render_runs(title, {"": tasks}, samples)


def render_runs(title: str, runs: dict[str, Tasks], samples: int) -> tuple[str, list[str]]:
    """Return the HTML of one or several runs, side by side under their names, and the names of its sections."""
    tasks = {
        _called(run, name): dataclasses.replace(task, name=_called(run, name))
        for run, its in runs.items()
        for name, task in its.items()
    }
    each = [{name: task for name, task in tasks.items() if _run(name) == run} for run in runs]
    sections = {
        "verdict": [{"run": _run(name), **task.metrics} for name, task in tasks.items() if task.stage == "gate"],
        "comparison": comparison(tasks),
        "differences": differences(runs),
        "notes": list(dict.fromkeys(note for one in each for note in notes(one))),
        "figures": figures(tasks),
        "training": [row for one in each for row in training(one)],
        "samples": side_by_side(tasks, samples),
        "lineage": list({task.uri: task for task in tasks.values()}.values()),
    }
    told = {"terms": TERMS, "makers": {task.uri: task for task in tasks.values()}}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = _number
    template = environment.from_string(files("components.report").joinpath("page.html.jinja").read_text("utf-8"))
    machines = {_run(name): task.get("machine") or {} for name, task in tasks.items() if _part(name) in COLUMNS}
    measured = {"columns": list(_measures(tasks)), "machines": machines}
    html = template.render(title=title, runs=list(runs), **measured, **told, **sections)
    return html, [name for name, content in sections.items() if content]


def differences(runs: dict[str, Tasks]) -> list[dict[str, Any]]:
    """Rows ``{field, values}`` of every config field that is not the same in all runs, one value a run."""
    settings = [
        {f"{name}.{path}": value for name, task in tasks.items() for path, value in _flat(task.config)}
        for tasks in runs.values()
    ]
    fields = dict.fromkeys(field for one in settings for field in one)
    rows = [{"field": field, "values": [one.get(field, "–") for one in settings]} for field in fields]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def comparison(tasks: Tasks) -> list[dict[str, Any]]:
    """Rows ``{metric, cells}`` of the headline table, one cell per measured variant."""
    measured = list(_measures(tasks).values())
    rows = []
    for quality in _keys(measured, "quality"):
        rows.append(
            {"metric": f"{quality} (score)", "cells": [_score(task.get(f"quality.{quality}")) for task in measured]}
        )
    if any(task.get("acceptance_length") for task in measured):
        rows.append(
            {
                "metric": "acceptance length",
                "cells": [_interval(task.get("acceptance_length"), "value") for task in measured],
            }
        )
    for regime in _keys(measured, "latency"):
        rows.append(
            {
                "metric": f"latency {regime} (ms, median)",
                "cells": [_interval(task.get(f"latency.{regime}"), "median_ms") for task in measured],
            }
        )
    if any(task.step_bytes for task in measured):
        rows.append({"metric": "bytes moved per step (MB)", "cells": [_megabytes(task, 1.0) for task in measured]})
        per_token = [_megabytes(task, task.get("acceptance_length.value") or 1.0) for task in measured]
        rows.append({"metric": "bytes moved per token (MB)", "cells": per_token})
    if any(task.get("parity") for task in measured):
        rows.append(
            {
                "metric": "greedy parity with the target alone",
                "cells": [_parity(task.get("parity")) for task in measured],
            }
        )
    return rows


def notes(tasks: Tasks) -> list[str]:
    """What a reader must know before quoting a figure of this run."""
    found = []
    if any((task.get("machine") or {}).get("device") == "cpu" for task in _measures(tasks).values()):
        found.append(
            "Measured on a CPU, where arithmetic and not memory takes the time: drafting and verifying a block costs "
            "about what its tokens save, so speculation is slower here, or hardly faster, than none. Acceptance "
            "lengths and parity carry over to a GPU, latencies not."
        )
    for task in tasks.values():
        if task.stage == "model" and (task.config.get("source") or {}).get("kind") == "wheel":
            found.append(
                "The teacher is a dequantised Q4_1 file, already on a 4-bit grid of its own; the gap between plain "
                "rounding and QAD is therefore not the paper's."
            )
    return found


def training(tasks: Tasks) -> list[dict[str, Any]]:
    """Rows ``{what, value}`` on regeneration, QAD, the two drafter stages and how well they predict serving."""
    rows = []
    served = next(
        (task.get("acceptance_length.value") for task in tasks.values() if task.get("acceptance_length")), None
    )
    for task in tasks.values():
        if task.stage == "regen":
            rows.append({"what": f"{task.name}: answers", "value": _answers(task)})
        if task.stage == "qad":
            rows.append(
                {
                    "what": f"{task.name}: held-out KL to the teacher",
                    "value": f"{_number(task.get('kl_before'))} → {_number(task.get('kl_after'))}",
                }
            )
            rows.append({"what": f"{task.name}: share of codes changed", "value": _number(task.get("codes_changed"))})
        if task.stage == "drafter":
            for kind, value in (task.get("accept_length") or {}).items():
                rows.append(
                    {"what": f"{task.name}: held-out accept-length, {kind}", "value": _interval(value, "value")}
                )
        if task.stage == "gptq" and task.get("accept_length.after"):
            predicted = task.get("accept_length.after.value")
            rows.append(
                {
                    "what": f"{task.name}: held-out accept-length, quantised",
                    "value": _interval(task.get("accept_length.after"), "value"),
                }
            )
            if served is not None:
                what = f"{task.name}: how much longer the served acceptance length is"
                rows.append({"what": what, "value": _number(served - predicted)})
    return rows


def _answers(task: TaskRecord) -> str:
    rate = task.get("tokens_per_second")
    said = [
        f"{task.get('rows')} rows, {task.get('generated_tokens')} tokens generated",
        f"{_number(task.get('truncated_share'))} of them cut at the limit",
        f"{task.get('failed')} failed",
        f"{_number(rate)} tokens/s" if rate else "all resumed",
    ]
    return "; ".join(said)


def figures(tasks: Tasks) -> list[str]:
    """Every SVG that the run has data for."""
    drawn = []
    for task in tasks.values():
        if task.stage == "qad" and task.curve:
            drawn.append(_curve(task, _called(_run(task.name), "QAD: loss"), "KL (nats)", ["loss"]))
            drawn.append(
                _curve(task, _called(_run(task.name), "QAD: held-out KL to the teacher"), "KL (nats)", ["kl"])
            )
        if task.stage == "drafter" and task.curve:
            drawn.append(_curve(task, f"{task.name}: loss", "nats", ["loss"]))
            drawn.append(_curve(task, f"{task.name}: held-out accept-length", "tokens", ["accept_length"]))
    measured = _measures(tasks)
    per_position: plots.Series = {
        _called(_run(task.name), name): (list(range(1, len(values) + 1)), values)
        for task in measured.values()
        for name, values in (
            ("drafter", task.get("acceptance_length.per_position")),
            ("bigram", task.get("acceptance_length.bigram.per_position")),
        )
        if values
    }
    if per_position:
        drawn.append(plots.lines("Acceptance per position", "position in the block", "share accepted", per_position))
    regimes = _keys(list(measured.values()), "latency")
    if regimes:
        groups = {
            label: [
                (entry["median_ms"], entry["low"], entry["high"])
                for entry in (task.get(f"latency.{regime}") for regime in regimes)
                if entry
            ]
            for label, task in measured.items()
        }
        drawn.append(
            plots.bars("Latency, batch 1", "ms", regimes, {k: v for k, v in groups.items() if len(v) == len(regimes)})
        )
    parts = list(dict.fromkeys(part for task in measured.values() for part in task.step_bytes))
    if parts:
        sizes = {
            label: [(task.step_bytes.get(part, 0) / 1e6,) * 3 for part in parts]
            for label, task in measured.items()
            if task.step_bytes
        }
        drawn.append(
            plots.bars("Bytes moved per step, as stored", "MB", [part.replace(" ", "\n") for part in parts], sizes)
        )
    return [figure for figure in drawn if figure]


def side_by_side(tasks: Tasks, count: int) -> list[dict[str, Any]]:
    """The first ``count`` prompts with every variant's greedy answer."""
    measured = _measures(tasks)
    by_prompt: dict[str, dict[str, Any]] = {}
    for label, task in measured.items():
        for sample in task.samples:
            if "prompt" in sample and "text" in sample:
                entry = by_prompt.setdefault(str(sample["id"]), {"prompt": sample["prompt"], "answers": {}})
                entry["answers"].setdefault(label, sample["text"])
    complete = [entry for entry in by_prompt.values() if len(entry["answers"]) == len(measured)]
    return complete[:count]


def _measures(tasks: Tasks) -> Tasks:
    return {
        _called(_run(name), label): tasks[name]
        for part, label in COLUMNS.items()
        for name in tasks
        if _part(name) == part
    }


def _called(run: str, name: str) -> str:
    """Return a name within a run; the runs of a page with one have no names."""
    return f"{run}/{name}" if run else name


def _run(called: str) -> str:
    return called.rpartition("/")[0]


def _part(called: str) -> str:
    return called.rpartition("/")[2]


def _flat(config: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(config, dict):
        return [(path, config)]
    return [leaf for key, value in config.items() for leaf in _flat(value, f"{path}.{key}" if path else str(key))]


def _keys(measured: list[TaskRecord], metric: str) -> list[str]:
    return list(dict.fromkeys(key for task in measured for key in (task.get(metric) or {})))


def _curve(task: TaskRecord, title: str, unit: str, keys: list[str]) -> str:
    series: plots.Series = {}
    for key in keys:
        points = [(line["step"], _value(line[key])) for line in task.curve if line.get(key) is not None]
        if points:
            series[key] = ([step for step, _ in points], [value for _, value in points])
    return plots.lines(title, "step", unit, series) if series else ""


def _value(entry: Any) -> float:
    """Return a plain number, or the ``value`` of an interval."""
    return float(entry["value"] if isinstance(entry, dict) else entry)


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _interval(entry: dict[str, Any] | None, key: str) -> str:
    if not entry or entry.get(key) is None:
        return "–"
    text = _number(entry[key])
    if entry.get("low") is not None:
        text += f" [{_number(entry['low'])}, {_number(entry['high'])}]"
    return f"{text}, n = {entry['n']}" if "n" in entry else text


def _megabytes(task: TaskRecord, tokens: float) -> str:
    """Return a step's bytes for each of so many tokens."""
    return _number(sum(task.step_bytes.values()) / tokens / 1e6) if task.step_bytes else "–"


def _score(entry: dict[str, Any] | None) -> str:
    text = _interval(entry, "score")
    return text + " (no power)" if entry and entry.get("power") is False else text


def _parity(entry: dict[str, Any] | None) -> str:
    if not entry:
        return "–"
    return f"{entry['equal']} of {entry['compared']} equal, {entry['ties']} ties, {entry['broken']} broken"
