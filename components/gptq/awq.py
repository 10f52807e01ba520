"""AWQ's scaling of input channels (arXiv 2306.00978), for the linears of a drafter's layer that have someone to scale.

A channel that carries large inputs is multiplied up in the weight and divided down in what makes the input, so that
rounding hurts it less. What makes it is the norm before ``gate`` and ``up``, the rows of ``v`` for ``o`` and the rows
of ``up`` for ``down``. The inputs of ``q``, ``k``, ``v`` and of the projection are the target's features, of which all
layers share one copy: nothing can scale them, and these linears are rounded as they are.
"""

import torch
from torch import Tensor, nn

from components.checkpoint.quantize import dequantize, integer_codes
from components.gptq.quantize import grid

STEPS = 20


def smooth(layer: nn.Module, hessians: dict[str, Tensor], group_size: int) -> Tensor:
    """Scale one decoder layer's weights in place, and ``hessians`` with their inputs; its function stays the same.

    Args:
        layer: a drafter's decoder layer.
        hessians: float32 [in, in] by the linear's name within the layer.
        group_size: of the later rounding.

    Returns:
        The weight of the norm before the MLP, in bfloat16 [hidden]: the only tensor changed that is no linear's.
    """
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm.weight
    with torch.no_grad():
        folded = norm / _search([mlp.gate_proj, mlp.up_proj], hessians["mlp.gate_proj"], group_size)
        folded = folded.to(torch.bfloat16)
        scale = torch.where(folded != 0, norm / folded.float(), 1)  # as the stored norm undoes it
        norm.copy_(folded)
        _scale(mlp.gate_proj, hessians, "mlp.gate_proj", scale)
        _scale(mlp.up_proj, hessians, "mlp.up_proj", scale)

        width = attention.v_proj.out_features // attention.head_dim, attention.head_dim
        heads = attention.o_proj.in_features // attention.v_proj.out_features
        scale = _search([attention.o_proj], hessians["self_attn.o_proj"], group_size, (width[0], heads, width[1]))
        attention.v_proj.weight.div_(scale.view(width[0], heads, width[1])[:, 0].reshape(-1, 1))
        _scale(attention.o_proj, hessians, "self_attn.o_proj", scale)

        scale = _search([mlp.down_proj], hessians["mlp.down_proj"], group_size)
        mlp.up_proj.weight.div_(scale[:, None])
        _scale(mlp.down_proj, hessians, "mlp.down_proj", scale)
    return folded


def _search(
    linears: list[nn.Linear], hessian: Tensor, group_size: int, shared: tuple[int, int, int] | None = None
) -> Tensor:
    """Return the channel scales [in] among rms(x)^(i/20) after which rounding changes the outputs least.

    The paper takes the mean of |x|; the root of its mean square is what a Hessian knows. With ``shared`` (groups,
    heads, width) the heads of a group, which read one value head, share their scales.
    """
    power = hessian.diagonal()
    if shared:
        power = power.view(shared).mean(1, keepdim=True).expand(shared).reshape(-1)
    size = power.sqrt().clamp(min=1e-6 * float(power.max().sqrt().clamp(min=1e-30)))
    best, least = torch.ones_like(size), float("inf")
    for step in range(STEPS):
        scale = size ** (step / STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        lost = sum(_lost(linear.weight, scale, hessian, group_size) for linear in linears)
        if lost < least:
            best, least = scale, lost
    return best


def _lost(weight: Tensor, scale: Tensor, hessian: Tensor, group_size: int) -> float:
    """Return ‖(W − Q(W·s)/s)X‖² up to a factor."""
    scaled = weight.float() * scale
    _, scales = grid(scaled, group_size, "none")
    difference = weight.float() - dequantize(integer_codes(scaled, scales), scales, torch.float32) / scale
    return float(((difference @ hessian) * difference).double().sum())


def _scale(linear: nn.Linear, hessians: dict[str, Tensor], name: str, scale: Tensor) -> None:
    linear.weight.mul_(scale)
    hessians[name] = hessians[name] / scale / scale[:, None]
