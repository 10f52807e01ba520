"""The frozen grid of a W4A16 checkpoint (8 bits for a head that says so): codes and scales, as stored."""

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torch import Tensor

from components.checkpoint.config import declared_grids, is_tied
from components.checkpoint.quantize import BITS, by_rows, integer_codes
from components.checkpoint.stream import Stream
from components.checkpoint.tensors import Tensors
from components.contract.errors import UserError

PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
_SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_SHIFT, _LOWEST = 136, 0x4300
"""A bf16 number that code 0 is shifted to, and the bits of the one for code −8: the next 15 are the next codes'."""
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
    """One quantised linear: codes int8 [out, in] of ``bits``, scales [out, in / group_size] in their stored dtype.

    Where ``words``, the packed codes or what makes them, are given, ``codes`` may be of the ``meta`` device: nothing
    but their shape.
    """

    codes: Tensor
    scales: Tensor
    group_size: int
    bits: int = BITS
    words: Tensor | Stream | None = None


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
        if kind in (SCALE, SHAPE) and f"{module}.{PACKED}" not in tensors:
            raise UserError(f"{tensors.file(name)}: {module} has a {kind} but no {PACKED}")
        if kind == PACKED and f"{module}.weight" in tensors:
            raise UserError(f"{tensors.file(name)}: {module} has a {PACKED} and a weight; only one of them can count")
    suffix = f".{PACKED}"
    modules = sorted(name.removesuffix(suffix) for name in tensors if name.endswith(suffix))
    if not modules:
        raise UserError(f"{tensors.folder}: holds no {PACKED}; an INT4 pack-quantized checkpoint is needed")
    if "lm_head" in modules and is_tied(tensors.folder):
        where = tensors.file(f"lm_head.{PACKED}")
        raise UserError(f"{where}: lm_head is packed, but config.json has tie_word_embeddings; nothing would read it")
    return modules


def read_module(tensors: Tensors, module: str, grids: set[tuple[int, int]], codes: bool = True) -> Quantized:
    """Return one module's codes and scales, checked against each other and the declared (bits, group size).

    Without ``codes`` they are a tensor of their shape on the ``meta`` device: nothing is unpacked.
    """
    where = f"{tensors.file(f'{module}.{PACKED}')}: {module}"
    for kind in (SCALE, SHAPE):
        if f"{module}.{kind}" not in tensors:
            raise UserError(f"{where} has no {kind}; the checkpoint is incomplete")
    packed, scales = tensors.blank(f"{module}.{PACKED}"), tensors.read(f"{module}.{SCALE}")
    stored = tensors.read(f"{module}.{SHAPE}")
    if stored.dtype != torch.int64 or stored.shape != (2,) or stored.min() < 1:
        raise UserError(f"{where}: {SHAPE} is {_describe(stored)}; expected int64 [2], out and in, neither below 1")
    rows, columns = shape = tuple(stored.tolist())
    widths = sorted({bits for bits, _ in grids if bits == BITS or module.endswith("lm_head")})
    fits = [bits for bits in widths if packed.shape == (rows, -(-columns * bits // 32))]
    if not fits or packed.dtype != torch.int32:
        expected = f"{' or '.join(map(str, widths))}-bit codes of {shape}"
        raise UserError(f"{where}: {PACKED} is {_describe(packed)}, which does not hold {expected}")
    if scales.dtype not in _SCALE_TYPES or scales.ndim != 2 or scales.shape[0] != rows:
        types = ", ".join(str(one).removeprefix("torch.") for one in _SCALE_TYPES)
        raise UserError(f"{where}: {SCALE} is {_describe(scales)}; expected a row per output of {shape}, in {types}")
    groups, bits = scales.shape[1], fits[0]
    if groups == 0 or columns % groups or (bits, columns // groups) not in grids:
        sizes = sorted(size for width, size in grids if width == bits)
        raise UserError(f"{where}: {groups} groups do not divide {columns} inputs into groups of {sizes}")
    lowest, highest = torch.aminmax(scales)
    if not (lowest > 0 and torch.isfinite(highest)):  # a NaN is both, and fails the first
        raise UserError(f"{where}: {SCALE} holds zero, negative, infinite or NaN scales; the checkpoint is damaged")
    if codes:
        found = unpack_codes(tensors[f"{module}.{PACKED}"], bits, columns)
    else:
        found = torch.empty(shape, dtype=torch.int8, device="meta")
    return Quantized(found, scales, columns // groups, bits)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return int8 codes [out, in] in the library's layout: int32 [out, ⌈in × bits / 32⌉].

    Words full of 4-bit codes are put together here, to the library's bits and many times as fast.
    """
    if bits == BITS and codes.shape[1] % 8 == 0 and sys.byteorder == "little":
        return by_rows(_bytes, codes, codes.shape[1]).view(torch.int32)
    return by_rows(lambda rows: pack_to_int32(rows, bits), codes, codes.shape[1])


def unpack_codes(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Return the int8 codes [out, in] that :func:`pack_codes` packed; ``columns`` is in."""
    return by_rows(lambda rows: unpack_from_int32(rows, bits, torch.Size((len(rows), columns))), packed, columns)


def packed_blocks(blocks: Iterable[tuple[Tensor, Tensor]], bits: int) -> Iterator[Tensor]:
    """Yield the packed :func:`integer_codes` of a weight block by block, in the same memory each time.

    Of bf16 latents on a bf16 grid whole words are made by one operation and in two bytes each, since memory costs
    more than arithmetic. It adds 136 to the fp32 quotient, in fp32, and rounds to bf16, whose neighbours from 128 to
    256 are the integers. The codes are those of the division: a sum in fp32 keeps the side of a tie, since quotients
    of two bf16 numbers that are no tie are further from it, within the codes' range, than the sum's own rounding
    (2⁻¹⁷).

    Args:
        blocks: latents [rows, in] and scales [rows, in / group] of some rows each, none of more than the first.
        bits: of a code, at most 8.

    Raises:
        ValueError: NaN or infinity among the latents, which have no code.
    """
    room: tuple[Tensor, ...] = ()
    for latents, scales in blocks:
        if not all(math.isfinite(bound.item()) for bound in torch.aminmax(latents)):
            raise ValueError("latents hold NaN or infinity")
        narrow = latents.dtype == scales.dtype == torch.bfloat16 and bits == BITS and sys.byteorder == "little"
        if not narrow or latents.shape[1] % 8:
            yield pack_codes(integer_codes(latents, scales, bits), bits)
            continue
        if not room:
            room = tuple(torch.empty(latents.shape, dtype=dtype) for dtype in (torch.bfloat16, torch.int8, torch.int8))
            room = (*room, torch.empty((len(latents), latents.shape[1] // 2), dtype=torch.uint8))
        shifted, codes, other, packed = (one[: len(latents)] for one in room)
        groups = (scales.shape[1], -1)
        shifted.fill_(_SHIFT).unflatten(1, groups).addcdiv_(latents.unflatten(1, groups), scales.unsqueeze(-1))
        codes.copy_(shifted.view(torch.int16).clamp_(_LOWEST, _LOWEST + 15))
        packed.copy_(_pairs(codes, other))
        yield packed.view(torch.int32)


def _bytes(codes: Tensor) -> Tensor:
    stored = codes.contiguous() + 8
    return _pairs(stored, torch.empty_like(stored)).to(torch.uint8)


def _pairs(stored: Tensor, room: Tensor) -> Tensor:
    """Put two codes, 0 … 15 in a byte each, into the lower byte of an int16; the bytes are used up, as is the room."""
    words, shifted = stored.view(torch.int32), room.view(torch.int32)
    words |= torch.bitwise_right_shift(words, 4, out=shifted)
    return words.view(torch.int16)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
