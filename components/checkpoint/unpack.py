"""A W4A16 checkpoint as dense weights: codes × scales exactly, everything else unchanged."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from components.checkpoint.config import is_tied, quantization, read_config
from components.checkpoint.grid import PACKED, SCALE, SHAPE, iterate_grid
from components.checkpoint.quantize import dequantize
from components.checkpoint.shards import TensorWriter
from components.checkpoint.stream import Stream
from components.checkpoint.tensors import Tensors
from components.checkpoint.write import copy_sidecars, dense_config, write_config


def dense_tensors(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Tensor]]:
    """Yield a model folder's tensors one at a time; packed weights come dequantised in ``dtype``, others as stored."""
    tensors = Tensors(folder)
    yield from passthrough_tensors(tensors)
    yield from _unpacked(tensors, dtype)


def _unpacked(tensors: Tensors, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Tensor]]:
    packed = any(name.endswith(f".{PACKED}") for name in tensors)
    if packed or quantization(read_config(tensors.folder)) is not None:
        for module, quantized in iterate_grid(tensors):
            yield f"{module}.weight", dequantize(quantized.codes, quantized.scales, dtype)


def passthrough_names(tensors: Tensors) -> list[str]:
    """Return the names of everything that is not part of a packed weight; no output head where it is tied."""
    tied = is_tied(tensors.folder)
    packed = (PACKED, SCALE, SHAPE)
    return [n for n in tensors if n.rpartition(".")[2] not in packed and not (tied and n == "lm_head.weight")]


def passthrough_tensors(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of :func:`passthrough_names`, as stored."""
    for name in passthrough_names(tensors):
        yield name, tensors[name]


def passthrough_streams(tensors: Tensors) -> Iterator[tuple[str, Stream]]:
    """Yield what :func:`passthrough_tensors` does, to be copied from its file to another."""
    for name in passthrough_names(tensors):
        yield name, tensors.stream(name)


def unpack(folder: Path, destination: Path) -> None:
    """Write the dense BF16 twin of a W4A16 folder: the same tensors and side files, no quantization_config."""
    destination.mkdir(parents=True, exist_ok=True)
    tensors = Tensors(folder)
    with TensorWriter(destination) as writer:
        for name, tensor in itertools.chain(passthrough_streams(tensors), _unpacked(tensors)):
            writer.add(name, tensor)
    write_config(destination, dense_config(read_config(folder)))
    copy_sidecars(folder, destination)
