import pytest
import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.scalar_type import scalar_types

from components.serving import unpacked_kernel

OWN = "CPUWNA16LinearKernel" if hasattr(torch.ops._C, "cpu_gemm_wna16") else "UnpackedLinearKernel"


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "UnpackedLinearKernel"), (torch.bfloat16, OWN)])
def test_layers_are_unpacked_where_vllm_has_no_kernel_for_their_activations(dtype, kernel):
    unpacked_kernel.register()
    config = MPLinearLayerConfig((64, 96), (64, 96), scalar_types.uint4b8, dtype, 32, zero_points=False)
    assert linear.choose_mp_linear_kernel(config).__name__ == kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chosen_kernel_multiplies_by_codes_times_scales(dtype):
    unpacked_kernel.register()
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (96, 64), generator=generator)
    scales = (torch.rand(96, 2, generator=generator) + 0.5).to(dtype)
    layer = torch.nn.Module()
    layer.weight_packed = packed(codes)
    layer.weight_scale = parameter(scales, input_dim=1, output_dim=0)
    config = MPLinearLayerConfig((64, 96), (64, 96), scalar_types.uint4b8, dtype, 32, zero_points=False)
    kernel = linear.choose_mp_linear_kernel(config)(config, "weight_packed", "weight_scale")
    kernel.process_weights_after_loading(layer)
    inputs = torch.randn(5, 64, generator=generator).to(dtype)
    exact = inputs.double() @ (codes.double() * scales.double().repeat_interleave(32, 1)).T
    found = kernel.apply_weights(layer, inputs).double()
    assert (found - exact).norm() / exact.norm() < (1e-6 if dtype == torch.float32 else 1e-2)


def packed(codes: torch.Tensor) -> torch.nn.Parameter:
    nibbles = (codes + 8).to(torch.int64).reshape(codes.shape[0], -1, 8)
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return parameter(words, input_dim=1, output_dim=0, packed_dim=1)


def parameter(tensor: torch.Tensor, **dims: int) -> torch.nn.Parameter:
    found = torch.nn.Parameter(tensor, requires_grad=False)
    for name, value in dims.items():
        setattr(found, name, value)
    return found
