"""One linear's codes: GPTQ with llm-compressor's own maths (arXiv 2210.17323), or plain rounding.

Both on the grid as it is stored.
"""

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from torch import Tensor

from components.checkpoint.grid import Quantized
from components.checkpoint.quantize import BITS, dequantize, integer_codes
from components.contract.errors import UserError


def grid(weight: Tensor, group_size: int, actorder: str) -> tuple[QuantizationArgs, Tensor]:
    """Return the library's description of the grid and its scales: the group's largest magnitude / 7.5, in bfloat16.

    Args:
        weight: [out, in].
        group_size: columns that share a scale; divides ``in``.
        actorder: ``static`` or ``none``.

    Returns:
        The arguments and bfloat16 [out, in / group_size].
    """
    arguments = QuantizationArgs(
        num_bits=BITS,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=group_size,
        actorder=None if actorder == "none" else actorder,
    )
    groups = weight.float().unflatten(-1, (-1, group_size))
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    return arguments, scales.to(torch.bfloat16)


def output_error(weight: Tensor, approximation: Tensor, hessian: Tensor) -> float:
    """Return ‖(W − Ŵ)X‖² / ‖WX‖² = tr(ΔHΔᵀ) / tr(WHWᵀ), summed in float64 over outputs; 0 for a silent linear."""
    difference = (weight - approximation).float()
    lost = float(((difference @ hessian) * difference).double().sum())
    whole = float(((weight.float() @ hessian) * weight.float()).double().sum())
    return lost / whole if whole > 0 else 0.0


def quantize(
    name: str, weight: Tensor, hessian: Tensor, group_size: int, damping: float, actorder: str
) -> tuple[Quantized, float]:
    """Quantise one weight against the Hessian of its inputs; also return the relative squared error of its outputs.

    The scales are rounded to bfloat16 first, so that GPTQ compensates on the grid that is stored, and the codes are
    its result divided by those scales in fp32.

    Args:
        name: for messages.
        weight: [out, in].
        hessian: float32 [in, in], a positive multiple of Σxxᵀ.
        group_size: columns that share a scale.
        damping: share of the Hessian's mean diagonal added to it.
        actorder: ``static`` or ``none``; the stored groups are the same.

    Raises:
        UserError: the damped Hessian is not positive definite.
    """
    arguments, scales = grid(weight, group_size, actorder)
    result: Any = quantize_weight(
        weights=weight.detach().float()[None].clone(),
        hessians=hessian[None].clone(),
        scale=scales.float()[None],
        zero_point=torch.zeros_like(scales, dtype=torch.float32)[None],
        global_scale=None,
        quant_args=arguments,
        percdamp=damping,
    )
    moved, _, fell_back = result
    if bool(fell_back):
        raise UserError(f"{name}: its Hessian is not positive definite; give more chats, or damping above {damping}")
    codes = integer_codes(moved[0], scales)
    error = output_error(weight, dequantize(codes, scales, torch.float32), hessian)
    return Quantized(codes, scales, group_size), error


def round_to_grid(weight: Tensor, hessian: Tensor, group_size: int) -> tuple[Quantized, float]:
    """Round every weight to the nearest code; also return the relative squared error of the outputs.

    Args:
        weight: [out, in].
        hessian: float32 [in, in], of the inputs that the error is measured on.
        group_size: columns that share a scale.
    """
    _, scales = grid(weight, group_size, "none")
    codes = integer_codes(weight, scales)
    error = output_error(weight, dequantize(codes, scales, torch.float32), hessian)
    return Quantized(codes, scales, group_size), error
