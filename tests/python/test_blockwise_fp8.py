"""fp8 in blocks: the quantisers of activations, weights and SwiGLU, and the product."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.python.blockwise import FLOATS, SIZES, assert_correct, multiply
from tests.python.quantizer_model import Quantized, activations, assert_same, reference
from torch import Tensor

from qcutlass import UnsupportedError, testing
from qcutlass.blockwise import (
    fp8_act_quant,
    fp8_gemm,
    fp8_silu_mul_quant,
    fp8_weight_dequant,
    fp8_weight_quant,
    int8_addmm,
)
from qcutlass.testing import BlockwiseCase

FP8 = {"dtype": torch.float8_e4m3fn}
LENGTHS = [1, 7, 31, 32, 33, 64, 100, 127, 128, 129, 255, 257, 512, 1000]
of_sizes = pytest.mark.parametrize("size", SIZES)


def of_rows(x: Tensor, size: int) -> Quantized:
    """Codes and scales of blocks of columns, each quantised by the model of a row."""
    parts = [reference(part.contiguous(), FP8) for part in x.split(size, -1)]
    return Quantized(
        torch.cat([p.codes.view(torch.uint8) for p in parts], -1).view(torch.float8_e4m3fn),
        torch.stack([p.scale for p in parts], -1),
    )


@of_sizes
@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_agree_with_the_stated_arithmetic(dtype: torch.dtype, size: int, seeds: Iterator[int]) -> None:
    for k in LENGTHS:
        x = activations(9, k, dtype, seed := next(seeds), "cpu")
        assert_same(Quantized(*fp8_act_quant(x, size)), of_rows(x, size), f"K={k} seed={seed}")


@of_sizes
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_agree_with_the_stated_arithmetic(dtype: torch.dtype, size: int, seeds: Iterator[int]) -> None:
    for n, k in [(1, 1), (1, 300), (300, 1), (31, 33), (129, 257), (200, 100)]:
        w = activations(n, k, dtype, seed := next(seeds))
        codes, scales = fp8_weight_quant(w, size)
        assert scales.shape == (-(-n // size), -(-k // size))
        for i, rows in enumerate(w.split(size)):
            for j, block in enumerate(rows.split(size, 1)):
                part = reference(block.reshape(1, -1), FP8)
                got = codes[i * size : (i + 1) * size, j * size : (j + 1) * size].reshape(1, -1)
                assert_same(Quantized(got, scales[i, j, None]), part, f"{n} x {k} at {i}, {j} seed={seed}")


def test_scales_that_are_powers_of_two(seed: int) -> None:
    """The least ones that are not below those of the plain form; codes are quotients by them."""
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(seed)) * 10.0 ** torch.arange(-25, 25)[:, None]
    x[3, :128] = 0
    x[4, :128] = 448
    x[5, 0] = torch.inf
    (_, plain), (codes, scales) = fp8_act_quant(x), fp8_act_quant(x, scale_fmt="ue8m0")
    finite = plain.isfinite()
    exponents = torch.frexp(scales[finite])
    assert bool((exponents.mantissa == 0.5).all())
    assert bool((scales[finite] >= plain[finite]).all())
    assert bool((scales[finite] / 2 < plain[finite]).all())
    assert scales[3, 0] == scales[4, 0] == 1
    assert scales[5, 0] == torch.inf
    wide = scales.repeat_interleave(128, 1)[:, :300]
    expected = (x / wide).to(torch.float8_e4m3fn)
    rows = finite.all(1)
    assert torch.equal(codes[rows].float(), expected[rows].float())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 100, 256, 300])
def test_swiglu_is_quantised_unrounded(width: int, dtype: torch.dtype, device: str, seed: int) -> None:
    """As fp8_act_quant does the fp32 product, up to the error of the two exponentials, which may change a code by one
    step, 1/8 of its size or a subnormal one, and its block's scale by as little as they differ."""
    gate_up = torch.randn(2, 3, 2 * width, generator=torch.Generator().manual_seed(seed)).to(dtype) * 3
    codes, scales = (t.cpu() for t in fp8_silu_mul_quant(gate_up.to(device)))
    assert (codes.shape, scales.shape) == ((2, 3, width), (2, 3, -(-width // 128)))
    gate, up = gate_up.double().split(width, -1)
    exact = gate * torch.sigmoid(gate) * up
    wide = scales.repeat_interleave(128, -1)[..., :width].double()
    error = (codes.double() * wide - exact).abs()
    half_a_step = torch.maximum(exact.abs() * 2.0**-4, wide * 2.0**-10)
    assert bool((error <= half_a_step * (1 + 2.0**-10)).all())
    largest = torch.stack([part.abs().amax(-1) for part in exact.split(128, -1)], -1)
    assert bool(((scales.double() * 448 - largest).abs() <= largest * 2.0**-18).all())


@of_sizes
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_come_back(dtype: torch.dtype, size: int, seed: int) -> None:
    w = torch.randn(200, 300, generator=torch.Generator().manual_seed(seed))
    codes, scales = fp8_weight_quant(w, size)
    wide = scales.repeat_interleave(size, 0)[:200].repeat_interleave(size, 1)[:, :300]
    testing.assert_equal(fp8_weight_dequant(codes, scales, size, dtype), (codes.float() * wide).to(dtype))


def test_zeros_and_numbers_that_are_not_finite() -> None:
    for quantize in (fp8_act_quant, fp8_weight_quant):
        codes, scales = quantize(torch.zeros(200, 300))
        assert not bool(codes.float().any())
        assert bool((scales == 1).all())
        x = torch.ones(3, 300)
        x[1, 150] = torch.nan
        _, scales = quantize(x)
        assert (~scales.isfinite()).nonzero().tolist() == [[1 if quantize is fp8_act_quant else 0, 1]]


def test_under_torch_compile(seed: int) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(seed))
    compiled = torch.compile(lambda x: fp8_act_quant(x, scale_fmt="ue8m0"), fullgraph=True, backend="eager")
    for got, expected in zip(compiled(x), fp8_act_quant(x, scale_fmt="ue8m0"), strict=True):
        assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fp8_act_quant(torch.ones(3, 64), 100), ValueError, "block_size: expected one of 32, 64"),
        (lambda: fp8_act_quant(torch.ones(3, 64), scale_fmt="e4m3"), ValueError, "scale_fmt: expected None or 'ue8m0'"),
        (lambda: fp8_act_quant(torch.ones(3, 64).int()), TypeError, "x: expected a tensor of float16"),
        (lambda: fp8_act_quant(torch.tensor(1.0)), ValueError, "x: expected shape"),
        (lambda: fp8_weight_quant(torch.ones(64)), ValueError, "x: expected shape .N, K."),
        (lambda: fp8_silu_mul_quant(torch.ones(3, 65)), ValueError, r"gate_up: expected shape \[..., 2 I\]"),
        (lambda: fp8_silu_mul_quant(torch.ones(3, 64).double()), TypeError, "gate_up: expected a tensor of"),
        (lambda: fp8_weight_dequant(torch.ones(4, 4), torch.ones(1, 1)), TypeError, "w: expected a tensor of float8"),
        (
            lambda: fp8_weight_dequant(torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(2, 1)),
            ValueError,
            r"s: expected shape .* = \[1, 1\], got \[2, 1\]",
        ),
    ],
)
def test_wrong_arguments(call: object, error: type[Exception], message: str) -> None:
    assert callable(call)
    with pytest.raises(error, match=message):
        call()


def assert_both_oracles(case: BlockwiseCase, seed: int) -> None:
    case = replace(case, dtype=torch.float8_e4m3fn)
    problem, expected = case.exact(seed=seed)
    testing.assert_equal(multiply(problem), expected, label=problem)
    assert_correct(multiply(p := case.random(seed=seed)), p)


@of_sizes
def test_products_of_every_shape(size: int, seeds: Iterator[int]) -> None:
    """Rows in blocks of every size, channels and columns that are ragged as those of models are."""
    choose = random.Random(next(seeds))
    for m in (1, 2, 3, 4, 5, 8, 9, 33):
        assert_both_oracles(BlockwiseCase(m, 200, 333, size, choose.choice(FLOATS), bias=m % 2 == 0), next(seeds))
    for n in (1, 15, 17, 127, 129, 576):
        assert_both_oracles(BlockwiseCase(choose.randrange(1, 20), n, 260, size), next(seeds))
    for k in (1, 31, 32, 33, 127, 129, 1000):
        assert_both_oracles(BlockwiseCase(choose.randrange(1, 20), 40, k, size), next(seeds))


def test_products_of_large_layers(seed: int) -> None:
    """Several blocks of rows, and the ragged layer of DeepSeek-V3."""
    for m, n, k in [(70, 40, 4500), (3, 2112, 1536)]:
        assert_both_oracles(BlockwiseCase(m, n, k, out_dtype=torch.bfloat16, bias=True), seed)


def test_every_number_is_multiplied_exactly() -> None:
    """Of both operands: 1 times it, subnormals and NaN too."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    one, scale = torch.eye(256)[:, :32].to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
    row = torch.zeros(256, 32)
    row[:, 0] = codes.float()
    numbers = row.to(torch.float8_e4m3fn)
    ones = torch.ones(1, 32).to(torch.float8_e4m3fn)
    weights = fp8_gemm(ones, torch.ones(1, 1), numbers, scale.expand(2, 1).contiguous(), torch.float32)
    testing.assert_equal(weights, codes.float()[None] / 2)
    activations = fp8_gemm(numbers, scale.expand(256, 1), one[:1], torch.ones(1, 1), torch.float32)
    testing.assert_equal(activations, codes.float()[:, None] / 2)


def test_plain_weights_are_packed_ones(seed: int) -> None:
    p = BlockwiseCase(5, 200, 300, 64, torch.float32, True, dtype=torch.float8_e4m3fn).random(seed=seed)
    expected = multiply(p)
    testing.assert_equal(multiply(p, p.b), expected)
    testing.assert_equal(multiply(p, p.b, n=None), expected)
    testing.assert_equal(multiply(p, torch.cat([p.b, p.b], 1)[:, :300]), expected)  # rows apart


def test_the_number_of_threads_changes_nothing(seed: int) -> None:
    p = BlockwiseCase(7, 600, 700, bias=True, dtype=torch.float8_e4m3fn).random(seed=seed)
    expected, threads = multiply(p), torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            testing.assert_equal(multiply(p), expected, label=p)
    finally:
        torch.set_num_threads(threads)


def test_a_layer_of_quantised_floats(seed: int) -> None:
    """The product of what the quantisers give is within their errors, each 1/16 of a number at most, of the floats'."""
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(9, 700, generator=g), torch.randn(300, 700, generator=g)
    y = fp8_gemm(*fp8_act_quant(x), *fp8_weight_quant(w), torch.float32).double()
    least = 2.0**-9 / 448  # half a subnormal, of the largest number
    x_error = x.abs().double() / 16 + least * x.abs().amax()
    w_error = w.abs().double() / 16 + least * w.abs().amax()
    allowed = x.abs().double() @ w_error.T + x_error @ w.abs().double().T + x_error @ w_error.T
    assert bool(((y - x.double() @ w.double().T).abs() <= 1.001 * allowed).all())


def test_types_are_those_of_the_function() -> None:
    codes, scales = fp8_act_quant(torch.ones(2, 64))
    with pytest.raises(TypeError, match="a: expected a tensor of int8 on cpu, got float8_e4m3fn"):
        int8_addmm(codes, scales, codes, torch.ones(1, 1))
    with pytest.raises(TypeError, match="a: expected a tensor of float8_e4m3fn on cpu, got int8"):
        fp8_gemm(codes.view(torch.int8), scales, codes, torch.ones(1, 1))


@pytest.mark.gpu
def test_gpus_have_products_of_blocks_of_128_alone() -> None:
    codes, scales = (t.cuda() for t in fp8_act_quant(torch.ones(2, 64), 64))
    with pytest.raises(UnsupportedError, match="block size: the CUDA kernels of float8_e4m3fn take blocks of 128"):
        fp8_gemm(codes, scales, codes, torch.ones(1, 1, device="cuda"), block_size=64)


@pytest.mark.gpu
@of_sizes
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantisers_agree_with_the_cpu(dtype: torch.dtype, size: int, seeds: Iterator[int]) -> None:
    for rows, k in ((1, 1), (3, 100), (257, 333), (513, 4096), (64, 11008)):
        x = activations(rows, k, dtype, seed := next(seeds))
        label = f"{rows} x {k} seed={seed}"
        for scale_fmt in (None, "ue8m0"):
            expected = Quantized(*fp8_act_quant(x, size, scale_fmt))
            assert_same(Quantized(*fp8_act_quant(x.cuda(), size, scale_fmt)), expected, label)
        codes, scales = fp8_weight_quant(x, size)
        assert_same(Quantized(*fp8_weight_quant(x.cuda(), size)), Quantized(codes, scales), label)
        numbers = fp8_weight_dequant(codes.cuda(), scales.cuda(), size, dtype).cpu()
        testing.assert_equal(numbers, fp8_weight_dequant(codes, scales, size, dtype), label=label)


@pytest.mark.gpu
def test_swiglu_of_rows_that_overlap() -> None:
    """Rows as far apart as outputs are long are not one long row: each has a gate and an up of its own."""
    rows = torch.randn(128 * 9, device="cuda").unfold(0, 256, 128)
    for got, expected in zip(fp8_silu_mul_quant(rows), fp8_silu_mul_quant(rows.contiguous()), strict=True):
        assert torch.equal(got.float(), expected.float())


@pytest.mark.gpu
def test_every_code_comes_back_on_a_gpu() -> None:
    """NaN and subnormals, too."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128)
    numbers = fp8_weight_dequant(codes.cuda(), torch.ones(1, 1, device="cuda"), output_dtype=torch.float32)
    testing.assert_equal(numbers.cpu(), codes.float())
