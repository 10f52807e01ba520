"""Fill the page's template from the tasks' records."""

import dataclasses
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import jinja2

from components.measure import cost
from components.report import plots
from components.report.collect import TaskRecord
from components.report.lineage import drawing
from components.report.table import (
    COLUMNS,
    Tasks,
    called,
    comparison,
    difference,
    interval,
    keys,
    measures,
    number,
    part_of,
    run_of,
)

TERMS = {
    "target, drafter, pair": "The target is the model that is served. The drafter proposes a block of tokens, which "
    "the target verifies in one pass; what it accepts is what it would have said alone. The pair is both.",
    "W4A16": "Weights of 4 bits in groups that share a scale, activations of 16 bits.",
    "acceptance length": "Tokens that one verifying pass of the target yields: the accepted ones and one of its own. "
    "1 means that nothing drafted was accepted; a bigram drafter, a table of token pairs, is the bar to clear.",
    "accept-length, held-out": "The same, predicted in training: on stored answers instead of a running server.",
    "greedy parity": "Whether speculation changes what the target answers at temperature 0. Equal: the same tokens. "
    "Tie: they part where two tokens are about equally likely. Broken: neither, which must not be.",
    "sampled as the target alone": "Whether continuations drawn at random are distributed as the target's own. p is "
    "the share of random splits of both sides' continuations that are as far apart; below 0.01 the two differ.",
    "times faster": "The ratio of the median latencies of the baseline and of a variant, measured in succession. "
    "The mean over the regimes is the published statistic.",
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
        called(run, name): dataclasses.replace(task, name=called(run, name))
        for run, its in runs.items()
        for name, task in its.items()
    }
    makers = {task.uri: task for task in tasks.values()}
    each = [{name: task for name, task in tasks.items() if run_of(name) == run} for run in runs]
    sections = {
        "verdict": [{"run": run_of(name), **task.metrics} for name, task in tasks.items() if task.stage == "gate"],
        "comparison": comparison(tasks),
        "differences": differences(runs),
        "notes": list(dict.fromkeys(note for one in each for note in notes(one))),
        "figures": figures(tasks),
        "training": [row for one in each for row in training(one)],
        "samples": side_by_side(tasks, samples),
        "lineage": list(makers.values()),
    }
    told = {"terms": TERMS, "makers": makers, "graph": drawing(list(makers.values()))}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = number
    template = environment.from_string(files("components.report").joinpath("page.html.jinja").read_text("utf-8"))
    machines = {run_of(name): task.get("machine") or {} for name, task in tasks.items() if part_of(name) in COLUMNS}
    dates = {run: date for run, its in runs.items() if (date := _date(its))}
    measured = {"columns": list(measures(tasks)), "machines": machines, "dates": dates}
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


def notes(tasks: Tasks) -> list[str]:
    """What a reader must know before quoting a figure of this run."""
    found = []
    if any((task.get("machine") or {}).get("device") == "cpu" for task in measures(tasks).values()):
        found.append(
            "Measured on a CPU, where arithmetic and not memory takes the time: drafting and verifying a block costs "
            "about what its tokens save, so speculation is slower here, or hardly faster, than none. Acceptance "
            "lengths and parity carry over to a GPU, latencies not."
        )
    found += [_prediction(label, task) for label, task in measures(tasks).items() if task.served and task.served[1]]
    for task in tasks.values():
        if task.stage == "model" and (task.config.get("source") or {}).get("kind") == "wheel":
            found.append(
                "The teacher is a dequantised Q4_1 file, already on a 4-bit grid of its own; the gap between plain "
                "rounding and QAD is therefore not the paper's."
            )
    return found


def _prediction(label: str, task: TaskRecord) -> str:
    """Say what the predicted rows are, how far to trust them, and what a step spends most on."""
    parts = task.step_bytes
    part = max(parts, key=parts.__getitem__)
    share = parts[part] / sum(parts.values())
    return (
        "Predicted on an A10G: by the cost model, from bytes and FLOPs of these very tensors at the acceptance length "
        "measured here, with constants fitted to latencies of Qwen3.5-4B. Of latencies that it was not fitted to it "
        f"missed those without a drafter by {cost.ERROR_ALONE:.0%} at most, those at a known acceptance length by "
        f"{cost.ERROR_DRAFTED:.0%}, published ones at an unknown one by up to {cost.ERROR_UNKNOWN:.0%}. The largest "
        f"part of a step of {label} is {part}, {share:.0%} of its bytes: what to attack first, unless the host bounds "
        "the step."
    )


def training(tasks: Tasks) -> list[dict[str, Any]]:
    """Rows ``{what, value}`` on regeneration, QAD, the two drafter stages and how well they predict serving."""
    rows = []
    served = next((task.get("acceptance_length") for task in tasks.values() if task.get("acceptance_length")), None)
    for task in tasks.values():
        if task.stage == "regen":
            rows.append({"what": f"{task.name}: answers", "value": _answers(task)})
        if task.stage == "qad":
            rows.append(
                {
                    "what": f"{task.name}: held-out KL to the teacher",
                    "value": f"{number(task.get('kl_before'))} → {number(task.get('kl_after'))}",
                }
            )
            rows.append({"what": f"{task.name}: share of codes changed", "value": number(task.get("codes_changed"))})
        if task.stage == "pack":
            told = [number(task.get(metric)) for metric in ("kl", "proof_tokens", "max_logit_difference")]
            said = "{} on {} held-out tokens; largest difference of a logit {}".format(*told)
            rows.append({"what": f"{task.name}: KL of what is served to what was trained", "value": said})
        if task.stage == "drafter":
            for kind, value in (task.get("accept_length") or {}).items():
                rows.append(
                    {"what": f"{task.name}: held-out accept-length, {kind}", "value": interval(value, "value")}
                )
        if task.stage == "gptq" and task.get("accept_length.after"):
            predicted = task.get("accept_length.after")
            what = f"{task.name}: held-out accept-length, quantised"
            rows.append({"what": what, "value": interval(predicted, "value")})
            if served:
                what = f"{task.name}: how much longer the served acceptance length is"
                rows.append({"what": what, "value": interval(difference(served, predicted), "value")})
    return rows


def _answers(task: TaskRecord) -> str:
    rate = task.get("tokens_per_second")
    said = [
        f"{task.get('rows')} rows, {task.get('generated_tokens')} tokens generated",
        f"{number(task.get('truncated_share'))} of them cut at the limit",
        f"{task.get('failed')} failed",
        f"{number(rate)} tokens/s" if rate else "all resumed",
    ]
    return "; ".join(said)


def figures(tasks: Tasks) -> list[str]:
    """Every SVG that the run has data for."""
    drawn = []
    for task in tasks.values():
        if task.stage == "qad" and task.curve:
            drawn.append(_curve(task, called(run_of(task.name), "QAD: loss"), "KL (nats)", ["loss"]))
            drawn.append(
                _curve(task, called(run_of(task.name), "QAD: held-out KL to the teacher"), "KL (nats)", ["kl"])
            )
        if task.stage == "drafter" and task.curve:
            drawn.append(_curve(task, f"{task.name}: loss", "nats", ["loss"]))
            drawn.append(_curve(task, f"{task.name}: held-out accept-length", "tokens", ["accept_length"]))
    measured = measures(tasks)
    per_position: plots.Series = {
        called(run_of(task.name), name): (list(range(1, len(values) + 1)), values)
        for task in measured.values()
        for name, values in (
            ("drafter", task.get("acceptance_length.per_position")),
            ("bigram", task.get("acceptance_length.bigram.per_position")),
        )
        if values
    }
    per_position |= {
        f"{task.name}, held-out": (list(range(1, len(values) + 1)), values)
        for task in tasks.values()
        if task.stage == "drafter" and (values := task.get("per_position"))
    }
    if per_position:
        drawn.append(plots.lines("Acceptance per position", "position in the block", "share accepted", per_position))
    regimes = keys(list(measured.values()), "latency")
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
    measured = measures(tasks)
    by_prompt: dict[str, dict[str, Any]] = {}
    for label, task in measured.items():
        for sample in task.samples:
            if "prompt" in sample and "text" in sample:
                entry = by_prompt.setdefault(str(sample["id"]), {"prompt": sample["prompt"], "answers": {}})
                entry["answers"].setdefault(label, sample["text"])
    complete = [entry for entry in by_prompt.values() if len(entry["answers"]) == len(measured)]
    return complete[:count]


def _date(tasks: Tasks) -> str:
    """Return when the newest task began, from its manifest: the page's own making would differ every time."""
    started = max((task.started for task in tasks.values() if task.started), default=None)
    return f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M} UTC" if started else ""


def _flat(config: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(config, dict):
        return [(path, config)]
    return [leaf for key, value in config.items() for leaf in _flat(value, f"{path}.{key}" if path else str(key))]


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
