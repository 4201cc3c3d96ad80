"""Dequantisation, exhaustively: every code, zero point and finite scale gives the correctly rounded weight."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import _C, testing
from qcutlass.products.extension import DTYPES as DTYPES_OF
from qcutlass.products.extension import backend
from qcutlass.products.packing import PackedWeights, weight_arguments
from qcutlass.products.rows import dequantize_rows
from qcutlass.products.weight_operators import DequantizeCall, check_dequantize

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def finite(dtype: torch.dtype) -> Tensor:
    """Every finite value of a 16-bit type."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    return values[values.isfinite()]


def all_codes(bits: int, channels: int) -> Tensor:
    return torch.arange(2**bits, dtype=torch.uint8).repeat(channels, 1)


def assert_dequantizes(
    device: str, codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, dtype: torch.dtype, group_size: int
) -> None:
    codes, scales, zeros = codes.to(device), scales.to(device), None if zeros is None else zeros.to(device)
    packed = qcutlass.preprocess_weights(codes, bits=bits)
    size = testing.Problem(codes, codes, scales, zeros, bits, group_size).ambiguous
    out = qcutlass.dequantize(packed, scales, zeros, k=codes.shape[1], dtype=dtype, **size)
    testing.assert_equal(out, testing.dequantized_weight(codes, scales, zeros, group_size, bits, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [*range(16), None])
def test_all_4_bit_codes_zeros_and_float16_scales(zero: int | None, dtype: torch.dtype, device: str) -> None:
    scales = finite(torch.float16)[None]
    zeros = None if zero is None else torch.full_like(scales, zero, dtype=torch.uint8)
    assert_dequantizes(device, all_codes(4, scales.shape[1]), scales, zeros, 4, dtype, 16)


@pytest.mark.parametrize("zero_dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("zero", [0, 1, 127, 128, 255, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_8_bit_codes_and_many_scales(
    zero: int | None, dtype: torch.dtype, zero_dtype: torch.dtype, device: str
) -> None:
    scales = finite(dtype)[::7][None]
    zeros = None if zero is None else torch.full_like(scales, zero, dtype=zero_dtype)
    assert_dequantizes(device, all_codes(8, scales.shape[1]), scales, zeros, 8, dtype, 256)


@pytest.mark.parametrize("zero", [*range(17), None])
def test_all_4_bit_codes_zeros_and_bfloat16_scales(zero: int | None, device: str) -> None:
    scales = finite(torch.bfloat16)[None]
    zeros = None if zero is None else torch.full_like(scales, zero, dtype=torch.uint8)
    assert_dequantizes(device, all_codes(4, scales.shape[1]), scales, zeros, 4, torch.bfloat16, 16)


@pytest.mark.parametrize("zero_dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_real_zeros(bits: int, scale_dtype: torch.dtype, zero_dtype: torch.dtype, seed: int, device: str) -> None:
    g = torch.Generator().manual_seed(seed)
    scales = (torch.randn(1, 5000, generator=g) / 50).to(scale_dtype)
    zeros = (torch.randn(1, 5000, generator=g) * 2**bits).to(zero_dtype)
    for dtype in DTYPES:
        assert_dequantizes(device, all_codes(bits, 5000), scales, zeros, bits, dtype, 2**bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_minimums_of_any_type(bits: int, seed: int, device: str) -> None:
    """Scales of 0 and negative ones among them."""
    for scale_dtype in DTYPES:
        for dtype in DTYPES:
            case = testing.Case(1, 50, 333, bits, 16, "minimum", dtype, scale_dtype, DTYPES[seed % len(DTYPES)])
            p = case.random(seed=seed)
            assert p.minimums is not None
            assert bool((p.scales == 0).any())
            packed = qcutlass.preprocess_weights(p.codes.to(device), bits=bits)
            scales, minimums = p.scales.to(device), p.minimums.to(device)
            out = qcutlass.dequantize(packed, scales, minimums=minimums, k=333, group_size=16, bits=bits, dtype=dtype)
            testing.assert_equal(out.cpu(), p.weight(dtype))
            weight = qcutlass.QuantizedTensor(p.codes, p.scales, None, bits, 16, minimums=p.minimums)
            testing.assert_equal(weight.dequantize(dtype), p.weight(dtype))
            options = {"k": 333, "group_size": 16, "bits": bits, "dtype": dtype, "minimums": minimums}
            rows = torch.tensor([3, 49, 3, 17], device=device)
            found = dequantize_rows(packed, scales, None, rows, **options)  # type: ignore[arg-type]
            testing.assert_equal(found.cpu(), p.weight(dtype)[rows.cpu()])


@pytest.mark.parametrize("zero_dtype", [torch.uint8, torch.int8, torch.int32])
def test_integer_zeros_of_any_type(zero_dtype: torch.dtype, seed: int, device: str) -> None:
    p = testing.random_problem(1, 33, 128, bits=4, group_size=32, zero_dtype=zero_dtype, seed=seed)
    assert_dequantizes(device, p.codes, p.scales, p.zeros, 4, torch.float16, 32)


def test_zeros_outside_the_range_of_codes(device: str) -> None:
    scales = torch.ones(1, 200, dtype=torch.float16)
    zeros = torch.arange(-100, 100, dtype=torch.int32)[None]
    assert_dequantizes(device, all_codes(4, 200), scales, zeros, 4, torch.float32, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [1, 7, 16, 32, 48, 64, 100, 128, 333, 1000])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 50])
def test_groups(n: int, group_size: int, bits: int, dtype: torch.dtype, seed: int, device: str) -> None:
    for k in (1, 63, 64, 65, 333):
        p = testing.random_problem(1, n, k, bits=bits, group_size=group_size, zeros="int", dtype=dtype, seed=seed + k)
        assert_dequantizes(device, p.codes, p.scales, p.zeros, bits, dtype, group_size)


def test_one_scale_a_channel_may_be_a_vector(seed: int) -> None:
    p = testing.random_problem(1, 40, 96, bits=8, group_size=96, seed=seed)
    packed = qcutlass.preprocess_weights(p.codes, bits=8)
    assert p.zeros is not None
    testing.assert_equal(
        qcutlass.dequantize(packed, p.scales[0], p.zeros[0], k=96), qcutlass.dequantize(packed, p.scales, p.zeros, k=96)
    )


def test_strided_scales_and_zeros(seed: int) -> None:
    p = testing.random_problem(1, 40, 128, group_size=32, zeros="int", seed=seed)
    assert p.zeros is not None
    packed = qcutlass.preprocess_weights(p.codes, bits=4)
    wide_scales = testing.Poisoned.around(p.scales, offset=1, padding=9).tensor
    wide_zeros = torch.full((4, 50), 255, dtype=torch.uint8)
    wide_zeros[:, 3:43] = p.zeros
    expected = qcutlass.dequantize(packed, p.scales, p.zeros, k=128)
    testing.assert_equal(qcutlass.dequantize(packed, wide_scales, wide_zeros[:, 3:43], k=128), expected)
    testing.assert_equal(qcutlass.dequantize(packed, p.scales.T.contiguous().T, p.zeros, k=128), expected)


@pytest.mark.parametrize("zeros", ["none", "int", "real"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_rows(bits: int, dtype: torch.dtype, zeros: testing.Zeros, device: str, seed: int) -> None:
    """Slices that start and end anywhere are those of the whole; columns beyond one block of a GPU kernel."""
    choose = random.Random(seed)
    for k in (1, 40, 1000, 1024, 2100):
        n, group_size = choose.randrange(1, 100), choose.choice([16, 24, 100, 128, 4096])
        p = testing.random_problem(
            1, n, k, bits=bits, group_size=group_size, zeros=zeros, dtype=dtype, device=device, seed=seed + k
        )
        packed = qcutlass.preprocess_weights(p.codes, bits=bits)
        for begin, end in [(0, n), (n // 2, n), (n // 3, n // 2 + 1), (n, n)]:
            rows = qcutlass.dequantize(packed, p.scales, p.zeros, k=k, rows=(begin, end), **p.ambiguous)
            testing.assert_equal(rows, p.weight(dtype)[begin:end], label=f"{p} rows {begin} .. {end}")


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("padding", [0, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_but_the_rows_is_written(dtype: torch.dtype, padding: int, offset: int, device: str, seed: int) -> None:
    for bits, zeros, k in [(4, "int", 136), (4, "real", 77), (8, "none", 136), (8, "real", 1033)]:
        p = testing.Case(1, 50, k, bits, 8, zeros, dtype).random(device=device, seed=seed)  # type: ignore[arg-type]
        packed = qcutlass.preprocess_weights(p.codes, bits=bits)
        call = DequantizeCall(packed, p.scales, p.zeros, k, 8, bits)
        weights, operands = weight_arguments(check_dequantize(call)[0], PackedWeights.of(call))
        box = testing.Poisoned((30, k), dtype, device, offset=offset, padding=padding)
        _C.dequantize(
            weights, 11, 41, DTYPES_OF[dtype], box.tensor.data_ptr(), box.tensor.stride(0), **backend(box.tensor)
        )
        box.check(p)
        testing.assert_equal(box.tensor, p.weight(dtype)[11:41], label=p)
        assert len(operands) == 2 + (zeros != "none")


@pytest.mark.gpu
def test_more_channels_than_a_launch_takes(seed: int) -> None:
    n = 16 * 65535 + 40
    p = testing.random_problem(1, n, 16, group_size=16, device="cuda", seed=seed)
    packed = qcutlass.preprocess_weights(p.codes, bits=4)
    testing.assert_equal(qcutlass.dequantize(packed, p.scales, p.zeros, k=16, bits=4), p.weight(torch.float16))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_k_that_leaves_codes_out_is_refused(bits: int) -> None:
    p = testing.random_problem(1, 32, 90, bits=bits, group_size=90, seed=1)
    packed = qcutlass.preprocess_weights(p.codes | 1, bits=bits)
    assert qcutlass.dequantize(packed, p.scales, k=90, bits=bits).shape == (32, 90)
    for rows in (None, (3, 4)):
        with pytest.raises(ValueError, match=r"^k: K = 89, but w_packed holds codes in column 89"):
            qcutlass.dequantize(packed, p.scales, k=89, bits=bits, rows=rows)
