"""The drafter quantised part by part, each on what it sees behind the quantised parts before it.

llm-compressor's functions do the GPTQ; its ``oneshot`` session does not run: it traces a model's forward and calls it
with token batches, while a drafter runs on the target's features and embedding, on anchors and under its own mask. The
order is the one of its ``sequential`` pipeline: all linears of a part from one set of Hessians, then on to the next.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from safetensors.torch import load, save
from speculators.models.dflash.core import DFlashDraftModel
from torch import nn

from components.checkpoint.census import compare
from components.checkpoint.grid import Quantized
from components.checkpoint.quantize import dequantize
from components.gptq.awq import smooth
from components.gptq.calibrate import Calibration
from components.gptq.quantize import output_error, quantize, round_to_grid
from components.store.work import Work

PROJECTION = "fc"
IN_LAYER = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
)


def parts(drafter: DFlashDraftModel) -> list[dict[str, nn.Linear]]:
    """Return the linears to quantise, by name, in order of calibration: the projection, then layer after layer.

    Raises:
        UserError: the drafter has other trained linears than these, or lacks one; it is named.
    """
    names = [[PROJECTION]] + [[f"layers.{i}.{name}" for name in IN_LAYER] for i in range(len(drafter.layers))]
    trained = {
        name: module
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    }
    compare(trained, (name for part in names for name in part), "linears of the drafter")
    return [{name: trained[name] for name in part} for part in names]


@dataclass(frozen=True)
class Errors:
    """Relative squared error of a linear's outputs on the calibration inputs: as stored, and with plain rounding."""

    stored: float
    rounding: float


@dataclass(frozen=True)
class How:
    """Method ``gptq``, ``awq`` or ``rtn``, its group, and GPTQ's damping and order of columns."""

    method: str
    group_size: int
    damping: float = 0.01
    actorder: str = "static"


@dataclass(frozen=True)
class Result:
    """What is stored: grids and errors by linear, and the tensors beside them that the method changed."""

    quantized: dict[str, Quantized] = field(default_factory=dict)
    errors: dict[str, Errors] = field(default_factory=dict)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)


def quantize_in_sequence(
    drafter: DFlashDraftModel,
    calibration: Calibration,
    how: How,
    work: Work,
    progress: Callable[[int, int], None],
) -> Result:
    """Quantise every part in turn; the drafter's weights become codes × scales in place.

    A part's result is stored once it is complete, so a killed run continues with the next part.
    """
    result = Result()
    order = parts(drafter)
    for number, linears in enumerate(order):
        stored = work.get(f"part-{number:03d}")
        if stored is None:
            hessians = calibration.hessians(drafter, linears)
            stored = _quantize_part(drafter, linears, hessians, how)
            work.put(f"part-{number:03d}", stored)
        tensors = load(stored)
        for name, linear in linears.items():
            codes, scales, errors = (tensors.pop(f"{name}.{what}") for what in ("codes", "scales", "errors"))
            result.quantized[name] = Quantized(codes, scales, how.group_size)
            result.errors[name] = Errors(*errors.tolist())
            with torch.no_grad():
                linear.weight.copy_(dequantize(codes, scales, torch.float32))
        for name, tensor in tensors.items():
            result.changed[name] = tensor
            with torch.no_grad():
                drafter.get_parameter(name).copy_(tensor)
        progress(number + 1, len(order))
    return result


def _quantize_part(
    drafter: DFlashDraftModel, linears: dict[str, nn.Linear], hessians: dict[str, torch.Tensor], how: How
) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    before = {name: linear.weight.detach().clone() for name, linear in linears.items()}
    prefix = next(iter(linears)).removesuffix(IN_LAYER[0])
    if how.method == "awq" and PROJECTION not in linears:
        within = {name.removeprefix(prefix): hessians[name] for name in linears}
        norm = smooth(drafter.get_submodule(prefix.removesuffix(".")), within, how.group_size)
        tensors[f"{prefix}post_attention_layernorm.weight"] = norm.cpu()
    for name, linear in linears.items():
        original, weight, hessian = before.pop(name), linear.weight.detach(), hessians.pop(name)
        rounded, rounding = round_to_grid(original, hessian, how.group_size)
        if how.method == "gptq":
            one, error = quantize(name, weight, hessian, how.group_size, how.damping, how.actorder)
        elif how.method == "awq":
            one, _ = round_to_grid(weight, hessian, how.group_size)
            unscaled = torch.where(weight != 0, original / weight, 1) * dequantize(
                one.codes, one.scales, torch.float32
            )
            error = output_error(original, unscaled, hessian)
        else:
            one, error = rounded, rounding
        tensors |= {f"{name}.codes": one.codes.cpu().contiguous(), f"{name}.scales": one.scales.cpu().contiguous()}
        tensors[f"{name}.errors"] = torch.tensor([error, rounding], dtype=torch.float64)
    return save(tensors)
