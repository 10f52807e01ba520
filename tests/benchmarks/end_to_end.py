"""The demo from nothing, then once more from the cache: ``.venv/core/bin/python tests/benchmarks/end_to_end.py``.

Takes a state folder of its own (``.qdflash/end-to-end``), which must not be there yet: the first run starts from an
empty store and an empty cache. Writes ``docs/results/end-to-end.json`` and its page, whatever the gate says.

``python tests/benchmarks/end_to_end.py h200`` runs the recipe smol-h200 once, where the caller's variables say: on
``QDFLASH_STORE``, by ``QDFLASH_PYTHON_…``. It goes on with what is committed there, so several leases of a GPU make
one run, whose seconds are the sum of its stages'.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from study import SMOLLM2, row, write

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".qdflash" / "end-to-end"
QDFLASH = (sys.executable, "-m", "pipelines.cli")
LABELS = {"measure_baseline": "baseline", "measure_target": "target", "measure_pair": "pair"}


def main() -> int:
    """Run what the command line says, read the metrics back, write the study; return the first run's exit code."""
    if sys.argv[1:] == ["h200"]:
        return _h200()
    if HOME.exists():
        print(f"end_to_end: {HOME} is there already; remove it for a run from nothing", file=sys.stderr)
        return 2
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "QDFLASH_"))}
    environment["QDFLASH_HOME"] = str(HOME)
    rows, codes = [], []
    for variant in ("first", "second"):
        started = time.monotonic()
        codes.append(_run(environment, "smol"))
        rows.append(row(variant, "seconds", round(time.monotonic() - started, 1), "s", note=f"exit {codes[-1]}"))
    manifests, versions = _committed(environment, "smol")
    rows += _rows({name: manifest["metrics"] for name, manifest in manifests.items()}, "cpu")
    command = ".venv/core/bin/python tests/benchmarks/end_to_end.py"
    write("end-to-end", command, versions, rows, others=True, about=SMOLLM2)
    subprocess.run([*QDFLASH, "store", "down"], env=environment, cwd=ROOT, check=True)
    return codes[0]


def _h200() -> int:
    environment = dict(os.environ)
    code = _run(environment, "smol-h200")
    manifests, versions = _committed(environment, "smol-h200")
    seconds = sum(one["seconds"] for one in manifests.values())
    rows = [row("run", "seconds", round(seconds, 1), "s", note=f"exit {code}")]
    rows += [row(name, "seconds", round(one["seconds"], 1), "s") for name, one in manifests.items()]
    rows += _rows({name: manifest["metrics"] for name, manifest in manifests.items()}, "cuda")
    rows = [{**one, "variant": f"h200: {one['variant']}"} for one in rows]
    command = "python tests/benchmarks/end_to_end.py h200"
    write("end-to-end", command, versions, rows, others=True, about=SMOLLM2)
    return code


def _run(environment: dict[str, str], recipe: str) -> int:
    return subprocess.run([*QDFLASH, "run", recipe], env=environment, cwd=ROOT, check=False).returncode


def _committed(environment: dict[str, str], recipe: str) -> tuple[dict[str, dict], dict[str, str]]:
    """Return the manifests of the recipe's committed tasks by name, and the versions that they name."""
    manifests, versions = {}, {}
    plan = json.loads(_output(environment, "plan", recipe, "--json"))
    for task in plan["tasks"]:
        if task["state"] == "cached":
            manifest = json.loads(_output(environment, "artifacts", "show", task["digest"], "--json"))
            manifests[task["name"]] = manifest
            versions |= {f"{task['role']}/{name}": found for name, found in manifest["versions"].items()}
    return manifests, versions


def _rows(metrics: dict[str, dict], device: str) -> list[dict]:
    rows = []
    if "qad" in metrics:
        for name, unit in (("kl_before", "nats"), ("kl_after", "nats"), ("codes_changed", "share")):
            rows.append(row("qad", name, metrics["qad"][name], unit))
    for stage in ("drafter_1", "drafter_2"):
        for kind, found in metrics.get(stage, {}).get("accept_length", {}).items():
            note = "teacher-forced on held-out sampled rows"
            rows.append(_interval(f"{stage}: {kind}", "accept_length", found, "tokens", found["n"], note))
    for task, label in LABELS.items():
        measured = metrics.get(task, {})
        if found := measured.get("acceptance_length"):
            rows.append(_interval(label, "acceptance_length", found, "tokens", found["n"]))
            if bigram := found.get("bigram"):
                rows.append(_interval("bigram", "acceptance_length", bigram, "tokens", bigram.get("n", found["n"])))
                gain, note = found["gain_over_bigram"], "difference on the same prompts, resampled in pairs"
                rows.append(_interval(f"{label} - bigram", "acceptance_length", gain, "tokens", gain["n"], note))
        for regime, found in measured.get("latency", {}).items():
            one = {"value": found["median_ms"], **found}
            rows.append(_interval(label, "latency_ms", one, "ms", found["n"]) | {"regime": regime, "device": device})
        for suite, found in measured.get("quality", {}).items():
            one = {"value": found["score"], **found}
            rows.append(_interval(f"{label}: {suite}", "score", one, "share", found["n"]))
    return rows


def _interval(variant: str, metric: str, found: dict, unit: str, n: int, note: str = "") -> dict:
    return row(variant, metric, found["value"], unit, n, low=found["low"], high=found["high"], note=note)


def _output(environment: dict[str, str], *words: str) -> str:
    command = [*QDFLASH, *words]
    return subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
