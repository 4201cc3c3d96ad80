"""A thousand launches of every kernel of asynchronous MMAs give the same bits, beside a neighbour that comes and goes.

Their warps meet at barriers in memory alone, and blocks exchange operands and sums: what goes wrong there does so now
and then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.python import blockwise, eight_bit
from tests.python.running import captured
from torch import Tensor

import qcutlass
from qcutlass import testing

pytestmark = pytest.mark.gpu

Product = Callable[..., tuple[Tensor, ...]]

# Six tiles of 128 tokens and three of 256, in pairs, the last one ragged: rings go round; and more tiles than SMs.
Shape = tuple[int, int, int]
LONG, WIDE = (712, 300, 1992), (712, 8960, 520)
LAUNCHES, REPLAYS = 50, 20


def weight_only(shape: Shape, bits: int, dtype: torch.dtype, zeros: testing.Zeros) -> tuple[Product, list[str]]:
    p = testing.Case(*shape, bits, zeros=zeros, dtype=dtype, bias=True).random(device="cuda", seed=1)
    packed = qcutlass.preprocess_weights(p.codes, bits=bits)
    operands = (p.a, packed, p.scales, p.zeros)
    return lambda **forced: (qcutlass.gemm(*operands, **p.keywords | forced),), qcutlass.tactics(
        *operands, **p.keywords
    )


def eight_by_eight(shape: Shape, dtype: torch.dtype) -> tuple[Product, list[str]]:
    p = testing.EightBitCase(*shape, dtype, bias=True).random(device="cuda", seed=1)
    multiply = qcutlass.gemm_w8a8 if dtype == torch.int8 else qcutlass.gemm_fp8
    operands: tuple[Any, ...] = (p.a, eight_bit.pack(p), p.a_scale, p.w_scale)
    options: dict[str, Any] = {"n": shape[1]} | p.keywords
    return lambda **forced: (multiply(*operands, **options | forced),), qcutlass.tactics(*operands, **options)


def of_blocks(shape: Shape, out_size: int | None) -> tuple[Product, list[str]]:
    p = testing.BlockwiseCase(*shape, 128, bias=True).random(device="cuda", seed=1)
    b = blockwise.pack(p)
    names = qcutlass.tactics(p.a, p.a_s, b, p.b_s, n=shape[1], block_size=128, out_block_size=out_size)
    if out_size is None:
        return lambda **forced: (blockwise.multiply(p, b, **forced),), names
    return lambda **forced: blockwise.multiply_quantized(p, out_size, b, **forced), names


PRODUCTS: dict[str, Callable[[Shape], tuple[Product, list[str]]]] = {
    "w4a16 fp16": lambda shape: weight_only(shape, 4, torch.float16, "none"),
    "w4a16 bf16, zeros": lambda shape: weight_only(shape, 4, torch.bfloat16, "int"),
    "w8a16 fp16": lambda shape: weight_only(shape, 8, torch.float16, "none"),
    "int8": lambda shape: eight_by_eight(shape, torch.int8),
    "fp8": lambda shape: eight_by_eight(shape, torch.float8_e4m3fn),
    "blockwise": lambda shape: of_blocks(shape, None),
    "blockwise, quantised": lambda shape: of_blocks(shape, 128),
    "blockwise, quantised finely": lambda shape: of_blocks(shape, 32),
}


# In clusters of three; by way of memory, where the kernel that adds the sums starts early and lets the next one do so.
SHARED = {"long": (LONG, 1), "shared": (LONG, 3), "through memory": (LONG, 8), "wide": (WIDE, 1)}


@pytest.mark.parametrize(("shape", "split_k"), SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_thousand_launches_give_the_same_bits(name: str, shape: Shape, split_k: int, ledger: Any) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    product, names = PRODUCTS[name](shape)
    busy, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, dtype=torch.float16, device="cuda")
    wanted = [tactic for tactic in names if "_sm90a_" in tactic]
    assert wanted
    for tactic in wanted:
        first = product(tactic=tactic, split_k=split_k)

        def launch_all(forced: str = tactic) -> list[tuple[Tensor, ...]]:
            return [product(tactic=forced, split_k=split_k) for _ in range(LAUNCHES)]

        launches, replay = captured(launch_all)
        for round_ in range(REPLAYS):
            with torch.cuda.stream(busy):
                for _ in range(round_):
                    torch.mm(matrix, matrix)
            replay()
            for expected, *outs in zip(first, *launches, strict=True):
                ledger.equal(torch.stack(outs), expected.expand(LAUNCHES, *expected.shape), f"{name}: {tactic}")
