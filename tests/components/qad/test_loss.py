import pytest
import torch

from components.qad import loss as module
from components.qad.loss import divergence, forward_kl


def problem(tokens=37, vocabulary=211, width=24, wider=40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return (
        draw(tokens, width).to(dtype),
        draw(vocabulary, width).to(dtype),
        draw(tokens, wider),
        draw(vocabulary, wider),
    )


def dense(student, student_head, teacher, teacher_head, temperature):
    student = student.double().detach().requires_grad_()
    p = torch.softmax(teacher.double() @ teacher_head.double().T / temperature, -1)
    q = torch.softmax(student @ student_head.double().T / temperature, -1)
    total = (p * (p.log() - q.log())).sum()
    (total / len(student)).backward()
    agreed = (p.argmax(-1) == q.argmax(-1)).sum()
    return total.detach(), student.grad, int(agreed)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("logits_at_a_time", [1, 211 * 10, 2**26])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 1e-2)]
)
def test_equals_the_dense_float64_reference(monkeypatch, temperature, logits_at_a_time, dtype, tolerance):
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", logits_at_a_time)
    student, student_head, teacher, teacher_head = problem(dtype=dtype)
    if dtype == torch.float64:
        teacher, teacher_head = teacher.double(), teacher_head.double()
    expected, gradient, agreed = dense(student, student_head, teacher, teacher_head, temperature)
    student.requires_grad_()
    total = forward_kl(student, student_head, teacher, teacher_head, temperature)
    (total / len(student)).backward()
    assert abs(total.detach() / expected - 1) < min(tolerance, 1e-5)
    assert (student.grad.double() - gradient).norm() / gradient.norm() < tolerance
    measured, same = divergence(student, student_head, teacher, teacher_head, temperature)
    assert abs(measured / float(expected) - 1) < 1e-5
    assert same == agreed


def test_a_small_divergence_is_not_lost():
    student, student_head, _, _ = problem()
    teacher = student + 1e-3 * torch.randn(student.shape, generator=torch.Generator().manual_seed(1))
    expected, _, _ = dense(student, student_head, teacher, student_head, 1.0)
    assert divergence(student, student_head, teacher, student_head)[0] == pytest.approx(float(expected), rel=0.02)


def test_no_tokens():
    student, student_head, teacher, teacher_head = problem()
    assert divergence(student[:0], student_head, teacher[:0], teacher_head) == (0.0, 0)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 1e-2)]
)
def test_gradient_by_a_head_that_trains(monkeypatch, temperature, dtype, tolerance):
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", 211 * 10)
    student, student_head, teacher, teacher_head = (tensor.to(dtype) for tensor in problem())
    inputs = [tensor.double().requires_grad_() for tensor in (student, student_head)]
    p = torch.softmax(teacher.double() @ teacher_head.double().T / temperature, -1)
    q = torch.log_softmax(inputs[0] @ inputs[1].T / temperature, -1)
    expected = torch.autograd.grad((p * (p.log() - q)).sum() / 7, inputs)
    student.requires_grad_(), student_head.requires_grad_()
    (forward_kl(student, student_head, teacher, teacher_head, temperature) / 7).backward()
    for found, wanted in zip((student.grad, student_head.grad), expected, strict=True):
        assert found.dtype == dtype
        assert (found.double() - wanted).norm() / wanted.norm() < tolerance
