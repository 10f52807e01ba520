"""Hidden states: what the loss takes instead of logits."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.contract.errors import UserError
from components.sequences.reader import Split
from components.training.room import reserve


def hidden_states(model: PreTrainedModel, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return the states that the output head is applied to, [sequences, length, hidden].

    Args:
        model: on any device.
        ids: [sequences, length], on any device.
        positions: of the same shape: from 0 at each document's start, where documents do not attend to each other.
    """
    where = None if positions is None else positions.to(model.device)
    ids = ids.to(model.device)
    states: Tensor = model.base_model(input_ids=ids, position_ids=where, use_cache=False).last_hidden_state
    return states


def states_of(model: PreTrainedModel, split: Split, indices: list[int]) -> Tensor:
    """Return the states that predict the counted tokens of some sequences: [counted tokens, hidden]."""
    ids = torch.from_numpy(split.ids[indices].astype("int64"))
    targets = torch.from_numpy(split.mask[indices, 1:].astype(bool))
    places = [place for index in indices if (place := split.positions(index)) is not None]
    positions = torch.from_numpy(np.stack(places)) if places else None
    return hidden_states(model, ids, positions)[:, :-1][targets]


def head(model: PreTrainedModel) -> Tensor:
    """Return the output head's weight [vocabulary, hidden].

    Raises:
        UserError: the model's logits are not finite, or not hidden · headᵀ (a bias, a cap or a multiplier), which the
            loss assumes.
    """
    weight: Tensor = model.get_output_embeddings().weight.detach().to(model.dtype)
    ids = torch.arange(min(8, len(weight)), device=weight.device).unsqueeze(0)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        product = hidden_states(model, ids) @ weight.T
    if not logits.isfinite().all():
        raise UserError(f"{model.config._name_or_path}: predicts NaN or infinity; its weights are damaged")
    if not torch.allclose(logits.float(), product.float(), rtol=0.02, atol=0.02):
        kind = type(model).__name__
        raise UserError(
            f"{model.config._name_or_path}: {kind} does more than its head on the last states; unsupported"
        )
    return weight


class TeacherStates:
    """The teacher's states at the counted positions of each sequence of a split.

    One sequence passes the teacher at a time, so that the values do not depend on how batches are composed. With a
    ``cache`` file each sequence passes only once; it holds [sequences, length − 1, hidden] in the
    teacher's type on disk and goes with the process.
    """

    def __init__(self, teacher: PreTrainedModel, split: Split, cache: Path | None = None) -> None:
        self._teacher, self._split, self._cache = teacher, split, cache
        self._seen: set[int] = set()
        if cache is not None:
            shape = (len(split), split.ids.shape[1] - 1, teacher.get_output_embeddings().weight.shape[1])
            size = shape[0] * shape[1] * shape[2]
            self._stored = torch.from_file(str(cache), shared=True, size=size, dtype=teacher.dtype).view(shape)

    @torch.no_grad()
    def __call__(self, index: int) -> Tensor:
        """Return the states [counted tokens, hidden] of one sequence.

        Raises:
            UserError: there is no room for them on the cache's disk.
        """
        if self._cache is None:
            return states_of(self._teacher, self._split, [index])
        targets = torch.from_numpy(self._split.mask[index, 1:].astype(bool))
        if index not in self._seen:
            found = states_of(self._teacher, self._split, [index]).cpu()
            size = self._stored[index].nbytes
            reserve(self._cache, index * size, size, "the teacher's states; free space or set cache_teacher: false")
            self._stored[index, targets] = found
            self._seen.add(index)
        return self._stored[index, targets]
