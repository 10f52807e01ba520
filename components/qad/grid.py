"""The fake quantiser: Q_s(W) = s · clamp(round(W / s), −8, 7) with s frozen and an identity gradient.

Source: "Quantize the Target, Quantize the Drafter" (arXiv 2607.04244), section 2.1. Division and rounding are fp32. An
INT8 head is clamped to −128, 127.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from components.checkpoint.grid import Quantized
from components.checkpoint.quantize import dequantize, fake_quantize, integer_codes


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, masters: Tensor, scales: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
        ctx.dtype = masters.dtype
        if masters.is_cuda:
            from components.qad import fused

            return fused.fake_quantize(masters, scales, dtype, bits)
        return fake_quantize(masters.to(dtype), scales, bits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0].to(ctx.dtype), None, None, None


class QuantizedLinear(nn.Module):
    """A linear layer that computes with its fake-quantised latents.

    ``weight`` is the fp32 master [out, in], which alone trains; what the forward quantises, and a checkpoint stores,
    is :attr:`latents`, the master in the compute type. ``weight_scale`` [out, in / group] is as stored.
    """

    weight_scale: Tensor

    def __init__(self, quantized: Quantized, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.bits = dtype, quantized.bits
        self.weight = nn.Parameter(dequantize(quantized.codes, quantized.scales, torch.float32))
        self.register_buffer("weight_scale", quantized.scales)
        self.bias = bias
        self._frozen: Tensor | None = None

    @property
    def codes(self) -> Tensor:
        """The integer codes that the forward computes with: int8 [out, in]."""
        return integer_codes(self.latents, self.weight_scale, self.bits)

    @property
    def latents(self) -> Tensor:
        """What the forward quantises: [out, in] in the compute type, detached."""
        return self.weight.detach().to(self.dtype)

    def quantized(self) -> Tensor:
        """Return what the forward computes with: [out, in] in the compute type, differentiable by the master."""
        if self._frozen is not None:
            return self._frozen
        weight: Tensor = _StraightThrough.apply(self.weight, self.weight_scale, self.dtype, self.bits)
        return weight

    def freeze(self, frozen: bool) -> None:
        """Quantise now for every forward to come, or again in each; a frozen layer does not train."""
        self._frozen = None
        if frozen:
            self._frozen = self.quantized().detach()

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return F.linear(hidden, self.quantized(), self.bias)
