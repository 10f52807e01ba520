"""A W4A16 checkpoint as dense weights: codes × scales exactly, everything else unchanged."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from components.checkpoint.config import quantization, read_config
from components.checkpoint.grid import PACKED, SCALE, SHAPE, iterate_grid
from components.checkpoint.quantize import dequantize
from components.checkpoint.tensors import Tensors
from components.checkpoint.write import TensorWriter, copy_sidecars, dense_config, write_config


def dense_tensors(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Tensor]]:
    """Yield a model folder's tensors one at a time; packed weights come dequantised in ``dtype``, others as stored."""
    tensors = Tensors(folder)
    yield from passthrough_tensors(tensors)
    if quantization(read_config(folder)) is not None:
        for module, quantized in iterate_grid(tensors):
            yield f"{module}.weight", dequantize(quantized.codes, quantized.scales, dtype)


def passthrough_tensors(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that is not part of a packed weight, as stored."""
    for name in tensors:
        if name.rpartition(".")[2] not in (PACKED, SCALE, SHAPE):
            yield name, tensors[name]


def unpack(folder: Path, destination: Path) -> None:
    """Write the dense BF16 twin of a W4A16 folder: the same tensors and side files, no quantization_config."""
    destination.mkdir(parents=True, exist_ok=True)
    with TensorWriter(destination) as writer:
        for name, tensor in dense_tensors(folder):
            writer.add(name, tensor)
    write_config(destination, dense_config(read_config(folder)))
    copy_sidecars(folder, destination)
