"""A folder of safetensors, read lazily: one tensor at a time, single file or shards."""

import json
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from components.checkpoint.stream import DTYPES, PART_BYTES, Stream
from components.contract.errors import UserError

INDEX = "model.safetensors.index.json"


class Tensors:
    """The tensors of a model folder by name; opening checks every shard against the index and against the others.

    Raises:
        UserError: no safetensors, a missing or truncated shard, an index that names a tensor no shard holds, or two
            shards that hold one tensor; file and tensor are named.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._shards = {name: self._open(name) for name in self._shard_names()}
        self._shard_of: dict[str, str] = {}
        for shard, handle in self._shards.items():
            for name in handle.keys():  # noqa: SIM118
                if name in self._shard_of:
                    raise UserError(f"{self.folder}: both {self._shard_of[name]} and {shard} hold {name}; keep one")
                self._shard_of[name] = shard
        for name, shard in self._index.items():
            if self._shard_of.get(name) != shard:
                raise UserError(f"{self.folder / INDEX}: it says {name} is in {shard}, which does not hold it")

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __getitem__(self, name: str) -> Tensor:
        return self._shards[self._shard(name)].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its values."""
        return tuple(self._entry(name)["shape"])

    def blank(self, name: str) -> Tensor:
        """Return a tensor without its values, on the ``meta`` device: ``[name]`` maps a part of its file for good.

        Raises:
            UserError: it has a type that no model of this project has.
        """
        entry = self._entry(name)
        if entry["dtype"] not in DTYPES:
            raise UserError(f"{self.file(name)}: {name} is {entry['dtype']}; only {', '.join(DTYPES)} are read")
        return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")

    def read(self, name: str) -> Tensor:
        """Return a tensor as ``[name]`` does, but in memory of its own: what that returns is mapped from its file."""
        blank = self.blank(name)
        read = list(self.blocks(name, max(1, blank.nbytes)))
        return (read[0] if read else torch.empty(0, dtype=torch.uint8)).view(blank.dtype).view(blank.shape)

    def blocks(self, name: str, size: int = PART_BYTES) -> Iterator[Tensor]:
        """Yield a tensor's bytes, uint8, ``size`` at a time (the last may be fewer) and in the same memory each time.

        Raises:
            UserError: the file has become shorter since it was opened.
        """
        path = self.file(name)
        start, end = self._entry(name)["data_offsets"]
        room = torch.empty(min(size, end - start), dtype=torch.uint8)
        with path.open("rb", buffering=0) as file:
            file.seek(self._headers[path.name][0] + start)
            for begin in range(start, end, size):
                block = room[: min(size, end - begin)]
                if file.readinto(block.numpy().data) != len(block):
                    raise UserError(f"{path}: {name} ends early; the file was cut while it was read")
                yield block

    def stream(self, name: str) -> Stream:
        """Return a tensor as its file has it, to be read when its turn comes."""
        entry = self._entry(name)
        start, end = entry["data_offsets"]
        return Stream(entry["dtype"], tuple(entry["shape"]), end - start, partial(self.blocks, name))

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor, for messages."""
        return self.folder / self._shard(name)

    def _open(self, shard: str) -> Any:
        path = self.folder / shard
        if not path.is_file():
            held = [name for name, holder in self._index.items() if holder == shard] or ["nothing"]
            raise UserError(f"{path}: the index names this shard, for {_few(held)}, but it is missing")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            lost = f"; it ends before {_few(lost)} does" if (lost := _lost(path)) else ""
            raise UserError(f"{path}: truncated or not a safetensors file{lost} ({error})") from error

    def _shard(self, name: str) -> str:
        if name not in self._shard_of:
            raise UserError(f"{self.folder}: no tensor {name} in {', '.join(self._shards)}")
        return self._shard_of[name]

    def _entry(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = self._headers[self._shard(name)][1][name]
        return entry

    @cached_property
    def _headers(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """Each shard's first byte of data and its header, which opening has checked."""
        return {shard: _header(self.folder / shard) for shard in self._shards}

    @cached_property
    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not path.exists():
            return {}
        try:
            index = dict(json.loads(path.read_text())["weight_map"])
            if any(Path(shard).name != shard for shard in index.values()):
                raise ValueError("a shard that is no file of the folder")
            return index
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not an index with a weight_map; the file is torn") from error

    def _shard_names(self) -> list[str]:
        names = sorted(set(self._index.values()) or {path.name for path in self.folder.glob("*.safetensors")})
        if not names:
            raise UserError(f"{self.folder}: no *.safetensors there; a model folder in safetensors is needed")
        return names


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def _lost(path: Path) -> list[str]:
    """Return the tensors that a truncated file no longer holds whole, as far as its header can tell."""
    try:
        start, header = _header(path)
        ends = {name: start + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return []
    size = path.stat().st_size
    return sorted((name for name, end in ends.items() if end > size), key=ends.__getitem__)


def _few(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
