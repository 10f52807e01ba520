"""The training loop over any number of processes, and the full state that a killed run continues from."""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash.core import DFlashDraftModel

from components.contract.errors import UserError
from components.drafter.blocks import Blocks, candidates, lay_out, random_anchors, seed_of, sent
from components.drafter.data import Chat
from components.drafter.features import Features
from components.drafter.loss import Kind, Objective
from components.drafter.model import trained_parameters
from components.drafter.stage import Config
from components.store.work import Work
from components.training.parallel import Ranks, Shares, balanced
from components.training.state import Line, load_state, save_state

BEST = "best-"


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    epochs: int
    batch: int
    micro_batch: int
    learning_rate: float
    warmup: float
    clip: float
    anchors: int
    gamma: float
    loss: Kind
    seed: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Config) -> "Schedule":
        """Return what the stage's config asks for."""
        values = {field.name: getattr(config, field.name) for field in fields(cls)}
        return cls(**values | {"dtype": getattr(torch, config.dtype)})

    def steps(self, chats: int) -> int:
        """Return the number of optimiser steps; the last batch of an epoch may be smaller."""
        return self.epochs * math.ceil(chats / self.batch)

    def rate(self, step: int, total: int) -> float:
        """Return the factor on the learning rate at ``step`` (from 0): linear warm-up, then cosine to zero."""
        warm = math.ceil(self.warmup * total)
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(total - warm, 1)))


class Trainer:
    """Trains ``drafter`` on ``chats`` and keeps the best weights by held-out acceptance, which ``score`` measures.

    Each rank takes its share of a step's conversations; the gradient is that of the whole batch, however it is split.
    ``scratch`` is a folder that a machine's ranks share; what is stored in ``work`` outlives them.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        chats: list[Chat],
        features: Features,
        schedule: Schedule,
        score: Callable[[], dict[str, Any]],
        scratch: Path,
        work: Work | None,
        ranks: Ranks = Ranks(),  # noqa: B008
    ) -> None:
        self.drafter, self.chats, self.features, self.schedule, self.score = drafter, chats, features, schedule, score
        self._objective = Objective(drafter, schedule.gamma, schedule.loss)
        self.ranks, self._scratch, self._work = ranks, scratch, work
        self.total = schedule.steps(len(chats))
        self._weights = trained_parameters(drafter)
        self._shares = Shares(self._weights, ranks)
        owned = [{"params": list(self._shares.owned.values())}]
        self._optimiser = torch.optim.AdamW(owned, lr=schedule.learning_rate, weight_decay=0.0, fused=True)
        self.step, self.curve = load_state(work, scratch, self._shares, self._optimiser, ranks)

    @property
    def tokens(self) -> int:
        """Tokens of conversations trained on so far, each as often as it was."""
        return next((line["tokens"] for line in reversed(self.curve) if "tokens" in line), 0)

    @property
    def best(self) -> Line | None:
        """The evaluation with the highest acceptance after at least one step, the first of equals."""
        trained = [line for line in self.curve if line["step"] and "accept_length" in line]
        return max(trained, key=lambda line: line["accept_length"]["value"], default=None)

    def run(
        self, evaluate_every: int, save_every: int, evaluated: Callable[[int, Line], None], moved: Callable[[], None]
    ) -> None:
        """Train from the current state to the end; the step-0 evaluation comes first.

        ``evaluated`` hears of evaluations, ``moved`` of stored states and the end.
        """
        if not self.curve:
            self._evaluate(evaluated)
        for step, batch in self._batches():
            loss, tokens = self.update(step, batch), sum(len(self.chats[index].token_ids) for index in batch)
            self.curve.append({"step": step + 1, "loss": loss, "tokens": self.tokens + tokens})
            self.step = step + 1
            last = self.step == self.total
            if last or self.step % evaluate_every == 0:
                self._evaluate(evaluated)
            if not last and self.step % save_every == 0:
                self._save()
            if last or self.step % save_every == 0:
                moved()

    def restore_best(self) -> Line:
        """Put the best weights into the drafter (rank 0's); return its evaluation.

        Raises:
            UserError: they are not what was stored.
        """
        folder, best = self._scratch / "best", self.best
        assert self._work is not None
        assert best is not None
        if not self._work.get_folder(f"{BEST}{best['step']}", folder):
            where = self._work.store.uri(self._work.prefix)
            raise UserError(
                f"{where}: the weights of step {best['step']} are gone or damaged; remove it and run again"
            )
        stored = load_file(folder / "weights.safetensors")
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(stored[name])
        return best

    def _batches(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (step, indices of chats) from the current step on; an epoch's order depends on seed and epoch."""
        per_epoch = self.total // self.schedule.epochs
        order: list[int] = []
        for step in range(self.step, self.total):
            epoch, position = divmod(step, per_epoch)
            if not (order and position):
                generator = torch.Generator().manual_seed(seed_of("order", self.schedule.seed, epoch))
                order = torch.randperm(len(self.chats), generator=generator).tolist()
            yield step, order[position * self.schedule.batch : (position + 1) * self.schedule.batch]

    def update(self, step: int, batch: list[int]) -> float:
        """Take one optimiser step; return the loss of the whole batch."""
        plan = self.schedule
        loss = self.backward(step, batch)
        self._shares.sum_gradients()
        norm = self._shares.norm()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            names = ", ".join(self.chats[index].id for index in batch[:4])
            raise UserError(f"step {step + 1}: loss {loss}, gradient norm {norm} on {names} …; lower learning_rate")
        self._shares.scale_gradients(min(1.0, plan.clip / (norm + 1e-6)))
        for group in self._optimiser.param_groups:
            group["lr"] = plan.learning_rate * plan.rate(step, self.total)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self._shares.spread()
        return loss

    def backward(self, step: int, batch: list[int]) -> float:
        """Add this rank's part of the gradient of the batch's loss; return that loss."""
        plan, device, denominator = self.schedule, self.drafter.device, 0.0
        losses: list[torch.Tensor] = []
        owners = balanced([self.work(index) for index in batch], self.ranks.world)
        mine = [index for index, owner in zip(batch, owners, strict=True) if owner == self.ranks.rank]
        for start in range(0, len(mine), plan.micro_batch):
            part = mine[start : start + plan.micro_batch]
            states = torch.cat([sent(self.features(index), device) for index in part])
            with torch.autocast(device.type, plan.dtype, enabled=plan.dtype != torch.float32):
                loss = self._objective(states, self._blocks(step, part))
            if not losses:  # a GPU is at work on the first forward
                denominator = sum(self._objective.weight(self._blocks(step, [index])) for index in batch)
            loss = loss / denominator
            loss.backward()
            losses.append(loss.detach())
        return self.ranks.sum(sum(torch.stack(losses).tolist()) if losses else 0.0)[0]

    def work(self, index: int) -> int:
        """Return how many positions a chat sends through the target and the drafter; one costs each about the same."""
        chat = self.chats[index]
        anchors = min(self.schedule.anchors, len(candidates(chat.answer_start, len(chat.token_ids))))
        return len(chat.token_ids) + anchors * self.drafter.block_size

    def _blocks(self, step: int, indices: list[int]) -> Blocks:
        """Lay out conversations with the anchors that they have in this step."""
        plan = self.schedule
        return lay_out(
            [
                (
                    chat.token_ids,
                    random_anchors(
                        chat.answer_start,
                        len(chat.token_ids),
                        plan.anchors,
                        seed_of("anchors", plan.seed, step, chat.id),
                    ),
                )
                for chat in (self.chats[index] for index in indices)
            ],
            self.drafter.block_size,
        )

    def _evaluate(self, evaluated: Callable[[int, Line], None]) -> None:
        line: Line = {"step": self.step, "accept_length": self.score()}
        self.curve.append(line)
        evaluated(self.step, line["accept_length"])
        if self._work is not None and self.ranks.rank == 0 and self.step and self.best is line:
            folder = self._scratch / "best"
            folder.mkdir(exist_ok=True)
            save_file(
                {name: one.detach().cpu().contiguous() for name, one in self._weights.items()},
                folder / "weights.safetensors",
            )
            self._work.put_folder(f"{BEST}{self.step}", folder)
            shutil.rmtree(folder)

    def _save(self) -> None:
        """Store the state; best weights that it does not name are of no use after that."""
        save_state(self._work, self._scratch, self.step, self._shares, self._optimiser, self.curve, self.ranks)
        if self._work is not None and self.ranks.rank == 0:
            kept = f"{BEST}{self.best['step']}" if self.best else ""
            for name in self._work.folders():
                if name.startswith(BEST) and name != kept:
                    self._work.delete_folder(name)
