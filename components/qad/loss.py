"""Forward KL from hidden states and output heads, without ever holding all logits.

loss = Σ_n KL(softmax(z_t / T) ‖ softmax(z_s / T)) over the given tokens, z = hidden · headᵀ, as in "Quantize the
Target, Quantize the Drafter" (arXiv 2607.04244), section 2.1. Logits exist for some hundred tokens at a time, in fp32
whatever the models' type. Their gradient (q − p) / T is at hand in the forward pass, so the gradients by the student's
hidden states and, where it trains, by its head are computed there too: no logits are computed twice.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LOGITS_AT_A_TIME = 2**27


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, temperature: float
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        precision = torch.float64 if student.dtype == torch.float64 else torch.float32
        by_states = torch.empty(student.shape, dtype=precision, device=student.device)
        by_head = torch.zeros_like(student_head, dtype=precision) if ctx.needs_input_grad[1] else None
        for rows, log_q, log_p in _pairs(student, student_head, teacher, teacher_head, temperature):
            p = log_p.exp()
            total += torch.linalg.vecdot(p, log_p.sub_(log_q)).double().sum()
            by_logits = log_q.exp_().sub_(p).div_(temperature)
            _product(by_logits.to(student_head.dtype), student_head, out=by_states[rows])
            if by_head is not None:
                by_head += _product(by_logits.T.to(student.dtype), student[rows])
        ctx.save_for_backward(by_states, by_head)
        ctx.types = student.dtype, student_head.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        by_states, by_head = (
            None if gradient is None else gradient.mul_(upstream[0]).to(kind)
            for gradient, kind in zip(ctx.saved_tensors, ctx.types, strict=True)
        )
        return by_states, by_head, None, None, None


def forward_kl(
    student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return the summed divergence in nats, differentiable once by ``student`` and, if it asks, ``student_head``.

    Args:
        student: hidden states [tokens, hidden] that the student's head is applied to.
        student_head: [vocabulary, hidden].
        teacher: hidden states [tokens, hidden of the teacher].
        teacher_head: [vocabulary, hidden of the teacher].
        temperature: divides both models' logits.

    Returns:
        float64 scalar.
    """
    total: Tensor = _ForwardKL.apply(student, student_head, teacher, teacher_head, temperature)
    return total


@torch.no_grad()
def divergence(
    student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, temperature: float = 1.0
) -> tuple[float, int]:
    """Return the summed divergence in nats, and the number of tokens on which both models' first choice agrees."""
    total, agreed = 0.0, 0
    for _, log_q, log_p in _pairs(student, student_head, teacher, teacher_head, temperature):
        agreed += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())
        total += float(torch.linalg.vecdot(log_p.exp(), log_p.sub_(log_q)).double().sum())
    return total, agreed


def _pairs(
    student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield rows and both models' log-probabilities [rows, vocabulary] there."""
    for rows in _chunks(len(student), len(student_head)):
        yield (
            rows,
            _log_probabilities(student[rows], student_head, temperature),
            _log_probabilities(teacher[rows], teacher_head, temperature),
        )


def _log_probabilities(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(_product(hidden.to(head.dtype), head.T).div_(temperature), dim=-1)


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return left · right, summed and kept in fp32 (fp64 for fp64); factors of 16 bits stay so where hardware can."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return torch.mm(left.float(), right.float(), out=out)


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, LOGITS_AT_A_TIME // vocabulary)
    size -= size % 128 if size > 128 else 0  # whole tiles of a GPU's matrix product
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))
