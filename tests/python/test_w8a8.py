"""qcutlass.gemm_w8a8 on CPU tensors: integer sums bit for bit, oracles E and T; zero points and their faults."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.python.eight_bit import ACTIVATIONS, FLOATS, ROWS, assert_correct, multiply, pack
from tests.python.kinds.description import ones
from tests.python.kinds.eight_bit import M, Model, N
from tests.python.kinds.int8 import INT8, OF_INTEGER_SUMS
from torch import Tensor

import qcutlass
from qcutlass import testing
from qcutlass.testing import EightBitCase


def test_every_number_of_rows(seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    for m in ROWS:
        azp = choose.choice(["none", "one", "each"])
        assert_correct(
            multiply(p := EightBitCase(m, 67, 333, out_dtype=torch.int32, azp=azp).random(seed=next(seeds))), p
        )
        for dtype in FLOATS:
            case = EightBitCase(m, 67, 333, out_dtype=dtype, azp=azp, bias=choose.random() < 0.5)
            assert_correct(multiply(p := case.random(seed=next(seeds))), p)
            problem, expected = case.exact(seed=next(seeds))
            testing.assert_equal(multiply(problem), expected, label=problem)


@pytest.mark.parametrize("m", [1, 3, 6])
def test_residues_of_channels_and_columns(m: int, seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    residues = [(n, choose.randrange(1, 200)) for n in range(1, 50)]
    residues += [(choose.randrange(1, 40), k) for k in range(1, 100)]
    residues += [(choose.randrange(1, 40), 1024 + k) for k in (-33, -32, -1, 0, 1, 31, 32, 33, 1024, 1025)]
    for n, k in residues:
        p = EightBitCase(m, n, k, out_dtype=torch.int32, azp=choose.choice(["none", "each"])).random(seed=next(seeds))
        assert_correct(multiply(p), p)
        p = EightBitCase(m, n, k, out_dtype=choose.choice(FLOATS), bias=True).random(seed=next(seeds))
        assert_correct(multiply(p), p)


@pytest.mark.parametrize("out_dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize("azp", ["none", "one", "each"])
def test_every_combination(azp: testing.Scope, out_dtype: torch.dtype, seeds: Iterator[int]) -> None:
    scales = ("one", "each") if out_dtype.is_floating_point else ("one",)
    for a_scale, w_scale in itertools.product(scales, scales):
        for bias, activation in itertools.product((False, True), ACTIVATIONS):
            if not out_dtype.is_floating_point and (bias or activation):
                continue
            case = EightBitCase(9, 50, 96, torch.int8, out_dtype, a_scale, w_scale, azp, bias, activation=activation)
            assert_correct(multiply(p := case.random(seed=next(seeds))), p)
            if activation in (None, "relu"):
                problem, expected = case.exact(seed=next(seeds))
                testing.assert_equal(multiply(problem), expected, label=problem)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    azp=st.sampled_from(["none", "one", "each"]),
    extreme=st.sampled_from([None, -128, 127]),
    seed=st.integers(0, 2**31),
)
def test_sums_of_any_problem(m: int, n: int, k: int, azp: testing.Scope, extreme: int | None, seed: int) -> None:
    p = EightBitCase(m, n, k, out_dtype=torch.int32, azp=azp).random(seed=seed)
    if extreme is not None:
        p.a.fill_(extreme)
        p.w[::2].fill_(-128)
    assert_correct(multiply(p), p)


def test_the_largest_k_of_the_largest_codes() -> None:
    k = 131071
    a, w = (torch.full((rows, k), -128, dtype=torch.int8) for rows in (2, 17))
    a[1], w[3] = 127, 127
    p = testing.EightBitProblem(a, w, None, None, out_dtype=torch.int32)
    assert int(p.sums().max()) == 2**31 - 2**14
    assert_correct(multiply(p), p)
    scaled = replace(p, a_scale=torch.tensor(2.0**-16), w_scale=torch.tensor(1.0), out_dtype=torch.float32)
    assert_correct(multiply(scaled), scaled)
    longer = torch.zeros(1, k + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"a_q: K = 131072 .* 131071"):
        qcutlass.gemm_w8a8(longer, torch.zeros(1, 4096, 32, 16, dtype=torch.int8), None, None, out_dtype=torch.int32)


@pytest.mark.parametrize("zero_point", [2**31 - 1, -(2**31), 2**24 + 1])
def test_zero_points_of_any_size(zero_point: int, seed: int) -> None:
    """Zero points are subtracted exactly before anything is rounded; int32 outputs are exact modulo 2^32."""
    p = EightBitCase(3, 40, 1000, out_dtype=torch.int32, azp="each").random(seed=seed)
    assert p.azp is not None
    p.azp[1] = zero_point
    assert_correct(multiply(p), p)
    scaled = EightBitCase(3, 40, 1000, out_dtype=torch.float32, azp="each").random(seed=seed)
    scaled = replace(scaled, azp=p.azp)
    assert_correct(multiply(scaled), scaled)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 4096])
def test_weight_sums(k: int, seed: int) -> None:
    p = EightBitCase(1, 37, k).random(seed=seed)
    expected = p.w.sum(1, dtype=torch.int32)
    testing.assert_equal(qcutlass.weight_sums(p.w), expected)
    testing.assert_equal(qcutlass.weight_sums(pack(p), 37), expected)
    testing.assert_equal(qcutlass.weight_sums(pack(p)), torch.cat([expected, torch.zeros(11, dtype=torch.int32)]))


def test_weight_sums_are_computed_where_they_are_not_given(seed: int) -> None:
    for out_dtype in (torch.float16, torch.int32):
        p = EightBitCase(5, 37, 200, azp="each", bias=out_dtype != torch.int32, out_dtype=out_dtype).random(seed=seed)
        for _ in range(2):
            testing.assert_equal(multiply(p, w_sums=None), multiply(p), label=p)


def test_n_is_told_by_what_has_n_elements(seed: int) -> None:
    p = EightBitCase(2, 40, 64, w_scale="one", bias=True, azp="one").random(seed=seed)
    packed, sums = pack(p), qcutlass.weight_sums(p.w)
    assert p.w_scale is not None
    one, each = p.w_scale, p.w_scale.expand(40)
    plain = lambda w_scale, **more: qcutlass.gemm_w8a8(p.a, packed, p.a_scale, w_scale, **more).shape[1]  # noqa: E731
    assert plain(each) == plain(each[:, None]) == 40
    assert plain(one, bias=p.bias) == plain(one, azp=p.azp, w_sums=sums) == plain(one, n=40) == 40
    assert plain(one) == plain(one.squeeze()) == 48  # all that were packed
    single = qcutlass.preprocess_weights(p.w[:1], 8, activations="int8")
    with pytest.raises(ValueError, match=r"n: .*pass n="):
        qcutlass.gemm_w8a8(p.a, single, p.a_scale, one)
    assert qcutlass.gemm_w8a8(p.a, single, p.a_scale, one, n=1).shape == (2, 1)
    assert qcutlass.gemm_w8a8(p.a, single, p.a_scale, one.squeeze()).shape == (2, 16)


@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3), (2, 1, 4), (0,), (2, 0)])
def test_leading_dimensions_of_activations_and_their_scales(leading: tuple[int, ...], seed: int) -> None:
    rows = torch.Size(leading).numel()
    p = EightBitCase(max(rows, 1), 20, 64, torch.int8, azp="each").random(seed=seed)
    assert p.a_scale is not None
    assert p.azp is not None
    a, scale, azp = p.a[:rows].reshape(*leading, 64), p.a_scale[:rows], p.azp[:rows]
    expected = multiply(replace(p, a=p.a[:rows], a_scale=scale, azp=azp)).reshape(*leading, 20)
    for shape in ((rows,), (rows, 1), leading, (*leading, 1)):
        out = multiply(replace(p, a=a, a_scale=scale.reshape(shape), azp=azp.reshape(shape)))
        testing.assert_equal(out, expected, label=shape)


@pytest.mark.parametrize("m", [2, 40])
def test_strides_of_operands(m: int, seed: int) -> None:
    p = EightBitCase(m, 33, 96, azp="each", bias=True).random(seed=seed)
    expected = multiply(p)
    wide = torch.zeros(m, 2 * 96, dtype=torch.int8)[:, ::2].copy_(p.a)
    every_second = torch.zeros(2 * m, 96, dtype=torch.int8)[::2].copy_(p.a)
    for a in (wide, every_second, p.a.T.contiguous().T):
        testing.assert_equal(multiply(replace(p, a=a)), expected)
    for name in ("a_scale", "w_scale", "bias", "azp"):
        value = getattr(p, name)
        spaced = torch.zeros(2 * len(value), dtype=value.dtype)[::2].copy_(value)
        testing.assert_equal(multiply(replace(p, **{name: spaced})), expected, label=name)
    assert p.azp is not None
    for name in ("a_scale", "azp"):
        p = replace(p, **{name: getattr(p, name)[:1].expand(m)})
    assert_correct(multiply(replace(p, a=p.a[:1].expand(m, 96))), replace(p, a=p.a[:1].expand(m, 96)))


@pytest.mark.parametrize("out_dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize("m", [1, 9, 66])
def test_nothing_around_the_inputs_is_used_or_around_the_output_written(
    m: int, out_dtype: torch.dtype, seed: int
) -> None:
    floating = out_dtype.is_floating_point
    case = EightBitCase(m, 45, 117, torch.int8, out_dtype, azp="each", bias=floating)
    p = replace(case, activation="silu" if floating else None).random(seed=seed)
    for offset, padding in [(0, 3), (1, 0), (3, 8), (5, 1)]:
        boxes = {
            name: testing.Poisoned.around(value, offset=offset, padding=padding).tensor
            for name in ("a", "a_scale", "w_scale", "bias", "azp")
            if (value := getattr(p, name)) is not None
        }
        box = testing.Poisoned((m, 45), out_dtype, offset=offset, padding=padding)
        assert multiply(replace(p, **boxes), out=box.tensor) is box.tensor
        box.check(p)
        assert_correct(box.tensor, p)


@pytest.mark.parametrize("m", [3, 40])
def test_out_of_any_strides(m: int, seed: int) -> None:
    p = EightBitCase(m, 20, 64).random(seed=seed)
    expected = multiply(p)
    half = {"dtype": torch.float16}
    for out in (torch.zeros(20, m, **half).T, torch.zeros(m, 40, **half)[:, ::2], torch.zeros(2 * m, 20, **half)[::2]):
        assert multiply(p, out=out) is out
        testing.assert_equal(out, expected, label=p)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bias_of_any_type(dtype: torch.dtype, seed: int) -> None:
    p = EightBitCase(6, 48, 128, bias=True, bias_dtype=dtype, out_dtype=torch.bfloat16).random(seed=seed)
    assert_correct(multiply(p), p)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_of_scales_and_bias_propagate(activation: str | None, value: float, seed: int) -> None:
    for name in ("a_scale", "w_scale", "bias"):
        p = EightBitCase(6, 33, 100, bias=True, activation=activation).random(seed=seed)
        getattr(p, name)[3] = value
        assert_correct(multiply(p), p, f"{name}: {p}")


def test_large_layers_on_any_number_of_threads(seed: int) -> None:
    threads = torch.get_num_threads()
    for m in (1, 65, 200):
        p = EightBitCase(m, 1027, 4100, out_dtype=torch.int32).random(seed=seed)
        expected = p.integer_sums()
        try:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                testing.assert_equal(multiply(p), expected, label=p)
        finally:
            torch.set_num_threads(threads)


def test_no_channels_and_no_rows() -> None:
    packed = qcutlass.preprocess_weights(torch.empty(0, 64, dtype=torch.int8), 8, activations="int8")
    a, one = torch.ones(3, 64, dtype=torch.int8), torch.ones(1)
    assert qcutlass.gemm_w8a8(a, packed, one, torch.ones(0)).shape == (3, 0)
    assert qcutlass.gemm_w8a8(a, packed, one, one).shape == (3, 0)
    packed = qcutlass.preprocess_weights(torch.zeros(16, 64, dtype=torch.int8), 8, activations="int8")
    assert qcutlass.gemm_w8a8(a[:0], packed, torch.ones(0), torch.ones(16)).shape == (0, 16)


@pytest.mark.parametrize("name", ["a_scale", "w_scale", "bias", "activation", "residual"])
def test_integer_sums_take_neither_scales_nor_an_epilogue(name: str) -> None:
    values = INT8.random(INT8.whole, seed=1).values
    sums: dict[str, Any] = values | dict.fromkeys(("a_scale", "w_scale", "bias", "activation", "residual"))
    sums["out_dtype"] = torch.int32
    assert qcutlass.gemm_w8a8(**sums).dtype == torch.int32
    with pytest.raises(ValueError, match=rf"{name}: expected None with out_dtype=torch.int32"):
        qcutlass.gemm_w8a8(**sums | {name: values[name]})


def test_n_is_not_taken_from_a_row_of_scales() -> None:
    values = INT8.random(INT8.whole, seed=1).values
    packed = values["w_packed"]
    with pytest.raises(ValueError, match=r"w_scale: expected shape \[N\] \(w_scale: or \[N, 1\]\), got \[1, 48\]"):
        qcutlass.gemm_w8a8(values["a_q"], packed, values["a_scale"], ones(1, N))
    out = qcutlass.gemm_w8a8(values["a_q"], packed, values["a_scale"], ones(N, 1))
    assert out.shape == (M, N)


def test_pairs_and_names_of_other_types() -> None:
    packed = INT8.random(INT8.whole, seed=1).values["w_packed"]
    with pytest.raises(TypeError, match=r"shape: expected a pair of ints \(N, K\), got 3"):
        qcutlass.unpack_weights(packed, 8, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"shape\[1\]: expected an int, got float"):
        qcutlass.unpack_weights(packed, 8, (N, 128.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"activations: expected .* got list"):
        qcutlass.preprocess_weights(ones(16, 32, dtype=torch.int8), 8, [])  # type: ignore[arg-type]
    q = qcutlass.quantize(torch.ones(16, 64))
    with pytest.raises(TypeError, match=r"rows: expected a pair of ints \(begin, end\)"):
        qcutlass.dequantize(qcutlass.preprocess_weights(q.codes, 4), q.scales, q.zeros, k=64, rows=(3,))  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", OF_INTEGER_SUMS)
def test_every_fault_of_integer_sums_is_rejected(fault: type[Model], seed: int) -> None:
    p = INT8.integer_case.random(seed=seed)
    testing.assert_equal(Model(p).run(), p.integer_sums())
    with pytest.raises(AssertionError, match=r"\d+ of \d+ elements differ"):
        testing.assert_equal(fault(p).run(), p.integer_sums())


def test_faults_between_two_roundings_are_told_from_fp32_ones(seed: int) -> None:
    """The bound of int8 products is as narrow as their roundings: a sum that was rounded to 22 bits is out of it."""
    p = EightBitCase(64, 256, 1024, out_dtype=torch.float32).random(seed=seed)
    total = p.sums().double()
    coarse = (total + total * 2.0**-21).float()
    scaled = Model(p).scale(coarse.double())
    assert testing.error_ratio(scaled, p.reference()) > 1


def test_every_code_occurs_in_random_problems(seed: int) -> None:
    p = EightBitCase(64, 256, 1024).random(seed=seed)
    assert len(p.a.unique()) == len(p.w.unique()) == 256


def test_everything_around_a_product_compiles_in_one_graph() -> None:
    p = EightBitCase(4, 33, 100, torch.int8, azp="each").random(seed=1)
    plain = EightBitCase(4, 33, 100, torch.float8_e4m3fn).random(seed=1)
    assert plain.a_scale is not None
    assert plain.w_scale is not None
    plain_scales = plain.a_scale, plain.w_scale

    def everything(w: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        packed = qcutlass.preprocess_weights(w, 8, activations="int8")
        sums = qcutlass.weight_sums(packed, 33)
        qcutlass.gemm_w8a8(p.a, packed, p.a_scale, p.w_scale, azp=p.azp, w_sums=sums, out=out)
        return sums, qcutlass.gemm_fp8(plain.a, plain.w, *plain_scales)

    out = torch.full((4, 33), torch.nan, dtype=torch.float16)
    sums, of_fp8 = torch.compile(everything, fullgraph=True, backend="aot_eager")(p.w, out)
    testing.assert_equal(sums, p.w.sum(1, dtype=torch.int32))
    testing.assert_equal(out, multiply(p))
    testing.assert_equal(of_fp8, multiply(replace(plain, out_dtype=torch.bfloat16)))


def test_calls_that_differ_in_n_are_told_apart() -> None:
    p = EightBitCase(4, 48, 96, bias=True).random(seed=1)
    product = INT8.product(p)
    assert p.w_scale is not None
    assert p.bias is not None
    part = replace(p, w=p.w[:47], w_scale=p.w_scale[:47], bias=p.bias[:47])
    for _ in range(2):
        assert_correct(product(), p)
        assert_correct(product(n=47, w_scale=part.w_scale, bias=part.bias), part)
    with pytest.raises(TypeError, match="n: expected an int"):
        product(n=48.0)
