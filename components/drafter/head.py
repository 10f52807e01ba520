"""Losses of hidden states under the frozen output head, a few hundred rows of logits at a time.

A row's gradient by its hidden state is at hand when its loss is, softmax(z) − wanted, pushed back through the head:
so it is computed in the forward pass, in fp32 from the logits on, and no logits outlive their chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOGITS_AT_A_TIME = 2**27
Wanted = Callable[[slice, Tensor], Tensor]
"""Of some rows and their log-probabilities [rows, vocabulary], fp32: each row's loss, fp32 [rows]; the second argument
becomes in place what the loss's gradient by the logits is."""


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, wanted: Wanted) -> Tensor:
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        chunk = max(1, LOGITS_AT_A_TIME // len(head))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, min(start + chunk, len(hidden)))
            logits = log_probabilities(hidden[rows], head)
            losses[rows] = wanted(rows, logits)
            gradient[rows] = logits.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return upstream[0].to(gradient.dtype)[:, None] * gradient, None, None


def cross_entropy(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    """Return −log q(id) of every row in nats, differentiable once by ``hidden``.

    Args:
        hidden: [rows, width].
        head: [vocabulary, width], frozen.
        ids: int64 [rows].

    Returns:
        float32 [rows].
    """

    def wanted(rows: slice, log_q: Tensor) -> Tensor:
        given = log_q.gather(1, ids[rows, None])
        log_q.exp_().scatter_add_(1, ids[rows, None], torch.full_like(given, -1.0))
        return -given[:, 0]

    losses: Tensor = _RowLosses.apply(hidden, head, wanted)
    return losses


def divergence(hidden: Tensor, head: Tensor, target: Tensor, places: Tensor) -> Tensor:
    """Return KL(p ‖ q) of every row in nats, differentiable once by ``hidden``; p is the target's under the same head.

    Args:
        hidden: [rows, width].
        head: [vocabulary, width], frozen.
        target: [tokens, width], the target's last hidden states.
        places: int64 [rows], the row of ``target`` that each row is compared with.

    Returns:
        float32 [rows].
    """

    def wanted(rows: slice, log_q: Tensor) -> Tensor:
        log_p = log_probabilities(target[places[rows]], head)
        p = log_p.exp()
        losses = (p * log_p.sub_(log_q)).sum(-1)  # autocast would take a dot product in bf16
        log_q.exp_().sub_(p)
        return losses

    losses: Tensor = _RowLosses.apply(hidden, head, wanted)
    return losses


def log_probabilities(hidden: Tensor, head: Tensor) -> Tensor:
    """Return log softmax(hidden · headᵀ), fp32 [rows, vocabulary]; the product is of the head's type."""
    return (hidden.to(head.dtype) @ head.T).float().log_softmax(-1)
