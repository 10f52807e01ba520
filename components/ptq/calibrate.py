"""Calibration batches: the token ids that the model was fed and produced, never a re-tokenisation."""

from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from components.chats.rows import read_rows
from components.contract.errors import UserError

Batch = dict[str, Tensor]


def calibration_batches(folder: Path, rows: int, tokens: int, vocabulary: int) -> "DataLoader[Batch]":
    """Return the first ``rows`` chats, one a batch, each cut to its first ``tokens`` ids.

    A batch is ``{input_ids, attention_mask}``, both int64 [1, length].

    Raises:
        UserError: there are none, or one has no token ids or others than the model's, 0 to ``vocabulary`` − 1.
    """
    batches = []
    for row in islice(read_rows(folder), rows):
        try:
            ids = torch.tensor([(row["prompt_token_ids"] + row["token_ids"])[:tokens]])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{folder}: row {row.get('id')} has no token ids; calibrate on regenerated chats"
            ) from error
        if ids.dtype != torch.int64 or ids.ndim != 2 or ids.min() < 0 or ids.max() >= vocabulary:
            raise UserError(f"{folder}: row {row.get('id')} has ids outside the model's vocabulary of {vocabulary}")
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    if not batches:
        raise UserError(f"{folder}: holds no chats; calibration needs at least one")
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
