"""Study ``drafter-memory``: peak memory and speed of drafter training at Qwen3.5-4B's true shapes on one GPU.

``python tests/benchmarks/drafter_memory.py`` on a GPU writes docs/results/drafter-memory.*; ``--toy`` runs every line
of it on a CPU at a toy size in seconds and writes nothing there. It needs fla-core beside the project's own packages,
and starts by comparing flex_attention on the GPU with SDPA on the CPU. Weights and tokens are random: neither memory
nor time depends on their values. Conversations are nearly as long as they may be, no two of one length. Variants are
named by conversations per forward pass (``micro1``, ``micro2``, ``micro4``), features are computed online, and each is
compared with a ``materialised`` loss, whose logits of all slots exist at once, in turns.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import study
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from components.drafter import head, model
from components.drafter.blocks import lay_out, random_anchors
from components.drafter.data import Chat
from components.drafter.features import TargetFeatures, online, target_layer_ids
from components.drafter.forward import block_hidden
from components.drafter.stage import Config
from components.drafter.train import Schedule, Trainer
from components.training.parallel import Ranks

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read when the GPU is first used
MICRO_BATCHES = (4, 2, 1)
Taken = dict[tuple[str, bool], list[dict[str, float] | None]]
"""Measurements by name and whether the loss was materialised; None where one did not fit."""
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True}


@dataclass(frozen=True)
class Size:
    """What a run measures."""

    device: str
    config: Config
    steps: int
    rounds: int
    target: dict[str, Any] = field(default_factory=dict)


TRUE = Size(
    "cuda",
    Config(
        layers=5,
        heads=32,
        key_value_heads=8,
        head_dim=128,
        intermediate_size=9728,
        mask_token=248070,
        batch=4,
        epochs=99,
        learning_rate=1e-9,
    ),
    steps=2,
    rounds=2,
    target={
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "rope_parameters": {**ROPE, "mrope_section": [11, 11, 10]},
    },
)
TOY = Size(
    "cpu",
    Config(
        layers=1,
        taps=2,
        block_size=4,
        mask_token=511,
        max_length=96,
        anchors=8,
        batch=4,
        epochs=99,
        dtype="float32",
        learning_rate=1e-9,
    ),
    steps=1,
    rounds=1,
    target={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
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
    """A random target with its drafter and chats, and a trainer of each micro-batch over them."""

    def __init__(self, size: Size, scratch: Path, ranks: Ranks = Ranks()) -> None:  # noqa: B008
        self.size, self.scratch, self.ranks, config = size, scratch, ranks, size.config
        shape = Qwen3_5TextConfig(**size.target, tie_word_embeddings=True, max_position_embeddings=32768)
        torch.set_default_dtype(getattr(torch, config.dtype))
        torch.manual_seed(0)
        with torch.device(size.device):
            self.target = Qwen3_5ForCausalLM(shape).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        taps = target_layer_ids(shape.num_hidden_layers, config.taps)
        wide = ("heads", "key_value_heads", "head_dim", "intermediate_size")
        with torch.device(size.device):
            built = model.build(
                shape,
                layers=config.layers,
                taps=taps,
                block_size=config.block_size,
                mask_token=config.mask_token or 0,
                **{name: getattr(config, name) for name in wide},
            )
        self.drafter = model.attach(built, self.target)
        draw = torch.Generator().manual_seed(0)
        self.chats = [
            Chat(str(row), torch.randint(0, 500, (config.max_length - row,), generator=draw), config.max_length // 8)
            for row in range(config.batch)
        ]
        self.compute = TargetFeatures(self.target, taps)

    def trainer(self, micro_batch: int) -> Trainer:
        """Return a trainer whose optimizer holds no moments yet."""
        schedule = Schedule.of(self.size.config.model_copy(update={"micro_batch": micro_batch}))
        features = online(self.compute, self.chats)
        return Trainer(self.drafter, self.chats, features, schedule, dict, self.scratch, None, self.ranks)

    def seconds(self, forward: Callable[[Tensor], object]) -> float:
        """Return what a forward of the target over every chat takes, the second time."""
        for _ in range(2):
            wait()
            began = time.monotonic()
            for chat in self.chats:
                forward(chat.token_ids.to(self.size.device))
            wait()
        return time.monotonic() - began


@contextmanager
def materialised() -> Iterator[None]:
    """Take the loss from the logits of all slots at once, by PyTorch's own cross entropy."""

    def plain(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight)
        return torch.nn.functional.cross_entropy(logits.float(), ids, reduction="none")

    chunked = head.cross_entropy
    head.cross_entropy = plain
    try:
        yield
    finally:
        head.cross_entropy = chunked


def wait() -> None:
    """Let the GPU finish."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Give unused memory back and forget peaks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(bench: Bench, micro_batch: int) -> dict[str, float] | None:
    """Take some optimizer steps; return the first's loss, the peak and the others' speed, or None where it is too big.

    Tokens are those of the conversations.
    """
    trainer, batch = bench.trainer(micro_batch), list(range(bench.size.config.batch))
    bench.drafter.zero_grad()
    release()
    try:
        loss = trainer.update(0, batch)
        wait()
        began = time.monotonic()
        for step in range(bench.size.steps):
            trainer.update(step + 1, batch)
        wait()
    except torch.OutOfMemoryError:
        return None
    tokens = bench.size.steps * sum(len(chat.token_ids) for chat in bench.chats)
    spent = time.monotonic() - began
    held = torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else float("nan")
    return {"loss": loss, "held": held, "rate": tokens / spent, "seconds": spent / bench.size.steps}


def check(device: str, window: int) -> float:
    """Return how far states and gradients of a small float32 drafter on a device are from those on the CPU."""
    shape = Qwen3_5TextConfig(**TOY.target, tie_word_embeddings=True)
    torch.manual_seed(0)
    target = Qwen3_5ForCausalLM(shape).requires_grad_(False)
    wide = {"heads": 4, "key_value_heads": 2, "head_dim": 64}
    drafter = model.build(shape, layers=2, taps=[1, 4], block_size=16, mask_token=511, window=window, **wide)
    model.attach(drafter, target)
    rows = []
    for row, length in enumerate((333, 64, 211)):
        rows.append((torch.randint(0, 500, (length,)), random_anchors(length // 4, length, 40, row)))
    blocks = lay_out(rows, 16)
    features = torch.randn(len(blocks.token_ids), 2 * shape.hidden_size)
    upstream = torch.randn(len(blocks.anchors), 16, shape.hidden_size)
    found = []
    for place in ("cpu", device):
        drafter.to(place).zero_grad()
        hidden = block_hidden(drafter, features.to(place), blocks.to(torch.device(place)))
        (hidden * upstream.to(place)).sum().backward()
        gradients = [weight.grad for weight in model.trained_parameters(drafter).values()]
        found.append([hidden.detach().double().cpu(), *(one.double().cpu() for one in gradients)])
    return max(float((one - other).norm() / other.norm()) for other, one in zip(*found, strict=True))


def run(size: Size, command: str) -> list[dict[str, Any]]:
    """Check, measure, print and write the study; return its rows."""
    error = check(size.device, 24)
    print(f"{size.device} with a window of 24: relative error {error:.1e}", flush=True)
    assert error < 1e-3
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(size, Path(folder))
        forwards = target_seconds(bench)
        print("target forward:", forwards, flush=True)
        names = [(f"micro{count}", count, whole) for count in MICRO_BATCHES for whole in (False, True)]
        taken: Taken = {(name, whole): [] for name, _, whole in names}
        for turn in range(size.rounds):
            for name, count, whole in names:
                if None in taken[name, whole]:
                    continue
                with materialised() if whole else nullcontext():
                    found = measure(bench, count)
                taken[name, whole].append(found)
                print(turn, name, "materialised" if whole else "chunked", found, flush=True)
                rows = _rows(size, taken, forwards)
                study.write("drafter-memory", command, _versions(), rows)
    return rows


def target_seconds(bench: Bench) -> dict[str, float]:
    """Time the target alone over all chats: as features ask, to its last layer, and with logits that nobody needs."""
    with torch.no_grad():
        return {
            "stopped": bench.seconds(bench.compute),
            "whole": bench.seconds(lambda ids: bench.target.get_decoder()(input_ids=ids[None], use_cache=False)),
            "logits": bench.seconds(lambda ids: bench.target(input_ids=ids[None], use_cache=False)),
        }


def _rows(size: Size, taken: Taken, forwards: dict[str, float]) -> list[dict[str, Any]]:
    rows, config = [], size.config
    note = f"{config.anchors} anchors of {config.block_size} slots, up to {config.max_length} tokens"
    for name in dict.fromkeys(name for name, _ in taken):
        chunked, whole = ([one for one in taken[name, kind] if one] for kind in (False, True))
        for variant, found in ((name, chunked), (f"{name}-materialised", whole)):
            if not found and None in taken[name, variant != name]:
                rows.append(study.row(variant, "peak_memory_gb", None, "GB", note="does not fit this GPU"))
            if not found:
                continue
            held = max(one["held"] for one in found)
            peak = None if held != held else held
            rows.append(study.row(variant, "peak_memory_gb", peak, "GB", len(found), note=note))
            for metric, key, unit in (("tokens_per_second", "rate", "tokens/s"), ("loss", "loss", "nats")):
                rows.append(_median(variant, metric, [one[key] for one in found], unit))
        pairs = list(zip(chunked, whole, strict=False))
        if pairs:
            ratios = [one["rate"] / other["rate"] for one, other in pairs]
            rows.append(_median(name, "tokens_per_second_ratio", ratios, "of materialised"))
        if chunked:
            shares = [forwards["stopped"] / one["seconds"] for one in chunked]
            rows.append(_median(name, "target_forward", shares, "of a step"))
    for kind, unit in (("whole", "of a forward to the last layer"), ("logits", "of a forward with logits")):
        rows.append(study.row("target", "saved_by_stopping", 1 - forwards["stopped"] / forwards[kind], unit))
    return rows


def _median(variant: str, metric: str, values: list[float], unit: str) -> dict[str, Any]:
    spread = f"{min(values):.5g} to {max(values):.5g}"
    return study.row(variant, metric, statistics.median(values), unit, len(values), note=spread)


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "speculators", "triton", "fla-core"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="every line at a toy size on a CPU; writes no results")
    toy = parser.parse_args(argv).toy
    with tempfile.TemporaryDirectory() as folder:
        if toy:
            study.RESULTS = Path(folder)
        rows = run(TOY if toy else TRUE, "python tests/benchmarks/drafter_memory.py")
        print((study.RESULTS / "drafter-memory.md").read_text())
    return rows


if __name__ == "__main__":
    main()
