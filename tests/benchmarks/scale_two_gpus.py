"""Study ``scale-two-gpus``: QAD and drafter training with one process and with two, and QAD's step by DeepSpeed.

``python tests/benchmarks/scale_two_gpus.py`` with two GPUs writes docs/results/scale-two-gpus.*; ``--toy`` runs every
line of it on a CPU over gloo at a toy size and writes nothing there. It needs bitsandbytes, fla-core and deepspeed
beside the project's own packages. Models are those of ``qad_memory.py`` and ``drafter_memory.py``: the true shapes of
Qwen3.5-4B with random weights. The batch is the same whatever the number of processes. The variants take turns, each
in a process of its own, while enough time is left. What is compiled and tuned stays in the machine's caches, so a
variant's first process on a machine takes longest; a process's first step does not count. Its log says what each step
took and, every 30 seconds, where it is:

- ``qad-1``, ``qad-2``: QAD's own step with so many processes;
- ``zero2-half-2``: DeepSpeed's ZeRO-2 as it is mostly used, bfloat16 in the model and fp32 masters in slices;
- ``zero2-2``: ZeRO-2 on fp32 masters that the model holds, which is what QAD's own step does;
- ``drafter-1``, ``drafter-2``: the drafter's step.
"""

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import drafter_memory
import gdn
import qad_memory
import study
import torch
import zero

from components.qad.train import Distillation
from components.training.parallel import Ranks, Shares, started
from components.training.state import Line

Found = dict[str, Any]
"""What a variant measured: tokens of a step, its steps' loss and seconds, each GPU's peak in 10⁹ bytes."""


@dataclass(frozen=True)
class Size:
    """What a run measures."""

    qad: qad_memory.Size
    drafter: drafter_memory.Size
    steps: int
    rounds: int
    patience: float


def _drafter(size: drafter_memory.Size, **changed: Any) -> drafter_memory.Size:
    return replace(size, config=size.config.model_copy(update={"micro_batch": 2, **changed}))


TRUE = Size(
    replace(qad_memory.TRUE, batch=4, length=8192),
    _drafter(drafter_memory.TRUE, batch=8, learning_rate=1e-3),
    steps=2,
    rounds=3,
    patience=300,
)
TOY = Size(
    replace(qad_memory.TOY, batch=4),
    _drafter(drafter_memory.TOY, learning_rate=1e-3),
    steps=2,
    rounds=1,
    patience=120,
)


def qad(kind: type[Distillation], size: Size, folder: Path, ranks: Ranks) -> Found:
    """Measure QAD by its own step or DeepSpeed's."""
    if ranks.device.type == "cuda":
        gdn.repair()
    bench = qad_memory.Bench(size.qad, folder, ranks)
    distillation = bench.distillation("chunked", size.qad.length, kind)
    steps = timed(distillation.step, 1 + size.steps)
    found = {"tokens": size.qad.batch * size.qad.length, "steps": steps, "peaks": peaks(ranks)}
    if ranks.world > 1 and kind is Distillation:
        found["exchange"] = exchange(bench.shares)
    return found


def drafter(size: Size, folder: Path, ranks: Ranks) -> Found:
    """Measure the drafter's step."""
    bench = drafter_memory.Bench(size.drafter, folder, ranks)
    shortest = min(len(chat.token_ids) for chat in bench.chats) // 64 * 64
    bench.chats = [replace(chat, token_ids=chat.token_ids[:shortest]) for chat in bench.chats]  # compiled for once
    trainer = bench.trainer(size.drafter.config.micro_batch)
    drafter_memory.release()
    chats = list(range(len(bench.chats)))
    steps = timed(lambda step: {"loss": trainer.update(step, chats)}, 1 + 2 * size.steps)
    return {"tokens": sum(len(chat.token_ids) for chat in bench.chats), "steps": steps, "peaks": peaks(ranks)}


def timed(step: Callable[[int], Line], count: int) -> list[Line]:
    """Take so many steps; return the line of each, with its seconds."""
    lines = []
    for index in range(count):
        qad_memory.wait()
        began = time.monotonic()
        line = step(index)
        qad_memory.wait()
        lines.append({**line, "seconds": time.monotonic() - began})
        print(f"step {index + 1}: {lines[-1]['seconds']:.1f} s", flush=True)
    return lines


def peaks(ranks: Ranks) -> list[float]:
    """Return what each rank's allocator held at most, in 10⁹ bytes; not a number on a CPU."""
    mine = [0.0] * ranks.world
    mine[ranks.rank] = qad_memory.peak_gb()[0]
    return ranks.sum(*mine)


def exchange(shares: Shares) -> dict[str, float]:
    """Time what a step exchanges: seconds to sum gradients at their owners and to spread masters, bytes of each.

    Beside it the seconds of one all-reduce of as many bytes at once, which sums and spreads in one call.
    """
    sums, spreads = [], []
    for _ in range(3):
        for master in shares.masters.values():
            master.grad = torch.zeros_like(master)
        for seconds, work in ((sums, shares.sum_gradients), (spreads, shares.spread)):
            torch.distributed.barrier()
            qad_memory.wait()
            began = time.monotonic()
            work()
            qad_memory.wait()
            seconds.append(time.monotonic() - began)
    for master in shares.masters.values():
        master.grad = None
    numbers = sum(master.numel() for master in shares.masters.values())
    piece = torch.zeros(min(numbers, 2**29), device=next(iter(shares.masters.values())).device)
    torch.distributed.all_reduce(piece)
    qad_memory.wait()
    began = time.monotonic()
    torch.distributed.all_reduce(piece)
    qad_memory.wait()
    whole = (time.monotonic() - began) * numbers / piece.numel()
    return {"sum": min(sums), "spread": min(spreads), "bytes": 4 * numbers, "all_reduce": whole}


VARIANTS: dict[str, tuple[int, Callable[[Size, Path, Ranks], Found]]] = {
    "qad-1": (1, partial(qad, Distillation)),
    "qad-2": (2, partial(qad, Distillation)),
    "zero2-half-2": (2, partial(qad, zero.ZeroHalf)),
    "drafter-1": (1, drafter),
    "drafter-2": (2, drafter),
    "zero2-2": (2, partial(qad, zero.Zero)),
}
BASES = {"qad-2": "qad-1", "drafter-2": "drafter-1", "zero2-half-2": "qad-2", "zero2-2": "qad-2"}


def one(variant: str, size: Size) -> Found:
    """Measure one variant, this process being rank 0."""
    count, work = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        ready = partial(work, size, Path(folder))
        with started(count, Path(folder), ready) as ranks:
            return ready(ranks)


def turns(variants: list[str], size: Size, seconds: float, runs: Path, flags: list[str]) -> None:
    """Measure variants in turns while time is left; add what each finds, or why it finds nothing, to ``runs``."""
    until = time.monotonic() + seconds
    takes = dict.fromkeys(variants, size.patience / 5)
    missing = dict.fromkeys(variants, f"it had no time left of {seconds:.0f} s for all")
    for variant in variants * size.rounds:
        if (left := until - time.monotonic()) > takes[variant]:
            began = time.monotonic()
            missing[variant] = _measured_apart(variant, runs, min(size.patience, left), flags)
            takes[variant] = time.monotonic() - began
            print(f"{variant}: {takes[variant]:.0f} s {missing[variant]}", flush=True)
    for variant, why in missing.items():
        if why:
            _note(runs, variant, {"why": why})


def _measured_apart(variant: str, runs: Path, limit: float, flags: list[str]) -> str:
    """Measure a variant in a process of its own; return why it failed, or nothing."""
    command = [sys.executable, __file__, "--alone", "--variants", variant, "--runs", str(runs), *flags]
    log = runs.with_name(f"{variant}.log")
    with log.open("w") as lines:
        try:
            code = subprocess.run(command, stdout=lines, stderr=lines, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"not done within {limit:.0f} s"
    return f"exit code {code}: {' '.join(log.read_text().split())[-200:]}" if code else ""


def _note(runs: Path, variant: str, found: Found) -> None:
    with runs.open("a") as lines:
        lines.write(json.dumps({"variant": variant, **found}) + "\n")


def rows_of(runs: list[Found]) -> list[dict[str, Any]]:
    """Return the study's rows."""
    done: dict[str, list[Found]] = {
        variant: [one for one in runs if one["variant"] == variant and "steps" in one] for variant in VARIANTS
    }
    rates = {
        variant: [one["tokens"] / statistics.mean(step["seconds"] for step in one["steps"][1:]) for one in found]
        for variant, found in done.items()
    }
    rows = []
    for variant, found in done.items():
        if not found:
            whys = [one["why"] for one in runs if one["variant"] == variant]
            rows.append(
                study.row(variant, "tokens_per_second", None, "tokens/s", note=(whys or ["not asked for"])[-1])
            )
            continue
        tokens = found[0]["tokens"]
        note = f"{tokens} tokens a step; {min(rates[variant]):.5g} to {max(rates[variant]):.5g}"
        rate, n = statistics.median(rates[variant]), len(found)
        rows.append(study.row(variant, "tokens_per_second", rate, "tokens/s", n, note=note))
        base = BASES.get(variant)
        if base and done[base]:
            ratio = rate / statistics.median(rates[base])
            rows.append(study.row(variant, "tokens_per_second_ratio", ratio, f"of {base}", n))
            if base.endswith("-1"):
                rows.append(study.row(variant, "efficiency", ratio / VARIANTS[variant][0], f"of {base}'s speed", n))
        each = [max(one["peaks"][rank] for one in found) for rank in range(len(found[0]["peaks"]))]
        peak = None if each[0] != each[0] else max(each)
        note = "each GPU: " + ", ".join(f"{one:.1f}" for one in each)
        rows.append(study.row(variant, "peak_memory_gb", peak, "GB", n, note=note))
        for metric in ("loss", "grad_norm"):
            if metric in found[0]["steps"][0]:
                rows += _values(variant, metric, found, done[base] if base else [], base or "")
        parts = [one["exchange"] for one in found if "exchange" in one]
        if parts:
            step = statistics.median(step["seconds"] for one in found for step in one["steps"][1:])
            best = min(parts, key=lambda part: part["sum"] + part["spread"])
            note = (
                f"sums {best['sum']:.3f} s, spreads {best['spread']:.3f} s, each of {best['bytes'] / 1e9:.1f} GB; "
                f"a step takes {step:.2f} s; all-reduce of as much in one piece {best['all_reduce']:.3f} s"
            )
            rows.append(
                study.row(variant, "exchange", best["sum"] + best["spread"], "s a step", len(parts), note=note)
            )
    return rows


def _values(variant: str, metric: str, found: list[Found], others: list[Found], base: str) -> list[dict[str, Any]]:
    """Return a metric of the last step, and how far the steps' are from another variant's at most."""
    last = statistics.median(one["steps"][-1][metric] for one in found)
    note = f"of step {len(found[0]['steps'])}"
    rows = [study.row(variant, metric, last, "nats" if metric == "loss" else "", len(found), note=note)]
    pairs = [
        (ours[metric], theirs[metric])
        for one in found
        for other in others
        for ours, theirs in zip(one["steps"], other["steps"], strict=True)
    ]
    if pairs:
        apart = max(abs(ours / theirs - 1) for ours, theirs in pairs)
        note = f"largest of {len(pairs)} pairs of steps"
        rows.append(study.row(variant, f"{metric}_difference", apart, f"of {base}'s", len(found), note=note))
    return rows


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "speculators", "triton", "fla-core", "bitsandbytes", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="every line at a toy size on a CPU; writes no results")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="measure only these")
    parser.add_argument("--seconds", type=float, default=900, help="start nothing that would end later than that")
    parser.add_argument("--runs", type=Path, help="where each run adds a line; the study is of all lines there")
    parser.add_argument("--alone", action="store_true", help="measure in this process, into --runs alone")
    given = parser.parse_args(argv)
    size = TOY if given.toy else TRUE
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if given.alone:
        faulthandler.dump_traceback_later(30, repeat=True)
        _note(given.runs, given.variants[0], one(given.variants[0], size))
        return []
    with tempfile.TemporaryDirectory() as folder:
        if given.toy:
            study.RESULTS = Path(folder)
        runs = given.runs or Path(folder) / "runs.jsonl"
        turns(given.variants, size, given.seconds, runs, ["--toy"] * given.toy)
        rows = rows_of([json.loads(line) for line in runs.read_text().splitlines()])
        study.write("scale-two-gpus", "python tests/benchmarks/scale_two_gpus.py", _versions(), rows)
        print((study.RESULTS / "scale-two-gpus.md").read_text())
    return rows


if __name__ == "__main__":
    main()
