"""Study ``pack-speed``: packing beside copying what it wrote, and beside compressed-tensors' own model compressor.

``.venv/train/bin/python tests/benchmarks/pack_speed.py``; writes docs/results/pack-speed.*. First the whole Qwen3.5-4B
by its shapes (but for its multi-token prediction), with random weights: what a user packs, whose embedding and vision
tower are carried through. Then 4 layers of its text model alone, where every byte is packed. These take turns on the
same files:

- ours, from student and latents to the folder, proofs excluded;
- copy, of that folder's files into a folder store: bytes alone, nothing is hashed;
- commit, of that folder as an artifact of a folder store: the same copy, and the sha256 of every file;
- read and write: ours without arithmetic, its floor; each latent is read once, and as many bytes as its codes have are
  written. For one byte of codes there are four of latents to read, which a copy does not have;
- on the layers alone the library, which gets weights and scales as its model and writes it.

All write to disk, and what they read is in memory: student and latents (11 GB) in /dev/shm, since a system may page a
file out at any time, and what a copy reads was written and read just before. What one leaves to be written to disk is
written or gone before the next starts. Memory is the resident set of a process, sampled, above what it was before,
with one and with ten times the layers.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import study
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import save_file

from components.checkpoint.census import skeleton
from components.checkpoint.config import read_config
from components.checkpoint.grid import PACKED, SCALE, Quantized
from components.checkpoint.quantize import integer_codes
from components.checkpoint.shards import TensorWriter
from components.checkpoint.tensors import Tensors
from components.checkpoint.write import save_quantized
from components.contract.log import Log
from components.pack.target import write_target
from components.store.artifact import commit
from components.store.backend import Store

FEW_LAYERS, SMALL_VOCABULARY, GROUP, ROUNDS = 4, 1024, 32, 5
WHOLE, ALONE = "the whole Qwen3.5-4B", f"{FEW_LAYERS} layers alone"
LARGEST = f"the largest tensor, an MLP's latents, has {9216 * 2560 * 2 / 1e9:.3f} GB"
T_QUANTILE = 2.776  # of 5 rounds, 95 %
DENSE = ("in_proj_a", "in_proj_b")
STEPS = ("ours", "copy", "commit", "read and write")
ABOUT = (
    "Ratios are the seconds of a copy (bytes alone), or of a commit (with the sha256 of every file), over these, of "
    "the same bytes and without proofs; `read and write` is ours without arithmetic. All write to disk and read from "
    "memory."
)


def main() -> int:
    """Measure and write the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", type=Path, help="pack this folder's student once and print its peak in GB")
    arguments = parser.parse_args()
    if arguments.peak:
        skeleton(arguments.peak / "student")  # imports the architecture
        print(peak_of(lambda: ours(arguments.peak, arguments.peak / "out")))
        return 0
    home = study.ROOT / ".qdflash"
    home.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as sources, tempfile.TemporaryDirectory(dir=home) as disk:
        whole = make(Path(sources, "whole"))
        seconds = alternate(whole, Path(disk), STEPS)
        shutil.rmtree(whole)
        alone = alternate(make(Path(sources, "few"), FEW_LAYERS), Path(disk), (*STEPS, "library"))
        peaks = {count: peak(make(Path(disk, "peak"), count)) for count in (FEW_LAYERS, 10 * FEW_LAYERS)}
    both = ((WHOLE, seconds), (ALONE, alone))
    rows = [
        *(
            ratio(who, over, of, who, note)
            for over in ("copy", "commit")
            for who in ("ours", "read and write")
            for note, of in both
        ),
        ratio("compressed-tensors", "copy", alone, "library", f"ModelCompressor; {ALONE}"),
        *(
            study.row(who, "seconds", statistics.median(found), "s", ROUNDS, note=note)
            for note, of in both
            for who, found in of.items()
        ),
        *(
            study.row("ours", "peak_memory_gb", found, "GB", note=f"{count} layers alone; {LARGEST}")
            for count, found in peaks.items()
        ),
    ]
    versions = {name: version(name) for name in ("torch", "compressed-tensors", "safetensors")}
    study.write("pack-speed", ".venv/train/bin/python tests/benchmarks/pack_speed.py", versions, rows, about=ABOUT)
    print(json.dumps({"seconds": seconds, "alone": alone, "peaks": peaks}))
    return 0


def make(folder: Path, layers: int | None = None) -> Path:
    """Write ``student/`` and ``latents/``, of so many layers alone; weights of one shape are the same tensor."""
    config = json.loads((study.ROOT / "tests/components/qwen3_5_4b.json").read_text())
    if layers:
        config = config["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": layers}
        config["vocab_size"] = SMALL_VOCABULARY
    (folder / "student").mkdir(parents=True)
    (folder / "student/config.json").write_text(json.dumps(config))
    model, generator = skeleton(folder / "student"), torch.Generator().manual_seed(0)
    linears = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    packed = [name for name in linears if ".layers." in name and name.rpartition(".")[2] not in DENSE]
    weights: dict[torch.Size, tuple[torch.Tensor, Quantized]] = {}
    for name in packed:
        if (shape := linears[name].weight.shape) not in weights:
            latents = torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
            scales = (latents.float().unflatten(1, (-1, GROUP)).abs().amax(-1) / 7.5).bfloat16()
            weights[shape] = latents, Quantized(integer_codes(latents, scales), scales, GROUP)
    tied = {"lm_head.weight"}
    others = [n for n, _ in model.named_parameters() if n.removesuffix(".weight") not in packed and n not in tied]
    shapes = dict(model.named_parameters())
    save_quantized(
        folder / "student",
        modules=((name, weights[linears[name].weight.shape][1]) for name in packed),
        others=((name, torch.ones(shapes[name].shape, dtype=torch.bfloat16)) for name in others),
        config=config,
        ignore=[name for name in linears if name not in packed],
        sidecars=folder,
    )
    (folder / "latents").mkdir()
    with TensorWriter(folder / "latents") as writer:
        for name in packed:
            latents, quantized = weights[linears[name].weight.shape]
            writer.add(f"{name}.weight", latents)
            writer.add(f"{name}.{SCALE}", quantized.scales)
    return folder


def ours(folder: Path, out: Path) -> None:
    """Pack as the stage does."""
    write_target(folder / "student", folder / "latents", folder, out, Log("pack"))


def read_and_write(folder: Path, out: Path) -> None:
    """Do what :func:`ours` does but for the arithmetic."""

    def pass_over(blocks: Iterable[tuple[torch.Tensor, torch.Tensor]], bits: int) -> Iterator[torch.Tensor]:
        for latents, _ in blocks:
            yield torch.empty((len(latents), latents.shape[1] * bits // 32), dtype=torch.int32)

    with patch("components.pack.latents.packed_blocks", pass_over):
        ours(folder, out)


def library(folder: Path, out: Path) -> None:
    """Pack as compressed-tensors does a model whose weights and scales are given."""
    declared = read_config(folder / "student")["quantization_config"]
    model, latents, student = skeleton(folder / "student"), Tensors(folder / "latents"), Tensors(folder / "student")
    apply_quantization_config(model, QuantizationConfig.model_validate(declared | {"quantization_status": "frozen"}))
    state = {name: latents[name] for name in latents}
    state |= {n: student[n] for n in student if not n.startswith(tuple(m + "." for m in _modules(latents)))}
    model.load_state_dict(state, strict=False, assign=True)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    out.mkdir()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(read_config(folder / "student")))
    compressor.update_config(str(out))
    if sum(name.endswith(PACKED) for name in tensors) != len(_modules(latents)):
        raise AssertionError("the library packed other modules than ours")


def _modules(latents: Tensors) -> list[str]:
    return [name.removesuffix(".weight") for name in latents if name.endswith(".weight")]


def copy(folder: Path, store: Path) -> None:
    """Copy a folder's files into a folder store."""
    for path in sorted(folder.iterdir()):
        Store(str(store)).upload(path, path.name)


def alternate(folder: Path, disk: Path, who: tuple[str, ...]) -> dict[str, list[float]]:
    """Return each round's seconds after a warm-up; they take turns, copies of what ours wrote follow it."""
    places = {name: disk / name for name in who}
    steps: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours(folder, places["ours"]),
        "copy": lambda: copy(places["ours"], places["copy"]),
        "commit": lambda: commit(Store(str(places["commit"])), "pack", "0" * 64, places["ours"], {"metrics": {}}),
        "read and write": lambda: read_and_write(folder, places["read and write"]),
        "library": lambda: library(folder, places["library"]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in who}
    for number in range(ROUNDS + 1):
        for name in who if number % 2 else (*who[3:], *who[:3]):
            os.sync()
            if name in ("copy", "commit"):
                read(places["ours"])
            started = time.perf_counter()
            steps[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
            if name != "ours":
                shutil.rmtree(places[name])
        shutil.rmtree(places["ours"])
        print(number, {name: found[-1:] for name, found in seconds.items()}, flush=True)
    return seconds


def read(folder: Path) -> None:
    """Read every file once, so that it is in memory."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def ratio(variant: str, over: str, seconds: dict[str, list[float]], under: str, note: str) -> dict[str, Any]:
    """Return the mean of the rounds' ratios of ``over``'s seconds to ``under``'s, with its interval."""
    found = [one / other for one, other in zip(seconds[over], seconds[under], strict=True)]
    mean, half = statistics.mean(found), T_QUANTILE * statistics.stdev(found) / math.sqrt(len(found))
    metric = f"ratio_to_{over}"
    return study.row(variant, metric, mean, "ratio", len(found), low=mean - half, high=mean + half, note=note)


def peak(folder: Path) -> float:
    """Return the peak, in GB, of a process that packs ``folder``; remove the folder."""
    argv = [sys.executable, __file__, "--peak", str(folder)]
    found = float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[-1])
    shutil.rmtree(folder)
    return found


def peak_of(work: Callable[[], None]) -> float:
    """Return the largest resident set, in GB, while ``work`` runs, above what it was before."""
    before, largest, done = _resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.002):
            largest = max(largest, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return (largest - before) / 1e9


def _resident() -> int:
    lines: Iterator[str] = iter(Path("/proc/self/status").read_text().splitlines())
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


if __name__ == "__main__":
    raise SystemExit(main())
