"""The block of a mixture of experts by every tactic of both of its products: within its bound, tokens in any order."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final

import pytest
import torch
from tests.python.kinds.description import tactics_here
from tests.python.test_moe import CASES, arguments, case_on, computed
from torch import Tensor

import qcutlass
from qcutlass import moe, testing
from qcutlass.products.checks import ACTIVATION_OF_GATE
from qcutlass.products.epilogue import GATE_STEP
from qcutlass.products.moe_operators import gate_rows, sum_slots
from qcutlass.testing.decoder import answer_ratio
from qcutlass.testing.moe import MoeProblem, experts_answer

TOKENS: Final = 300  # experts have more rows than small tiles, one of them than any: another order moves rows of theirs
NAMES: Final = [name for name in CASES if name not in ("ids of others alone", "int32", "more slots than experts")]
ON_CPU: Final = (
    "bias and zeros",
    "odd sizes",
    "MXFP4, gpt-oss",
)  # the chosen kernels alone: that the steps are the block


class Steps:
    """A block in the steps that it consists of, its products by any tactic."""

    def __init__(self, problem: MoeProblem) -> None:
        self.problem, case = problem, problem.case
        self.x, gate_up, down, ids, weights = arguments(problem)
        self.routing = moe.route(ids, case.experts, weights)
        fuses = not case.interleaved and case.limit is None and case.intermediate % GATE_STEP == 0
        self.gate = f"{case.activation}_mul" if fuses else None
        assert self.gate is None or self.gate in ACTIVATION_OF_GATE
        offsets, rows, row_scale = self.routing.offsets, self.routing.rows, self.routing.row_scale
        self.first = parts(gate_up) | {"offsets": offsets, "rows": rows, "activation": self.gate}
        self.second = parts(down) | {"offsets": offsets, "row_scale": row_scale}

    def tactics(self) -> tuple[list[str], list[str]]:
        """Those of the first and of the second product that the device has; none on the CPU."""
        if self.x.is_cpu:
            return [], []
        gated = self.x.new_empty(self.routing.rows.shape[0], self.problem.case.intermediate)
        both, down = (
            tactics_here(qcutlass.gemm_grouped, a, **options)
            for a, options in ((self.x, self.first), (gated, self.second))
        )
        return both, down

    def __call__(self, first: str | None = None, second: str | None = None) -> Tensor:
        """The block; None: by the chosen tactic."""
        case, rows = self.problem.case, qcutlass.gemm_grouped(self.x, **self.first, tactic=first)
        if self.gate is None:
            rows = gate_rows(rows, case.activation, case.limit, None, case.interleaved, self.routing.offsets)
        return sum_slots(qcutlass.gemm_grouped(rows, **self.second, tactic=second), self.routing.order)


def parts(weights: moe.ExpertWeights) -> dict[str, Any]:
    """The arguments of a product."""
    found = weights._asdict()
    del found["interleaved"]
    return found


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cpu") for name in ON_CPU), *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in NAMES)],
)
def test_the_block_by_every_tactic(name: str, device: str, seed: int) -> None:
    """Those of one product in turn beside those of the other from the last one on, so that main loops follow others."""
    problem = replace(case_on(name, device), tokens=TOKENS if device == "cuda" else 20).random(device=device, seed=seed)
    order = torch.randperm(len(problem.x), generator=torch.Generator().manual_seed(seed)).to(device)
    block, permuted = Steps(problem), Steps(problem.tokens(order))
    testing.assert_equal(block(), computed(problem))
    answer = experts_answer(problem, rounds_weights=device == "cuda")
    first, second = block.tactics()
    for tactics in [(None, None), *zip_longest(first, reversed(second))]:
        out = block(*tactics)
        ratio = answer_ratio(out, answer)
        assert ratio <= 1, f"{tactics}: {problem}: {ratio:.3g} times the bound"
        testing.assert_equal(permuted(*tactics), out[order], label=f"{tactics}: {problem}")
