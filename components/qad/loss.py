"""Forward KL from hidden states and output heads, without ever holding all logits.

loss = Σ_n KL(softmax(z_t / T) ‖ softmax(z_s / T)) over the given tokens, z = hidden · headᵀ, as in "Quantize the
Target, Quantize the Drafter" (arXiv 2607.04244), section 2.1. Logits exist for a few hundred tokens at a time, in fp32
whatever the models' type; the gradient by the student's hidden states, Σ (q − p) / T · head, is computed with them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LOGITS_AT_A_TIME = 2**26


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, temperature: float
    ) -> Tensor:
        ours, theirs = _wide(student_head), _wide(teacher_head)
        gradient = torch.empty(student.shape, dtype=ours.dtype, device=student.device)
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        for rows in _chunks(len(student), len(ours)):
            log_q = _log_probabilities(student[rows], ours, temperature)
            log_p = _log_probabilities(teacher[rows], theirs, temperature)
            p = log_p.exp()
            total += torch.linalg.vecdot(p, log_p.sub_(log_q)).double().sum()
            torch.mm(log_q.exp_().sub_(p).div_(temperature), ours, out=gradient[rows])
        ctx.save_for_backward(gradient)
        ctx.dtype = student.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream[0].to(gradient.dtype)).to(ctx.dtype), None, None, None, None


def forward_kl(
    student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return the summed divergence in nats, differentiable with respect to ``student`` alone.

    Args:
        student: hidden states [tokens, hidden] that the student's head is applied to.
        student_head: [vocabulary, hidden], frozen.
        teacher: hidden states [tokens, hidden of the teacher].
        teacher_head: [vocabulary, hidden of the teacher].
        temperature: divides both models' logits.

    Returns:
        float64 scalar.
    """
    if student_head.requires_grad:
        raise ValueError("the student's head must be frozen: its gradient is not computed")
    total: Tensor = _ForwardKL.apply(student, student_head, teacher, teacher_head, temperature)
    return total


@torch.no_grad()
def divergence(
    student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, temperature: float = 1.0
) -> tuple[float, int]:
    """Return the summed divergence in nats, and the number of tokens on which both models' first choice agrees."""
    ours, theirs = _wide(student_head), _wide(teacher_head)
    total, agreed = 0.0, 0
    for rows in _chunks(len(student), len(ours)):
        log_q = _log_probabilities(student[rows], ours, temperature)
        log_p = _log_probabilities(teacher[rows], theirs, temperature)
        agreed += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())
        total += float(torch.linalg.vecdot(log_p.exp(), log_p.sub_(log_q)).double().sum())
    return total, agreed


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _log_probabilities(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax((hidden.to(head.dtype) @ head.T).div_(temperature), dim=-1)


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, LOGITS_AT_A_TIME // vocabulary)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))
