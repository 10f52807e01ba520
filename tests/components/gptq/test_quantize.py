import pytest
import torch

from components.checkpoint.quantize import dequantize
from components.contract.errors import UserError
from components.gptq.quantize import quantize, round_to_grid


def problem(rows: int = 24, columns: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, correlated inputs [512, columns], and the Hessian of those inputs."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns // 4, columns, generator=generator)
    inputs = torch.randn(512, columns // 4, generator=generator) @ mixing
    inputs += 0.3 * torch.randn(512, columns, generator=generator)
    return torch.randn(rows, columns, generator=generator), inputs, 2 * inputs.T @ inputs


def float64_gptq(weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor, damping: float) -> torch.Tensor:
    """Column after column, the rest re-solved each time by least squares: GPTQ's definition, without Cholesky."""
    left, hessian, width = weight.double().clone(), hessian.double().clone(), weight.shape[1] // scales.shape[1]
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    codes = torch.zeros_like(left)
    for column in range(weight.shape[1]):
        scale = scales[:, column // width].double()
        codes[:, column] = torch.round(left[:, column] / scale).clamp(-8, 7)
        error = left[:, column] - codes[:, column] * scale
        rest = slice(column + 1, None)
        if column + 1 < weight.shape[1]:
            left[:, rest] += error[:, None] * torch.linalg.solve(hessian[rest, rest], hessian[rest, column])[None]
    return codes.to(torch.int8)


def test_codes_are_those_of_the_definition_in_float64():
    weight, _, hessian = problem()
    quantized, _ = quantize("w", weight, hessian, 32, 0.01, "none")
    expected = float64_gptq(weight, hessian, quantized.scales, 0.01)
    assert (quantized.codes != expected).float().mean() < 0.01


def test_scales_are_the_largest_magnitude_over_seven_and_a_half():
    weight, _, hessian = problem()
    quantized, _ = quantize("w", weight, hessian, 32, 0.01, "static")
    assert torch.equal(quantized.scales, (weight.unflatten(1, (2, 32)).abs().amax(-1) / 7.5).bfloat16())


@pytest.mark.parametrize("actorder", ["none", "static"])
@pytest.mark.parametrize("group_size", [32, 64])
def test_outputs_are_nearer_than_with_rounding_and_the_error_is_the_outputs(actorder, group_size):
    weight, inputs, hessian = problem()
    quantized, error = quantize("w", weight, hessian, group_size, 0.01, actorder)
    assert error < 0.8 * round_to_grid(weight, hessian, group_size)[1]
    wanted = inputs.double() @ weight.double().T
    got = inputs.double() @ dequantize(quantized.codes, quantized.scales, torch.float64).T
    assert error == pytest.approx(float((got - wanted).square().sum() / wanted.square().sum()), rel=1e-3)


def test_inputs_stay_untouched_and_the_result_is_the_same_again():
    weight, _, hessian = problem()
    before = weight.clone(), hessian.clone()
    first, _ = quantize("w", weight, hessian, 32, 0.01, "static")
    again, _ = quantize("w", weight, hessian, 32, 0.01, "static")
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])
    assert torch.equal(first.codes, again.codes)


def test_a_hessian_that_is_none_is_refused_by_name():
    weight, _, hessian = problem()
    with pytest.raises(UserError, match=r"layers\.1\.q: its Hessian is not positive definite"):
        quantize("layers.1.q", weight, -hessian, 32, 0.01, "none")
