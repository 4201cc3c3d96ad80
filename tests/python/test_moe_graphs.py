"""The block of a mixture of experts in graphs: those of torch.compile, for any number of tokens, and those of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from tests.python.running import captured
from tests.python.test_moe import CASES, CODES, arguments, assert_right, case_on, on_both, options
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from qcutlass import moe, testing
from qcutlass.testing.moe import MoeProblem

Block = Callable[[Tensor, Tensor, Tensor], Tensor]


def block_of(problem: MoeProblem, alone: bool = False) -> Block:
    """The block as torch.compile takes it, with operations before and behind it that it may fuse, or alone."""
    _, gate_up, down, _, _ = arguments(problem)

    def block(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.experts(x, gate_up, down, ids, weights, **options(problem.case))

    return block if alone else lambda x, ids, weights: block(x + 1, ids, weights.softmax(-1)) * 2


def assert_same(compiled: Block, block: Block, problem: MoeProblem, *tokens: int) -> None:
    """Bit for bit, for the first tokens of a problem."""
    for count in tokens:
        part = problem.tokens(slice(0, count))
        given = part.x, part.topk_ids, part.topk_weights
        testing.assert_equal(compiled(*given), block(*given), label=count)


@on_both
@pytest.mark.parametrize("name", ["bias and zeros", "minimums", "MXFP4, gpt-oss", "NVFP4"])
def test_any_number_of_tokens_has_one_graph(name: str, device: str, seed: int) -> None:
    problem = replace(case_on(name, device), tokens=300).random(device=device, seed=seed)
    block, graphs = block_of(problem), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=graphs, dynamic=True)
    with torch.no_grad():
        assert_same(compiled, block, problem, 7, 64, 300)
        assert graphs.frame_count == 1
        assert_same(compiled, block, problem, 0, 1)  # numbers that torch makes graphs of their own for


@on_both
def test_the_block_compiles_to_the_end(device: str, seed: int) -> None:
    """On the CPU without operations around it, which the compiler of C++ takes long for."""
    problem = case_on("bias and zeros", device).random(device=device, seed=seed)
    block = block_of(problem, alone=device == "cpu")
    with torch.no_grad():
        assert_same(torch.compile(block, fullgraph=True, dynamic=True), block, problem, 7, 20)


CAPTURED: Final = {
    **{name: CASES[name] for name in ("gpt-oss", "many rows", "bias and zeros", *CODES)},
    "one token": replace(CASES["top 8 of 128"], tokens=1),
}


def in_other_orders(given: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """The arguments of a block whose experts have their columns in an order of their own each."""
    x, gate_up, down, *routing = given
    g = torch.Generator().manual_seed(seed)

    def ordered(weights: moe.ExpertWeights, columns: int) -> moe.ExpertWeights:
        perm = torch.stack([torch.randperm(columns, generator=g) for _ in weights.w_packed])
        return weights._replace(perm=perm.int().to(x.device))

    return x, ordered(gate_up, x.shape[1]), ordered(down, gate_up.scales.shape[-1] // 2), *routing


@pytest.mark.gpu
@pytest.mark.parametrize("ordered", [False, True], ids=["in order", "in other orders"])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_block_reads_what_is_in_memory_then(name: str, ordered: bool, seed: int) -> None:
    case = CAPTURED[name]
    problem = case.random(device="cuda", seed=seed)
    given = in_other_orders(arguments(problem), seed) if ordered else arguments(problem)
    moe.experts(*given, **options(case))
    torch.cuda.synchronize()
    out, replay = captured(lambda: moe.experts(*given, **options(case)))
    for number in range(3):
        other = replace(case, invalid=0.2 * number).random(device="cuda", seed=seed + 5 + number)
        problem.x.copy_(other.x)
        problem.topk_ids.copy_(other.topk_ids)
        problem.topk_weights.copy_(other.topk_weights)
        replay()
        testing.assert_equal(out, moe.experts(*given, **options(case)))
        if not ordered:
            assert_right(out, problem)
