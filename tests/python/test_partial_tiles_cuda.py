"""Tiles of fewer tokens than kernels have rows for: asynchronous copies bring those that exist alone, and what an
earlier launch left in the rest of shared memory reaches no result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python import blockwise, eight_bit
from torch import Tensor

import qcutlass
from qcutlass import testing

pytestmark = pytest.mark.gpu

# product(rows of activations, tactic=...) of all or the first of 512 tokens, of more tiles than a GPU has SMs.
Product = Callable[..., Tensor]
M, N, K = 512, 8960, 520
ROWS = (1, 3, 17, 65, 100, 129, 200, 257, 385)


def weight_only(bits: int) -> tuple[Product, Tensor, list[str]]:
    p = testing.Case(M, N, K, bits, bias=True).random(device="cuda", seed=1)
    operands = (qcutlass.preprocess_weights(p.codes, bits=bits), p.scales, p.zeros)
    return (
        lambda a, **forced: qcutlass.gemm(a, *operands, **p.keywords | forced),
        p.a,
        qcutlass.tactics(p.a, *operands, **p.keywords),
    )


def eight_by_eight(dtype: torch.dtype) -> tuple[Product, Tensor, list[str]]:
    p = testing.EightBitCase(M, N, K, dtype, bias=True).random(device="cuda", seed=1)
    multiply = qcutlass.gemm_w8a8 if dtype == torch.int8 else qcutlass.gemm_fp8
    packed = eight_bit.pack(p)
    options: dict[str, Any] = {"n": N} | p.keywords
    return (
        lambda a, **forced: multiply(a, packed, p.a_scale[: len(a)], p.w_scale, **options | forced),
        p.a,
        qcutlass.tactics(p.a, packed, p.a_scale, p.w_scale, **options),
    )


def of_blocks() -> tuple[Product, Tensor, list[str]]:
    p = testing.BlockwiseCase(M, N, K, 128, bias=True).random(device="cuda", seed=1)
    b = blockwise.pack(p)
    return (
        lambda a, **forced: blockwise.multiply(replace(p, a=a, a_s=p.a_s[: len(a)]), b, **forced),
        p.a,
        qcutlass.tactics(p.a, p.a_s, b, p.b_s, n=N, block_size=128),
    )


PRODUCTS: dict[str, Callable[[], tuple[Product, Tensor, list[str]]]] = {
    "w4a16": lambda: weight_only(4),
    "w8a16": lambda: weight_only(8),
    "int8": lambda: eight_by_eight(torch.int8),
    "fp8": lambda: eight_by_eight(torch.float8_e4m3fn),
    "blockwise": of_blocks,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_are_those_of_the_whole_product_whatever_came_before(name: str, ledger: Any) -> None:
    """The rows of fewer tokens are bit for bit those of all of them, and do not depend on what lies behind the last."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    product, a, names = PRODUCTS[name]()
    poison = torch.full_like(a, 127) if a.dtype == torch.int8 else torch.full_like(a.float(), torch.nan).to(a.dtype)
    wanted = [tactic for tactic in names if "_sm90a_" in tactic]
    assert wanted
    for tactic in wanted:
        whole = product(a, tactic=tactic, split_k=1)
        assert whole.isfinite().all()
        for rows in ROWS:
            product(poison, tactic=tactic, split_k=1)
            out = product(a[:rows], tactic=tactic, split_k=1)
            ledger.equal(out, whole[:rows], f"{tactic}, {rows} tokens")
