"""How long GPTQ of a drafter takes, on random weights and features: neither time nor memory depends on the values."""

import tempfile
import time
from typing import Any

import torch
from transformers import Qwen3Config

from components.drafter import model
from components.drafter.data import Chat
from components.gptq.calibrate import Calibration
from components.gptq.sequence import How, quantize_in_sequence
from components.store.backend import Store
from components.store.work import Work
from components.training.parallel import Ranks


def measure(shape: dict[str, int], conversations: int, tokens: int, anchors: int, group_size: int) -> dict[str, Any]:
    """Quantise a drafter of five layers and five taps on chats of ``tokens`` tokens; return seconds and peak GiB."""
    device, dtype = Ranks().device, torch.bfloat16 if torch.cuda.is_available() else torch.float32
    torch.manual_seed(0)
    target = Qwen3Config(**shape, rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    drafter = model.build(target, layers=5, taps=[1, 2, 3, 4, 5], block_size=16, mask_token=0)
    drafter.verifier_lm_head, drafter.verifier_norm = None, None
    torch.nn.init.normal_(drafter.embed_tokens.weight, std=0.02)  # a target's, otherwise
    drafter.to(device)
    wide = 5 * shape["hidden_size"]
    chats = [
        Chat(str(at), torch.randint(1, shape["vocab_size"], (tokens + at % 64,)), tokens // 4)
        for at in range(conversations)
    ]

    def features(index: int) -> torch.Tensor:
        draw = torch.Generator(device).manual_seed(index)
        return torch.randn(len(chats[index].token_ids), wide, generator=draw, device=device, dtype=dtype)

    calibration = Calibration(chats, features, anchors, dtype)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Store(folder), "_work")
        result = quantize_in_sequence(drafter, calibration, How("gptq", group_size), work, lambda *_: None)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "seconds": time.monotonic() - began,
        "peak_gib": peak,
        "linears": len(result.quantized),
        "blocks": calibration.blocks,
        "tokens": tokens,
        "conversations": conversations,
    }
