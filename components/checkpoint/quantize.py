"""Symmetric group quantisation to INT4 (an output head also to INT8): the only place where weights become codes.

A row of a weight is cut into groups along the input dimension; each group has one stored scale ``s``, and a weight
``w`` has the code ``round_half_even(w / s)`` clamped to [-8, 7], or [-128, 127]. The division is done in fp32
whatever the dtypes: in bf16 about one code in a hundred comes out differently.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

BITS = 4
_ELEMENTS = 1 << 20


def limits(bits: int) -> tuple[int, int]:
    """Return the lowest and the highest code of a width."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def by_rows(function: Callable[[Tensor], Tensor], matrix: Tensor, columns: int) -> Tensor:
    """Apply a function of rows to a few of them at a time: its temporaries, ``columns`` wide, stay in the cache."""
    rows = max(1, _ELEMENTS // max(1, columns))
    first = function(matrix[:rows])
    if rows >= len(matrix):
        return first
    whole = first.new_empty((len(matrix), *first.shape[1:]))
    whole[:rows] = first
    for start in range(rows, len(matrix), rows):
        whole[start : start + rows] = function(matrix[start : start + rows])
    return whole


def integer_codes(latents: Tensor, scales: Tensor, bits: int = BITS) -> Tensor:
    """Return the codes of a weight on a given grid.

    Args:
        latents: [out, in], any float dtype.
        scales: [out, in / group], any float dtype, positive.
        bits: of a code, at most 8.

    Returns:
        int8 [out, in] within :func:`limits`.
    """
    codes = torch.empty(latents.shape, dtype=torch.int8, device=latents.device)
    for room, scale, part, latent in parts(scales.detach(), codes, latents.detach()):
        part.copy_(rounded(room, latent, scale, bits))
    return codes


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return codes × scales, rounded once, to ``dtype``; of fp32 scales to fp32 before that.

    The product of a code and a bf16 or fp16 scale is exact in fp32, so float32 gives the exact product and, of bf16
    scales, bfloat16 the same values as a kernel that multiplies in bf16.

    Args:
        codes: int8 [out, in].
        scales: [out, in / group].
        dtype: of the result.

    Returns:
        [out, in] in ``dtype``.
    """
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for room, scale, part, code in parts(scales, weight, codes):
        part.copy_(room.copy_(code).mul_(scale))
    return weight


def fake_quantize(latents: Tensor, scales: Tensor, bits: int = BITS) -> Tensor:
    """Return the weight a served model computes with, in the latents' dtype: dequantised integer codes."""
    weight = torch.empty_like(latents)
    for room, scale, part, latent in parts(scales.detach(), weight, latents.detach()):
        part.copy_(rounded(room, latent, scale, bits).add_(0).mul_(scale))  # a code has no −0
    return weight


def rounded(room: Tensor, latent: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the codes of a part as fp32, in its ``room``; see :func:`parts`."""
    return room.copy_(latent).div_(scale).round_().clamp_(*limits(bits))


def parts(scales: Tensor, *matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a few rows at a time: fp32 room, the same each time, their scales in fp32, and each matrix's part.

    All are cut into groups, [rows, groups, group]. Temporaries of their own would cost more than the arithmetic.
    """
    grouped = [matrix.unflatten(-1, (scales.shape[-1], -1)) for matrix in matrices]
    rows = max(1, _ELEMENTS // max(1, matrices[-1].shape[-1]))
    room = torch.empty(grouped[-1][:rows].shape, device=scales.device)
    for start in range(0, len(scales), rows):
        part = slice(start, start + rows)
        scale = scales[part].float().unsqueeze(-1)
        yield room[: len(scale)], scale, *(matrix[part] for matrix in grouped)
