"""A drafter trained here, served by vLLM: the same answers as the target alone, drafts as our own forward predicts."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from components.checkpoint.load import load_model
from components.contract.context import Inputs, Output
from components.contract.log import Log
from components.drafter import forward, model
from components.drafter.blocks import lay_out
from components.drafter.features import TargetFeatures
from components.gptq.folder import read
from components.ptq import stage as ptq
from components.store.backend import Store
from components.store.work import Work
from tests.components.drafter.runs import drafter_stage
from tests.components.gptq.test_stage import bind, quantize
from tests.components.tiny_models import HYBRID, SHAPE

SERVER_PYTHON = Path(sys.prefix).parent / "vllm/bin/python"
PHRASES, KNOWN, PERIOD, TOKENS, BLOCK = 12, 7, 24, 60, 4
TIE = 0.06
WINDOW, MASK_FROM = 16, 30
TARGET_GROUP, DRAFT_GROUP = 32, 64
FUSED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
ALONE = range(4, 9)  # phrases of both kinds
DEEP = {**SHAPE, "num_hidden_layers": 5, "tie_word_embeddings": True}
DEEP_HYBRID = {
    **HYBRID,
    "num_hidden_layers": 5,
    "layer_types": [*["linear_attention", "full_attention"] * 2, "linear_attention"],
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,  # vLLM's CPU kernel takes no 32
    "linear_value_head_dim": 64,
}
CONFIG = {
    "layers": 2,
    "taps": 2,
    "block_size": BLOCK,
    "group_size": 32,
    "held_out": 0.1,
    "anchors": 32,
    "gamma": 4.0,
    "epochs": 9,
    "batch": 4,
    "learning_rate": 3e-3,
    "dtype": "float32",
    "evaluate_every": 63,
    "evaluation_anchors": 32,
}

pytestmark = pytest.mark.slow


def phrases() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(4, 320) for _ in range(PERIOD)] for _ in range(PHRASES)]


def prompt_of(phrase: list[int], draw: random.Random) -> tuple[list[int], int]:
    """A prompt that ends inside ``phrase``, and where the phrase goes on."""
    start = draw.randrange(PERIOD)
    return [1, *(draw.randrange(4, 320) for _ in range(3)), *(phrase * 2)[start : start + 6]], start + 6


def teach(target: torch.nn.Module, steps: int) -> None:
    """Make the target repeat the phrases with confidence, so that rounding decides no token."""
    draw = random.Random(1)
    optimiser = torch.optim.AdamW(target.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = []
        for phrase in (draw.choice(phrases()) for _ in range(16)):
            prompt, start = prompt_of(phrase, draw)
            rows.append([*prompt, *(phrase * 4)[start:][:38]])
        ids = torch.tensor(rows)
        optimiser.zero_grad()
        target(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimiser.step()


def write_chats(folder: Path) -> Path:
    """Chats about the first ``KNOWN`` phrases only, so that a drafter is right often, but not always."""
    draw = random.Random(2)
    folder.mkdir()
    with (folder / "part-0.jsonl").open("w") as lines:
        for index in range(60):
            phrase = phrases()[draw.randrange(KNOWN)]
            prompt, start = prompt_of(phrase, draw)
            answer = (phrase * 4)[start:][:40]
            row = {"id": f"r{index}", "prompt_token_ids": prompt, "token_ids": answer, "finish_reason": "length"}
            lines.write(json.dumps(row) + "\n")
    return folder


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [prompt_of(phrase, draw)[0] for phrase in phrases()]


def rounded(model_folder: Path, folder: Path) -> Path:
    """The model in W4A16, group 32."""
    (folder / "scratch").mkdir(parents=True)
    (folder / "out").mkdir()
    output = Output(folder / "out", folder / "scratch", Work(Store(str(folder / "store")), "_work"), Log("ptq"))
    ptq.run(ptq.Config(group_size=TARGET_GROUP), Inputs({"model": [bind(model_folder)]}), output)
    return output.path


def serve(folder: Path, target: Path, draft: Path, dtype: str) -> dict:
    job = {"target": str(target), "draft": str(draft), "dtype": dtype, "mask_from": MASK_FROM}
    job |= {"slots": BLOCK - 1, "tokens": TOKENS, "together": prompts(), "alone": [prompts()[one] for one in ALONE]}
    (folder / "job.json").write_text(json.dumps(job))
    files = (folder / name for name in ("job.json", "out.json", "logits.pt"))
    command = [SERVER_PYTHON, Path(__file__).with_name("serve.py"), *files]
    with (folder / "vllm.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(list(map(str, command)), stdout=log, stderr=log, timeout=400, env=environment)
    assert done.returncode == 0, (folder / "vllm.log").read_text()[-3000:]
    report = json.loads((folder / "out.json").read_text())
    alone = report["alone"]
    report["alone"] = {
        "answers": [one["answers"][0] for one in alone],
        "logprobs": [one["logprobs"][0] for one in alone],
        "drafts": sum(one["drafts"] for one in alone),
        "accepted": [sum(counts) for counts in zip(*(one["accepted"] for one in alone), strict=True)],
    }
    return report


@torch.no_grad()
def logits_of(target: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """One forward over whole texts, so no state is ever rolled back; float32 [rows, length, vocabulary]."""
    return target(input_ids=ids, use_cache=False).logits.float()


@torch.no_grad()
def replay(drafter: torch.nn.Module, target: torch.nn.Module, ids: torch.Tensor, start: int) -> list[int]:
    """How many drafts greedy verification accepts in each step of ``TOKENS`` tokens from ``start`` on."""
    features = TargetFeatures(target, model.taps_of(drafter))(ids)
    anchor, steps = start, []
    while anchor + 1 < start + TOKENS:
        drafted = forward.predictions(drafter, features, lay_out([(ids, torch.tensor([anchor]))], BLOCK))[0]
        right = drafted == ids[anchor + 1 : anchor + BLOCK]
        steps.append(int(right.int().cumprod(0).sum()))
        anchor += steps[-1] + 1
    return steps


@pytest.mark.parametrize(("kind", "draft_vocabulary"), [("qwen3", 160), ("qwen3_5", None)])
def test_served_drafts_are_those_of_our_forward_and_change_no_answer(kind, draft_vocabulary, tiny_model, tmp_path):
    """Two pairs: what each has in common with real ones differs.

    Pure attention in float32: a W4A16 target, and beside it a drafter quantised in another group, its projection of
    the target's features too, with a trimmed vocabulary and a window shorter than the texts. The hybrid in BF16, whose
    states are rolled back: a dense drafter with full attention. That logits agree says that the server has every
    tensor; that its mask, read from the loaded drafter, is ours says that it is neither causal nor wider.
    """
    torch.manual_seed(0)
    exact = kind == "qwen3"
    taught = Qwen3ForCausalLM(Qwen3Config(**DEEP)) if exact else Qwen3_5ForCausalLM(Qwen3_5TextConfig(**DEEP_HYBRID))
    teach(taught, 110)
    folder = tmp_path / "target"
    taught.bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, folder)
    chats = write_chats(tmp_path / "chats")
    if exact:
        folder = rounded(folder, tmp_path / "w4a16")
    config = CONFIG | {"draft_vocabulary": draft_vocabulary, "window": WINDOW if exact else None}
    _, draft = drafter_stage(tmp_path, config, {"target": folder, "chats": chats})
    if exact:
        knobs = {"method": "gptq", "held_out": 0.1, "conversations": 54, "group_size": DRAFT_GROUP}
        draft, metrics = quantize(draft, folder, chats, tmp_path / "gptq", **knobs)
        assert metrics["quantized"] == 15

    served = serve(tmp_path, folder, draft, "float32" if exact else "bfloat16")

    target = load_model(folder, torch.float32 if exact else torch.bfloat16)
    if exact:
        drafter = read(draft, target)
        assert model.window_of(drafter) == WINDOW < TOKENS
    else:
        drafter = model.attach(model.read(draft), target)
        model.load_weights(drafter, draft)
    drafter.to(target.dtype)
    if exact:
        check_loaded(served)
    for how, phrase in (("alone", ALONE), ("together", range(PHRASES))):
        check_answers(target, drafter, served[how], phrase, exact, f"{kind}, {how}")
    check_logits(
        target, drafter, served["alone"]["answers"], torch.load(tmp_path / "logits.pt"), 1e-5 if exact else 0.04
    )


def check_loaded(served: dict) -> None:
    """Every linear of both models is quantised in vLLM as it was stored; the drafter's mask is |distance| < window."""
    inside = [f"model.layers.{at}.{name}" for at in range(2) for name in FUSED]
    assert served["draft_groups"] == dict.fromkeys(["model.fc", *inside], DRAFT_GROUP)
    assert set(served["target_groups"].values()) == {TARGET_GROUP}
    anchor, places = served["anchor"], range(served["anchor"] + BLOCK)
    assert anchor >= MASK_FROM > WINDOW + BLOCK
    assert served["mask"] == [[abs(anchor + slot - place) < WINDOW for place in places] for slot in range(BLOCK)]


def check_answers(
    target: torch.nn.Module, drafter: torch.nn.Module, served: dict, asked: range, exact: bool, name: str
) -> None:
    """Every served token is what the target alone says, but at ties; drafts fare as those of our forward."""
    ids = torch.tensor([prompts()[one] + answer for one, answer in zip(asked, served["answers"], strict=True)])
    start = ids.shape[1] - TOKENS
    logits = logits_of(target, ids)[:, start - 1 : -1]
    chosen = logits.gather(-1, ids[:, start:, None])[..., 0]
    assert (logits.amax(-1) - chosen).max() <= (1e-4 if exact else TIE)
    ours = logits.log_softmax(-1).gather(-1, ids[:, start:, None])[..., 0]
    assert (ours - torch.tensor(served["logprobs"])).abs().max() < (1e-3 if exact else 0.15)

    for _ in range(BLOCK):
        ids = torch.cat([ids, logits_of(target, ids)[:, -1:].argmax(-1)], dim=1)
    steps = [accepted for row in ids for accepted in replay(drafter, target, row, start)]
    expected = [sum(accepted > slot for accepted in steps) for slot in range(BLOCK - 1)]
    print(f"{name}: served {served['drafts']} drafts, accepted {served['accepted']}; ours {len(steps)}, {expected}")
    assert served["drafts"] == pytest.approx(len(steps), rel=0 if exact else 0.03)
    assert served["accepted"] == pytest.approx(expected, rel=0 if exact else 0.06)
    assert {0, 1, 2, 3} >= set(steps) >= {0, 1, 3}
    taught_steps = [accepted for row in ids[: KNOWN - asked[0]] for accepted in replay(drafter, target, row, start)]
    assert sum(taught_steps) / len(taught_steps) > 1.5


@torch.no_grad()
def check_logits(
    target: torch.nn.Module, drafter: torch.nn.Module, answers: list[list[int]], drafts: list, limit: float
) -> None:
    """The drafter's logits in the server are those of our forward, by the norm of all differences relative to ours."""
    apart = whole = 0.0
    for index, (one, answer) in enumerate(zip(ALONE, answers, strict=True)):
        ids = torch.tensor(prompts()[one] + answer)
        served = [(anchor, logits) for place, anchor, logits in drafts if place == index and anchor < len(ids)]
        features = TargetFeatures(target, model.taps_of(drafter))(ids)
        blocks = lay_out([(ids, torch.tensor([anchor for anchor, _ in served]))], BLOCK)
        ours = drafter.lm_head(forward.block_hidden(drafter, features, blocks)[:, 1:]).float()
        theirs = torch.stack([logits for _, logits in served]).float()
        theirs = theirs[theirs.isfinite()].view_as(ours)  # a trimmed vocabulary's others are -inf there
        apart, whole = apart + float((ours - theirs).square().sum()), whole + float(ours.square().sum())
        assert len(served) > 5
    print(f"logits of {len(drafts)} drafts are {(apart / whole) ** 0.5:.1e} apart")
    assert (apart / whole) ** 0.5 < limit
