"""The frozen grid of a W4A16 checkpoint (8 bits for a head that says so): codes and scales, as stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor

from components.checkpoint.config import declared_grids
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
    """One quantised linear: codes int8 [out, in] of ``bits``, scales [out, in / group_size] in their stored dtype."""

    codes: Tensor
    scales: Tensor
    group_size: int
    bits: int = BITS


def read_grid(folder: Path) -> dict[str, Quantized]:
    """Return every quantised module of a W4A16 folder, named as stored.

    Raises:
        UserError: anything but a symmetric weight-only group grid of 4 bits (or 8 in a head), naming both.
    """
    return dict(iterate_grid(Tensors(folder)))


def iterate_grid(tensors: Tensors) -> Iterator[tuple[str, Quantized]]:
    """Yield the quantised modules one at a time, in name order, so that only one is in memory."""
    grids = declared_grids(tensors.folder)
    for module in quantized_modules(tensors):
        yield module, read_module(tensors, module, grids)


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


def read_module(tensors: Tensors, module: str, grids: set[tuple[int, int]]) -> Quantized:
    """Return one module's codes and scales, checked against each other and the declared (bits, group size)."""
    where = f"{tensors.file(f'{module}.{PACKED}')}: {module}"
    for kind in (SCALE, SHAPE):
        if f"{module}.{kind}" not in tensors:
            raise UserError(f"{where} has no {kind}; the checkpoint is incomplete")
    packed, scales = tensors[f"{module}.{PACKED}"], tensors[f"{module}.{SCALE}"]
    shape = tuple(tensors[f"{module}.{SHAPE}"].tolist())
    widths = sorted({bits for bits, _ in grids})
    fits = [bits for bits in widths if len(shape) == 2 and packed.shape == (shape[0], -(-shape[1] * bits // 32))]
    if not fits or packed.dtype != torch.int32:
        codes = f"{' or '.join(map(str, widths))}-bit codes of {shape}"
        raise UserError(f"{where}: {PACKED} is {_describe(packed)}, which does not hold {codes}")
    rows, columns = shape
    if not scales.is_floating_point() or scales.ndim != 2 or scales.shape[0] != rows:
        raise UserError(f"{where}: {SCALE} is {_describe(scales)}; expected one row of floats per output of {shape}")
    groups, bits = scales.shape[1], fits[0]
    if groups == 0 or columns % groups or (bits, columns // groups) not in grids:
        sizes = sorted(size for width, size in grids if width == bits)
        raise UserError(f"{where}: {groups} groups do not divide {columns} inputs into groups of {sizes}")
    if not torch.isfinite(scales).all() or not (scales > 0).all():
        raise UserError(f"{where}: {SCALE} holds zero, negative, infinite or NaN scales; the checkpoint is damaged")
    return Quantized(unpack_from_int32(packed, bits, torch.Size(shape)), scales, columns // groups, bits)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
