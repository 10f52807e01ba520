"""QAD's step as DeepSpeed's ZeRO-2 takes it: the same masters, loss, clipping and optimizer, another exchange."""

import os
import time
from typing import Any
from unittest.mock import patch

import torch

from components.qad.optimizer import adamw, batch_indices, learning_rate
from components.qad.train import Distillation
from components.training.state import Line


class Zero(Distillation):
    """A distillation whose gradients DeepSpeed sums, clips and applies, on masters in fp32.

    DeepSpeed lays the masters end to end, gives each rank an equal slice of them with its moments, and sums each
    micro-batch's gradients at the slices' owners. It is given the masters alone: the model stays as it is.
    """

    types: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # else it compiles an exchange of its own for CPUs; gloo serves
        masters = torch.nn.ParameterList(self.student.masters())
        self.optimizer = adamw(masters, 8 if self.ranks.device.type == "cuda" else 32)
        config = {
            "train_micro_batch_size_per_gpu": self.config.micro_batch,
            "train_batch_size": self.config.batch,
            "gradient_clipping": self.config.max_grad_norm,
            "zero_optimization": {"stage": 2, "overlap_comm": self.ranks.device.type == "cuda"},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            **self.types,
        }
        with patch.dict(os.environ, LOCAL_RANK=str(self.ranks.rank)):
            self.engine, *_ = deepspeed.initialize(model=masters, optimizer=self.optimizer, config=config)

    def step(self, step: int) -> Line:
        """Take one optimizer step and return its line of the curve."""
        config, started = self.config, time.monotonic()
        indices = batch_indices(step, config.batch, len(self.split), config.seed)
        rate = learning_rate(step, config.steps, config.learning_rate, config.warmup_ratio)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        loss = self.backward(indices)
        speed = len(indices) * self.split.ids.shape[1] / (time.monotonic() - started)
        norm = float(self.engine.get_global_grad_norm())
        return {"step": step + 1, "loss": loss, "grad_norm": norm, "lr": rate, "tokens_per_second": round(speed, 1)}

    def backward(self, indices: list[int]) -> float:
        """Let DeepSpeed take the gradient of each micro-batch, and with the last one the step; return the loss."""
        size, counted = self.config.micro_batch, max(1, int(self.split.mask[indices, 1:].sum()))
        mine, total = indices[self.ranks.rank :: self.ranks.world], 0.0
        for start in range(0, len(mine), size):
            part = self.divergence(mine[start : start + size]) / counted
            self.engine.backward(part * self.ranks.world, scale_wrt_gas=False)  # it takes the mean over ranks
            self.engine.step()
            total += float(part.detach())
        return self.ranks.sum(total)[0]


class ZeroHalf(Zero):
    """The same with masters in fp32 at their owners alone: what the model holds, and its gradients, are bfloat16."""

    types = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}  # noqa: RUF012
