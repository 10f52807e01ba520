"""What QAD computes on a GPU against independent references: ``python tests/benchmarks/gpu_checks.py``, in seconds."""

import torch
from torch import Tensor

from components.checkpoint.quantize import fake_quantize as plain
from components.qad import fused
from components.qad.loss import forward_kl


def check() -> None:
    """Raise AssertionError where a figure is off; print the rest."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    for group, bits in ((32, 4), (64, 4), (128, 4), (32, 8)):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        for scale_dtype in (torch.bfloat16, torch.float32):
            scales = (draw(9216, 2560 // group).abs() * 0.02 + 1e-4).to(scale_dtype)
            wide = scales.float().repeat_interleave(group, 1)
            halves = torch.randint(low - 2, high + 3, wide.shape, device="cuda", generator=generator) + 0.5
            random = draw(9216, 2560) * wide * (high * 0.7)
            for masters in (random, halves * wide):
                for dtype, raw in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
                    one = fused.fake_quantize(masters, scales, dtype, bits)
                    other = plain(masters.to(dtype), scales, bits)
                    assert torch.equal(one.view(raw), other.view(raw)), (group, bits, scale_dtype, dtype)
            step = wide.double()
            exact = (torch.clamp(torch.round(random.double() / step), low, high) * step).float()
            share = float((fused.fake_quantize(random, scales, torch.float32, bits) != exact).double().mean())
            assert share < 1e-5, f"{share} of the weights are not those of float64"
    print(
        f"fused fake quantiser: bit-equal to the plain one; other codes than in float64 for {share:.1e} of the weights"
    )

    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        student, teacher = (draw(1000, 512).to(dtype) for _ in range(2))
        ours, theirs = (draw(20001, 512).to(dtype) * 0.1 for _ in range(2))
        inputs = [tensor.double().requires_grad_() for tensor in (student, ours)]
        wanted = torch.log_softmax(teacher.double() @ theirs.double().T, -1)
        dense = (wanted.exp() * (wanted - torch.log_softmax(inputs[0] @ inputs[1].T, -1))).sum()
        expected = torch.autograd.grad(dense, inputs)
        found = [tensor.requires_grad_() for tensor in (student, ours)]
        total = forward_kl(*found, teacher, theirs)
        gradients = torch.autograd.grad(total, found)
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(gradients, expected, strict=True)]
        loss = abs(float(total / dense.detach()) - 1)
        print(f"forward KL in {dtype}: relative error {loss:.1e}, of the gradients {errors[0]:.1e}, {errors[1]:.1e}")
        assert max(errors) < limit
        assert loss < 1e-5


if __name__ == "__main__":
    check()
