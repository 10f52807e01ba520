"""The fake quantiser as one GPU kernel: a weight is read once and written once.

Bit for bit what :func:`components.checkpoint.quantize.fake_quantize` computes: the division rounds as IEEE 754 asks
(plain Triton division does not), and adding then subtracting 1.5 · 2²³ rounds half to even.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from components.checkpoint.quantize import limits

_BLOCK = 2048


@triton.jit
def _kernel(
    weights, scales, out, total, GROUP: tl.constexpr, BLOCK: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    latent = tl.load(weights + at, mask=inside, other=0.0).to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(scales + at // GROUP, mask=inside, other=1.0).to(tl.float32)
    clamped = tl.minimum(tl.maximum(tl.math.div_rn(latent, scale), LOW), HIGH)
    code = ((clamped + 12582912.0) - 12582912.0).to(tl.int32).to(tl.float32)  # the integer has no negative zero
    tl.store(out + at, (code * scale).to(out.dtype.element_ty), mask=inside)


def fake_quantize(masters: Tensor, scales: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    """Return what a served model computes with when it stores ``masters`` in ``dtype``.

    Args:
        masters: [out, in] on a GPU, contiguous; rounded to ``dtype`` before anything else.
        scales: [out, in / group] on the same GPU, contiguous.
        dtype: float32 or bfloat16.
        bits: of a code.

    Returns:
        [out, in] in ``dtype``.
    """
    out = torch.empty_like(masters, dtype=dtype)
    total, (low, high) = masters.numel(), limits(bits)
    _kernel[(triton.cdiv(total, _BLOCK),)](
        masters,
        scales,
        out,
        total,
        GROUP=total // scales.numel(),
        BLOCK=_BLOCK,
        LOW=float(low),
        HIGH=float(high),
    )
    return out
