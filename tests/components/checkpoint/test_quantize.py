import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as library_dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as library_quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from components.checkpoint.grid import pack_codes, packed_blocks, unpack_codes
from components.checkpoint.quantize import dequantize, fake_quantize, integer_codes


def pack_latents(latents: torch.Tensor, scales: torch.Tensor, bits: int, rows: int = 100) -> torch.Tensor:
    """Pack a few rows at a time; what a block yields is used up by the next."""
    blocks = zip(latents.split(rows), scales.split(rows), strict=True)
    return torch.cat([words.clone() for words in packed_blocks(blocks, bits)])


BITS = st.sampled_from([4, 8])
SHAPES = {"rows": st.integers(1, 9), "groups": st.integers(1, 5), "size": st.sampled_from([1, 2, 8, 32, 33, 64, 128])}


def sample(rows: int, groups: int, size: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(rows, groups * size, generator=generator).to(dtype)
    scales = (torch.rand(rows, groups, generator=generator) * 0.3 + 0.01).bfloat16()
    return latents, scales


@settings(deadline=None, max_examples=60)
@given(**SHAPES, seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.bfloat16]), bits=BITS)
def test_codes_are_numpys_fp32_quotients_rounded_half_even(rows, groups, size, seed, dtype, bits):
    latents, scales = sample(rows, groups, size, seed, dtype)
    low, high = {4: (-8, 7), 8: (-128, 127)}[bits]
    wide = np.repeat(scales.float().numpy(), size, axis=1)
    expected = np.clip(np.rint(latents.float().numpy() / wide), low, high).astype(np.int8)
    codes = integer_codes(latents, scales, bits)
    assert codes.dtype == torch.int8
    assert np.array_equal(codes.numpy(), expected)
    float64 = np.clip(np.rint(latents.double().numpy() / wide.astype(np.float64)), low, high)
    assert np.abs(codes.numpy().astype(int) - float64).max() <= 1


@settings(deadline=None, max_examples=60)
@given(**SHAPES, seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.bfloat16]), bits=BITS)
def test_codes_survive_dequantisation(rows, groups, size, seed, dtype, bits):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, groups * size), generator=generator).to(
        torch.int8
    )
    scales = (torch.rand(rows, groups, generator=generator) * 3 + 1e-4).bfloat16()
    weights = dequantize(codes, scales, dtype)
    assert torch.equal(integer_codes(weights, scales, bits), codes)
    assert torch.equal(fake_quantize(weights, scales, bits), weights)


@settings(deadline=None, max_examples=60)
@given(**SHAPES, seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.bfloat16]), bits=BITS)
def test_fake_quantisation_is_what_the_codes_stand_for_to_the_sign_of_zero(rows, groups, size, seed, dtype, bits):
    latents, scales = sample(rows, groups, size, seed, dtype)
    found, expected = (
        fake_quantize(latents, scales, bits),
        dequantize(integer_codes(latents, scales, bits), scales, dtype),
    )
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 9), columns=st.integers(1, 80), seed=st.integers(0, 2**31), bits=BITS)
def test_packing_is_the_librarys_bit_for_bit(rows, columns, seed, bits):
    generator = torch.Generator().manual_seed(seed)
    low, high = {4: (-8, 8), 8: (-128, 128)}[bits]
    codes = torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int8)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, pack_to_int32(codes, bits))
    assert torch.equal(unpack_codes(packed, bits, columns), codes)


@settings(deadline=None, max_examples=60)
@given(
    **SHAPES,
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bits=BITS,
    block=st.integers(1, 9),
)
def test_latents_are_packed_as_the_library_packs_their_codes(rows, groups, size, seed, dtype, bits, block):
    latents, scales = sample(rows, groups, size, seed, dtype)
    expected = pack_to_int32(integer_codes(latents, scales, bits), bits)
    assert torch.equal(pack_latents(latents, scales, bits, block), expected)


@pytest.mark.parametrize("exponent", [1, 2, 120, 127, 254])
def test_every_bf16_latent_is_packed_as_its_code_on_every_mantissa_of_a_scale(exponent: int):
    """Only the exponents' difference counts beside these, but for numbers that are subnormal or overflow."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    latents = every[every.isfinite()].expand(128, -1)
    scales = (torch.arange(128, dtype=torch.int16) + (exponent << 7)).view(torch.bfloat16).unsqueeze(1)
    assert torch.equal(pack_latents(latents, scales, 4), pack_codes(integer_codes(latents, scales), 4))
    if exponent == 127:  # scales of 1 to 2: latents at every tie of every one of them
        ties = (latents.abs().float() / scales.float()) % 1 == 0.5
        assert ties.sum(1).min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_has_no_code(value: float, dtype: torch.dtype):
    latents, scales = sample(1100, 16, 64, 5, dtype)
    latents[-1, 3] = value
    with pytest.raises(ValueError, match="latents hold NaN or infinity"):
        pack_latents(latents, scales, 4)


def test_every_pair_of_codes_is_packed_as_the_library_does():
    every = torch.arange(-8, 8, dtype=torch.int8)
    pairs = torch.cartesian_prod(every, every).view(64, 8)
    assert torch.equal(pack_codes(pairs, 4), pack_to_int32(pairs, 4))
    assert torch.equal(pack_codes(pairs.T, 4), pack_to_int32(pairs.T.contiguous(), 4))


def test_large_matrices_are_worked_on_in_parts_with_the_same_result():
    latents, scales = sample(1100, 16, 64, 5, torch.bfloat16)
    wide = np.repeat(scales.float().numpy(), 64, axis=1)
    expected = torch.from_numpy(np.clip(np.rint(latents.float().numpy() / wide), -8, 7).astype(np.int8))
    codes = integer_codes(latents, scales)
    assert torch.equal(codes, expected)
    exact = torch.from_numpy(codes.numpy() * wide)
    assert torch.equal(dequantize(codes, scales, torch.float32), exact)
    assert torch.equal(fake_quantize(latents, scales), exact.bfloat16())
    packed = pack_codes(codes, 4)
    assert torch.equal(packed, pack_to_int32(codes, 4))
    assert torch.equal(pack_latents(latents, scales, 4), packed)
    assert torch.equal(unpack_codes(packed, 4, 1024), codes)


def test_dequantisation_is_the_librarys_bit_for_bit():
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    codes = torch.randint(-8, 8, (64, 256), dtype=torch.int8)
    scales = torch.rand(64, 8).bfloat16()
    expected = library_dequantize(codes, scales, args=args)
    assert torch.equal(dequantize(codes, scales), expected)


def test_division_in_bf16_would_move_codes():
    """The library's eager path divides in the weight's dtype; ours must not."""
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    torch.manual_seed(0)
    latents = torch.randn(256, 256).bfloat16()
    scales = latents.float().unflatten(1, (-1, 32)).abs().amax(-1).div(7.5).bfloat16()
    theirs = library_quantize(latents, scales, None, args, dtype=torch.int8)
    moved = (integer_codes(latents, scales) != theirs).float().mean()
    assert 0.003 < moved < 0.03
    assert torch.equal(
        integer_codes(latents, scales), library_quantize(latents.float(), scales.float(), None, args, torch.int8)
    )
