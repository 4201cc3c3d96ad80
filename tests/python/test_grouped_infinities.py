"""gemm_grouped with activations that are not finite, by weights that have minimums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.python.test_grouped import product, tactics, weight_dtype

from qcutlass import testing
from qcutlass.testing import Case, GroupedCase


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [0, 8], ids=["one level", "two levels"])
def test_rows_that_are_not_finite(levels: int, seed: int) -> None:
    """An infinite activation makes each output infinite with the sign of its weight, whatever its minimum is."""
    case = Case(9, 72, 512, 4, 32, "minimum", torch.bfloat16, super_groups=levels)
    problem = GroupedCase(case, (2, 0, 3, 1), gathered=False).random(device="cuda", seed=seed)
    problem.a[1::2] = 0
    problem.a[1::2, 300] = torch.inf
    every = tactics(problem)
    assert any("m8" in str(tactic) for tactic in every)  # which scales sums
    for tactic in every:
        out = product(problem, tactic=tactic)
        for rows, part in problem.parts():
            for i, row in enumerate(range(rows.start, rows.stop)):
                if row % 2 == 1:
                    expected = (part.weight()[:, 300] * torch.inf).to(out.dtype)
                    testing.assert_equal(out[row], expected, label=(tactic, row))
                else:
                    ref = replace(part, a=part.a[i : i + 1]).reference(weight_dtype(problem, tactic))
                    testing.assert_close(out[row : row + 1], ref, label=(tactic, row))
