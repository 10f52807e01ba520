import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as library_fake_quantize

from components.checkpoint.grid import Quantized
from components.qad.grid import QuantizedLinear

OUT, IN, GROUP = 24, 128, 32


def layer(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    scales = (torch.rand(OUT, IN // GROUP, generator=generator) * 0.02 + 0.001).bfloat16()
    codes = torch.randint(-8, 8, (OUT, IN), generator=generator).to(torch.int8)
    built = QuantizedLinear(Quantized(codes, scales, GROUP), None, dtype)
    return built, codes, scales


def moved(built):
    noise = torch.randn(built.weight.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        built.weight += noise * built.weight_scale.float().repeat_interleave(GROUP, 1)
    return built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_start_is_codes_times_stored_scales(dtype):
    built, codes, scales = layer(dtype)
    served = (codes.double() * scales.double().repeat_interleave(GROUP, 1)).to(dtype)
    assert torch.equal(built(torch.eye(IN, dtype=dtype)).T, served)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradients_follow_the_formula_in_float64(dtype):
    built, _, scales = layer(dtype)
    moved(built)
    hidden = torch.randn(5, IN, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    upstream = torch.randn(5, OUT, generator=torch.Generator().manual_seed(3)).to(dtype)
    step = scales.double().repeat_interleave(GROUP, 1)
    weight = torch.clamp(torch.round(built.latents.double() / step), -8, 7) * step
    assert weight.unique().numel() > 16
    out = built(hidden)
    out.backward(upstream)
    tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 0.05}
    torch.testing.assert_close(out.double(), hidden.double() @ weight.T, **tolerance)
    torch.testing.assert_close(built.weight.grad.double(), upstream.double().T @ hidden.double(), rtol=0.01, atol=0.05)
    torch.testing.assert_close(hidden.grad.double(), upstream.double() @ weight, rtol=0.01, atol=0.01)
    assert built.weight.grad.dtype == torch.float32


def test_clamped_weights_keep_their_gradient():
    built, _, scales = layer()
    with torch.no_grad():
        built.weight.copy_(20 * scales.float().repeat_interleave(GROUP, 1))
    built(torch.ones(1, IN)).sum().backward()
    assert torch.equal(built.weight.grad, torch.ones(OUT, IN))


def test_equals_the_librarys_fake_quantisation_in_fp32():
    built, _, scales = layer()
    moved(built)
    arguments = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=GROUP)
    oracle = library_fake_quantize(
        x=built.weight.detach(), scale=scales.float(), zero_point=torch.zeros_like(scales.float()), args=arguments
    )
    assert torch.equal(built(torch.eye(IN)).T, oracle)
