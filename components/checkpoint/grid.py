"""The frozen grid of a W4A16 checkpoint: every quantised module's codes and scales, as stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor

from components.checkpoint.config import group_sizes
from components.checkpoint.quantize import BITS
from components.checkpoint.tensors import Tensors
from components.contract.errors import UserError

PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
_REFUSED = {
    "weight_zero_point": "has zero points; only symmetric grids are supported",
    "weight_g_idx": "has g_idx (activation order at run time); quantise with static or no activation order",
    "input_scale": "has an activation scale; only W4A16 (weights alone) is supported",
    "input_zero_point": "has an activation zero point; only W4A16 (weights alone) is supported",
    "input_global_scale": "has an activation scale; only W4A16 (weights alone) is supported",
    "output_scale": "has an activation scale; only W4A16 (weights alone) is supported",
    "weight_global_scale": "has a second-level scale; only plain group scales are supported",
}


@dataclass(frozen=True)
class Quantized:
    """One quantised linear: codes int8 [out, in], scales [out, in / group_size] in their stored dtype."""

    codes: Tensor
    scales: Tensor
    group_size: int


def read_grid(folder: Path) -> dict[str, Quantized]:
    """Return every quantised module of a W4A16 folder, named as stored.

    Raises:
        UserError: anything but a symmetric INT4 weight-only group grid, naming the module and the file.
    """
    return dict(iterate_grid(Tensors(folder)))


def iterate_grid(tensors: Tensors) -> Iterator[tuple[str, Quantized]]:
    """Yield the quantised modules one at a time, in name order, so that only one is in memory."""
    sizes = group_sizes(tensors.folder)
    for module in quantized_modules(tensors):
        yield module, read_module(tensors, module, sizes)


def quantized_modules(tensors: Tensors) -> list[str]:
    """Return the sorted names of the modules whose weights are packed; refuse what the reader cannot represent."""
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind in _REFUSED:
            raise UserError(f"{tensors.file(name)}: {module} {_REFUSED[kind]}")
        if kind == SCALE and f"{module}.{PACKED}" not in tensors:
            raise UserError(f"{tensors.file(name)}: {module} has a {SCALE} but no {PACKED}")
    suffix = f".{PACKED}"
    modules = sorted(name.removesuffix(suffix) for name in tensors if name.endswith(suffix))
    if not modules:
        raise UserError(f"{tensors.folder}: holds no {PACKED}; an INT4 pack-quantized checkpoint is needed")
    return modules


def read_module(tensors: Tensors, module: str, sizes: set[int]) -> Quantized:
    """Return one module's codes and scales, checked against each other and the declared group sizes."""
    where = f"{tensors.file(f'{module}.{PACKED}')}: {module}"
    for kind in (SCALE, SHAPE):
        if f"{module}.{kind}" not in tensors:
            raise UserError(f"{where} has no {kind}; the checkpoint is incomplete")
    packed, scales = tensors[f"{module}.{PACKED}"], tensors[f"{module}.{SCALE}"]
    shape = tuple(tensors[f"{module}.{SHAPE}"].tolist())
    if len(shape) != 2 or packed.dtype != torch.int32 or packed.shape != (shape[0], -(-shape[1] * BITS // 32)):
        raise UserError(f"{where}: {PACKED} is {_describe(packed)}, which does not hold {BITS}-bit codes of {shape}")
    rows, columns = shape
    if not scales.is_floating_point() or scales.ndim != 2 or scales.shape[0] != rows:
        raise UserError(f"{where}: {SCALE} is {_describe(scales)}; expected one row of floats per output of {shape}")
    groups = scales.shape[1]
    if groups == 0 or columns % groups or columns // groups not in sizes:
        raise UserError(f"{where}: {groups} groups do not divide {columns} inputs into groups of {sorted(sizes)}")
    if not torch.isfinite(scales).all() or not (scales > 0).all():
        raise UserError(f"{where}: {SCALE} holds zero, negative, infinite or NaN scales; the checkpoint is damaged")
    codes = unpack_from_int32(packed, BITS, torch.Size(shape))
    return Quantized(codes, scales, columns // groups)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
