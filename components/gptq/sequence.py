"""The drafter quantised part by part, each calibrated on the outputs of the quantised parts before it.

llm-compressor's functions do the GPTQ; its ``oneshot`` session does not run: it traces a model's forward and calls it
with token batches, while a drafter runs on the target's features and embedding, on anchors and under its own mask. The
order is the one of its ``sequential`` pipeline: all linears of a part from one set of Hessians, then on to the next.
"""

from collections.abc import Callable

import torch
from safetensors.torch import load, save
from speculators.models.dflash.core import DFlashDraftModel
from torch import nn

from components.checkpoint.census import compare
from components.checkpoint.grid import Quantized
from components.checkpoint.quantize import dequantize
from components.gptq.calibrate import Calibration
from components.gptq.quantize import Errors, quantize
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


def quantize_in_sequence(
    drafter: DFlashDraftModel,
    calibration: Calibration,
    *,
    group_size: int,
    damping: float,
    actorder: str,
    work: Work,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, Quantized], dict[str, Errors]]:
    """Quantise every part in turn; the drafter's weights become codes × scales in place.

    A part's result is stored once it is complete, so a killed run continues with the next part.
    """
    quantized: dict[str, Quantized] = {}
    errors: dict[str, Errors] = {}
    order = parts(drafter)
    for number, linears in enumerate(order):
        stored = work.get(f"part-{number:03d}")
        if stored is None:
            stored = _quantize_part(linears, calibration.hessians(drafter, linears), group_size, damping, actorder)
            work.put(f"part-{number:03d}", stored)
        tensors = load(stored)
        for name, linear in linears.items():
            one = Quantized(tensors[f"{name}.codes"], tensors[f"{name}.scales"], group_size)
            quantized[name], errors[name] = one, Errors(*tensors[f"{name}.errors"].tolist())
            with torch.no_grad():
                linear.weight.copy_(dequantize(one.codes, one.scales, torch.float32))
        progress(number + 1, len(order))
    return quantized, errors


def _quantize_part(
    linears: dict[str, nn.Linear],
    hessians: dict[str, torch.Tensor],
    group_size: int,
    damping: float,
    actorder: str,
) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    for name, linear in linears.items():
        one, errors = quantize(name, linear.weight.detach(), hessians.pop(name), group_size, damping, actorder)
        tensors |= {f"{name}.codes": one.codes.cpu().contiguous(), f"{name}.scales": one.scales.cpu().contiguous()}
        tensors[f"{name}.errors"] = torch.tensor([errors.gptq, errors.rounding], dtype=torch.float64)
    return save(tensors)
