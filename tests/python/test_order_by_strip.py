"""What belongs to groups in the order of strips: the same bits as from matrices, whatever kernel reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qcutlass
from qcutlass import _C, WeightOnly
from qcutlass.algorithms.floating import quantize_nearest
from qcutlass.products.decoder_block import _order_by_strip
from qcutlass.products.product import Product
from qcutlass.products.weight_only import WEIGHT_ONLY, GemmCall

K = 2304  # more than what 4-bit products read of a strip at once

SCHEMES: dict[str, WeightOnly] = {
    "symmetric": WeightOnly(4, 32, symmetric=True),
    "zeros": WeightOnly(4, 64),
    "eight": WeightOnly(8, 16),
    "short": WeightOnly(4, 80, scale_dtype=torch.bfloat16),
    "MXFP4": WeightOnly(4, 32, weight_dtype="e2m1", scale_dtype=torch.float8_e8m0fnu),
    "NVFP4": WeightOnly(4, 16, weight_dtype="e2m1", scale_dtype=torch.float8_e4m3fn),
}

INTEGERS = [name for name, scheme in SCHEMES.items() if scheme.weight_dtype is None] + ["q4_k", "q6_k"]
PRODUCTS = [(name, None) for name in dict.fromkeys((*INTEGERS, *SCHEMES))] + [(name, "int8") for name in INTEGERS]


def _call(kind: str, n: int, m: int, activations: str | None) -> GemmCall:
    a = torch.randn(m, K)
    if kind in SCHEMES:
        q = quantize_nearest(torch.randn(n, K), SCHEMES[kind])
        supers: dict[str, Any] = {}
        scales, zeros, minimums, codes, bits, size = q.scales, q.zeros, None, q.codes, q.bits, q.group_size
        weight_dtype, global_scale = q.weight_dtype, q.global_scale
    else:
        bits, size = (4, 32) if kind == "q4_k" else (8, 16)
        groups, blocks = K // size, K // 256
        codes = torch.randint(0, 2**bits, (n, K), dtype=torch.uint8)
        supers = {"super_scales": torch.rand(blocks, n).half()}
        scales, minimums = torch.randint(-64, 64, (groups, n)).to(torch.int8), None
        if kind == "q4_k":
            scales, minimums = (torch.randint(0, 64, (groups, n), dtype=torch.uint8) for _ in range(2))
            supers["super_minimums"] = torch.rand(blocks, n).half()
        zeros = weight_dtype = global_scale = None
    packed = qcutlass.preprocess_weights(codes, bits)
    options: dict[str, Any] = {"activations": activations, "weight_dtype": weight_dtype, "global_scale": global_scale}
    return GemmCall(a, packed, scales, zeros, group_size=size, bits=bits, minimums=minimums, **options, **supers)


def _made(call: GemmCall, by_strip: bool) -> torch.Tensor:
    shape = call.check(None)
    product = Product(WEIGHT_ONLY, call, shape, torch.empty(len(call.a), shape.n))
    copies = _order_by_strip(product) if by_strip else {}
    assert product.arguments.weights.by_strip == by_strip == bool(copies)
    _C.gemm_host(product.arguments, 2)
    return product.out


@pytest.mark.parametrize("m", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("n", [64, 53, 7, 160])
@pytest.mark.parametrize(("kind", "activations"), PRODUCTS)
def test_same_bits(kind: str, n: int, m: int, activations: str | None, seed: int) -> None:
    torch.manual_seed(seed)
    call = _call(kind, n, m, activations)
    assert torch.equal(_made(call, by_strip=True), _made(call, by_strip=False))


def test_copies_are_of_several_groups_that_leave_a_trace_of_changes() -> None:
    with torch.inference_mode():
        without_trace = _call("symmetric", 64, 1, None)
    one_group = qcutlass.quantize(torch.randn(64, K), bits=4, group_size=-1)
    packed = qcutlass.preprocess_weights(one_group.codes, 4)
    for call in (without_trace, GemmCall(torch.randn(1, K), packed, one_group.scales[0])):
        _made(call, by_strip=False)
        shape = call.check(None)
        product = Product(WEIGHT_ONLY, call, shape, torch.empty(1, shape.n))
        assert not _order_by_strip(product)
        assert not product.arguments.weights.by_strip
