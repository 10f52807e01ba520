"""The training loop, in one process."""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.checkpoint.load import load_model
from components.contract.context import Output
from components.contract.errors import StageError, UserError
from components.qad.checkpoints import restore_checkpoints, save_checkpoint
from components.qad.curve import write_curve
from components.qad.evaluate import distance
from components.qad.hidden import TeacherStates, head, states_of
from components.qad.loss import forward_kl
from components.qad.optimizer import adamw, batch_indices, learning_rate
from components.qad.stage import Config
from components.qad.student import Student, check_pair
from components.sequences.reader import Split, read_index, read_split
from components.store.work import Work
from components.training.parallel import Ranks, Shares
from components.training.state import Line, load_state, save_state


def train(
    config: Config,
    teacher: Path,
    student: Path,
    sequences: Path,
    scratch: Path,
    output: Output | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008
    work: Work | None = None,
) -> dict[str, Any]:
    """Train the student's latents; continue where a killed run stopped.

    Args:
        config: of the stage.
        teacher: model folder.
        student: INT4 folder.
        sequences: an artifact of the sequences stage.
        scratch: a folder; that of a machine's first rank is shared.
        output: rank 0's alone.
        ranks: this process among those that train.
        work: the stage's parts, where no output has them.

    Returns:
        ``kl_before``, ``kl_after`` (nats per token on the held-out subset), ``top1_before``, ``top1_after``,
        ``codes_changed`` (share), ``loss_first``, ``loss_last``, ``steps``, ``tokens``, ``tokens_per_second``,
        ``frozen_sha256`` (of everything that did not train, before and after).

    Raises:
        UserError: teacher, student and sequences do not belong together, the batch does not split, the optimizer
            needs a GPU, the held-out subset counts no token, or the loss or its gradient is not finite (the step is
            named).
        StageError: a frozen tensor changed.
    """
    check_pair(teacher, student, read_index(sequences)["vocabulary_size"])
    if config.batch % (config.micro_batch * ranks.world):
        parts = f"micro-batches of {config.micro_batch} on {ranks.world} processes"
        raise UserError(f"qad.batch: {config.batch} sequences do not split into {parts}")
    if config.optimizer == "adamw8bit" and ranks.device.type == "cpu":
        raise UserError("qad.optimizer: adamw8bit needs a GPU; set it to adamw")
    if not read_split(sequences, "val").mask[: config.evaluation_sequences, 1:].any():
        raise UserError(
            f"qad.evaluation_sequences: none of the first {config.evaluation_sequences} val sequences of {sequences} "
            "has a token that counts; raise it, or count more in sequences.count"
        )
    scratch = ranks.shared(scratch)
    with output.timed("load") if output else nullcontext():
        run = Run(config, teacher, student, sequences, scratch, ranks)
    work, frozen = output.work if output else work, run.student.frozen_digest()
    step, curve = load_state(work, scratch, run.shares, run.optimizer, ranks)
    if not curve:
        curve.append({"step": 0, "loss": None, "grad_norm": None, "lr": None, "tokens_per_second": None})
        curve[0].update(run.evaluate())
    if output:
        restore_checkpoints(output.work, output.path, step, config.checkpoint_every)
        output.log.event("start", kl=curve[0]["kl"], top1_agreement=curve[0]["top1_agreement"])
        output.log.progress(step, config.steps)
    while step < config.steps:
        curve.append(run.step(step))
        step += 1
        last = step == config.steps
        if last or step % config.evaluate_every == 0:
            curve[-1].update(run.evaluate())
            if output:
                output.log.event("step", **curve[-1])
        if output and (last or step % config.checkpoint_every == 0):
            save_checkpoint(None if last else output.work, output.path, step, run.student)
        if not last and step % config.state_every == 0:
            save_state(work, scratch, step, run.shares, run.optimizer, curve, ranks)
        if output:
            output.log.progress(step, config.steps, loss=curve[-1]["loss"])
    if run.student.frozen_digest() != frozen:
        raise StageError("qad: a tensor that must not train has changed; nothing is published")
    if output:
        write_curve(curve, output.path)
    return _summary(config, curve, run.split.ids.shape[1]) | {"frozen_sha256": frozen}


@dataclass
class Distillation:
    """What one optimizer step needs: the student, the teacher's states and head, the data and the optimizer.

    ``optimizer`` moves the masters that this rank owns.
    """

    config: Config
    student: Student
    teacher: Callable[[int], Tensor]
    teacher_head: Tensor
    split: Split
    shares: Shares
    optimizer: torch.optim.Optimizer
    ranks: Ranks = Ranks()  # noqa: RUF009

    def step(self, step: int) -> Line:
        """Take one optimizer step and return its line of the curve."""
        config, started = self.config, time.monotonic()
        indices = batch_indices(step, config.batch, len(self.split), config.seed)
        loss = self.backward(indices)
        self.shares.sum_gradients()
        norm = self.shares.norm()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise UserError(
                f"step {step + 1}: loss {loss}, gradient norm {norm} on sequences {indices}; "
                "checkpoints before it are kept; lower learning_rate or inspect those sequences"
            )
        self.shares.scale_gradients(min(1.0, config.max_grad_norm / (norm + 1e-6)))
        rate = learning_rate(step, config.steps, config.learning_rate, config.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.shares.spread()
        speed = len(indices) * self.split.ids.shape[1] / (time.monotonic() - started)
        return {"step": step + 1, "loss": loss, "grad_norm": norm, "lr": rate, "tokens_per_second": round(speed, 1)}

    def backward(self, indices: list[int]) -> float:
        """Add this rank's part of the gradient of the mean over all counted tokens of ``indices``; return that mean.

        The divisor is the whole batch's count, so sequences with few counted tokens weigh less, and how the batch is
        split over micro-batches and ranks does not change the gradient's sum.
        """
        size, counted = self.config.micro_batch, max(1, int(self.split.mask[indices, 1:].sum()))
        mine, total = indices[self.ranks.rank :: self.ranks.world], 0.0
        for start in range(0, len(mine), size):
            part = self.divergence(mine[start : start + size]) / counted
            part.backward()
            total += float(part.detach())
        return self.ranks.sum(total)[0]

    def divergence(self, indices: list[int]) -> Tensor:
        """Return the summed divergence of some sequences in nats, differentiable by the masters."""
        states = states_of(self.student.model, self.split, indices)
        wanted = torch.cat([self.teacher(index) for index in indices]).to(states.device)
        return forward_kl(states, self.student.head(), wanted, self.teacher_head, self.config.temperature)


class Run(Distillation):
    """A distillation of three artifacts' folders, and its held-out subset."""

    def __init__(
        self,
        config: Config,
        teacher: Path,
        student: Path,
        sequences: Path,
        scratch: Path,
        ranks: Ranks = Ranks(),  # noqa: B008
    ) -> None:
        dtype = getattr(torch, config.dtype)
        train, self.held_out = read_split(sequences, "train"), read_split(sequences, "val")
        ours = Student.open(student, dtype, ranks.device)
        head(ours.model)
        theirs = load_model(teacher, dtype).requires_grad_(False).to(ranks.device)
        caches = (scratch / f"teacher-{name}-{ranks.rank}.bin" for name in ("train", "val"))
        states, self.teacher_held_out = (
            TeacherStates(theirs, split, cache if config.cache_teacher else None)
            for split, cache in zip((train, self.held_out), caches, strict=True)
        )
        if config.recompute_activations:
            ours.recompute_activations()
        shares = Shares({name: layer.weight for name, layer in ours.layers.items()}, ranks)
        optimizer = adamw(shares.owned.values(), 8 if config.optimizer == "adamw8bit" else 32)
        super().__init__(config, ours, states, head(theirs), train, shares, optimizer, ranks)

    def evaluate(self) -> Line:
        """Measure the student on the fixed held-out subset."""
        indices = range(min(self.config.evaluation_sequences, len(self.held_out)))
        mine = indices[self.ranks.rank :: self.ranks.world]
        found = distance(self.student, self.teacher_held_out, self.teacher_head, self.held_out, mine)
        parts = (found.kl * found.tokens, found.top1_agreement * found.tokens, found.tokens)
        kl, agreed, tokens = self.ranks.sum(*parts)
        tokens = max(tokens, 1)
        return {"kl": kl / tokens, "top1_agreement": agreed / tokens, "codes_changed": self.student.codes_changed()}


def _summary(config: Config, curve: list[Line], length: int) -> dict[str, Any]:
    first, last = curve[0], curve[-1]
    return {
        "kl_before": first["kl"],
        "kl_after": last["kl"],
        "top1_before": first["top1_agreement"],
        "top1_after": last["top1_agreement"],
        "codes_changed": last["codes_changed"],
        "loss_first": curve[1]["loss"],
        "loss_last": last["loss"],
        "steps": config.steps,
        "tokens": config.steps * config.batch * length,
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in curve[1:]),
    }
