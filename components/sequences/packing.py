"""Documents, their loss masks, and the cut into fixed-length chunks.

Packing follows the published recipe ("Quantize the Target, Quantize the Drafter", arXiv 2607.04244, section 2):
documents are joined with a separator and cut every ``sequence_length`` tokens; only the last chunk is padded.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.chats.rows import Row
from components.contract.errors import UserError

TOKEN, MASK, OFFSET = np.dtype("<i4"), np.dtype("u1"), np.dtype("<i8")


@dataclass(frozen=True)
class Document:
    """One row: its token ids (int32), whether each counts as a target (uint8), and its id."""

    row_id: str
    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]


def document(row: Row, separator: int, vocabulary: int, count: str) -> Document:
    """Return prompt ids + answer ids, and a separator unless the answer ended in it or was cut off.

    The end token that the model produced itself belongs to the answer and counts; an added separator never does, nor
    does the document's first token, which nothing of the document predicts.

    Raises:
        UserError: the row lacks token ids or holds ids outside the vocabulary.
    """
    try:
        prompt, answer = row["prompt_token_ids"], row["token_ids"]
        added = [separator] if row["finish_reason"] != "length" and answer[-1:] != [separator] else []
        ids = np.array([*prompt, *answer, *added], dtype=TOKEN)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        message = f"row {row.get('id')}: prompt_token_ids, token_ids and finish_reason are needed as regen writes them"
        raise UserError(f"{message} ({type(error).__name__}: {error})") from error
    if not prompt or ids.min() < 0 or ids.max() >= vocabulary:
        raise UserError(f"row {row['id']}: no prompt, or token ids outside the model's vocabulary of {vocabulary}")
    mask = np.zeros(len(ids), dtype=MASK)
    mask[1 if count == "all" else len(prompt) : len(prompt) + len(answer)] = 1
    return Document(row["id"], ids, mask)


def shuffled(documents: list[Document], seed: int) -> list[Document]:
    """Order documents by a hash of seed and row id, so that sharding and file order do not matter."""
    return sorted(documents, key=lambda one: hashlib.sha256(f"{seed}:{one.row_id}".encode()).digest())


def pack(documents: list[Document], folder: Path, split: str, length: int, padding: int) -> dict[str, int]:
    """Write ``<split>.bin``, ``.mask.bin`` and ``.starts.bin``; return the split's sizes.

    A chunk's first token has no context in its chunk, so its mask is 0.

    Returns:
        ``chunks``, ``documents``, ``tokens`` (without padding) and ``counted`` (targets).
    """
    lengths = np.array([len(one.ids) for one in documents], dtype=OFFSET)
    starts, tokens = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(OFFSET), int(lengths.sum())
    chunks = -(-tokens // length)
    ids = np.memmap(folder / f"{split}.bin", TOKEN, "w+", shape=(chunks * length,))
    mask = np.memmap(folder / f"{split}.mask.bin", MASK, "w+", shape=(chunks * length,))
    for start, one in zip(starts, documents, strict=True):
        ids[start : start + len(one.ids)] = one.ids
        mask[start : start + len(one.ids)] = one.mask
    ids[tokens:] = padding
    mask[::length] = 0
    counted = int(mask.sum())
    ids.flush()
    mask.flush()
    starts.tofile(folder / f"{split}.starts.bin")
    return {"chunks": chunks, "documents": len(documents), "tokens": tokens, "counted": counted}
