"""Writes safetensors tensor by tensor: one shard, or several with an index."""

import json
import math
import os
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from components.checkpoint.stream import DTYPES, Stream
from components.checkpoint.tensors import INDEX
from components.contract.errors import UserError

MAX_SHARD_BYTES = 5 * 10**9
MAX_SHARD_TENSORS = 4000
HEADER_BYTES = 1 << 20
"""Space kept for a shard's header, which comes first and is known last; the format lets it end in blanks."""
WRITERS = 3
"""Threads: on two cores two compute while one waits for the disk or the file."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorWriter:
    """Writes tensors to disk, a few at a time, each by a thread of its own while the next are made.

    A tensor in memory is kept until it is written, and no other but those whose bytes do not fill eights: they come
    last in their shard, so that every tensor is aligned to its type. A :class:`Stream` is read or computed by the
    thread that writes it. One shard is called ``model.safetensors``; several get numbered names and an index.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = max_shard_bytes
        self._file: BinaryIO | None = None
        self._header: dict[str, Any] = {}
        self._odd: dict[str, Stream] = {}
        self._bytes = 0
        self._end = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._torch_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(WRITERS, initializer=torch.set_num_threads, initargs=(1,))
        self._writing: deque[Future[None]] = deque()
        self._held: Future[None] | None = None

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            if raised[0] is None:
                self._finish()
        finally:
            self._pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self._torch_threads)
            if self._file:
                self._file.close()

    def add(self, name: str, tensor: Tensor | Stream) -> None:
        """Append one tensor, which must keep its values until the next call.

        Raises:
            ValueError: its name was given before.
            UserError: it has no values (device ``meta``), or a dtype that safetensors does not have.
            OSError: a tensor before it could not be written; or whatever making a stream before it raised.
        """
        if name in self._header or name in self._odd or any(name in shard for shard in self._shards):
            raise ValueError(f"{name} is written twice")
        in_memory = isinstance(tensor, Tensor)
        if in_memory and self._held:
            self._held.result()
        stream = self._stream(name, tensor) if isinstance(tensor, Tensor) else tensor
        full = len(self._header) + len(self._odd) == MAX_SHARD_TENSORS
        if full or (self._bytes and self._bytes + stream.nbytes > self._limit):
            self._close()
        self._bytes += stream.nbytes
        if stream.nbytes % 8:
            self._odd[name] = stream
        else:
            writing = self._append(name, stream)
            self._held = writing if in_memory else self._held

    def _stream(self, name: str, tensor: Tensor) -> Stream:
        if tensor.is_meta or tensor.dtype not in _NAMES:
            fault = "has no values (device meta)" if tensor.is_meta else f"is {tensor.dtype}, which is not stored"
            raise UserError(f"{self._folder}: {name} {fault}; nothing is written of a model that is not loaded")
        return Stream(_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, partial(iter, (tensor,)))

    def _append(self, name: str, stream: Stream) -> Future[None]:
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()
        if self._file is None:
            self._file = (self._folder / _part(len(self._shards))).open("wb", buffering=0)
        span = [self._end, self._end + stream.nbytes]
        self._header[name] = {"dtype": stream.dtype, "shape": list(stream.shape), "data_offsets": span}
        self._end = span[1]
        writing = self._pool.submit(_write, self._file.fileno(), HEADER_BYTES + span[0], stream)
        self._writing.append(writing)
        return writing

    def _close(self) -> None:
        for name, stream in sorted(self._odd.items(), key=lambda one: -_item_bytes(one[1])):
            self._append(name, stream)
        wait(self._writing, return_when=FIRST_EXCEPTION)
        for writing in self._writing:
            if writing.done():
                writing.result()
        assert self._file is not None
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")).encode()
        room = HEADER_BYTES - 8
        if len(header) > room:
            raise UserError(f"{self._folder}: {len(self._header)} tensors have too long names for one shard's header")
        _put(self._file.fileno(), 0, memoryview(room.to_bytes(8, "little") + header.ljust(room)))
        self._file.close()
        self._shards.append(list(self._header))
        self._total_bytes += self._bytes
        self._file, self._header, self._odd, self._bytes, self._end = None, {}, {}, 0, 0
        self._writing.clear()

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


def _write(descriptor: int, offset: int, stream: Stream) -> None:
    end = offset + stream.nbytes
    for part in stream.parts():
        data = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        _put(descriptor, offset, data)
        offset += len(data)
    assert offset == end, f"{stream} has other parts than it says"


def _put(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _item_bytes(stream: Stream) -> int:
    return stream.nbytes // max(1, math.prod(stream.shape))
