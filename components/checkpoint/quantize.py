"""Symmetric group quantisation to INT4 (an output head also to INT8): the only place where weights become codes.

A row of a weight is cut into groups along the input dimension; each group has one stored scale ``s``, and a weight
``w`` has the code ``round_half_even(w / s)`` clamped to [-8, 7], or [-128, 127]. The division is done in fp32
whatever the dtypes: in bf16 about one code in a hundred comes out differently.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

BITS = 4
_ELEMENTS = 1 << 19


def limits(bits: int) -> tuple[int, int]:
    """Return the lowest and the highest code of a width."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def by_rows(function: Callable[..., Tensor], *matrices: Tensor) -> Tensor:
    """Apply a function of equally many rows to a few of them at a time: its temporaries stay small, in the cache."""
    rows = max(1, _ELEMENTS // max(1, matrices[0].shape[-1]))
    if rows >= len(matrices[0]):
        return function(*matrices)
    return torch.cat([function(*parts) for parts in zip(*(one.split(rows) for one in matrices), strict=True)])


def integer_codes(latents: Tensor, scales: Tensor, bits: int = BITS) -> Tensor:
    """Return the codes of a weight on a given grid.

    Args:
        latents: [out, in], any float dtype.
        scales: [out, in / group], any float dtype, positive.
        bits: of a code, at most 8.

    Returns:
        int8 [out, in] within :func:`limits`.
    """
    return by_rows(partial(_integer_codes, bits=bits), latents.detach(), scales.detach())


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return codes × scales, rounded once, to ``dtype``.

    The product of a code and a bf16 scale is exact in fp32, so float32 gives the exact product and bfloat16 the same
    values as a kernel that multiplies in bf16.

    Args:
        codes: int8 [out, in].
        scales: [out, in / group].
        dtype: of the result.

    Returns:
        [out, in] in ``dtype``.
    """
    return by_rows(partial(_dequantize, dtype=dtype), codes, scales)


def fake_quantize(latents: Tensor, scales: Tensor, bits: int = BITS) -> Tensor:
    """Return the weight a served model computes with, in the latents' dtype: dequantised integer codes."""

    def both(latents: Tensor, scales: Tensor) -> Tensor:
        return _dequantize(_integer_codes(latents, scales, bits), scales, latents.dtype)

    return by_rows(both, latents.detach(), scales.detach())


def _integer_codes(latents: Tensor, scales: Tensor, bits: int) -> Tensor:
    grouped = latents.float().unflatten(-1, (scales.shape[-1], -1))
    codes = torch.round(grouped / scales.float().unsqueeze(-1)).clamp_(*limits(bits))
    return codes.to(torch.int8).flatten(-2)


def _dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    grouped = codes.unflatten(-1, (scales.shape[-1], -1)).float()
    return (grouped * scales.float().unsqueeze(-1)).flatten(-2).to(dtype)
