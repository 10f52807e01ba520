"""Study ``qad-memory``: peak memory and speed of QAD at Qwen3.5-4B's true shapes on one GPU.

``python tests/benchmarks/qad_memory.py`` on a GPU writes docs/results/qad-memory.*: ``--quick`` without the largest
lengths, with ``--lengths`` those alone, either keeping the other's rows. ``--toy`` runs every line of it on a CPU at a
toy size in seconds and writes nothing there. It needs bitsandbytes and fla-core beside the project's own packages, and
starts with what GPU kernels compute, checked in seconds (``gpu_checks.py``, ``gdn.py``). Weights and tokens are
random: neither memory nor time depends on their values. The variants take turns in one process:

- ``materialised``: both models' logits exist whole in bf16, and the KL of 2,048 tokens at a time is taken in fp32;
- ``chunked``: what the qad stage does, from hidden states;
- ``chunked-cached-teacher``: the same with the teacher's states read from disk, and no teacher on the GPU.
"""

import argparse
import copy
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import gdn
import numpy as np
import study
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from components.checkpoint.grid import Quantized
from components.checkpoint.quantize import integer_codes
from components.qad.hidden import TeacherStates, states_of
from components.qad.optimizer import adamw
from components.qad.stage import Config
from components.qad.student import Student
from components.qad.train import Distillation
from components.sequences.reader import Split
from components.training.parallel import Ranks, Shares

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read when the GPU is first used
VARIANTS = ("materialised", "chunked", "chunked-cached-teacher")
BUDGET_GB = 80
PEAK_TFLOPS = 989
KERNELS = {
    "matrix products": ("nvjet", "gemm", "cutlass", "aten::mm", "aten::bmm", "aten::addmm"),
    "attention": ("sdpa", "flash", "fmha", "scaled_dot_product"),
    "gated delta rule, in Triton": ("chunk_", "recompute_w_u", "solve_tril", "wy_repr", "l2norm"),
    "convolution": ("conv",),
    "fake quantiser": ("_kernel", "_StraightThrough"),
    "softmax": ("softmax",),
    "optimizer": ("optimizer", "Optimizer", "adamw"),
    "element by element, sums and copies": ("elementwise", "reduce", "copy", "Memcpy", "Memset", "cat", "index"),
}
"""Kinds of kernels by what their names hold; the first that fits counts."""

QUANTISED = ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True}


@dataclass(frozen=True)
class Size:
    """What a run measures."""

    device: str
    dtype: str
    length: int
    step_length: int = 2048
    longest: int = 40960
    batch: int = 2
    rounds: int = 3
    group: int = 32
    model: dict[str, Any] = field(default_factory=dict)


TRUE = Size(
    "cuda",
    "bfloat16",
    16384,
    model={
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "rope_parameters": {**ROPE, "mrope_section": [11, 11, 10]},
    },
)
TOY = Size(
    "cpu",
    "float32",
    128,
    step_length=64,
    longest=256,
    rounds=2,
    model={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]},
    },
)


class Bench:
    """Teacher, student and this rank's optimizer, and a distillation of each variant and length over them."""

    def __init__(self, size: Size, folder: Path, ranks: Ranks = Ranks()) -> None:  # noqa: B008
        self.size, self.folder, self.ranks, self.device = size, folder, ranks, torch.device(size.device)
        config = Qwen3_5TextConfig(**size.model, tie_word_embeddings=True, max_position_embeddings=size.longest)
        dtype = getattr(torch, size.dtype)
        torch.set_default_dtype(dtype)
        torch.manual_seed(0)
        with self.device:
            self.teacher = Qwen3_5ForCausalLM(config).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        self.student = Student(copy.deepcopy(self.teacher), self._grid(), dtype)
        self.student.recompute_activations()
        self.shares = Shares({name: layer.weight for name, layer in self.student.layers.items()}, ranks)
        self.optimizer = adamw(self.shares.owned.values(), 8 if self.device.type == "cuda" else 32)

    def _grid(self) -> Iterator[tuple[str, Quantized]]:
        for name, module in self.teacher.named_modules():
            if name.endswith((*QUANTISED, "down_proj")):
                weight = module.weight
                scales = (weight.float().unflatten(-1, (-1, self.size.group)).abs().amax(-1) / 7.5).bfloat16()
                yield name, Quantized(integer_codes(weight, scales), scales, self.size.group)

    def distillation(self, variant: str, length: int, kind: type[Distillation] = Distillation) -> Distillation:
        """Return a variant ready to step, with the teacher where the variant has it."""
        cached = variant == "chunked-cached-teacher"
        draw = np.random.default_rng(length)
        rows = 2 * self.size.batch
        ids = draw.integers(0, self.size.model["vocab_size"], (rows, length), dtype=np.int32)
        split = Split(ids, np.ones((rows, length), np.uint8), np.zeros(rows, np.int64))
        self.teacher.to(self.device)
        states = TeacherStates(self.teacher, split, self.folder / "teacher.bin" if cached else None)
        teacher_head = self.teacher.lm_head.weight.detach()
        if cached:
            for index in range(rows):
                states(index)
            teacher_head = teacher_head.clone()
            self.teacher.to("cpu")
        config = Config(steps=1000, batch=self.size.batch, dtype=self.size.dtype, learning_rate=2e-6)
        kind = Materialised if variant == "materialised" else kind
        built = kind(config, self.student, states, teacher_head, split, self.shares, self.optimizer, self.ranks)
        if isinstance(built, Materialised):
            built.teacher_model = self.teacher
        release()
        return built


Part = Callable[[Bench], Iterator[list[dict[str, Any]]]]
"""Yields the rows of a part of the study as they are measured."""


class Materialised(Distillation):
    """A distillation through both models' whole logits."""

    teacher_model: Qwen3_5ForCausalLM

    def divergence(self, indices: list[int]) -> Tensor:
        """Return the same sum as the chunked loss."""
        with torch.no_grad():
            teacher = states_of(self.teacher_model, self.split, indices) @ self.teacher_head.T
        student = states_of(self.student.model, self.split, indices) @ self.student.head().T
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        for pair in zip(student.split(2048), teacher.split(2048), strict=True):
            total = total + checkpoint(_kl, *pair, use_reentrant=False)
        return total


def _kl(student: Tensor, teacher: Tensor) -> Tensor:
    wanted = torch.log_softmax(teacher.float(), -1)
    return (wanted.exp() * (wanted - torch.log_softmax(student.float(), -1))).sum().double()


def release() -> None:
    """Give unused memory back and forget peaks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> tuple[float, float]:
    """Return what the allocator held at most since :func:`release`, and what of it tensors took, in 10⁹ bytes."""
    if not torch.cuda.is_available():
        return float("nan"), float("nan")
    return torch.cuda.max_memory_reserved() / 1e9, torch.cuda.max_memory_allocated() / 1e9


def wait() -> None:
    """Let the GPU finish."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(bench: Bench, variant: str, length: int, steps: int) -> dict[str, float]:
    """Take ``steps`` optimizer steps; return the last loss, the peak and the tokens per second of all but the first.

    Raises:
        torch.OutOfMemoryError: the variant does not fit.
    """
    distillation = bench.distillation(variant, length)
    seconds = []
    for step in range(steps):
        wait()
        started = time.monotonic()
        loss = distillation.step(step)["loss"]
        wait()
        seconds.append(time.monotonic() - started)
    reserved, allocated = peak_gb()
    best = seconds[1:] or seconds
    rate = len(best) * bench.size.batch * length / sum(best)
    return {"loss": loss, "reserved": reserved, "allocated": allocated, "rate": rate}


def fits(bench: Bench, variant: str, length: int) -> bool:
    """Say whether a step fits."""
    try:
        measure(bench, variant, length, 1)
        fitted = True
    except torch.OutOfMemoryError:
        fitted = False
    bench.optimizer.zero_grad()
    release()
    return fitted


def longest(bench: Bench, variant: str, limit: int) -> int:
    """Return the largest length up to ``limit`` that fits, to the size's step: the limit itself, or by bisection."""
    low, high = 0, limit // bench.size.step_length
    if fits(bench, variant, high * bench.size.step_length):
        return high * bench.size.step_length
    high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(bench, variant, middle * bench.size.step_length):
            low = middle
        else:
            high = middle - 1
    return low * bench.size.step_length


def kernels(bench: Bench, variant: str, length: int) -> dict[str, float]:
    """Print the longest kernels of one step; return each kind's share of its GPU time (operators' on a CPU)."""
    from torch.profiler import ProfilerActivity, profile

    distillation = bench.distillation(variant, length)
    distillation.step(0)
    on_gpu = bench.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        distillation.step(1)
        wait()
    spent = {
        event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total
        for event in trace.key_averages()
    }
    total, shares = sum(spent.values()), dict.fromkeys([*KERNELS, "other"], 0.0)
    for name, time_of in sorted(spent.items(), key=lambda one: -one[1]):
        kind = next((kind for kind, parts in KERNELS.items() if _is(name, parts)), "other")
        shares[kind] += time_of / total
        if time_of > 0.005 * total:
            print(f"  {time_of / total:6.1%} {kind}: {name[:100]}", flush=True)
    return shares


def _is(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part if part == "_kernel" else part in name for part in parts)


def run(size: Size, command: str, parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Measure some parts of the study, print and write them; return their rows."""
    rows: list[dict[str, Any]] = []
    if size.device == "cuda":
        import gpu_checks

        gpu_checks.check()
        rows += _delta_rule()
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        bench = Bench(size, Path(folder))
        print(
            f"built in {time.monotonic() - started:.0f} s, {len(bench.student.layers)} quantised linears", flush=True
        )
        for found in chain.from_iterable(part(bench) for part in parts):
            rows += found
            study.write("qad-memory", command, _versions(), rows, others=True)
    return rows


def _turns(bench: Bench) -> Iterator[list[dict[str, Any]]]:
    """Measure the variants in turns at one length, then where the time of a step goes."""
    length = bench.size.length
    yield _rows(bench.size, length, take_turns(bench, length))
    yield _bounds(bench, "chunked", length)


def _bounds(bench: Bench, variant: str, length: int) -> list[dict[str, Any]]:
    """Say what a step's time goes into, and what share of the GPU's matrix arithmetic it uses."""
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    shares = kernels(bench, variant, length)
    rows = [study.row(variant, "share of GPU time", share, "", note=kind) for kind, share in shares.items()]
    distillation = bench.distillation(variant, length)
    attention = {
        op: lambda *_, **__: 0 for op in flop_registry if "scaled_dot_product" in str(op)
    }  # heads are grouped
    with FlopCounterMode(display=False, custom_mapping=attention) as counted:
        distillation.step(0)
    work = counted.get_total_flops()
    seconds = bench.size.batch * length / measure(bench, variant, length, 2)["rate"]
    note = "of matrix products outside attention, what is computed twice counted twice"
    rows.append(study.row(variant, "arithmetic of a step", work / 1e12, "TFLOP", note=note))
    rate = work / seconds / 1e12
    note = f"{rate / PEAK_TFLOPS:.0%} of the {PEAK_TFLOPS} that an H200 has for dense bf16"
    return [*rows, study.row(variant, "arithmetic a second", rate, "TFLOP/s", note=note)]


def _delta_rule() -> list[dict[str, Any]]:
    """Say which gated delta rule serves, how exact it is and how long it takes, beside PyTorch's own."""
    found = gdn.probe()
    print("gated delta rule:", found, flush=True)
    name, plain = found["implementation"], "PyTorch"
    rows = []
    for variant, suffix in ((name, ""), (plain, "_of_pytorch")):
        note = "forward and backward of one layer, 16384 tokens, 32 heads of 128"
        took = found.get(f"milliseconds{suffix}")
        rows.append(study.row(f"gated delta rule: {variant}", "milliseconds", took, "ms", note=note))
        note = "largest relative error of output and gradients in bf16 against PyTorch in float32, 512 tokens"
        rows.append(study.row(f"gated delta rule: {variant}", "error", found[f"error{suffix}"], "", note=note))
    return rows


def _lengths(bench: Bench) -> Iterator[list[dict[str, Any]]]:
    """Measure each variant at the largest length that it fits in the budget, then all at the largest common one."""
    size = bench.size
    if size.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, BUDGET_GB * 1e9 / total))
    fits(bench, VARIANTS[0], size.step_length)  # the moments exist from the first step on
    for variant in VARIANTS:
        best = longest(bench, variant, size.longest)
        note = f"the longest of multiples of {size.step_length} within {BUDGET_GB} GB and {size.longest}"
        found = study.row(variant, "longest_sequence", best, "tokens", note=note)
        if variant == VARIANTS[0]:  # the others hold less: its longest is the longest that all fit
            where = " at the common longest"
            yield [found, *_rows(size, best, take_turns(bench, best), where)]
        else:
            yield [found, *_at_its_longest(bench, variant, best)]


def take_turns(bench: Bench, length: int) -> dict[str, list[dict[str, float]]]:
    """Measure the variants in turns; return each one's figures of every turn."""
    taken: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for turn in range(bench.size.rounds):
        for variant in VARIANTS:
            found = measure(bench, variant, length, 2)
            taken[variant].append(found)
            print(turn, variant, length, {key: round(value, 4) for key, value in found.items()}, flush=True)
    return taken


def _at_its_longest(bench: Bench, variant: str, length: int) -> list[dict[str, Any]]:
    found = measure(bench, variant, length, 2)
    print("at its longest:", variant, length, found, flush=True)
    note = f"{length} tokens a sequence"
    rows = [study.row(variant, "tokens_per_second at its longest", found["rate"], "tokens/s", note=note)]
    return [study.row(variant, "peak_memory_gb at its longest", _peak([found]), "GB", note=note), *rows]


def _peak(found: list[dict[str, float]]) -> float | None:
    held = max(one["reserved"] for one in found)
    return None if held != held else held


def _rows(size: Size, length: int, taken: dict[str, list[dict[str, float]]], where: str = "") -> list[dict[str, Any]]:
    rows = []
    note = f"{length} tokens a sequence, {size.batch} sequences a step"
    for variant, found in taken.items():
        rates = [one["rate"] for one in found]
        ratios = [one["rate"] / base["rate"] for one, base in zip(found, taken["materialised"], strict=True)]
        used = f"{note}; tensors {max(one['allocated'] for one in found):.1f}"
        rows.append(study.row(variant, f"peak_memory_gb{where}", _peak(found), "GB", len(found), note=used))
        for metric, values, unit in (
            ("tokens_per_second", rates, "tokens/s"),
            ("tokens_per_second_ratio", ratios, "of materialised"),
        ):
            spread = f"{min(values):.4g} to {max(values):.4g}"
            row = study.row(variant, f"{metric}{where}", statistics.median(values), unit, len(values), note=spread)
            rows.append(row)
        loss = statistics.median(one["loss"] for one in found)
        rows.append(study.row(variant, f"loss{where}", loss, "nats", len(found)))
    return rows


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "triton", "fla-core", "bitsandbytes")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="every line at a toy size on a CPU; writes no results")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--quick", action="store_true", help="not the largest lengths")
    part.add_argument("--lengths", action="store_true", help="only the largest lengths")
    given = parser.parse_args(argv)
    flag, parts = (" --quick", [_turns]) if given.quick else ("", [_turns, _lengths])
    if given.lengths:
        flag, parts = " --lengths", [_lengths]
    with tempfile.TemporaryDirectory() as folder:
        if given.toy:
            study.RESULTS = Path(folder)
        size = TOY if given.toy else TRUE
        rows = run(size, f"python tests/benchmarks/qad_memory.py{flag}", parts)
        print((study.RESULTS / "qad-memory.md").read_text())
    return rows


if __name__ == "__main__":
    main()
