"""Tiles of fewer tokens than kernels have rows for: asynchronous copies bring those that exist alone, and what an
earlier launch left in the rest of shared memory reaches no result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.python.wgmma_products import PRODUCTS, on_gpu, product
from torch import Tensor

SHAPE = (512, 8960, 520)  # more tiles than SMs
ROWS = (1, 3, 17, 65, 100, 129, 200, 257, 385)


def poison(a: Tensor) -> Tensor:
    """Activations that no sum survives, or that change every one."""
    return torch.full_like(a, 127) if a.dtype == torch.int8 else torch.full_like(a.float(), torch.nan).to(a.dtype)


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_of_a_product_do_not_depend_on_how_many_there_are(name: str) -> None:
    """The checks of the GPU tests below, on the CPU: rows agree, and poison shows.

    12 rows are more than a few, for which sums are cut into other parts.
    """
    few = product(name, (20, 70, 300), "cpu")
    assert any("_sm90a_" in tactic for tactic in few.names)
    whole, rows = few.run(few.a), few.run(few.a[:12])
    assert all(torch.equal(out[:12], first) for out, first in zip(whole, rows, strict=True))
    assert not any(torch.equal(out, other) for out, other in zip(whole, few.run(poison(few.a)), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_are_those_of_the_whole_product_whatever_came_before(name: str, ledger: Any) -> None:
    """The rows of fewer tokens are bit for bit those of all of them, and do not depend on what lies behind the last."""
    some, tactics = on_gpu(name, SHAPE)
    for tactic in tactics:
        whole = some.run(some.a, tactic=tactic, split_k=1)
        assert all(out.isfinite().all() for out in whole)
        for rows in ROWS:
            some.run(poison(some.a), tactic=tactic, split_k=1)
            outs = some.run(some.a[:rows], tactic=tactic, split_k=1)
            for out, expected in zip(outs, whole, strict=True):
                ledger.equal(out, expected[:rows], f"{name}: {tactic}, {rows} tokens")
