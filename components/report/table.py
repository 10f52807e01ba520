"""The headline table: what was measured of baseline, target and pair, as cells for people and as plain numbers."""

import math
from typing import Any

from components.measure import cost
from components.measure.speedup import speedup
from components.report.collect import TaskRecord

Tasks = dict[str, TaskRecord]
SEED = 0
COLUMNS = {"measure_baseline": "BF16 baseline", "measure_target": "W4A16 target", "measure_pair": "target + drafter"}


def comparison(tasks: Tasks) -> list[dict[str, Any]]:
    """Rows ``{metric, cells}`` of the headline table, one cell per measured variant."""
    measured = list(measures(tasks).values())
    rows = []
    for quality in keys(measured, "quality"):
        rows.append(
            {"metric": f"{quality} (score)", "cells": [_score(task.get(f"quality.{quality}")) for task in measured]}
        )
    if any(task.get("acceptance_length") for task in measured):
        rows.append(
            {
                "metric": "acceptance length",
                "cells": [interval(task.get("acceptance_length"), "value") for task in measured],
            }
        )
    for regime in keys(measured, "latency"):
        rows.append(
            {
                "metric": f"latency {regime} (ms, median)",
                "cells": [interval(task.get(f"latency.{regime}"), "median_ms") for task in measured],
            }
        )
    rows += _faster(measures(tasks))
    if any(task.step_bytes for task in measured):
        rows.append({"metric": "bytes moved per step (MB)", "cells": [_megabytes(task, 1.0) for task in measured]})
        per_token = [_megabytes(task, task.get("acceptance_length.value") or 1.0) for task in measured]
        rows.append({"metric": "bytes moved per token (MB)", "cells": per_token})
        for regime in keys(measured, "latency"):
            cells = [_predicted(task, regime) for task in measured]
            if set(cells) != {"–"}:
                rows.append({"metric": f"predicted on an A10G: {regime} (ms)", "cells": cells})
    if any(task.get("parity") for task in measured):
        rows.append(
            {
                "metric": "greedy parity with the target alone",
                "cells": [_parity(task.get("parity")) for task in measured],
            }
        )
    if any(task.get("sampled") for task in measured):
        cells = [_sampled(task.get("sampled")) for task in measured]
        rows.append({"metric": "sampled as the target alone does", "cells": cells})
    return rows


def _faster(measured: Tasks) -> list[dict[str, Any]]:
    """Rows of how many times faster than its run's baseline each variant is, by regime and on average."""
    found = {}
    for label, task in measured.items():
        base = measured.get(called(run_of(task.name), COLUMNS["measure_baseline"]), task)
        shared = {name: samples for name, samples in base.timed.items() if name in task.timed and base is not task}
        found[label] = speedup(shared, task.timed, SEED)
    rows = []
    for regime in dict.fromkeys(name for one in found.values() for name in one["regimes"]):
        cells = [interval(one["regimes"].get(regime), "value") for one in found.values()]
        rows.append({"metric": f"times faster than the baseline: {regime}", "cells": cells})
    if len(rows) > 1:
        cells = [interval(one["mean"], "value") for one in found.values()]
        rows.append({"metric": "times faster: mean of the regimes", "cells": cells})
    return rows


def headline(tasks: Tasks) -> dict[str, float]:
    """Return the table's numbers by the addresses that a gate's rules use, and ``gate.passed`` as 1 or 0."""
    found: dict[str, float] = {}
    for task in measures(tasks).values():
        rows = [(f"quality.{suite}", "score") for suite in keys([task], "quality")]
        rows += [("acceptance_length", "value")]
        rows += [(f"latency.{regime}", "median_ms") for regime in keys([task], "latency")]
        for path, key in rows:
            entry = task.get(path) or {}
            numbers = {one: entry.get(one) for one in (key, "low", "high", "n")}
            found |= {f"{task.name}.{path}.{one}": value for one, value in numbers.items() if value is not None}
        if parity := task.get("parity"):
            found |= {f"{task.name}.parity.{one}": parity[one] for one in ("equal", "ties", "broken")}
        if sampled := task.get("sampled"):
            found[f"{task.name}.sampled.passed"] = int(sampled["passed"])
    gates = [task for task in tasks.values() if task.stage == "gate"]
    return found | {f"{task.name}.passed": int(task.metrics["passed"]) for task in gates}


def measures(tasks: Tasks) -> Tasks:
    """Return the measurements by column, in the table's order."""
    return {
        called(run_of(name), label): tasks[name]
        for part, label in COLUMNS.items()
        for name in tasks
        if part_of(name) == part
    }


def called(run: str, name: str) -> str:
    """Return a name within a run; the runs of a page with one have no names."""
    return f"{run}/{name}" if run else name


def run_of(name: str) -> str:
    """Return the run of a name that :func:`called` made."""
    return name.rpartition("/")[0]


def part_of(name: str) -> str:
    """Return the task of a name that :func:`called` made."""
    return name.rpartition("/")[2]


def keys(measured: list[TaskRecord], metric: str) -> list[str]:
    """Return the names under a metric that any of the measurements has."""
    return list(dict.fromkeys(key for task in measured for key in (task.get(metric) or {})))


def number(value: Any) -> str:
    """Return a number of four digits, or a dash."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def interval(entry: dict[str, Any] | None, key: str) -> str:
    """Return ``1.4 [1.2, 1.6], n = 24``, or a dash."""
    if not entry or entry.get(key) is None:
        return "–"
    text = number(entry[key])
    if entry.get("low") is not None:
        text += f" [{number(entry['low'])}, {number(entry['high'])}]"
    return f"{text}, n = {entry['n']}" if "n" in entry else text


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return two independent estimates' difference, its interval from theirs (MOVER, Zou and Donner 2008)."""
    low = math.hypot(one["value"] - one["low"], other["high"] - other["value"])
    high = math.hypot(one["high"] - one["value"], other["value"] - other["low"])
    value = one["value"] - other["value"]
    return {"value": value, "low": value - low, "high": value + high}


def _megabytes(task: TaskRecord, tokens: float) -> str:
    """Return a step's bytes for each of so many tokens."""
    return number(sum(task.step_bytes.values()) / tokens / 1e6) if task.step_bytes else "–"


def _predicted(task: TaskRecord, regime: str) -> str:
    """Return what the cost model expects of a request alone on the GPU, at the acceptance length that was measured."""
    asked = task.config.get("latency", {}).get(regime)
    if task.served is None or not asked or asked["concurrency"] > 1:
        return "–"
    accepted = task.get("acceptance_length.value") or 1.0
    request = cost.Request(asked["input_tokens"], asked["output_tokens"], accepted)
    return number(1000 * cost.predict(cost.A10G, cost.FITTED, request, *task.served).seconds)


def _score(entry: dict[str, Any] | None) -> str:
    text = interval(entry, "score")
    return text + " (no power)" if entry and entry.get("power") is False else text


def _parity(entry: dict[str, Any] | None) -> str:
    if not entry:
        return "–"
    return f"{entry['equal']} of {entry['compared']} equal, {entry['ties']} ties, {entry['broken']} broken"


def _sampled(entry: dict[str, Any] | None) -> str:
    if not entry:
        return "–"
    tests = "; ".join(f"{name}: p = {number(test['p'])}" for name, test in entry["tests"].items())
    return f"{'holds' if entry['passed'] else 'does not hold'}: {tests}"
