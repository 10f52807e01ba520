"""Reads what the ``sequences`` stage wrote, memory-mapped."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contract.errors import UserError
from components.sequences.packing import MASK, OFFSET, TOKEN


@dataclass(frozen=True)
class Split:
    """One split: ``ids`` int32 and ``mask`` uint8, both [chunks, length]; ``starts`` int64 [documents].

    ``mask[c, t]`` says whether token t is a target, that is, whether the prediction made at t − 1 counts.
    ``boundaries`` is ``leak`` or ``reset``: see :meth:`positions`.
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    starts: NDArray[np.int64]
    boundaries: str = "leak"

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, index: int) -> NDArray[np.int64] | None:
        """Return one sequence's positions [length], from 0 at each document's start and at the sequence's own.

        transformers confines attention to a document when it is given such positions and no mask. None where documents
        attend to those before them.
        """
        if self.boundaries == "leak":
            return None
        length = self.ids.shape[1]
        offsets = np.arange(index * length, (index + 1) * length)
        starts = self.starts[np.searchsorted(self.starts, offsets, side="right") - 1]
        return offsets - np.maximum(starts, offsets[0])


def read_index(folder: Path) -> dict[str, Any]:
    """Return ``index.json``."""
    path = folder / "index.json"
    if not path.is_file():
        raise UserError(f"{path}: missing; an artifact of the sequences stage is needed")
    index: dict[str, Any] = json.loads(path.read_text())
    return index


def read_split(folder: Path, split: str) -> Split:
    """Map one split (``train`` or ``val``) read-only; sizes are checked against the index."""
    index = read_index(folder)
    size = index["splits"][split]
    shape = (size["chunks"], index["sequence_length"])
    ids = _map(folder / f"{split}.bin", TOKEN, shape)
    mask = _map(folder / f"{split}.mask.bin", MASK, shape)
    starts = _map(folder / f"{split}.starts.bin", OFFSET, (size["documents"],))
    return Split(ids, mask, starts, index.get("boundaries", "leak"))


def _map(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    expected = int(np.prod(shape)) * dtype.itemsize
    if not path.is_file() or path.stat().st_size != expected:
        raise UserError(f"{path}: missing or not the {expected} bytes that index.json implies")
    return np.memmap(path, dtype, "r", shape=shape)
