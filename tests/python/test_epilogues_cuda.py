"""Gates and residuals in the epilogues of kernels: the bits of separate operators, by every tactic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.eight_bit import needs_instructions
from tests.python.kinds.description import half
from tests.python.test_epilogues import (
    BLOCKS,
    CODES,
    EIGHT,
    FLOATS,
    GATES,
    multiply,
    multiply_blocks,
    multiply_eight,
    multiply_four,
)
from torch import Tensor

import qcutlass
from qcutlass import _C, blockwise, testing
from qcutlass.products.decoder_operators import gate
from qcutlass.products.selection import weight_dtype
from qcutlass.testing import BlockwiseCase, BlockwiseProblem, Case, EightBitCase, Int4Case, Int4Problem, bounds
from qcutlass.testing.blockwise import options_of

pytestmark = pytest.mark.gpu

ROWS = (1, 5, 17, 70, 300)
SPLITS = (0, 1, 3)


def call_of(problem: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The function and operands of a problem's product, and its options."""
    if isinstance(problem, Int4Problem):
        packed = qcutlass.preprocess_weights(problem.codes, 4, "int8" if problem.a.dtype == torch.int8 else "fp8")
        names = ("bias", "activation", "out_dtype", "group_size", "residual")
        operands = qcutlass.gemm_w4a8, problem.a, packed, problem.a_scale, problem.scales, problem.zeros
        return operands, {name: getattr(problem, name) for name in names}
    if isinstance(problem, BlockwiseProblem):
        is_int8 = problem.b.dtype == torch.int8
        packed = qcutlass.preprocess_weights(problem.b, 8, "int8" if is_int8 else "fp8")
        multiplied = blockwise.int8_addmm if is_int8 else blockwise.fp8_gemm
        return (multiplied, problem.a, problem.a_s, packed, problem.b_s), options_of(problem) | {"n": problem.shape[1]}
    if not isinstance(problem, testing.EightBitProblem):
        packed = qcutlass.preprocess_weights(problem.codes, bits=problem.bits)
        return (qcutlass.gemm, problem.a, packed, problem.scales, problem.zeros), problem.keywords
    is_int8 = problem.w.dtype == torch.int8
    packed = qcutlass.preprocess_weights(problem.w, 8, "int8" if is_int8 else "fp8")
    function = qcutlass.gemm_w8a8 if is_int8 else qcutlass.gemm_fp8
    return (function, problem.a, packed, problem.a_scale, problem.w_scale), problem.keywords | {"n": problem.shape[1]}


def tactics_of(problem: Any) -> list[str]:
    """Names of the configurations that this GPU can run for a problem."""
    given, options = call_of(problem)
    names = [candidate.plan.tactic for candidate in qcutlass.explain(*given, **options).candidates]
    return list(dict.fromkeys(names))


def bare(problem: Any) -> Any:
    activation = None if problem.activation in GATES else problem.activation
    return replace(problem, activation=activation, residual=None)


def assert_bits(problem: Any, run: Callable[..., Tensor], ledger: Any) -> None:
    """By every kernel and split: gate and residual as operators behind the product would compute them."""
    compared = 0
    for tactic in tactics_of(problem):
        if tactic.endswith("_dense"):  # torch.mm may add in another order where its result is fp32
            continue
        for split_k in SPLITS:
            options = {"tactic": tactic, "split_k": split_k}
            try:
                expected = run(bare(problem), **options)
            except qcutlass.UnsupportedError:
                continue  # this configuration has no such split
            if problem.activation in GATES:
                expected = gate(problem.activation, *(part.contiguous() for part in bounds.gate_and_up(expected)))
            if problem.residual is not None:
                expected = expected + problem.residual
            ledger.equal(run(problem, **options), expected, f"{tactic} split_k={split_k} {problem}")
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("activation", [*GATES, "silu", None])
@pytest.mark.parametrize("codes", CODES)
def test_bits_are_those_of_separate_operators(
    codes: str, activation: str | None, seeds: Iterator[int], ledger: Any
) -> None:
    for (index, m), dtype in itertools.product(enumerate(ROWS), FLOATS[:2]):
        n = 352 if activation in GATES else (352, 361)[index % 2]  # rows of 361 are not aligned
        residual = activation not in GATES or index in (2, 3)
        case = Case(m, n, 448, dtype=dtype, **{"group_size": 64} | CODES[codes])
        case = replace(case, activation=activation, bias=bool(index % 2), residual=residual)
        assert_bits(case.random(seed=next(seeds), device="cuda"), multiply, ledger)


@pytest.mark.parametrize("activation", [*GATES, "gelu", None])
@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_bits_of_eight_bits(dtype: torch.dtype, activation: str | None, seeds: Iterator[int], ledger: Any) -> None:
    needs_instructions(dtype)
    for index, m in enumerate(ROWS):
        n = 352 if activation in GATES else (352, 361)[index % 2]
        azp = "each" if dtype == torch.int8 and index % 2 else "none"
        case = EightBitCase(m, n, 448, dtype, FLOATS[index % 3], azp=azp, bias=bool(index % 2), activation=activation)  # type: ignore[arg-type]
        case = replace(case, residual=activation not in GATES or index > 1)
        assert_bits(case.random(seed=next(seeds), device="cuda"), multiply_eight, ledger)


@pytest.mark.parametrize("activation", [*GATES, "gelu", None])
@pytest.mark.parametrize("dtype", EIGHT[:2], ids=str)
@pytest.mark.parametrize("group_size", [32, 128])
def test_bits_of_four_by_eight_bits(
    dtype: torch.dtype, group_size: int, activation: str | None, seeds: Iterator[int], ledger: Any
) -> None:
    needs_instructions(dtype)
    for (index, m), out_dtype in itertools.product(enumerate(ROWS), FLOATS):
        n = 352 if activation in GATES else (352, 361)[index % 2]
        case = Int4Case(m, n, 448, dtype, out_dtype, group_size, bias=bool(index % 2), activation=activation)
        case = replace(case, residual=activation not in GATES or index > 1)
        assert_bits(case.random(seed=next(seeds), device="cuda"), multiply_four, ledger)


@pytest.mark.parametrize("activation", [*GATES, "gelu", None])
@pytest.mark.parametrize(("dtype", "size"), BLOCKS, ids=str)
def test_bits_of_blocks(
    dtype: torch.dtype, size: int, activation: str | None, seeds: Iterator[int], ledger: Any
) -> None:
    needs_instructions(dtype)
    for (index, m), out_dtype in itertools.product(enumerate(ROWS), FLOATS):
        n = 352 if activation in GATES else (352, 361)[index % 2]
        case = BlockwiseCase(m, n, 448, size, out_dtype, bias=bool(index % 2), activation=activation, dtype=dtype)
        case = replace(case, residual=activation not in GATES or index > 1)
        assert_bits(case.random(seed=next(seeds), device="cuda"), multiply_blocks, ledger)


@pytest.mark.parametrize("activation", ["silu_mul", None])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
def test_rows_of_other_kinds_at_any_address(
    out_dtype: torch.dtype, activation: str | None, seeds: Iterator[int], ledger: Any
) -> None:
    """Results and residuals that begin anywhere: products of 4 by 8 bits leave the largest tile to aligned ones."""
    kinds: list[tuple[Any, Callable[..., Tensor]]] = [(BlockwiseCase(300, 352, 448), multiply_blocks)]
    if _C.device_traits(torch.cuda.current_device()).wgmma:
        kinds.append((Int4Case(300, 352, 448), multiply_four))
    for case, run in kinds:
        whole = replace(case, out_dtype=out_dtype, activation=activation, residual=True)
        problem = whole.random(seed=next(seeds), device="cuda")
        for tactic in tactics_of(problem):
            expected = run(problem, tactic=tactic)
            rows, columns = expected.shape
            shifted = torch.empty(rows * columns + 1, dtype=out_dtype, device="cuda")[1:].view(rows, columns)
            moved = replace(problem, residual=shifted.copy_(problem.residual))
            if tactic not in tactics_of(moved):
                assert "m160" in tactic
                continue
            box = torch.full((rows, columns + 3), torch.nan, dtype=out_dtype, device="cuda")
            run(moved, out=box[:, 1 : columns + 1], tactic=tactic)
            ledger.equal(box[:, 1 : columns + 1].contiguous(), expected, f"{tactic} {problem}")
            assert bool(box[:, 0].isnan().all())
            assert bool(box[:, columns + 1 :].isnan().all())


def test_rows_are_the_same_bits_whatever_their_number(seed: int) -> None:
    """Kernels for few rows and for many, of integers whose sums are exact, end alike."""
    case = EightBitCase(4096, 512, 1024, torch.int8, torch.float16, activation="silu_mul", residual=True)
    problem = case.random(seed=seed, device="cuda")
    whole = multiply_eight(problem, batch_invariant=True)
    for rows in (1, 64, 300):
        residual = problem.residual
        assert residual is not None
        scale = None if problem.a_scale is None else problem.a_scale[:rows]
        part = replace(problem, a=problem.a[:rows], a_scale=scale, residual=residual[:rows])
        assert torch.equal(multiply_eight(part, batch_invariant=True), whole[:rows])


@pytest.mark.parametrize("activation", [*GATES, "silu"])
def test_gates_and_residuals_together(activation: str, seeds: Iterator[int], ledger: Any) -> None:
    for m in ROWS:
        for dtype in FLOATS[:2]:
            case = Case(m, 352, 448, dtype=dtype, group_size=64, activation=activation, bias=True, residual=True)
            problem = case.random(seed=next(seeds), device="cuda")
            (_, *operands), options = call_of(problem)
            for tactic in tactics_of(problem):
                rounded = weight_dtype(*operands, **options, tactic=tactic)
                ledger.close(multiply(problem, tactic=tactic), problem.reference(rounded), f"{tactic} {problem}")
            eight = EightBitCase(m, 352, 448, activation=activation, bias=True, residual=True)
            whole = eight.random(seed=next(seeds), device="cuda")
            for tactic in tactics_of(whole):
                out = multiply_eight(whole, tactic=tactic)
                ledger.close(out, whole.reference(), f"{tactic} {whole}")


def test_rows_of_any_alignment(seeds: Iterator[int], ledger: Any) -> None:
    """Results and residuals that begin anywhere, and rows of the result apart."""
    for m in (3, 70, 300):
        for activation in ("silu_mul", None):
            case = Case(m, 352, 448, group_size=64, activation=activation, residual=True)
            problem = case.random(seed=next(seeds), device="cuda")
            assert problem.residual is not None
            expected = multiply(problem)
            rows, columns = expected.shape
            shifted = torch.empty(rows * columns + 1, dtype=torch.float16, device="cuda")[1:].view(rows, columns)
            moved = replace(problem, residual=shifted.copy_(problem.residual))
            ledger.equal(multiply(moved), expected, problem)
            repeated = replace(problem, residual=problem.residual[:1].expand(rows, columns))
            ledger.equal(multiply(repeated), multiply(replace(repeated, residual=repeated.residual.clone())), problem)  # type: ignore[union-attr]
            whole = torch.full((rows, columns + 3), torch.nan, dtype=torch.float16, device="cuda")
            multiply(moved, out=whole[:, 1 : columns + 1])
            ledger.equal(whole[:, 1 : columns + 1].contiguous(), expected, problem)
            assert bool(whole[:, 0].isnan().all())
            assert bool(whole[:, columns + 1 :].isnan().all())


@pytest.mark.parametrize("activation", ["silu_mul", None])
def test_aligned_rows_are_written_alone(activation: str | None, seeds: Iterator[int], ledger: Any) -> None:
    """By every kernel, where the last tile has fewer tokens than others, and nothing around them."""
    for m, residual in itertools.product((7, 129, 257), (False, True)):
        case = Case(m, 352, 448, group_size=64, activation=activation, residual=residual)
        problem = case.random(seed=next(seeds), device="cuda")
        (_, *operands), options = call_of(problem)
        for tactic in tactics_of(problem):
            box = testing.Poisoned((m, 352 if activation is None else 176), torch.float16, "cuda", padding=8)
            multiply(problem, out=box.tensor, tactic=tactic, split_k=1)
            box.check(f"{tactic} {problem}")
            rounded = weight_dtype(*operands, **options, tactic=tactic)
            ledger.close(box.tensor.contiguous(), problem.reference(rounded), f"{tactic} {problem}")


def test_graphs_replay_them(seed: int) -> None:
    problem = Case(4, 64, 128, activation="silu_mul", residual=True).random(seed=seed, device="cuda")
    out = half(4, 32).cuda()
    multiply(problem, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(problem, out=out)
    out.fill_(torch.nan)
    graph.replay()
    testing.assert_close(out, problem.reference(), label=problem)


def test_a_residual_is_read_after_what_writes_it(seed: int) -> None:
    """The kernel before in the stream writes the residual, and lets this one start early."""
    problem = Case(1, 4096, 4096, residual=True).random(seed=seed, device="cuda")
    packed = qcutlass.preprocess_weights(problem.codes, bits=4)
    operands = packed, problem.scales, problem.zeros
    first = qcutlass.gemm(problem.a, *operands)
    expected = qcutlass.gemm(first, *operands) + first
    for _ in range(50):
        written = qcutlass.gemm(problem.a, *operands)
        assert torch.equal(qcutlass.gemm(written, *operands, residual=written), expected)
