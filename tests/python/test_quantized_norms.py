"""Norms that are quantised in the same pass: the bits are those of the norm and of the quantiser behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.python.eight_bit import needs_instructions
from tests.python.modules import randn, random_linear
from tests.python.running import assert_replays
from torch import Tensor

from qcutlass import FP8, W8A8, QuantLinear, quantize_activations, testing
from qcutlass.products.decoder_operators import (
    NORM_CODES,
    add_rms_norm_quantized,
    rms_norm,
    rms_norm_quantized,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5
SHAPES = [(1, 4096), (1, 1, 576), (3, 5, 64), (300, 1000), (2, 1), (7, 33), (17, 1028), (2, 8200), (3, 20001)]

codes_of = pytest.mark.parametrize("code", NORM_CODES, ids=str)
static = pytest.mark.parametrize("scale", [None, 0.017], ids=["each row", "static"])


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return randn(*shape, seed=seed).to(device, dtype)


def given(scale: float | None, device: str) -> Tensor | None:
    return None if scale is None else torch.tensor([scale], device=device)


def in_turn(x: Tensor, weight: Tensor, code: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, codes and scale by two operators."""
    normed = rms_norm(x, weight, EPS)
    codes, scales, *_ = quantize_activations(normed, dtype=code, scale=scale)
    return normed, codes, scales


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    (normed, codes, scale), (wanted, wanted_codes, wanted_scale) = found, expected
    testing.assert_equal(normed, wanted, label="norm")
    assert codes.dtype == wanted_codes.dtype
    testing.assert_equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8), label="codes")
    testing.assert_equal(scale, wanted_scale, label="scale")


@pytest.mark.parametrize("device", DEVICES)
@static
@codes_of
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_both_in_turn(
    shape: tuple[int, ...], dtype: torch.dtype, code: torch.dtype, scale: float | None, device: str, seed: int
) -> None:
    x, residual = (numbers(*shape, seed=seed + i, dtype=dtype, device=device) for i in range(2))
    one = given(scale, device)
    for kind in {torch.float32, dtype}:
        weight = numbers(shape[-1], seed=seed + 2, dtype=kind, device=device)
        total, *found = add_rms_norm_quantized(x, residual, weight, EPS, code, one)
        testing.assert_equal(total, x + residual, label="sum")
        expected = in_turn(total, weight, code, one)
        assert_same(tuple(found), expected)
        assert_same(rms_norm_quantized(total, weight, EPS, code, one), expected)


@pytest.mark.parametrize("device", DEVICES)
@static
@codes_of
def test_rows_at_any_address(code: torch.dtype, scale: float | None, device: str, seed: int) -> None:
    rows = numbers(5, 131, seed=seed, dtype=torch.float16, device=device)
    weight, one = numbers(128, seed=seed + 1, device=device), given(scale, device)
    for first in (0, 1, 3):
        x = rows[:, first : first + 128]
        total, *found = add_rms_norm_quantized(x, x, weight, EPS, code, one)
        assert_same(tuple(found), in_turn(total, weight, code, one))


@pytest.mark.parametrize("device", DEVICES)
@static
@codes_of
@pytest.mark.parametrize("columns", [65, 512, 9000])
def test_what_is_not_finite(columns: int, code: torch.dtype, scale: float | None, device: str, seed: int) -> None:
    """NaN and infinities of the input, of the sum and of the weights; rows of zeros; scales that are none."""
    x, one = numbers(6, columns, seed=seed, dtype=torch.float16, device=device), given(scale, device)
    weight = numbers(columns, seed=seed + 1, device=device)
    x[1, 3], x[2, columns // 2], x[3, -1], x[4] = torch.nan, torch.inf, -torch.inf, 0
    x[5] = 60000  # and their sum overflows
    total, *found = add_rms_norm_quantized(x, x, weight, EPS, code, one)
    testing.assert_equal(total, x + x)
    expected = in_turn(total, weight, code, one)
    assert expected[0].isnan().any(dim=-1).tolist() == [False, True, True, True, False, True]
    assert_same(tuple(found), expected)
    finite = numbers(2, columns, seed=seed + 2, dtype=torch.float16, device=device)
    weight[columns // 3] = torch.nan
    assert_same(rms_norm_quantized(finite, weight, EPS, code, one), in_turn(finite, weight, code, one))
    weight[columns // 3] = torch.inf
    assert_same(rms_norm_quantized(finite, weight, EPS, code, one), in_turn(finite, weight, code, one))
    for extreme in (torch.nan, torch.inf, 1e-30, 1e30):
        other = given(extreme, device)
        assert_same(rms_norm_quantized(x, weight, EPS, code, other), in_turn(x, weight, code, other))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [W8A8(), FP8()], ids=str)
def test_products_behind_codes_read_what_was_written(scheme: Any, seed: int) -> None:
    """They start while the norm runs; norms of three rows take turns, whose codes and scales memory holds by turns."""
    needs_instructions(torch.float8_e4m3fn if isinstance(scheme, FP8) else torch.int8)
    k, weight = 4096, torch.ones(4096, device="cuda")
    layer: Any = QuantLinear.from_linear(random_linear(512, k, seed), scheme).cuda()
    inputs = [(i + 1) * numbers(3, k, seed=seed + i, dtype=torch.float16, device="cuda") for i in range(3)]
    expected = [layer(rms_norm(x, weight, EPS)) for x in inputs]
    residual, outs = torch.zeros_like(inputs[0]), []
    add_rms_norm_quantized(inputs[0], residual, weight, EPS, *layer.input_codes)  # kernels are loaded before a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs * 7:
            total, normed, *ready = add_rms_norm_quantized(x, residual, weight, EPS, *layer.input_codes)
            layer._ready_codes = lambda a, ready=ready: (*ready, None)
            outs.append(layer(normed))
            residual.copy_(total - x)
    assert_replays(graph, outs, expected)


@pytest.mark.gpu
@static
@codes_of
def test_norms_in_a_graph(code: torch.dtype, scale: float | None, seed: int) -> None:
    x = numbers(5, 4096, seed=seed, dtype=torch.bfloat16, device="cuda")
    weight, one = numbers(4096, seed=seed + 1, device="cuda"), given(scale, "cuda")
    add_rms_norm_quantized(x, x, weight, EPS, code, one)  # kernels are loaded before a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, *found = add_rms_norm_quantized(x, x, weight, EPS, code, one)
    for value in (None, torch.nan, 1.0):
        if value is not None:
            x[2, 7] = value
        graph.replay()
        assert_same(tuple(found), in_turn(x + x, weight, code, one))


def test_results_do_not_depend_on_the_number_of_threads(seed: int) -> None:
    x, weight = numbers(300, 576, seed=seed), numbers(576, seed=seed + 1)
    x[150, 4] = torch.nan
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append([rms_norm_quantized(x, weight, EPS, torch.int8, one) for one in (None, given(0.02, "cpu"))])
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        assert_same(one, three)


@codes_of
@static
def test_operators_are_torch_operators(code: torch.dtype, scale: float | None, seed: int) -> None:
    x, weight, one = numbers(2, 3, 64, seed=seed), numbers(64, seed=seed + 1), given(scale, "cpu")
    torch.library.opcheck(torch.ops.qcutlass.rms_norm_quantized.default, (x, weight, EPS, code, one))
    torch.library.opcheck(torch.ops.qcutlass.add_rms_norm_quantized.default, (x, x + 1, weight, EPS, code, one))
    assert_same(torch.ops.qcutlass.rms_norm_quantized(x, weight, EPS, code, one), in_turn(x, weight, code, one))


@codes_of
@static
def test_functions_compile_without_a_break(code: torch.dtype, scale: float | None, seed: int) -> None:
    def both(x: Tensor, weight: Tensor, one: Tensor | None) -> tuple[Tensor, ...]:
        total, normed, codes, scales = add_rms_norm_quantized(x, x, weight, EPS, code, one)
        return total, normed, codes.float(), scales, rms_norm_quantized(total, weight, EPS, code, one)[1].float()

    arguments = numbers(2, 3, 64, seed=seed), numbers(64, seed=seed + 1), given(scale, "cpu")
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for out, expected in zip(compiled(*arguments), both(*arguments), strict=True):
            testing.assert_equal(out, expected)


@static
def test_there_may_be_no_rows(scale: float | None) -> None:
    empty, one = torch.empty(0, 64), given(scale, "cpu")
    total, *found = add_rms_norm_quantized(empty, empty, torch.ones(64), EPS, torch.int8, one)
    assert total.shape == (0, 64)
    assert_same(tuple(found), in_turn(empty, torch.ones(64), torch.int8, one))


X, ONE = torch.ones(2, 64), torch.ones(1)
WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "codes": (
        lambda: rms_norm_quantized(X, X[0], EPS, torch.float8_e5m2),
        TypeError,
        "dtype: expected torch.int8 or torch.float8_e4m3fn, got torch.float8_e5m2; quantize_activations takes others",
    ),
    "scales": (
        lambda: rms_norm_quantized(X, X[0], EPS, torch.int8, torch.ones(2)),
        ValueError,
        r"scale: expected one element, shape \[\] or \[1\], got \[2\]; leave it out for one a row",
    ),
    "type of scale": (
        lambda: rms_norm_quantized(X, X[0], EPS, torch.int8, ONE.half()),
        TypeError,
        "scale: expected a tensor of float32, got float16",
    ),
    "device": (
        lambda: rms_norm_quantized(X, X[0], EPS, torch.int8, ONE.to("meta")),
        ValueError,
        "scale is on meta, x is on cpu",
    ),
    "residual": (
        lambda: add_rms_norm_quantized(X, X[0], X[0], EPS, torch.int8),
        ValueError,
        "residual: expected the shape of x",
    ),
    "gradient": (
        lambda: rms_norm_quantized(X, X[0], EPS, torch.int8, torch.nn.Parameter(torch.ones(1))),
        RuntimeError,
        "scale requires grad, but qcutlass is for inference",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
