"""qcutlass.gemm_fp8 on CPU tensors against oracles E and T; formats, and sums that are promoted too late."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.python.eight_bit import ACTIVATIONS, FLOAT8, FLOATS, ROWS, arguments, assert_correct, multiply
from tests.python.kinds.description import Judged
from tests.python.kinds.float8 import FLOAT8_PRODUCTS, NotPromoted, Promoted, PromotedEvery512

import qcutlass
from qcutlass import _C, testing
from qcutlass.products import launching
from qcutlass.products.kinds import KINDS
from qcutlass.testing import EightBitCase

BYTES = torch.arange(256, dtype=torch.uint8)


def test_every_number_of_rows(seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    for m in ROWS:
        for dtype in FLOAT8:
            case = EightBitCase(m, 67, 333, dtype, choose.choice(FLOATS), bias=choose.random() < 0.5)
            assert_correct(multiply(p := case.random(seed=next(seeds))), p)
            problem, expected = case.exact(seed=next(seeds))
            testing.assert_equal(multiply(problem), expected, label=problem)


@pytest.mark.parametrize("m", [1, 6])
def test_residues_of_channels_and_columns(m: int, seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    residues = [(n, choose.randrange(1, 200)) for n in range(1, 36)]
    residues += [(choose.randrange(1, 40), k) for k in range(1, 70)]
    for n, k in residues:
        case = EightBitCase(m, n, k, choose.choice(FLOAT8), choose.choice(FLOATS))
        problem, expected = case.exact(seed=next(seeds))
        testing.assert_equal(multiply(problem), expected, label=problem)


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_combination(dtype: torch.dtype, out_dtype: torch.dtype, seeds: Iterator[int]) -> None:
    scopes = ("one", "each")
    for a_scale, w_scale, bias in itertools.product(scopes, scopes, (False, True)):
        for activation in ACTIVATIONS:
            case = EightBitCase(9, 50, 96, dtype, out_dtype, a_scale, w_scale, bias=bias, activation=activation)
            assert_correct(multiply(p := case.random(seed=next(seeds))), p)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_number_of_both_formats(dtype: torch.dtype) -> None:
    """One product of two numbers an output: all pairs, exact in fp32, NaN and infinities among them."""
    a, w = BYTES.view(dtype)[:, None], BYTES.view(torch.float8_e4m3fn)[:, None]
    one = torch.ones(1)
    p = testing.EightBitProblem(a, w, one, one, out_dtype=torch.float32)
    assert int(a.float().isnan().sum()) == (2 if dtype == torch.float8_e4m3fn else 6)
    expected = a.float() * w.float().T
    testing.assert_equal(multiply(p), expected)
    for k in (31, 32, 40):  # at every place of a tile, beside zeros
        for place in range(k):
            wide = torch.zeros(256, k).to(torch.float8_e4m3fn)
            wide[:, place] = w[:, 0]
            row = torch.zeros(1, k).to(dtype)
            row[0, place] = 1.0
            testing.assert_equal(multiply(replace(p, a=row, w=wide)), w.float().T, label=place)


def test_plain_weights_are_packed_at_the_call(seed: int) -> None:
    for n, k in [(1, 1), (40, 100), (48, 128)]:
        p = EightBitCase(5, n, k, torch.float8_e4m3fn, torch.bfloat16, bias=True).random(seed=seed)
        assert p.a_scale is not None
        assert p.w_scale is not None
        expected = multiply(p)
        strided = torch.zeros(n, 2 * k).to(torch.float8_e4m3fn)[:, ::2]
        strided.copy_(p.w)
        for w in (p.w, strided, p.w.T.contiguous().T):
            for _ in range(2):
                out = qcutlass.gemm_fp8(p.a, w, p.a_scale, p.w_scale, **p.keywords)
                testing.assert_equal(out, expected, label=p)


def test_packing_is_undone_by_unpacking_and_equals_that_of_int8() -> None:
    w = BYTES.repeat(40, 1)[:, :200].contiguous()
    packed = qcutlass.preprocess_weights(w.view(torch.float8_e4m3fn), 8, activations="fp8")
    assert packed.dtype == torch.float8_e4m3fn
    as_int8 = qcutlass.preprocess_weights(w.view(torch.int8), 8, activations="int8")
    testing.assert_equal(packed.view(torch.int8), as_int8)
    back = qcutlass.unpack_weights(packed, 8, (40, 200))
    testing.assert_equal(back.view(torch.uint8), w)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("m", [1, 40])
def test_nan_and_infinity_propagate(m: int, value: float, seed: int) -> None:
    for name in ("a", "a_scale", "bias"):
        case = EightBitCase(m, 33, 100, torch.float8_e5m2, bias=True)
        p = case.random(seed=seed)
        getattr(p, name)[..., -1] = value
        assert_correct(multiply(p), p, f"{name}: {p}")


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("m", [1, 9, 66])
def test_nothing_around_the_inputs_is_used_or_around_the_output_written(
    m: int, out_dtype: torch.dtype, seed: int
) -> None:
    p = EightBitCase(m, 45, 117, torch.float8_e4m3fn, out_dtype, bias=True, activation="gelu").random(seed=seed)
    for offset, padding in [(0, 3), (1, 0), (3, 8), (5, 1)]:
        boxes = {
            name: testing.Poisoned.around(getattr(p, name), offset=offset, padding=padding).tensor
            for name in ("a", "a_scale", "w_scale", "bias")
        }
        box = testing.Poisoned((m, 45), out_dtype, offset=offset, padding=padding)
        assert multiply(replace(p, **boxes), out=box.tensor) is box.tensor
        box.check(p)
        assert_correct(box.tensor, p)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_gpus_without_fp8_instructions_are_refused_by_name(dtype: torch.dtype) -> None:
    product = arguments(EightBitCase(16, 4096, 4096, dtype))
    for capability in (80, 86):
        with pytest.raises(qcutlass.UnsupportedError, match=rf"float8.* {capability / 10}"):
            _C.select(product, _C.DeviceTraits(capability, 108, 166912))
    assert _C.select(product, _C.DeviceTraits(89, 142, 101376)).tactic.startswith("w8a8_")


def test_views_and_leading_dimensions_of_activations(seed: int) -> None:
    p = EightBitCase(24, 40, 96, torch.float8_e5m2).random(seed=seed)
    expected = multiply(p)
    wide = torch.zeros(24, 192).to(p.a.dtype)[:, ::2]
    wide.copy_(p.a)
    for a in (wide, p.a.T.contiguous().T):
        testing.assert_equal(multiply(replace(p, a=a)), expected)
    testing.assert_equal(multiply(replace(p, a=p.a.view(4, 6, 96))), expected.view(4, 6, 40))
    batched = p.a.view(4, 6, 96).transpose(0, 1)
    assert p.a_scale is not None
    out = multiply(replace(p, a=batched, a_scale=p.a_scale.view(4, 6).T))
    testing.assert_equal(out, expected.view(4, 6, 40).transpose(0, 1))


def test_large_layers_on_any_number_of_threads(seed: int) -> None:
    threads = torch.get_num_threads()
    for m in (1, 70):
        p = EightBitCase(m, 515, 4100, torch.float8_e4m3fn, torch.float32).random(seed=seed)
        first = multiply(p)
        assert_correct(first, p)
        try:
            torch.set_num_threads(3)
            testing.assert_equal(multiply(p), first, label=p)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("k", [129, 449, 1024])
def test_sums_that_are_promoted_too_late_are_rejected(k: int, dtype: torch.dtype, seed: int) -> None:
    case = EightBitCase(32, 48, k, dtype, torch.float32)
    wide, narrow = Judged(case, {"aligned": True}), Judged(case)
    accepted, ratio = FLOAT8_PRODUCTS.verdicts(Promoted, wide, seed)
    assert accepted, "sums of 128 small integers are exact"
    assert ratio <= 1, f"the sound loop is rejected: ratio {ratio}, seed {seed}"
    assert FLOAT8_PRODUCTS.verdicts(Promoted, narrow, seed)[1] > 1, "the bound of fp32 sums is narrower"
    if k > 256:
        for fault in (PromotedEvery512, NotPromoted):
            found = FLOAT8_PRODUCTS.verdicts(fault, wide, seed)[1]
            assert found > 1, f"{fault.__name__}: {found}, seed {seed}"


def test_int8_and_fp8_calls_of_equal_options_are_told_apart() -> None:
    launching.forget()
    for seed in (1, 2):
        for dtype in (torch.int8, *FLOAT8):
            p = EightBitCase(4, 48, 96, dtype, torch.bfloat16).random(seed=seed)
            assert_correct(multiply(p), p)
    assert {name: len(kind.launches) for name, kind in KINDS.items() if len(kind.launches)} == {
        "gemm_w8a8": 1,
        "gemm_fp8": 2,
    }
