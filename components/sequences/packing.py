"""Documents, their loss masks, and the cut into fixed-length chunks.

Packing follows the published recipe ("Quantize the Target, Quantize the Drafter", arXiv 2607.04244, section 2):
documents are joined with a separator and cut every ``sequence_length`` tokens; only the last chunk is padded.
"""

import hashlib
from collections.abc import Iterable, Iterator
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

    ``count`` is ``all``, ``answer`` or ``all_and_separator``. The end token that the model produced itself belongs to
    the answer; an added separator counts in ``all_and_separator`` only. The document's first token, which nothing of
    the document predicts, never counts.

    Raises:
        UserError: the row lacks an id or token ids, or holds ids outside the vocabulary.
    """
    try:
        prompt, answer = row["prompt_token_ids"], row["token_ids"]
        added = [separator] if row["finish_reason"] != "length" and answer[-1:] != [separator] else []
        numbers = np.array([*prompt, *answer, *added])
        if numbers.dtype.kind != "i" or numbers.ndim != 1:
            raise TypeError("ids are whole numbers")
        if not isinstance(row_id := row["id"], str):
            raise TypeError("an id is a text")
        ids = numbers.astype(TOKEN)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        message = (
            f"row {row.get('id')}: id, prompt_token_ids, token_ids, finish_reason are needed as regen writes them"
        )
        raise UserError(f"{message} ({type(error).__name__}: {error})") from error
    if not prompt or numbers.min() < 0 or numbers.max() >= vocabulary:
        raise UserError(f"row {row_id}: no prompt, or token ids outside the model's vocabulary of {vocabulary}")
    mask = np.zeros(len(ids), dtype=MASK)
    first, last = (len(prompt) if count == "answer" else 1), len(prompt) + len(answer)
    mask[first : len(ids) if count == "all_and_separator" else last] = 1
    return Document(row_id, ids, mask)


class Documents:
    """The documents of one split, kept in two flat files until all are known and their order with them.

    Memory holds some 150 bytes for each, whatever its length.
    """

    def __init__(self, folder: Path, split: str, seed: int) -> None:
        self._ids = (folder / f"{split}.ids").open("w+b")
        self._masks = (folder / f"{split}.masks").open("w+b")
        self._seed = seed
        self._lengths: list[int] = []
        self._row_ids: list[str] = []

    def __len__(self) -> int:
        return len(self._lengths)

    def append(self, one: Document) -> None:
        """Take one more document."""
        self._ids.write(one.ids.data)
        self._masks.write(one.mask.data)
        self._lengths.append(len(one.ids))
        self._row_ids.append(one.row_id)

    def shuffled(self) -> Iterator[Document]:
        """Yield them in the order of a hash of seed and row id, so that sharding and file order do not matter."""
        starts = np.concatenate([[0], np.cumsum(self._lengths, dtype=OFFSET)])
        keys = [hashlib.sha256(f"{self._seed}:{row_id}".encode()).digest() for row_id in self._row_ids]
        for index in sorted(range(len(self)), key=keys.__getitem__):
            self._ids.seek(int(starts[index]) * TOKEN.itemsize)
            self._masks.seek(int(starts[index]))
            length = self._lengths[index]
            ids, mask = self._ids.read(length * TOKEN.itemsize), self._masks.read(length)
            yield Document(self._row_ids[index], np.frombuffer(ids, TOKEN), np.frombuffer(mask, MASK))


def pack(documents: Iterable[Document], folder: Path, split: str, length: int, padding: int) -> dict[str, int]:
    """Write ``<split>.bin``, ``.mask.bin`` and ``.starts.bin``, document after document; return the split's sizes.

    A chunk's first token has no context in its chunk, so its mask is 0. Nothing is written by numpy, which does not
    say that a disk was full when it found out with the last bytes.

    Returns:
        ``chunks``, ``documents``, ``tokens`` (without padding) and ``counted`` (targets).
    """
    starts, tokens, counted = [], 0, 0
    with (folder / f"{split}.bin").open("wb") as ids, (folder / f"{split}.mask.bin").open("wb") as masks:
        for one in documents:
            mask = one.mask.copy()
            mask[-tokens % length :: length] = 0
            ids.write(one.ids.data)
            masks.write(mask.data)
            starts.append(tokens)
            tokens += len(one.ids)
            counted += int(mask.sum())
        chunks = -(-tokens // length)
        ids.write(np.full(chunks * length - tokens, padding, TOKEN).data)
        masks.write(bytes(chunks * length - tokens))
    (folder / f"{split}.starts.bin").write_bytes(np.array(starts, OFFSET).data)
    return {"chunks": chunks, "documents": len(starts), "tokens": tokens, "counted": counted}
