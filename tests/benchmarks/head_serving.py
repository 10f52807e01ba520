"""Study ``head-serving``: targets with a quantised output head, served by vLLM alone and under a DFlash drafter.

Three commands, the second by an interpreter that has vLLM, with ``--model FOLDER --work FOLDER`` as for
``qad_quality.py``, whose chats they use: ``python tests/benchmarks/head_serving.py make`` packs SmolLM2 with an INT8
and with an INT4 head (ptq, a short qad, select, pack) and makes a drafter of random weights without a head of its own;
``serve`` answers the held-out prompts greedily with vLLM; ``compare`` checks every answered token against this
project's own forward pass of the same target and writes docs/results/head-serving.*.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import qad_quality
import study

HEADS = (8, 4)
TIE = 0.1
TOKENS = 48
QAD = {
    "steps": 20,
    "batch": 16,
    "micro_batch": 16,
    "learning_rate": 1e-4,
    "optimizer": "adamw",
    "evaluate_every": 20,
    "checkpoint_every": 20,
}


def make(stages: qad_quality.Stages, work: Path) -> None:
    """Pack a target for each head; make the drafter unless it is there."""
    import torch
    from transformers import AutoConfig

    sequences = stages.sequences()
    for bits in HEADS:
        student = stages.student(bits)
        pair = {"teacher": stages.model, "student": student, "sequences": sequences}
        computed = {"dtype": stages.size.qad.get("dtype", "bfloat16")}
        trained = stages.run("qad", QAD | computed, **pair)
        chosen = stages.run("select", computed, qad=trained, **pair)
        given = {"student": student, "model": stages.model, "sequences": sequences}
        packed = stages.run("pack", computed, qad=trained, selected=chosen, **given)
        (work / f"int{bits}").unlink(missing_ok=True)
        (work / f"int{bits}").symlink_to(packed.path)
    if not (work / "draft").exists():
        from components.drafter import model

        torch.manual_seed(0)
        target = AutoConfig.from_pretrained(stages.model.path)
        last = target.num_hidden_layers - 1
        model.save(
            model.build(target, layers=1, taps=[1, last // 2, last - 1], block_size=8, mask_token=0), work / "draft"
        )


def serve(stages: qad_quality.Stages, work: Path) -> None:
    """Answer with every target, alone and with the drafter, each in a process of its own."""
    from components.chats.template import Template, prompt_token_ids
    from components.checkpoint.load import load_tokenizer

    tokenizer = load_tokenizer(stages.model.path)
    ids = [prompt_token_ids(tokenizer, row["conversations"], Template()) for row in qad_quality.prompts(0)]
    (work / "prompts.json").write_text(json.dumps(ids))
    for bits in HEADS:
        for draft in (False, True):
            name = f"served-{bits}{'-draft' if draft else ''}"
            argv = [sys.executable, __file__, "one", "--work", str(work), "--bits", str(bits), *["--draft"] * draft]
            with (work / f"{name}.log").open("w") as log:
                done = subprocess.run(argv, stdout=log, stderr=log, check=False)
            print(name, "exit", done.returncode, flush=True)


def one(work: Path, bits: int, draft: bool) -> None:
    """Answer with one target in this process."""
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    llm = LLM(
        model=str((work / f"int{bits}").resolve()),
        dtype="bfloat16" if torch_has_gpu() else "float32",
        max_model_len=512,
        max_num_seqs=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **({"gpu_memory_utilization": 0.15} if torch_has_gpu() else {}),
        **(
            {"speculative_config": {"method": "dflash", "model": str(work / "draft"), "num_speculative_tokens": 7}}
            if draft
            else {}
        ),
    )
    ready = time.monotonic()
    prompts = [{"prompt_token_ids": ids} for ids in json.loads((work / "prompts.json").read_text())]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    found = {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": counters.get("vllm:spec_decode_num_drafts", 0),
        "accepted": counters.get("vllm:spec_decode_num_accepted_tokens", 0),
        "start_seconds": ready - started,
    }
    (work / f"served-{bits}{'-draft' if draft else ''}.json").write_text(json.dumps(found))


def torch_has_gpu() -> bool:
    """Say whether vLLM will run on a GPU."""
    import torch

    return torch.cuda.is_available()


def compare(work: Path) -> list[dict[str, Any]]:
    """Return the study's rows."""
    import torch

    from components.checkpoint.load import load_model

    rows = []
    prompts = json.loads((work / "prompts.json").read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for bits in HEADS:
        model = load_model((work / f"int{bits}").resolve()).to(device)  # type: ignore[arg-type]
        for name, title in ((f"served-{bits}", "alone"), (f"served-{bits}-draft", "with a drafter")):
            variant = f"{'h200' if device == 'cuda' else 'cpu'}: INT{bits} head, {title}"
            file, log = work / f"{name}.json", (work / f"{name}.log").read_text()
            if not file.exists():
                said = next((line for line in reversed(log.splitlines()) if "Error" in line), "no word")
                rows.append(study.row(variant, "tokens_agree_with_own_forward", None, "share", 0, note=said[-150:]))
                continue
            found = json.loads(file.read_text())
            agreed = []
            for prompt, answer in zip(prompts, found["answers"], strict=True):
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([prompt + answer], device=device)).logits[0].float()
                at = logits[len(prompt) - 1 : -1].log_softmax(-1).cpu()
                chosen = at.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
                agreed.append(int((at.amax(1) - chosen <= TIE).sum()))
            kernels = ", ".join(sorted(set(re.findall(r"(\w+Kernel)\b", log))))
            share = qad_quality.interval(agreed, [TOKENS] * len(agreed))
            note = f"greedy tokens within {TIE} nat of the first choice; {kernels}"
            rows.append(study.row(variant, "tokens_agree_with_own_forward", unit="share", note=note, **share))
            rows.append(study.row(variant, "start_seconds", found["start_seconds"], "s", note="eager"))
            if found["drafts"]:
                length = 1 + found["accepted"] / found["drafts"]
                note = f"random weights; {found['drafts']:.0f} drafts"
                rows.append(study.row(variant, "acceptance_length", length, "tokens", len(prompts), note=note))
    return rows


def main() -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "serve", "one", "compare"))
    parser.add_argument("--variant", choices=qad_quality.SIZES, default="h200-smollm2")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--bits", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--draft", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = arguments.work
    os.environ["QDFLASH_HOME"] = str(work / "home")
    if arguments.command == "one":
        one(work, arguments.bits, arguments.draft)
    elif arguments.command == "compare":
        names = ("torch", "transformers", "compressed-tensors")
        script = "python tests/benchmarks/head_serving.py $step --model FOLDER --work FOLDER"
        command = f"for step in make serve compare; do {script}; done"
        versions = {name: version(name) for name in names}
        study.write("head-serving", command, versions, compare(work), about=study.SMOLLM2)
    else:
        stages = qad_quality.Stages(work, arguments.model, qad_quality.SIZES[arguments.variant])
        {"make": make, "serve": serve}[arguments.command](stages, work)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
