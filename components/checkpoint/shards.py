"""Writes safetensors tensor by tensor: one shard, or several with an index."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from components.checkpoint.tensors import INDEX
from components.contract.errors import UserError

MAX_SHARD_BYTES = 5 * 10**9
MAX_SHARD_TENSORS = 4000
HEADER_BYTES = 1 << 20
"""Space kept for a shard's header, which comes first and is known last; the format lets it end in blanks."""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorWriter:
    """Streams tensors to disk; one is written while the next is made.

    No other is kept in memory, but for those whose bytes do not fill eights: they come last in their shard, so that
    every tensor is aligned to its type. One shard is called ``model.safetensors``; several get numbered names and an
    index.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = max_shard_bytes
        self._file: BinaryIO | None = None
        self._header: dict[str, Any] = {}
        self._odd: dict[str, Tensor] = {}
        self._bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[int] | None = None

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *raised: object) -> None:
        with self._thread:
            if raised[0] is None:
                self._finish()
        if self._file:
            self._file.close()

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor, whose values stay as they are until the next call.

        Raises:
            ValueError: its name was given before.
            UserError: it has no values (device ``meta``), or a dtype that safetensors does not have.
            OSError: the tensor before it could not be written.
        """
        if name in self._header or name in self._odd or any(name in shard for shard in self._shards):
            raise ValueError(f"{name} is written twice")
        if tensor.is_meta or tensor.dtype not in _NAMES:
            fault = "has no values (device meta)" if tensor.is_meta else f"is {tensor.dtype}, which is not stored"
            raise UserError(f"{self._folder}: {name} {fault}; nothing is written of a model that is not loaded")
        full = len(self._header) + len(self._odd) == MAX_SHARD_TENSORS
        if full or (self._bytes and self._bytes + tensor.nbytes > self._limit):
            self._close()
        self._bytes += tensor.nbytes
        if tensor.nbytes % 8:
            self._odd[name] = tensor
        else:
            self._append(name, tensor)

    def _append(self, name: str, tensor: Tensor) -> None:
        self._wait()
        if self._file is None:
            self._file = (self._folder / _part(len(self._shards))).open("wb")
            self._file.seek(HEADER_BYTES)
        start = self._file.tell() - HEADER_BYTES
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        self._writing = self._thread.submit(self._file.write, data)
        span = [start, start + tensor.nbytes]
        self._header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}

    def _wait(self) -> None:
        if self._writing:
            self._writing.result()
            self._writing = None

    def _close(self) -> None:
        for name, tensor in sorted(self._odd.items(), key=lambda one: -one[1].itemsize):
            self._append(name, tensor)
        self._wait()
        assert self._file is not None
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")).encode()
        room = HEADER_BYTES - 8
        if len(header) > room:
            raise UserError(f"{self._folder}: {len(self._header)} tensors have too long names for one shard's header")
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header.ljust(room))
        self._file.close()
        self._shards.append(list(self._header))
        self._total_bytes += self._bytes
        self._file, self._header, self._odd, self._bytes = None, {}, {}, 0

    def _finish(self) -> None:
        if self._header or self._odd:
            self._close()
        count = len(self._shards)
        if count == 1:
            (self._folder / _part(0)).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / _part(number)).rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _part(number: int) -> str:
    return f".part-{number:05d}.safetensors"
