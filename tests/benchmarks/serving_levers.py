"""Study ``serving-levers``: what each change of a served pair gives, one at a time, against one fixed configuration.

No weights are needed: ``python tests/benchmarks/serving_levers.py SIZE make --work FOLDER`` (training) writes
config.json alone for every target and drafter, vLLM makes weights of no content for them and accepts as many drafted
tokens as it is told. ``… ask NAME…`` (vLLM; all without a name) starts the reference and the named variants beside
each other and asks them in turn, in rounds; what was asked is in the work folder, and a second call adds to it. ``…
table`` writes docs/results/serving-levers.*. SIZE is ``h200-qwen3.5-4b`` or ``cpu-toy``.
"""

import argparse
import json
import multiprocessing
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lever_engine
import study
from lever_table import about, table

REFERENCE = "reference"


@dataclass(frozen=True)
class Variant:
    """A served pair: bits of the output head, rows of the drafter's own head (None shares the target's), drafted
    tokens, the drafter's window, and what vLLM is told besides."""

    head: int = 16
    vocabulary: int | None = None
    tokens: int = 15
    window: int | None = 1024
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


MARLIN = {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}
VARIANTS = {
    REFERENCE: Variant(),
    "ours": Variant(head=4, vocabulary=32768),
    "INT4 head": Variant(head=4),
    "INT8 head": Variant(head=8),
    "draft vocabulary 32768": Variant(vocabulary=32768),
    "10 drafted": Variant(tokens=10),
    "7 drafted": Variant(tokens=7),
    "no window": Variant(window=None),
    "no asynchronous scheduling": Variant(engine={"async_scheduling": False}),
    "draft vocabulary 131072": Variant(vocabulary=131072),
    "prefix caching": Variant(engine={"enable_prefix_caching": True}),
    "Marlin kernels": Variant(env=MARLIN),
    "Marlin kernels, INT8 activations": Variant(env={**MARLIN, "VLLM_MARLIN_INPUT_DTYPE": "int8"}),
    "vLLM's own capture sizes": Variant(engine={"compilation_config": {}}),
}
"""In the order of what is to be run first."""


@dataclass(frozen=True)
class Size:
    """One machine's load: regimes are (input, output) tokens, ``accepted`` the acceptance lengths (None: the real)."""

    regimes: dict[str, tuple[int, int]]
    accepted: tuple[float | None, ...]
    rounds: int
    groups: tuple[int, int]
    shape: dict[str, Any]
    drafter: dict[str, Any]
    engine: dict[str, Any]
    env: dict[str, str]
    least: int = 1
    """Divides block sizes and vocabularies by this."""


SIZES = {
    "h200-qwen3.5-4b": Size(
        regimes={"short": (64, 128), "medium": (2048, 256), "long": (8192, 256)},
        accepted=(4.0, 5.0, 6.0),
        rounds=5,
        groups=(32, 128),
        shape={},
        drafter={"layers": 5, "taps": [1, 8, 15, 22, 29], "heads": 32, "key_value_heads": 8, "head_dim": 128}
        | {"intermediate_size": 9728, "mask_token": 248319},
        engine={
            "max_model_len": 8704,
            "max_num_batched_tokens": 16384,
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": 2 * 2**30,
            "attention_backend": "FLASH_ATTN",
            "gdn_prefill_backend": "triton",
        },
        env={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
    ),
    "cpu-toy": Size(
        regimes={"short": (8, 9), "medium": (48, 17)},
        accepted=(None,),
        rounds=2,
        groups=(32, 32),
        shape={
            "vocab_size": 1024,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
        drafter={"layers": 1, "taps": [1], "mask_token": 1023},
        engine={"max_model_len": 128, "enforce_eager": True, "dtype": "bfloat16"},
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"},
        least=4,
    ),
}


def folders(variant: Variant, size: Size, work: Path) -> tuple[Path, Path]:
    """Return where a variant's target and drafter are."""
    drafter = f"vocabulary-{variant.vocabulary}-window-{variant.window}"
    return work / f"head-{variant.head}", work / drafter


def make(size: Size, work: Path) -> None:
    """Write every target's and drafter's config.json."""
    import torch
    from cost_shapes import DENSE, dense_table, read_config
    from transformers import AutoConfig

    from components.checkpoint.write import quantization_config
    from components.drafter import model

    config = read_config()
    config["text_config"] |= size.shape
    modules = (name.removesuffix(".weight") for name in dense_table(config))
    dense = [name for name in modules if name.endswith(DENSE) and not name.endswith("embed_tokens")]
    for variant in VARIANTS.values():
        target, drafter = folders(variant, size, work)
        head = None if variant.head == 16 else (variant.head, size.groups[1])
        tied = {"tie_word_embeddings": head is None}
        ignore = [*dense, "re:.*visual.*", "re:.*mtp.*", *([] if head else ["lm_head"])]
        declared = {"quantization_config": quantization_config(size.groups[0], ignore, head)}
        _write(target, {**config, **tied, "text_config": {**config["text_config"], **tied}, **declared})
        with torch.device("meta"):
            built = model.build(
                AutoConfig.from_pretrained(target),
                block_size=16 // size.least,
                window=variant.window,
                **size.drafter,
            )
        own = {"draft_vocab_size": variant.vocabulary // size.least**2} if variant.vocabulary else {}
        packed = quantization_config(size.groups[1], ["lm_head"] if own else [])
        _write(drafter, {**model.config_of(built), **own, "quantization_config": packed})


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def arguments(variant: Variant, size: Size, work: Path) -> dict[str, Any]:
    """Return what vLLM's ``LLM`` is given."""
    target, drafter = (str(folder.resolve()) for folder in folders(variant, size, work))
    tokens = max(1, (variant.tokens + 1) // size.least - 1)
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": tokens}
    if size.accepted != (None,):
        speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5.0}
        speculative |= {"attention_backend": size.engine["attention_backend"]}
    return {
        "model": target,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "language_model_only": True,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 1 + tokens]},
        "speculative_config": speculative,
        **size.engine,
        **variant.engine,
    }


@dataclass
class Engine:
    """A variant's process and the pipe to it."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection

    def __call__(self, *request: Any) -> Any:
        """Return what the engine answers, to no request that it is ready; EOFError when it is gone."""
        if request:
            self.pipe.send(request)
        return self.pipe.recv()


def ask(size: Size, names: list[str], work: Path) -> None:
    """Ask the reference and the named variants in turn; rows go to ``levers.jsonl``."""
    names = [REFERENCE, *(name for name in names if name != REFERENCE)]
    session, file = round(time.time()), work / "levers.jsonl"
    engines = {name: _start(VARIANTS[name], size, work, name) for name in names}

    def keep(name: str, kind: str, **found: Any) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps({"session": session, "variant": name, "kind": kind, **found}) + "\n")

    def each(kind: str | None, *request: Any, **labels: Any) -> None:
        """Ask every engine that lives, and keep what it says as rows of this kind."""
        for name, engine in list(engines.items()):
            try:
                found = engine(*request)
            except (EOFError, BrokenPipeError):
                del engines[name]
                keep(name, "failed", log=_cause(work, name))
                print(f"{name}: {_cause(work, name)}", flush=True)
            else:
                if kind:
                    keep(name, kind, **labels, **found)

    each("start")
    print("ready:", ", ".join(engines), flush=True)
    for regime, (tokens, answer) in size.regimes.items():
        each(None, "ask", tokens, answer, 0)
        for turn in range(1, size.rounds + 1):
            each("prefill", "ask", tokens, 1, 100 + turn, regime=regime, round=turn)
        for accepted in size.accepted:
            if accepted:
                each(None, "accept", accepted)
            for turn in range(1, size.rounds + 1):
                each("answer", "ask", tokens, answer, turn, regime=regime, acceptance=accepted, round=turn)
        each("prefill on the GPU", "profile", tokens, 1, 1, regime=regime)
        each("answer on the GPU", "profile", tokens, answer, 1, regime=regime)
        print(f"{regime}: asked", flush=True)
    for engine in engines.values():
        engine.pipe.close()
    for engine in engines.values():
        engine.process.join()


def _start(variant: Variant, size: Size, work: Path, name: str) -> Engine:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    given = (there, arguments(variant, size, work), {**size.env, **variant.env}, _log(work, name))
    process = context.Process(target=lever_engine.serve, args=given)
    process.start()
    there.close()
    return Engine(process, here)


def _log(work: Path, name: str) -> Path:
    return work / f"engine-{name.replace(' ', '-').replace(',', '')}.log"


def _cause(work: Path, name: str) -> str:
    from components.serving.server import cause_of

    return cause_of(_log(work, name).read_text(errors="replace"))


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("command", choices=("make", "ask", "table"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    size = SIZES[given.size]
    if given.command == "make":
        make(size, given.work)
    elif given.command == "ask":
        ask(size, given.names or list(VARIANTS), given.work)
    else:
        command = f"python tests/benchmarks/serving_levers.py {given.size} COMMAND --work FOLDER"
        rows = [json.loads(line) for line in (given.work / "levers.jsonl").read_text().splitlines()]
        versions = {name: version(name) for name in ("torch", "vllm")}
        study.write("serving-levers", command, versions, table(rows, VARIANTS, size), about=about(size))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
