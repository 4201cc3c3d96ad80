"""A thousand launches of every kernel of asynchronous MMAs give the same bits, beside a neighbour that comes and goes.

Their warps meet at barriers in memory alone, and blocks exchange operands and sums: what goes wrong there does so now
and then.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.python.running import captured
from tests.python.wgmma_products import PRODUCTS, Shape, on_gpu
from torch import Tensor

pytestmark = pytest.mark.gpu

# Six tiles of 128 tokens and three of 256, in pairs, the last one ragged: rings go round; and more tiles than SMs.
LONG, WIDE = (712, 300, 1992), (712, 8960, 520)
# Shares of K: clusters of three add theirs; eight go through memory, and the kernel that adds them starts early.
CASES = {"long": (LONG, 1), "cluster": (LONG, 3), "memory": (LONG, 8), "wide": (WIDE, 1), "last wave": (WIDE, 2)}
LAUNCHES, REPLAYS = 50, 20


@pytest.mark.parametrize(("shape", "split_k"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_thousand_launches_give_the_same_bits(name: str, shape: Shape, split_k: int, ledger: Any) -> None:
    product, tactics = on_gpu(name, shape)
    busy, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, dtype=torch.float16, device="cuda")
    for tactic in tactics:
        first = product.run(product.a, tactic=tactic, split_k=split_k)

        def launch_all(forced: str = tactic) -> list[tuple[Tensor, ...]]:
            return [product.run(product.a, tactic=forced, split_k=split_k) for _ in range(LAUNCHES)]

        launches, replay = captured(launch_all)
        for round_ in range(REPLAYS):
            with torch.cuda.stream(busy):
                for _ in range(round_):
                    torch.mm(matrix, matrix)
            replay()
            for expected, *outs in zip(first, *launches, strict=True):
                ledger.equal(torch.stack(outs), expected.expand(LAUNCHES, *expected.shape), f"{name}: {tactic}")
