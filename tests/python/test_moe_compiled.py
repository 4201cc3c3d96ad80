"""The block of a mixture of experts by torch.compile: one graph for any number of tokens, and code of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.python.test_moe import arguments, case_on, on_both, options
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from qcutlass import moe, testing
from qcutlass.testing.moe import MoeProblem

Block = Callable[[Tensor, Tensor, Tensor], Tensor]


def block_of(problem: MoeProblem, alone: bool = False) -> Block:
    """The block as torch.compile takes it, with exact operations before and behind it, or alone."""
    _, gate_up, down, _, _ = arguments(problem)

    def block(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.experts(x, gate_up, down, ids, weights, **options(problem.case))

    return block if alone else lambda x, ids, weights: block(x + 1, ids, weights / 2) * 2


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
