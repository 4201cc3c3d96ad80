"""One product of every kind that has kernels of asynchronous MMAs, as functions of the rows of activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.python import blockwise, eight_bit
from torch import Tensor

import qcutlass
from qcutlass import testing

Shape = tuple[int, int, int]  # m, n, k


@dataclass(frozen=True)
class Product:
    """run(a, tactic=..., split_k=...) gives the outputs of `a` or of its first rows; explain(...) says how; `names`: of
    all its tactics."""

    a: Tensor
    run: Callable[..., tuple[Tensor, ...]]
    explain: Callable[..., qcutlass.Explanation]
    names: list[str]

    def plan(self, tactic: str, split_k: int) -> Any:
        return self.explain(tactic=tactic, split_k=split_k).plan


def weight_only(shape: Shape, device: str, bits: int, dtype: torch.dtype, zeros: testing.Zeros) -> Product:
    p = testing.Case(*shape, bits, zeros=zeros, dtype=dtype, bias=True).random(device=device, seed=1)
    operands = (qcutlass.preprocess_weights(p.codes, bits=bits), p.scales, p.zeros)
    return Product(
        p.a,
        lambda a, **forced: (qcutlass.gemm(a, *operands, **p.keywords | forced),),
        lambda **forced: qcutlass.explain(qcutlass.gemm, p.a, *operands, **p.keywords | forced),
        qcutlass.tactics(qcutlass.gemm, p.a, *operands, **p.keywords),
    )


def eight_by_eight(shape: Shape, device: str, dtype: torch.dtype) -> Product:
    p = testing.EightBitCase(*shape, dtype, bias=True).random(device=device, seed=1)
    multiply = qcutlass.gemm_w8a8 if dtype == torch.int8 else qcutlass.gemm_fp8
    packed, options = eight_bit.pack(p), {"n": shape[1]} | p.keywords
    return Product(
        p.a,
        lambda a, **forced: (multiply(a, packed, p.a_scale[: len(a)], p.w_scale, **options | forced),),
        lambda **forced: qcutlass.explain(multiply, p.a, packed, p.a_scale, p.w_scale, **options | forced),
        qcutlass.tactics(multiply, p.a, packed, p.a_scale, p.w_scale, **options),
    )


def of_blocks(shape: Shape, device: str, out_size: int | None) -> Product:
    p = testing.BlockwiseCase(*shape, 128, bias=True).random(device=device, seed=1)
    b = blockwise.pack(p)

    def run(a: Tensor, **forced: Any) -> tuple[Tensor, ...]:
        rows = replace(p, a=a, a_s=p.a_s[: len(a)])
        if out_size is None:
            return (blockwise.multiply(rows, b, **forced),)
        return blockwise.multiply_quantized(rows, out_size, b, **forced)

    function, sizes = blockwise.function_of(out_size)
    operands, sizes = (p.a, p.a_s, b, p.b_s), sizes | {"n": shape[1], "block_size": 128}
    return Product(
        p.a,
        run,
        lambda **forced: qcutlass.explain(function, *operands, **sizes | forced),
        qcutlass.tactics(function, *operands, **sizes),
    )


PRODUCTS: dict[str, Callable[[Shape, str], Product]] = {
    "w4a16 fp16": lambda shape, device: weight_only(shape, device, 4, torch.float16, "none"),
    "w4a16 bf16, zeros": lambda shape, device: weight_only(shape, device, 4, torch.bfloat16, "int"),
    "w8a16 fp16": lambda shape, device: weight_only(shape, device, 8, torch.float16, "none"),
    "int8": lambda shape, device: eight_by_eight(shape, device, torch.int8),
    "fp8": lambda shape, device: eight_by_eight(shape, device, torch.float8_e4m3fn),
    "blockwise": lambda shape, device: of_blocks(shape, device, None),
    "blockwise, quantised": lambda shape, device: of_blocks(shape, device, 128),
    "blockwise, quantised finely": lambda shape, device: of_blocks(shape, device, 32),
}


def on_gpu(name: str, shape: Shape) -> tuple[Product, list[str]]:
    """A product on the GPU, and its tactics of asynchronous MMAs."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    product = PRODUCTS[name](shape, "cuda")
    wanted = [tactic for tactic in product.names if "_sm90a_" in tactic]
    assert wanted
    return product, wanted
