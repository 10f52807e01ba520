"""The training loop: full state on every checkpoint, so that a killed run continues bit for bit on the CPU."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from speculators.models.dflash.core import DFlashDraftModel

from components.contract.errors import UserError
from components.drafter.blocks import random_anchors, seed_of
from components.drafter.data import Chat
from components.drafter.features import Features
from components.drafter.loss import Kind, weight_sum, weighted_loss
from components.drafter.model import trained_parameters
from components.store.work import Work

STATE = "state"


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    epochs: int
    batch: int
    learning_rate: float
    warmup: float
    weight_decay: float
    clip: float
    anchors: int
    gamma: float
    loss: Kind
    seed: int
    dtype: torch.dtype

    def steps(self, chats: int) -> int:
        """Return the number of optimiser steps; the last batch of an epoch may be smaller.

        Raises:
            UserError: it would be zero.
        """
        total = self.epochs * math.ceil(chats / self.batch)
        if total < 1:
            raise UserError(f"drafter: {chats} chats and {self.epochs} epochs give zero training steps")
        return total

    def rate(self, step: int, total: int) -> float:
        """Return the factor on the learning rate at ``step`` (from 0): linear warm-up, then cosine to zero."""
        warm = math.ceil(self.warmup * total)
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(total - warm, 1)))


@dataclass
class State:
    """What a checkpoint holds beside weights and optimiser."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None


class Trainer:
    """Trains ``drafter`` on ``chats`` and keeps the best weights by held-out acceptance, which ``score`` measures."""

    def __init__(
        self,
        drafter: DFlashDraftModel,
        chats: list[Chat],
        features: Features,
        schedule: Schedule,
        score: Callable[[], dict[str, Any]],
    ) -> None:
        self.drafter, self.chats, self.features, self.schedule, self.score = drafter, chats, features, schedule, score
        self.total = schedule.steps(len(chats))
        self.state = State()
        self._weights = trained_parameters(drafter)
        decayed = [weight for weight in self._weights.values() if weight.ndim > 1]
        plain = [weight for weight in self._weights.values() if weight.ndim <= 1]
        self._optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": schedule.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=schedule.learning_rate,
            fused=True,
        )

    def run(self, evaluate_every: int, save_every: int, save: Callable[[], None], log: Callable[..., None]) -> State:
        """Train from the current state to the end; the step-0 evaluation comes first."""
        if self.state.step == 0 and not self.state.curve:
            self._evaluate(log)
        for step, batch in self._batches():
            began = time.monotonic()
            loss = self._step(step, batch)
            self.state.step = step + 1
            self.state.seconds += time.monotonic() - began
            self.state.curve.append({"step": step + 1, "loss": loss, "tokens": self.state.tokens})
            if self.state.step % evaluate_every == 0 or self.state.step == self.total:
                self._evaluate(log)
            if self.state.step % save_every == 0 or self.state.step == self.total:
                save()
        return self.state

    def save(self, work: Work, scratch: Path) -> None:
        """Store weights, optimiser, schedule position, curve and best weights as one part."""
        folder = scratch / "state"
        folder.mkdir(exist_ok=True)
        weights = {name: weight.detach() for name, weight in self._weights.items()}
        torch.save(
            {"weights": weights, "optimiser": self._optimiser.state_dict(), "state": vars(self.state)},
            folder / "state.pt",
        )
        work.put_folder(STATE, folder)

    def resume(self, work: Work, scratch: Path) -> bool:
        """Continue from the stored part; return False when there is none."""
        folder = scratch / "state"
        if not work.get_folder(STATE, folder):
            return False
        stored = torch.load(folder / "state.pt", weights_only=True)
        self._load(stored["weights"])
        self._optimiser.load_state_dict(stored["optimiser"])
        self.state = State(**stored["state"])
        return True

    def restore_best(self) -> dict[str, Any]:
        """Put the best weights into the drafter; return their ``step`` and ``score``."""
        assert self.state.best is not None
        self._load(self.state.best["weights"])
        return self.state.best

    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(weights[name])

    def _batches(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (step, indices of chats) from the current step on; an epoch's order depends on seed and epoch."""
        per_epoch = self.total // self.schedule.epochs
        for step in range(self.state.step, self.total):
            epoch, position = divmod(step, per_epoch)
            generator = torch.Generator().manual_seed(seed_of("order", self.schedule.seed, epoch))
            order = torch.randperm(len(self.chats), generator=generator).tolist()
            yield step, order[position * self.schedule.batch : (position + 1) * self.schedule.batch]

    def _step(self, step: int, batch: list[int]) -> float:
        plan = self.schedule
        anchors = {
            index: random_anchors(
                self.chats[index].answer_start,
                len(self.chats[index].token_ids),
                plan.anchors,
                seed_of("anchors", plan.seed, step, self.chats[index].id),
            )
            for index in batch
        }
        size, device = self.drafter.block_size, self.drafter.device
        denominator = sum(weight_sum(self.chats[i].token_ids, anchors[i], size, plan.gamma) for i in batch)
        for group in self._optimiser.param_groups:
            group["lr"] = plan.learning_rate * plan.rate(step, self.total)
        self._optimiser.zero_grad(set_to_none=True)
        total = 0.0
        for index in batch:
            chat = self.chats[index]
            states, ids, places = (part.to(device) for part in (self.features(index), chat.token_ids, anchors[index]))
            with torch.autocast(device.type, plan.dtype, enabled=plan.dtype != torch.float32):
                loss = weighted_loss(self.drafter, states, ids, places, plan.gamma, plan.loss)
            (loss / denominator).backward()
            total += float(loss.detach()) / denominator
            self.state.tokens += len(chat.token_ids)
        torch.nn.utils.clip_grad_norm_(list(self._weights.values()), plan.clip)
        self._optimiser.step()
        return total

    def _evaluate(self, log: Callable[..., None]) -> None:
        score = self.score()
        self.state.curve.append({"step": self.state.step, "accept_length": score})
        log(step=self.state.step, accept_length=score["value"], low=score["low"], high=score["high"])
        if self.state.step and (self.state.best is None or score["value"] > self.state.best["score"]["value"]):
            weights = {name: weight.detach().clone() for name, weight in self._weights.items()}
            self.state.best = {"step": self.state.step, "score": score, "weights": weights}
