"""The gptq stage: its ports, its knobs, and the order in which its parts run."""

import time
from collections import Counter
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from components.chats.rows import read_rows
from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.stage import Port

ROLE = "train"
VERSION = 4
INPUTS = {
    "drafter": Port("the trained DFlash drafter (drafter)"),
    "target": Port("the model folder it drafts for, dense or W4A16"),
    "chats": Port("chats that this target answered (regen)"),
}
OUTPUTS = {
    "config.json": "the drafter's config with its quantization_config",
    "model.safetensors": "packed codes, scales and shapes of every linear; norms and vocabulary as in the drafter, "
    "but for a norm that awq scales",
}


class Config(StageConfig):
    """Knobs of the gptq stage."""

    method: Literal["gptq", "awq", "rtn"] = Field(
        "gptq",
        description="gptq: codes make up for each other; awq: input channels scaled, then rounded; rtn: rounded",
    )
    group_size: Literal[32, 64, 128] = Field(128, description="Input columns that share one scale")
    damping: float = Field(0.01, gt=0, lt=1, description="gptq: share of the Hessian's mean diagonal added to it")
    actorder: Literal["static", "none"] = Field(
        "static", description="gptq's columns: static, in order of activation, groups as stored; none, as they come"
    )
    conversations: int = Field(256, ge=1, description="Conversations to calibrate on, chosen by row id")
    mix: dict[str, Annotated[int, Field(ge=1)]] = Field(
        {}, description="conversations by category, adding up to ``conversations``; empty takes them from all alike"
    )
    anchors: int = Field(
        16,
        ge=1,
        description="Anchors per conversation, spread evenly over the answer; one whose answer is too short for them "
        "is left out",
    )
    max_length: int = Field(3072, ge=8, description="Longest conversation, tokens; a longer one is left out, not cut")
    held_out: float = Field(
        0.02, gt=0, lt=1, description="Share of the chats for the evaluation; the drafter stage's, so it saw none"
    )
    evaluation_anchors: int = Field(64, ge=1, description="Anchors per held-out chat, spread evenly")
    evaluation_conversations: int = Field(256, ge=1, description="Most held-out chats to evaluate, chosen by row id")
    cache_features: bool = Field(True, description="Compute the target's features once, to disk; false: every time")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Compute type of target and drafter; Hessians are float32"
    )

    @model_validator(mode="after")
    def _mix_adds_up(self) -> Self:
        if self.mix and sum(self.mix.values()) != self.conversations:
            raise ValueError(f"mix adds up to {sum(self.mix.values())}, conversations is {self.conversations}")
        return self


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Calibrate, quantise, write, read back and evaluate; return errors, census and acceptance.

    Raises:
        UserError: the three inputs do not fit together, a width the group does not divide, too few rows, or a written
            folder whose quantised modules are not all the drafter's linears.
    """
    import torch

    from components.checkpoint.load import load_model
    from components.drafter import data, evaluate, features, model
    from components.gptq import folder
    from components.gptq.calibrate import Calibration, choose, draw, whole, with_room
    from components.gptq.compare import logits_apart
    from components.gptq.sequence import How, parts, quantize_in_sequence
    from components.training.parallel import Ranks

    began = time.monotonic()
    dtype = getattr(torch, config.dtype)
    source = inputs["drafter"].path
    drafter = model.read(source)
    target = load_model(inputs["target"].path, dtype).to(Ranks().device)
    model.attach(drafter, target)
    model.load_weights(drafter, source)
    model.check_group(drafter, config.group_size)
    linears = {name: linear for part in parts(drafter) for name, linear in part.items()}
    rows, longer = whole(read_rows(inputs["chats"].path), config.max_length)
    chats = data.split(rows, config.max_length, config.held_out)
    category = {row["id"]: row.get("category", "") for row in rows}
    usable = with_room(chats.train, config.anchors)
    chosen = draw(usable, config.conversations, config.mix, category)
    held_out = choose(chats.held_out, config.evaluation_conversations)
    every = [*chosen, *held_out]
    data.refuse_unknown_tokens(len(drafter.embed_tokens.weight), every)
    data.refuse_mask_token(drafter.mask_token_id, every)

    with output.timed("features"):
        compute = features.TargetFeatures(target, model.taps_of(drafter))
        if config.cache_features:
            progress = partial(output.log.progress, what="features")
            look_up = features.cached(compute, every, output.scratch / "features.bin", output.work, progress)
        else:
            look_up = features.online(compute, every)
    calibration = Calibration(chosen, look_up, config.anchors, dtype)
    assert calibration.blocks == config.conversations * config.anchors
    calibration.check_rank(drafter, linears)

    def held_out_features(index: int) -> torch.Tensor:
        return look_up(len(chosen) + index)

    def score(one: Any) -> dict[str, Any]:
        draft = evaluate.neural(one, held_out_features, dtype)
        return evaluate.accept_length(draft, held_out, one.block_size, config.evaluation_anchors)

    with output.timed("before"):
        before = score(drafter)
    with output.timed(config.method):
        how = How(config.method, config.group_size, config.damping, config.actorder)
        progress = partial(output.log.progress, what="parts")
        result = quantize_in_sequence(drafter, calibration, how, output.work, progress)
    with output.timed("write"):
        folder.write(result, source, output.path)
        count = folder.check_census(output.path, linears)
    with output.timed("after"):
        written = folder.read(output.path, target)
        after = score(written)
        model.load_weights(drafter, source)
        logits = logits_apart(drafter, written, held_out, held_out_features, config.anchors, dtype)
    errors = result.errors
    worst = max(errors, key=lambda name: errors[name].stored)
    return {
        "quantized": count,
        "relative_error": {
            "mean": sum(one.stored for one in errors.values()) / count,
            "max": errors[worst].stored,
            "worst": worst,
            "rounding_mean": sum(one.rounding for one in errors.values()) / count,
            "by_linear": {name: {"stored": one.stored, "rounding": one.rounding} for name, one in errors.items()},
        },
        "accept_length": {"before": _interval(before), "after": _interval(after)},
        "logits": logits,
        "conversations": len(chosen),
        "by_category": dict(sorted(Counter(category[chat.id] for chat in chosen).items())),
        "blocks": calibration.blocks,
        "held_out": len(held_out),
        "left_out": {"longer": longer, "too_short": chats.too_short + len(chats.train) - len(usable)},
        "seconds": round(time.monotonic() - began, 3),
    }


def _interval(score: dict[str, Any]) -> dict[str, float]:
    return {key: round(score[key], 5) for key in ("value", "low", "high")}
