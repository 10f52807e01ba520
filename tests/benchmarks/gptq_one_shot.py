"""GPTQ of a drafter the published way, to compare with the stage's: one forward an anchor, all Hessians in one pass.

Every anchor's forward sees the conversation before it again, so early tokens weigh as often as anchors follow them;
each linear is calibrated on what the drafter gives before any of it is quantised (arXiv 2607.04244).
"""

from pathlib import Path
from typing import Any

import torch

from components.chats.rows import read_rows
from components.checkpoint.load import load_model
from components.drafter import data, evaluate, model
from components.drafter.blocks import strided_anchors
from components.drafter.data import Chat
from components.drafter.features import TargetFeatures
from components.gptq import folder
from components.gptq.calibrate import Calibration, choose, whole
from components.gptq.compare import logits_apart
from components.gptq.quantize import quantize, round_to_grid
from components.gptq.sequence import Errors, Result, parts
from components.gptq.stage import Config
from components.training.parallel import Ranks


def anchored(chats: list[Chat], anchors: int) -> list[tuple[int, Chat]]:
    """Return a chat for each anchor, cut where its block begins, and the index of the chat that it is cut from."""
    return [
        (index, Chat(f"{chat.id}/{place}", chat.token_ids[: place + 2], place))
        for index, chat in enumerate(chats)
        for place in strided_anchors(chat.answer_start, len(chat.token_ids), anchors).tolist()
    ]


def measure(source: Path, target_folder: Path, rows: Path, config: Config, written: Path) -> dict[str, Any]:
    """Quantise the drafter of ``source`` into ``written``; return the figures that the stage's metrics have."""
    dtype = getattr(torch, config.dtype)
    target = load_model(target_folder, dtype).to(Ranks().device)  # type: ignore[arg-type]
    drafter = model.attach(model.read(source), target)
    model.load_weights(drafter, source)
    split = data.split(whole(read_rows(rows), config.max_length)[0], config.max_length, config.held_out)
    chosen = choose(split.train, config.conversations)
    held_out = choose(split.held_out, config.evaluation_conversations)
    compute = TargetFeatures(target, model.taps_of(drafter))
    samples = anchored(chosen, config.anchors)
    last: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def prefix(index: int) -> torch.Tensor:
        nonlocal last
        chat, sample = samples[index]
        if last[0] != chat:
            last = chat, compute(chosen[chat].token_ids)
        return last[1][: len(sample.token_ids)]

    def seen(index: int) -> torch.Tensor:
        return compute(held_out[index].token_ids)

    calibration = Calibration([sample for _, sample in samples], prefix, 1, dtype)
    linears = {name: linear for part in parts(drafter) for name, linear in part.items()}
    hessians, result = calibration.hessians(drafter, linears), Result()
    for name, linear in linears.items():
        weight, hessian = linear.weight.detach(), hessians.pop(name)
        rounding = round_to_grid(weight, hessian, config.group_size)[1]
        one, error = quantize(name, weight, hessian, config.group_size, config.damping, "none")
        result.quantized[name], result.errors[name] = one, Errors(error, rounding)
    folder.write(result, source, written)
    after = folder.read(written, target)
    draft = evaluate.neural(after, seen, dtype)
    return {
        "accept_length": evaluate.accept_length(draft, held_out, after.block_size, config.evaluation_anchors),
        "logits": logits_apart(drafter, after, held_out, seen, config.anchors, dtype),
        "output_error": sum(one.stored for one in result.errors.values()) / len(result.errors),
        "blocks": calibration.blocks,
        "held_out": len(held_out),
    }
