"""One arm of the study ``qad-quality``: a distillation by the stage's own steps, measured before and after."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.checkpoint.load import load_tokenizer
from components.qad.evaluate import distance
from components.qad.grid import QuantizedLinear
from components.qad.hidden import hidden_states
from components.qad.stage import Config
from components.qad.train import Run


class Estimated(QuantizedLinear):
    """The ablation of the frozen grid: each forward takes its scales from the latents, absmax / 7.5 (or 127.5)."""

    def quantized(self) -> Tensor:
        """Return what the forward computes with, on a new grid."""
        if self._frozen is None:
            groups = self.latents.float().unflatten(-1, (self.weight_scale.shape[-1], -1))
            self.weight_scale.copy_(groups.abs().amax(-1) / (2 ** (self.bits - 1) - 0.5))
        return super().quantized()


def code_items(file: Path, model: Path) -> list[tuple[list[int], int]]:
    """Return each item's token ids, prompt and canonical solution, and where the solution starts."""
    tokenizer = load_tokenizer(model)
    items = []
    for line in gzip.decompress(file.read_bytes()).splitlines():
        row = json.loads(line)
        start, end = (
            tokenizer(row[key], add_special_tokens=False)["input_ids"] for key in ("prompt", "canonical_solution")
        )
        items.append((start + end, len(start)))
    return items


@torch.no_grad()
def log_likelihoods(model: PreTrainedModel, weight: Tensor, items: list[tuple[list[int], int]]) -> list[float]:
    """Return log p(solution | prompt) of each item, in nats."""
    found = []
    for ids, start in items:
        states = hidden_states(model, torch.tensor([ids]))[0, start - 1 : -1]
        chosen = torch.tensor(ids[start:], device=states.device).unsqueeze(1)
        found.append(float((states @ weight.T).float().log_softmax(-1).gather(1, chosen).sum()))
    return found


def figures(run: Run, items: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Measure the student on the held-out sequences and every item: sums, so that they can be resampled."""
    parts = []
    for index in range(min(run.config.evaluation_sequences, len(run.held_out))):
        found = distance(run.student, run.teacher_held_out, run.teacher_head, run.held_out, [index])
        if found.tokens:
            parts.append((found.kl * found.tokens, found.top1_agreement * found.tokens, found.tokens))
    kl, agreed, tokens = map(list, zip(*parts, strict=True))
    with run.student.frozen():
        likelihoods = log_likelihoods(run.student.model, run.student.head(), items)
    changed = run.student.codes_changed()
    of_head = None
    if (head := run.student.layers.get("lm_head")) is not None:
        of_head = float((head.codes.cpu() != run.student.start["lm_head"]).float().mean())
    return {
        "kl": kl,
        "agreed": agreed,
        "tokens": tokens,
        "code": likelihoods,
        "codes_changed": changed,
        "of_head": of_head,
    }


def distil(
    arm: dict[str, Any],
    settings: dict[str, Any],
    folders: dict[str, Path],
    items: list[tuple[list[int], int]],
    steps: int,
) -> dict[str, Any]:
    """Train one arm and return its :func:`figures`.

    Args:
        arm: ``estimated``: scales from each step's latents; ``masters``: the type to which they are rounded each step.
        settings: of the stage.
        folders: ``teacher``, ``student`` and ``sequences``.
        items: of :func:`code_items`.
        steps: to take of the settings' course; 0: measure the start.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(Config(**settings), folders["teacher"], folders["student"], folders["sequences"], Path(scratch))
        for layer in run.student.layers.values():
            if arm["estimated"]:
                layer.__class__ = Estimated
        for step in range(steps):
            run.step(step)
            if arm["masters"] != "float32":
                for master in run.student.masters():
                    master.data.copy_(master.data.to(getattr(torch, arm["masters"])))
        return figures(run, items)
