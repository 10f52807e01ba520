"""The gated delta rule on a GPU: which implementation transformers takes, whether it is right, and how fast it is.

Its backward pass in flash-linear-attention refuses to run on Hopper with Triton 3.4 to 3.7.0, whose compiler gets one
of its kernels wrong. :func:`repair` replaces that kernel by the same formula in PyTorch; TileLang or a later Triton do
without.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HEADS, WIDTH = 32, 128


def chunk_bwd_dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor,
    g: Tensor,
    dv: Tensor,
    scale: float,
    chunk_size: int = 64,
    **unused: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients by q, k, w and the natural logarithm of the decays, given those of what a chunk gives.

    Of a chunk with state h [K, V] at its start: o = scale · (2^g q h + tril(q kᵀ 2^(g_i − g_j)) v), the next chunk's
    state 2^g_last h + (2^(g_last − g) k)ᵀ v, and new values u − w h.

    Args:
        q: [batch, tokens, heads, K]; tokens a multiple of ``chunk_size``. k and w likewise.
        v: new values [batch, tokens, heads, V]. do and dv (gradients by outputs and new values) likewise.
        h: states [batch, chunks, heads, K, V]; dh likewise: gradients by the states at the chunks' ends.
        g: [batch, tokens, heads]: base-2 logarithms of the decays, summed within a chunk.
        scale: of the queries.
        chunk_size: tokens of a chunk.
        unused: variable lengths and other layouts, which this caller does not have.
    """
    assert unused.get("cu_seqlens") is None
    assert not unused.get("state_v_first")
    assert q.shape[1] % chunk_size == 0
    assert q.shape[2] == v.shape[2]

    def cut(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (-1, chunk_size)).transpose(2, 3)

    def join(tensor: Tensor) -> Tensor:
        return tensor.transpose(2, 3).flatten(1, 2).contiguous()

    q, k, v, do, dv, g = (cut(tensor) for tensor in (q, k, v, do, dv, g.unsqueeze(-1).float()))
    h, dh = h.to(v.dtype), dh.to(v.dtype)
    last = g[..., -1:, :]
    dw = -_product(dv.to(v.dtype), h.mT)
    dq = _product(do, h.mT).mul_(g.exp2() * scale)
    dk = _product(v, dh.mT).mul_((last - g).exp2())
    dlast = (h.float() * dh.float()).sum((-2, -1)).unsqueeze(-1) * last.squeeze(-1).exp2() + (dk * k).sum((-2, -1))[
        ..., None
    ]
    ds = _product(do, v.mT).mul_((g - g.mT).tril().exp2()).tril_().mul_(scale).to(k.dtype)
    dq += _product(ds, k)
    dk += _product(ds.mT, q)
    dg = (dq * q).sum(-1) - (dk * k).sum(-1)
    dg[..., -1:] += dlast
    return join(dq).to(q.dtype), join(dk).to(k.dtype), join(dw).to(w.dtype), join(dg.unsqueeze(-1)).squeeze(-1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.dtype == torch.bfloat16 and left.is_cuda:
        shape = (*left.shape[:-1], right.shape[-1])
        return torch.bmm(left.flatten(0, 2), right.flatten(0, 2), out_dtype=torch.float32).view(shape)
    return left.float() @ right.float()


def repair() -> bool:
    """Replace the kernel that flash-linear-attention refuses here; return whether the library is there."""
    try:
        from fla.ops.gated_delta_rule import chunk
    except ImportError:
        return False
    chunk.chunk_bwd_dqkwg = chunk_bwd_dqkwg
    return True


def probe(tokens: int = 16384) -> dict[str, Any]:
    """Repair where needed; return which implementation serves, its error and its milliseconds beside PyTorch's own."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    plain = qwen.torch_chunk_gated_delta_rule.__wrapped__
    found: dict[str, Any] = {"implementation": "PyTorch", "why": ""}
    rule: Callable[..., Any] = plain
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

        found["implementation"] = "flash-linear-attention"
        try:
            _gradients(rule, 128, torch.bfloat16)
        except RuntimeError as error:
            found["why"] = str(error)[:120]
            found["implementation"] += ", one backward kernel in PyTorch"
            repair()
    except ImportError as error:
        found["why"] = str(error)
    wanted = _gradients(plain, 512, torch.float32)
    for name, candidate in (("error", rule), ("error_of_pytorch", plain)):
        found[name] = max(
            float((one.double() - other.double()).norm() / other.double().norm())
            for one, other in zip(_gradients(candidate, 512, torch.bfloat16), wanted, strict=True)
        )
    for name, candidate in (("milliseconds", rule), ("milliseconds_of_pytorch", plain)):
        with contextlib.suppress(torch.OutOfMemoryError):
            _gradients(candidate, tokens, torch.bfloat16)
            torch.cuda.synchronize()
            started = time.monotonic()
            _gradients(candidate, tokens, torch.bfloat16)
            torch.cuda.synchronize()
            found[name] = round((time.monotonic() - started) * 1e3, 1)
    return found


def _gradients(rule: Callable[..., Any], tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return output and gradients by every input of forward and backward, of the same drawn inputs each time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16().to(dtype)

    q, k, v, upstream = (draw(1, tokens, HEADS, WIDTH) for _ in range(4))
    beta = draw(1, tokens, HEADS).sigmoid()
    decay = -torch.nn.functional.softplus(draw(1, tokens, HEADS).float())
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, decay, beta)]
    out, _ = rule(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]
