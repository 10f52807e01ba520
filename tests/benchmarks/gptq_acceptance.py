"""Study ``gptq-acceptance``: what quantising a drafter costs it, and what a step of the served pair then takes.

``python tests/benchmarks/gptq_acceptance.py SIZE run STEP… --model FOLDER --work FOLDER`` runs stages by their own
command lines on a store in the work folder, each as soon as what it reads is committed there; the steps are, in order,

    model, target, chats-short, prompts-long, chats-long, chats, drafter, rtn, awq, gptq

and those named chats-… need an interpreter that has vLLM, the others the training one. ``… one-shot`` quantises the
published way, ``… speed`` times GPTQ at Qwen3.5-4B's shapes, ``kernel_probe.py`` (vLLM) says which kernel takes which
linear. ``… serve`` (vLLM) serves the target with every drafter and without one and asks them the same held-out
prompts greedily, one request at a time, in turn; ``… table`` writes docs/results/gptq-acceptance.*. SIZE is
``h200-smollm2`` or ``cpu-smollm2``, FOLDER a Hugging Face folder of SmolLM2-135M-Instruct. ``window.py`` goes on with
the same work folder.
"""

import argparse
import json
import os
import random
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import drafter_prompts
import served_pairs
import study
from steps import Steps, commit_rows, run

from components.chats.rows import Row, is_held_out, read_rows
from components.chats.template import Template
from components.contract.context import Input
from components.contract.stage import load
from components.model.sources import folder_sha256
from components.serving.profiles import Profile

METHODS = ("rtn", "awq", "gptq")
HELD_OUT = drafter_prompts.HELD_OUT
NEVER = 10**6
QWEN_4B = {"vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128}
QWEN_4B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
TOY = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
TOY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 8}


@dataclass(frozen=True)
class Size:
    """One machine's load.

    ``answers``: of each short training prompt; ``every``: n takes each n-th prompt; ``long``: how many long prompts,
    of what lengths in tokens; ``ask``: prompts of each kind that the servers are asked; ``at_once``: servers.
    """

    answers: int
    every: int
    long: tuple[int, int, int]
    regen: dict[str, Any]
    drafter: dict[str, Any]
    gptq: dict[str, Any]
    profile: dict[str, Any]
    ask: dict[str, int]
    tokens: int
    at_once: int
    windows: tuple[int, ...]
    speed: dict[str, Any]


SIZES = {
    "h200-smollm2": Size(
        answers=3,
        every=1,
        long=(400, 3600, 7400),
        regen={
            "max_tokens": 256,
            "max_model_len": 8192,
            "parallel": 512,
            "shard_rows": 1024,
            "dtype": "bfloat16",
            "device": "cuda",
            "gpu_memory_utilization": 0.3,
        },
        drafter={"anchors": 64, "batch": 16, "micro_batch": 16, "epochs": 7, "loss": "d_pace", "max_length": 8192},
        gptq={"conversations": 192, "anchors": 16, "evaluation_conversations": 64, "max_length": 8192},
        profile={
            "dtype": "bfloat16",
            "max_model_len": 8192,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.05,
            "attention_backend": "FLASH_ATTN",
            "cudagraph_capture_sizes": [1, 16],
        },
        ask={"short": 64, "long": 32},
        tokens=128,
        at_once=6,
        windows=(256, 512, 1024, 2048),
        speed={"shape": QWEN_4B, "conversations": 256, "tokens": 1024, "anchors": 16, "group_size": 128},
    ),
    "cpu-smollm2": Size(
        answers=1,
        every=24,
        long=(8, 120, 200),
        regen={"max_tokens": 24, "max_model_len": 512, "parallel": 32, "dtype": "float32", "sampling": {"top_p": 1}},
        drafter={
            "anchors": 4,
            "batch": 8,
            "layers": 1,
            "block_size": 4,
            "dtype": "float32",
            "max_length": 256,
            "epochs": 1,
        },
        gptq={
            "conversations": 32,
            "anchors": 16,
            "evaluation_conversations": 4,
            "evaluation_anchors": 8,
            "max_length": 256,
            "dtype": "float32",
        },
        profile={
            "dtype": "float32",
            "max_model_len": 512,
            "enforce_eager": True,
            "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        },
        ask={"short": 3, "long": 2},
        tokens=12,
        at_once=1,
        windows=(64,),
        speed={"shape": TOY, "conversations": 8, "tokens": 64, "anchors": 4, "group_size": 32},
    ),
}


def plan(name: str, model: Path, work: Path) -> Steps:
    """Return every step of both studies by name."""
    size, steps = SIZES[name], Steps(str(work / "store"))
    add = steps.add
    asked = steps.given("prompts", drafter_prompts.prompts(size.answers)[:: size.every])
    source = {"kind": "folder", "uri": str(model), "sha256": folder_sha256(model)}
    teacher = add("model", "model", {"source": source})
    target = add("target", "ptq", {"method": "rtn", "group_size": 32}, model=teacher)
    where = ["--model", str(model), "--work", str(work)]
    short = add("chats-short", "regen", size.regen, prompts=asked, model=target)
    long = steps.made("prompts-long", "prompts", [__file__, name, "make", "prompts-long", *where], short)
    answered = add("chats-long", "regen", size.regen, prompts=long, model=target)
    chats = steps.made("chats", "regen", [__file__, name, "make", "chats", *where], short, answered)
    common = {"group_size": 64, "held_out": HELD_OUT}
    rare = {"evaluate_every": NEVER, "save_every": NEVER, "processes": 1, "cache_features": False}
    drafter = add("drafter", "drafter", {**common, **rare, **size.drafter}, target=target, chats=chats)
    for method in METHODS:
        add(method, "gptq", {**common, **size.gptq, "method": method}, drafter=drafter, target=target, chats=chats)
    return steps


def make(steps: Steps, name: str, size: Size) -> None:
    """Commit what no stage makes: prompts that follow a history of answered chats; all chats together."""
    short = list(read_rows(Input(steps["chats-short"].uri).path))
    if name == "chats":
        commit_rows(steps[name].uri, short + list(read_rows(Input(steps["chats-long"].uri).path)))
        return
    number, least, most = size.long
    draw, rows = random.Random(0), []
    sides: dict[bool, list[Row]] = {True: [], False: []}
    for row in short:
        sides[is_held_out(row["id"], HELD_OUT)].append(row)
    wanted = {True: max(1, round(number * HELD_OUT)), False: number - max(1, round(number * HELD_OUT))}
    for held_out, many in sides.items():
        names = (one for one in map("long-{}".format, count()) if is_held_out(one, HELD_OUT) == held_out)
        for last in draw.choices(many, k=wanted[held_out]):
            length, left, history = len(last["prompt_token_ids"]), draw.randrange(least, most), []
            while length < left:
                one = draw.choice(many)
                length += len(one["prompt_token_ids"]) + len(one["token_ids"])
                history += [*one["conversations"], {"role": "assistant", "content": one["text"]}]
            conversation = [*history, *last["conversations"]]
            rows.append({"id": next(names), "category": last["category"], "conversations": conversation})
    commit_rows(steps[name].uri, rows)


def prompts(steps: Steps, size: Size, model: Path) -> dict[str, list[Row]]:
    """Return the held-out prompts that servers are asked, by kind."""
    from transformers import AutoTokenizer

    from components.measure import answers

    tokenizer, found = AutoTokenizer.from_pretrained(model), {}
    longest = size.profile["max_model_len"] - size.tokens - 16
    for kind, step in (("short", "chats-short"), ("long", "prompts-long")):
        rows = (row for row in read_rows(Input(steps[step].uri).path) if is_held_out(row["id"], HELD_OUT))
        found[kind] = answers.select(rows, tokenizer, Template(), count=size.ask[kind], seed=0, longest=longest)
    return found


def serve(steps: Steps, size: Size, model: Path, work: Path, names: list[str]) -> None:
    """Ask the target alone and with every drafter, or those named; rows go to ``served.jsonl``."""
    target = Input(steps["target"].uri).path
    drafters = {"bf16": "drafter", **{method: method for method in METHODS}}
    made = {name: step for name, step in drafters.items() if steps[step].done}
    pairs = {name: served_pairs.Pair(target, Input(steps[step].uri).path) for name, step in made.items()}
    pairs["no drafter"] = served_pairs.Pair(target, None)
    pairs = {name: pair for name, pair in pairs.items() if name in (names or pairs)}
    profile = Profile(**size.profile, max_num_seqs=1)
    asked = prompts(steps, size, model)
    served_pairs.measure(pairs, asked, profile, size.tokens, size.at_once, work / "served.jsonl")


def speed(work: Path, size: Size) -> None:
    """Time GPTQ on a drafter of random weights; write ``speed.json``."""
    import gptq_speed

    (work / "speed.json").write_text(json.dumps(gptq_speed.measure(**size.speed)))


def one_shot(steps: Steps, size: Size, work: Path) -> None:
    """Quantise the drafter the published way; write ``one-shot.json``."""
    import gptq_one_shot

    drafter, target, chats = (Input(steps[name].uri).path for name in ("drafter", "target", "chats"))
    config = load("gptq").Config(group_size=64, held_out=HELD_OUT, **size.gptq)
    found = gptq_one_shot.measure(drafter, target, chats, config, work / "one-shot")
    (work / "one-shot.json").write_text(json.dumps(found))


def command_line(doc: str | None, commands: tuple[str, ...]) -> tuple[argparse.Namespace, Steps, Size]:
    """Parse the command line of either study."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("command", choices=commands)
    parser.add_argument("names", nargs="*", metavar="NAME", help="steps or variants")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="steps at once")
    arguments = parser.parse_args()
    arguments.work = arguments.work.resolve()
    arguments.work.mkdir(parents=True, exist_ok=True)
    os.environ["QDFLASH_HOME"] = str(arguments.work / "home")
    return arguments, plan(arguments.size, arguments.model, arguments.work), SIZES[arguments.size]


def versions(steps: Steps) -> dict[str, str]:
    """Return what the figures were made with."""
    served_by = steps["chats-short"].artifact
    assert served_by is not None
    names = ("torch", "transformers", "compressed-tensors", "llmcompressor", "speculators")
    return {**{name: version(name) for name in names}, "vllm": served_by.manifest["versions"]["vllm"]}


def main() -> int:
    """Run from the command line."""
    arguments, steps, size = command_line(__doc__, ("run", "make", "one-shot", "speed", "serve", "table"))
    if arguments.command == "run":
        return min(1, run(steps, arguments.names, arguments.jobs, arguments.work / "logs"))
    if arguments.command == "table":
        from gptq_table import about, table

        study.write(
            "gptq-acceptance",
            f"python tests/benchmarks/gptq_acceptance.py {arguments.size} COMMAND --model FOLDER --work FOLDER",
            versions(steps),
            table(steps, arguments.work),
            about=about(steps, size),
        )
        return 0
    {
        "make": lambda: make(steps, arguments.names[0], size),
        "one-shot": partial(one_shot, steps, size, arguments.work),
        "speed": partial(speed, arguments.work, size),
        "serve": partial(serve, steps, size, arguments.model, arguments.work, arguments.names),
    }[arguments.command]()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
