"""AdamW on the fp32 masters, the learning rate's course, and which sequences a step sees."""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def adamw(masters: Iterable[torch.nn.Parameter], bits: int = 32) -> torch.optim.Optimizer:
    """Return the published recipe's optimizer: betas 0.9 and 0.95, eps 1e-8, no weight decay.

    Args:
        masters: what it moves.
        bits: of the moments: 32, or 8 in blocks of 256 (bitsandbytes), on a GPU alone.
    """
    settings: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    if bits == 32:
        return torch.optim.AdamW(masters, fused=True, **settings)
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(masters, **settings)
    return optimizer


def learning_rate(step: int, steps: int, peak: float, warmup_ratio: float) -> float:
    """Return the rate of the step after ``step`` finished ones: a linear rise, then a cosine to 0."""
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def batch_indices(step: int, batch: int, sequences: int, seed: int) -> list[int]:
    """Return the sequences of one optimizer step.

    Epochs follow each other without a gap, each in its own order. The answer depends on the arguments alone: the step
    is the sampler's whole state.
    """
    places = (divmod(place, sequences) for place in range(step * batch, (step + 1) * batch))
    return [int(_order(epoch, sequences, seed)[offset]) for epoch, offset in places]


@lru_cache(maxsize=2)
def _order(epoch: int, sequences: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(sequences)
