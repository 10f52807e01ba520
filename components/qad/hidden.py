"""Hidden states: what the loss takes instead of logits."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.contract.errors import UserError
from components.sequences.reader import Split


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the states that the output head is applied to: [sequences, length, hidden] for ids of the same shape."""
    states: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def head(model: PreTrainedModel) -> Tensor:
    """Return the output head's weight [vocabulary, hidden].

    Raises:
        UserError: the model's logits are not hidden · headᵀ (a bias, a cap or a multiplier), which the loss assumes.
    """
    weight: Tensor = model.get_output_embeddings().weight.detach()
    ids = torch.arange(min(8, len(weight)), device=weight.device).unsqueeze(0)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        product = hidden_states(model, ids) @ weight.T
    if not torch.allclose(logits.float(), product.float(), rtol=0.02, atol=0.02):
        kind = type(model).__name__
        raise UserError(
            f"{model.config._name_or_path}: {kind} does more than its head on the last states; unsupported"
        )
    return weight


def ids_of(split: Split, index: int) -> Tensor:
    """Return one sequence's ids, int64 [1, length]."""
    return torch.from_numpy(split.ids[index].astype("int64")).unsqueeze(0)


def targets_of(split: Split, index: int) -> Tensor:
    """Return a bool mask [length − 1]: position t is True where the prediction of token t + 1 counts."""
    return torch.from_numpy(split.mask[index, 1:].astype(bool))


class TeacherStates:
    """The teacher's states at the counted positions of each sequence of a split.

    One sequence passes the teacher at a time, so that the values do not depend on how batches are composed. With a
    ``cache`` folder each sequence passes only once; the file there holds [sequences, length − 1, hidden] in the
    teacher's type and goes with the process.
    """

    def __init__(self, teacher: PreTrainedModel, split: Split, cache: Path | None = None) -> None:
        self._teacher, self._split = teacher, split
        self._seen: set[int] = set()
        self._stored: Tensor | None = None
        if cache is not None:
            shape = (len(split), split.ids.shape[1] - 1, teacher.get_output_embeddings().weight.shape[1])
            size = shape[0] * shape[1] * shape[2]
            self._stored = torch.from_file(str(cache), shared=True, size=size, dtype=teacher.dtype).view(shape)

    @torch.no_grad()
    def __call__(self, index: int) -> Tensor:
        """Return the states [counted tokens, hidden] of one sequence."""
        targets = targets_of(self._split, index)
        if self._stored is None:
            return self._compute(index)[targets]
        if index not in self._seen:
            self._stored[index] = self._compute(index)
            self._seen.add(index)
        return self._stored[index][targets]

    def _compute(self, index: int) -> Tensor:
        return hidden_states(self._teacher, ids_of(self._split, index))[0, :-1]
