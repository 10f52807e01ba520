"""How far a student is from its teacher on held-out sequences."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from components.contract.errors import UserError
from components.qad.hidden import TeacherStates, states_of
from components.qad.loss import divergence
from components.qad.student import Student
from components.sequences.reader import Split


@dataclass(frozen=True)
class Distance:
    """Mean forward KL in nats per token at temperature 1, share of equal first choices, and the number of tokens."""

    kl: float
    top1_agreement: float
    tokens: int


@torch.no_grad()
def distance(
    student: Student,
    teacher: TeacherStates,
    teacher_head: Tensor,
    split: Split,
    indices: Iterable[int],
) -> Distance:
    """Compare both models on the counted tokens of the given sequences, one sequence at a time.

    Raises:
        UserError: one of them predicts NaN or infinity there; the sequence is named.
    """
    total, agreed, tokens = 0.0, 0, 0
    with student.frozen():
        student_head = student.head()
        for index in indices:
            states = states_of(student.model, split, [index])
            kl, same = divergence(states, student_head, teacher(index).to(states.device), teacher_head)
            if not math.isfinite(kl):
                raise UserError(
                    f"KL on val sequence {index} is {kl}: a model predicts NaN or infinity there; "
                    "lower qad.learning_rate, or inspect the models where it was so before training"
                )
            total, agreed, tokens = total + kl, agreed + same, tokens + len(states)
    return Distance(total / max(tokens, 1), agreed / max(tokens, 1), tokens)
