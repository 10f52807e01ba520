"""Study ``drafter-acceptance``: acceptance length after one and two stages of training, and what each knob is worth.

``python tests/benchmarks/drafter_acceptance.py SIZE run STEP… --model FOLDER --work FOLDER`` runs stages by their own
command lines on a store in the work folder, each as soon as what it reads is committed there, so several such commands
share the work: chats and measure-… by an interpreter that has vLLM, the others by the training one. ``… score`` then
measures every drafter on the held-out chats, and ``… table`` writes docs/results/drafter-acceptance.*. SIZE is
``h200-smollm2`` or ``cpu-smollm2``, FOLDER a Hugging Face folder of SmolLM2-135M-Instruct; STEP is one of

    prompts, chats-a, student, sequences, qad, select, target, chats-b, the names in ``ARMS``, bundle-ARM, measure-ARM

The teacher answers (chats A), is quantised, distilled and packed (target), and the target answers (chats B). All arms
are measured as drafters of the packed target: teacher-forced on its answers to the held-out prompts, and the arms in
``SERVED`` also by the counters of a vLLM server that answers such prompts greedily, one at a time. Intervals resample
prompts, in pairs where two drafters are compared.
"""

import argparse
import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import drafter_prompts
import study
from steps import Step, Steps, run

from components.chats.rows import Row, is_held_out
from components.contract.context import Input
from components.contract.stage import load
from components.measure import acceptance
from components.model.sources import folder_sha256


@dataclass(frozen=True)
class Arm:
    """One drafter: the chats it learns from, passes over them in units of a stage's, and what it does otherwise."""

    chats: str = "a"
    stages: int = 1
    init: str | None = None
    change: tuple[str, Any] | None = None


ARMS = {
    "stage1": Arm(),
    "stage1-only": Arm(stages=2),
    "direct": Arm("b", stages=2),
    "two-stage": Arm("b", init="stage1"),
    "loss kl": Arm(change=("loss", "kl")),
    "loss d_pace": Arm(change=("loss", "d_pace")),
    "seed 1": Arm(change=("seed", 1)),
    "block 8": Arm(change=("block_size", 8)),
    "gamma 3.5": Arm(change=("gamma", 3.5)),
    "anchors 16": Arm(change=("anchors", 16)),
    "layers 2": Arm(change=("layers", 2)),
    "gamma 14": Arm(change=("gamma", 14.0)),
    "block 4": Arm(change=("block_size", 4)),
    "anchors 256": Arm(change=("anchors", 256)),
    "layers 1": Arm(change=("layers", 1)),
}
SERVED = ("stage1-only", "direct", "two-stage")
PAPER = {"stage 1 only": 4.92, "direct": 4.97, "two-stage": 5.03}


@dataclass(frozen=True)
class Size:
    """One machine's load.

    ``answers``: of each training prompt; ``every``: n takes each n-th prompt; ``epochs``: of one stage of training.
    """

    answers: int
    every: int
    regen: dict[str, Any]
    length: int
    qad: dict[str, Any]
    drafter: dict[str, Any]
    epochs: int
    measure: dict[str, Any]


NEVER = 10**6
SIZES = {
    "h200-smollm2": Size(
        answers=8,
        every=1,
        regen={
            "max_tokens": 256,
            "max_model_len": 1024,
            "parallel": 1024,
            "shard_rows": 1024,
            "dtype": "bfloat16",
            "device": "cuda",
            "replicas": 2,
            "gpu_memory_utilization": 0.3,
        },
        length=512,
        qad={"steps": 200, "batch": 16, "micro_batch": 16, "learning_rate": 1e-4, "optimizer": "adamw"},
        drafter={"max_length": 512, "anchors": 64, "batch": 16, "micro_batch": 16},
        epochs=2,
        measure={
            "profile": {
                "dtype": "bfloat16",
                "max_model_len": 1024,
                "enforce_eager": True,
                "gpu_memory_utilization": 0.1,
                "attention_backend": "FLASH_ATTN",
            },
            "answers": {"prompts": 72, "max_tokens": 128, "concurrent_prompts": 0},
        },
    ),
    "cpu-smollm2": Size(
        answers=1,
        every=24,
        regen={"max_tokens": 24, "max_model_len": 512, "parallel": 64, "dtype": "float32", "sampling": {"top_p": 1}},
        length=128,
        qad={
            "steps": 2,
            "batch": 2,
            "micro_batch": 2,
            "learning_rate": 1e-3,
            "optimizer": "adamw",
            "dtype": "float32",
        },
        drafter={"max_length": 128, "anchors": 4, "batch": 8, "layers": 1, "block_size": 4, "dtype": "float32"},
        epochs=1,
        measure={
            "profile": {
                "dtype": "float32",
                "max_model_len": 512,
                "enforce_eager": True,
                "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            },
            "answers": {"prompts": 4, "max_tokens": 12, "concurrent_prompts": 0},
        },
    ),
}


def plan(size: Size, model: Path, store: str) -> dict[str, Step]:
    """Return every step of the study by name."""
    steps = Steps(store)
    add = steps.add
    rows = drafter_prompts.prompts(size.answers)[:: size.every]
    held_out = [row for row in rows if is_held_out(row["id"], drafter_prompts.HELD_OUT)]
    asked, measured = (steps.given("prompts", many) for many in (rows, held_out))
    source = {"kind": "folder", "uri": str(model), "sha256": folder_sha256(model)}
    teacher = add("model", "model", {"source": source})
    chats = {"a": add("chats-a", "regen", size.regen, prompts=asked, model=teacher)}
    student = add("student", "ptq", {}, model=teacher)
    split = {"sequence_length": size.length, "held_out": drafter_prompts.HELD_OUT, "truncated": "keep"}
    sequences = add("sequences", "sequences", split, chats=chats["a"], model=teacher)
    steps_apart = {"evaluate_every": NEVER, "checkpoint_every": NEVER}
    pair = {"teacher": teacher, "student": student, "sequences": sequences}
    qad = add("qad", "qad", {**size.qad, **steps_apart, "processes": 1}, **pair)
    computed = {"dtype": size.qad.get("dtype", "bfloat16")}
    select = add("select", "select", computed, qad=qad, **pair)
    chosen = {"qad": qad, "selected": select}
    target = add("target", "pack", computed, **chosen, student=student, model=teacher, sequences=sequences)
    chats["b"] = add("chats-b", "regen", {**size.regen, "seed": 1}, prompts=asked, model=target)
    for name, arm in ARMS.items():
        config = drafter_config(size, arm)
        init = steps[arm.init] if arm.init else None
        add(name, "drafter", config, target=target if arm.chats == "b" else teacher, chats=chats[arm.chats], init=init)
    for name in SERVED:
        bundle = add(f"bundle-{name}", "bundle", {}, target=target, drafter=steps[name])
        wanted = {"label": name, "draft": True, "latency": {}, **size.measure}
        add(f"measure-{name}", "measure", wanted, model=bundle, prompts=measured)
    return steps


def drafter_config(size: Size, arm: Arm) -> dict[str, Any]:
    """Return an arm's config of the drafter stage."""
    return {
        "group_size": 64,
        "held_out": drafter_prompts.HELD_OUT,
        "cache_features": False,
        "evaluate_every": NEVER,
        "save_every": 500,
        "processes": 1,
        **size.drafter,
        "epochs": arm.stages * size.epochs,
        **dict([arm.change] if arm.change else []),
    }


def score(steps: dict[str, Step], size: Size, work: Path) -> None:
    """Measure every committed drafter that has no file in ``work`` yet; write one for each."""
    import drafter_arms

    def keep(name: str, records: list[Row]) -> None:
        (work / f"score-{name.replace(' ', '-')}.json").write_text(json.dumps(records))
        print(name, acceptance.summarise(records, 0)["value"], flush=True)

    missing = [name for name in ARMS if steps[name].done and not _score(work, name)]
    drafters = {name: Input(steps[name].uri).path for name in missing}
    if drafters:
        config = load("drafter").Config(**drafter_config(size, ARMS["stage1"]))
        target, chats = (Input(steps[name].uri).path for name in ("target", "chats-b"))
        drafter_arms.score(target, chats, drafters, config, keep, baselines=not _score(work, "bigram"))


def _score(work: Path, name: str) -> list[Row] | None:
    file = work / f"score-{name.replace(' ', '-')}.json"
    return json.loads(file.read_text()) if file.exists() else None


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("command", choices=("run", "score", "table"))
    parser.add_argument("names", nargs="*", metavar="STEP")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="steps at once")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    os.environ["QDFLASH_HOME"] = str(work / "home")
    size = SIZES[arguments.size]
    steps = plan(size, arguments.model, str(work / "store"))
    if arguments.command == "run":
        return min(1, run(steps, arguments.names, arguments.jobs, work / "logs"))
    if arguments.command == "score":
        score(steps, size, work)
        return 0
    from drafter_table import about, table

    served_by = steps["chats-a"].artifact
    assert served_by is not None
    study.write(
        "drafter-acceptance",
        f"python tests/benchmarks/drafter_acceptance.py {arguments.size} COMMAND --model FOLDER --work FOLDER",
        {
            **{name: version(name) for name in ("torch", "transformers", "compressed-tensors", "speculators")},
            "vllm": served_by.manifest["versions"]["vllm"],
        },
        table(steps, lambda name: _score(work, name)),
        about=about(steps, size),
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
