"""The products of qcutlass.blockwise: oracles E and T, quantised outputs, every form of the operands."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.python.blockwise import (
    ACTIVATIONS,
    DEVICES,
    FLOATS,
    SIZES,
    assert_correct,
    assert_quantized,
    multiply,
    multiply_quantized,
    pack,
)
from tests.python.kinds.blockwise import OF_SUMS, Model
from tests.python.kinds.blockwise_quantized import QuantizedModel
from torch import Tensor

import qcutlass
from qcutlass import blockwise, testing
from qcutlass.testing import BlockwiseCase, BlockwiseProblem

ROWS = [*range(1, 18), 33, 64, 65, 127, 128, 129]

on_devices = pytest.mark.parametrize("device", DEVICES)
of_sizes = pytest.mark.parametrize("size", SIZES)


def assert_both_oracles(case: BlockwiseCase, device: str, seed: int) -> None:
    """Random data by oracle T, exact data bit for bit where there is such, and both quantised."""
    p = case.random(device=device, seed=seed)
    assert_correct(multiply(p), p)
    assert_quantized(multiply_quantized(p, case.block_size), p, case.block_size)
    if case.activation in (None, "relu"):
        problem, expected = case.exact(device=device, seed=seed)
        testing.assert_equal(multiply(problem), expected, label=problem)
        assert_quantized(multiply_quantized(problem, case.block_size), problem, case.block_size)


@on_devices
@of_sizes
def test_every_number_of_rows(size: int, device: str, seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    for m in ROWS:
        assert_both_oracles(
            BlockwiseCase(m, 200, 333, size, choose.choice(FLOATS), bias=m % 2 == 0), device, next(seeds)
        )


@on_devices
@of_sizes
def test_short_last_blocks(size: int, device: str, seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    near = [base + step for base in (0, size, 3 * size) for step in (-17, -1, 0, 1, 15, 16, 31, 33) if base + step > 0]
    for n in near:
        assert_both_oracles(BlockwiseCase(choose.randrange(1, 20), n, choose.choice(near), size), device, next(seeds))
    for k in near:
        assert_both_oracles(BlockwiseCase(choose.randrange(1, 20), choose.choice(near), k, size), device, next(seeds))


@on_devices
def test_sizes_of_one(device: str, seed: int) -> None:
    for shape in ((1, 1, 1), (1, 1, 300), (1, 300, 1), (300, 1, 1)):
        assert_both_oracles(BlockwiseCase(*shape, bias=True), device, seed)


@on_devices
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_epilogues(out_dtype: torch.dtype, activation: str | None, device: str, seeds: Iterator[int]) -> None:
    for m in (3, 40):
        for bias_dtype in FLOATS:
            case = BlockwiseCase(m, 144, 256, 128, out_dtype, True, bias_dtype, activation)
            assert_both_oracles(case, device, next(seeds))
        assert_both_oracles(BlockwiseCase(m, 144, 256, 128, out_dtype, activation=activation), device, next(seeds))


@on_devices
def test_blocks_of_the_output_need_not_be_those_of_the_operands(device: str, seeds: Iterator[int]) -> None:
    for size in SIZES:
        for out_size in SIZES:
            p = BlockwiseCase(9, 300, 256, size, bias=True).random(device=device, seed=next(seeds))
            assert_quantized(multiply_quantized(p, out_size), p, out_size)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 300),
    k=st.integers(1, 400),
    size=st.sampled_from(SIZES),
    extreme=st.sampled_from([None, -128, 127]),
    seed=st.integers(0, 2**31),
)
def test_any_problem(m: int, n: int, k: int, size: int, extreme: int | None, seed: int) -> None:
    p = BlockwiseCase(m, n, k, size, torch.float32).random(seed=seed)
    if extreme is not None:
        p.a.fill_(extreme)
        p.b[::2].fill_(-128)
    assert_correct(multiply(p), p)
    assert_quantized(multiply_quantized(p, size), p, size)


@on_devices
@pytest.mark.parametrize("m", [1, 16, 100])
def test_plain_and_packed_weights_give_the_same_bits(m: int, device: str, seed: int) -> None:
    for n in (40, 304):
        p = BlockwiseCase(m, n, 500, bias=True).random(device=device, seed=seed)
        plain = {"b": p.b, "strided": torch.stack([p.b, p.b], 2)[..., 0], "a column's": p.b.T.contiguous().T}
        for name, b in plain.items():
            testing.assert_equal(multiply(p, b, n=None), multiply(p), label=name)
            for got, expected in zip(multiply_quantized(p, 64, b), multiply_quantized(p, 64), strict=True):
                testing.assert_equal(got, expected, label=name)


@on_devices
def test_n_of_packed_weights(device: str, seed: int) -> None:
    p = BlockwiseCase(2, 40, 64, bias=True).random(device=device, seed=seed)
    assert multiply(p, n=None).shape == (2, 40)  # the bias tells
    assert blockwise.int8_gemm(p.a, p.a_s, pack(p), p.b_s).shape == (2, 48)  # all that were packed
    assert blockwise.int8_gemm(p.a, p.a_s, pack(p), p.b_s, n=40).shape == (2, 40)
    codes, scales = blockwise.int8_gemm_quant(p.a, p.a_s, pack(p), p.b_s, 32)
    assert (codes.shape, scales.shape) == ((2, 48), (2, 2))


@on_devices
def test_gemm_is_addmm_without_a_bias(device: str, seed: int) -> None:
    p = BlockwiseCase(5, 200, 300, 64, torch.bfloat16).random(device=device, seed=seed)
    operands = (p.a, p.a_s, p.b, p.b_s)
    out = blockwise.int8_gemm(*operands, torch.bfloat16, block_size=64)
    testing.assert_equal(out, blockwise.int8_addmm(*operands, None, torch.bfloat16, block_size=64))
    quantized = blockwise.int8_gemm_quant(*operands, 32, block_size=64)
    for got, expected in zip(quantized, blockwise.int8_addmm_quant(*operands, None, 32, block_size=64), strict=True):
        testing.assert_equal(got, expected)
    assert blockwise.int8_gemm(*operands, block_size=64).dtype == torch.float16


def test_products_without_a_bias_are_explained() -> None:
    p = BlockwiseCase(16, 4096, 512).random(seed=1)
    operands = (p.a, p.a_s, pack(p), p.b_s)
    why = qcutlass.explain(blockwise.int8_gemm, *operands, torch.bfloat16, device="h200")
    assert why.problem.endswith("blocks of 128, bfloat16 out")
    why = qcutlass.explain(blockwise.int8_gemm_quant, *operands, 32, device="h200")
    assert why.problem.endswith("blocks of 128, int8 out in blocks of 32")


@on_devices
@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3), (2, 1, 4), (0,), (2, 0)])
def test_leading_dimensions(leading: tuple[int, ...], device: str, seed: int) -> None:
    rows = torch.Size(leading).numel()
    p = BlockwiseCase(max(rows, 1), 150, 200, bias=True).random(device=device, seed=seed)
    a, a_s = p.a[:rows], p.a_s[:rows]
    expected = multiply(replace(p, a=a, a_s=a_s)).reshape(*leading, 150)
    codes, scales = (t.reshape(*leading, -1) if rows else t for t in multiply_quantized(replace(p, a=a, a_s=a_s), 128))
    for given_scales in (a_s.reshape(*leading, 2), a_s):
        q = replace(p, a=a.reshape(*leading, 200), a_s=given_scales)
        testing.assert_equal(multiply(q), expected, label=leading)
        got = multiply_quantized(q, 128)
        assert (got[0].shape, got[1].shape) == ((*leading, 150), (*leading, 2))
        if rows:
            testing.assert_equal(got[0], codes)
            testing.assert_equal(got[1], scales)


def moved(p: BlockwiseProblem) -> Iterator[tuple[str, BlockwiseProblem]]:
    """The same problem with each operand at other strides, or at odd addresses."""

    def spread(t: Tensor, dim: int) -> Tensor:
        return torch.stack([t, t], dim + 1).flatten(dim, dim + 1)[(slice(None),) * dim + (slice(None, None, 2),)]

    def shifted(t: Tensor) -> Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    for name in ("a", "a_s", "b_s", "bias"):
        value = getattr(p, name)
        forms = [spread(value, dim) for dim in range(value.dim())] + [shifted(value)]
        if value.dim() == 2:
            forms.append(value.T.contiguous().T)
        for form in forms:
            yield f"{name} {list(form.shape)} {form.stride()}", replace(p, **{name: form})


@on_devices
@pytest.mark.parametrize("m", [2, 40])
def test_strides_and_addresses_of_operands(m: int, device: str, seed: int) -> None:
    p = BlockwiseCase(m, 150, 288, bias=True).random(device=device, seed=seed)
    expected, quantized = multiply(p), multiply_quantized(p, 128)
    for label, q in moved(p):
        assert_correct(multiply(q), p, label)
        assert_quantized(multiply_quantized(q, 128), p, 128)
        if device == "cpu":  # where addresses choose no other kernel
            testing.assert_equal(multiply(q), expected, label=label)
            testing.assert_equal(multiply_quantized(q, 128)[0], quantized[0], label=label)


@on_devices
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("m", [1, 9, 66])
def test_nothing_around_the_inputs_is_used_or_around_the_output_written(
    m: int, out_dtype: torch.dtype, device: str, seed: int
) -> None:
    p = BlockwiseCase(m, 145, 217, 64, out_dtype, bias=True, activation="silu").random(device=device, seed=seed)
    for offset, padding in [(0, 3), (1, 0), (3, 8), (16, 16)]:
        boxes = {
            name: testing.Poisoned.around(getattr(p, name), offset=offset, padding=padding).tensor
            for name in ("a", "a_s", "b_s", "bias")
        }
        box = testing.Poisoned((m, 145), out_dtype, device, offset=offset, padding=padding)
        q = replace(p, **boxes)
        assert multiply(q, out=box.tensor) is box.tensor
        box.check(p)
        assert_correct(box.tensor, p)
        assert_quantized(multiply_quantized(q, 64), p, 64)


@on_devices
@pytest.mark.parametrize("m", [3, 40])
def test_out_of_any_strides(m: int, device: str, seed: int) -> None:
    problem, expected = BlockwiseCase(m, 24, 64).exact(device=device, seed=seed)
    half: dict[str, Any] = {"dtype": torch.float16, "device": device}
    for out in (torch.zeros(24, m, **half).T, torch.zeros(m, 48, **half)[:, ::2], torch.zeros(2 * m, 24, **half)[::2]):
        assert multiply(problem, out=out) is out
        testing.assert_equal(out, expected, label=problem)


@on_devices
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_of_scales_and_bias_propagate(value: float, device: str, seed: int) -> None:
    for name in ("a_s", "b_s", "bias"):
        p = BlockwiseCase(6, 150, 200, bias=True).random(device=device, seed=seed)
        getattr(p, name)[..., -1] = value
        assert_correct(multiply(p), p, f"{name}: {p}")
        codes, scales = multiply_quantized(p, 128)
        assert not bool(scales[..., -1].isfinite().any()), name
        assert not bool(codes[..., 128:].any()), name


@on_devices
def test_blocks_of_zeros_come_out_as_zeros_of_scale_1(device: str, seed: int) -> None:
    p = BlockwiseCase(6, 300, 200).random(device=device, seed=seed)
    p.a[2].zero_()
    p.b[128:256].zero_()
    codes, scales = multiply_quantized(p, 128)
    assert bool((scales[2] == 1).all())
    assert bool((scales[:, 1] == 1).all())
    assert not bool(codes[2].any())
    assert not bool(codes[:, 128:256].any())
    assert bool(codes[3, 256:].any())


def test_the_fused_output_is_the_unfused_composition(seed: int) -> None:
    """On the CPU even its bits."""
    for size in SIZES:
        p = BlockwiseCase(9, 300, 400, size, torch.float32, bias=True, activation="silu").random(seed=seed)
        unfused = blockwise.act_quant(multiply(p), size)
        for got, expected in zip(multiply_quantized(p, size), unfused, strict=True):
            testing.assert_equal(got, expected, label=p)


def test_large_layers_on_any_number_of_threads(seed: int) -> None:
    threads = torch.get_num_threads()
    for m in (1, 65, 200):
        p = BlockwiseCase(m, 1027, 4100).random(seed=seed)
        packed = pack(p)
        expected, quantized = multiply(p, packed), multiply_quantized(p, 128, packed)
        assert_correct(expected, p)
        try:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                testing.assert_equal(multiply(p, packed), expected, label=p)
                testing.assert_equal(multiply_quantized(p, 128, packed)[0], quantized[0], label=p)
        finally:
            torch.set_num_threads(threads)


@on_devices
def test_no_channels_and_no_rows(device: str) -> None:
    a, a_s = torch.ones(3, 64, dtype=torch.int8, device=device), torch.ones(3, 1, device=device)
    b, b_s = torch.ones(0, 64, dtype=torch.int8, device=device), torch.ones(0, 1, device=device)
    packed = qcutlass.preprocess_weights(b, 8, activations="int8")
    for weights in (b, packed):
        assert blockwise.int8_gemm(a, a_s, weights, b_s).shape == (3, 0)
        assert [t.shape for t in blockwise.int8_gemm_quant(a, a_s, weights, b_s)] == [(3, 0), (3, 0)]
    b, b_s = torch.ones(16, 64, dtype=torch.int8, device=device), torch.ones(1, 1, device=device)
    assert blockwise.int8_gemm(a[:0], a_s[:0], b, b_s).shape == (0, 16)
    assert [t.shape for t in blockwise.int8_gemm_quant(a[:0], a_s[:0], b, b_s)] == [(0, 16), (0, 1)]


@pytest.mark.parametrize("fault", OF_SUMS)
def test_the_bound_alone_rejects_wrong_scales_and_sums(fault: type[Model], seed: int) -> None:
    """Whatever the type of the output, and however many shares K was cut into."""
    for out_dtype in FLOATS:
        real = BlockwiseCase(64, 256, 1024, 128, out_dtype, bias=True).random(seed=seed)
        assert testing.error_ratio(fault(real).run(), real.reference(), splits=16) > 1


def test_scales_of_zeros_are_one(seed: int) -> None:
    p = BlockwiseCase(64, 256, 1024, 128, torch.float32).random(seed=seed)
    p.a[3] = 0
    codes, scales = QuantizedModel(p).run()
    codes[3], scales[3] = 0, 1
    testing.assert_quantized(codes, scales, p.reference(), 128)
    for wrong in (0.0, torch.nan, 2.0**-126):
        scales[3] = wrong
        with pytest.raises(AssertionError, match="times what is allowed"):
            testing.assert_quantized(codes, scales, p.reference(), 128)


def test_every_code_occurs_in_random_problems(seed: int) -> None:
    p = BlockwiseCase(64, 256, 1024).random(seed=seed)
    assert len(p.a.unique()) == len(p.b.unique()) == 256
