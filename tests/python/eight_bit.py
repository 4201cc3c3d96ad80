"""Calls and checks for tests of 8-by-8-bit products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import _C, testing

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
ROWS = [*range(18), 33, 64, 65, 127, 128, 129]
ACTIVATION_TYPES = {
    torch.int8: _C.DType.INT8,
    torch.float8_e4m3fn: _C.DType.FLOAT8_E4M3,
    torch.float8_e5m2: _C.DType.FLOAT8_E5M2,
}
OUT_TYPES = {
    torch.float16: _C.DType.FLOAT16,
    torch.bfloat16: _C.DType.BFLOAT16,
    torch.float32: _C.DType.FLOAT32,
    torch.int32: _C.DType.INT32,
}


def pack(p: testing.EightBitProblem) -> Tensor:
    return qcutlass.preprocess_weights(p.w, 8, activations="int8" if p.w.dtype == torch.int8 else "fp8")


def multiply(p: testing.EightBitProblem, **keywords: Any) -> Tensor:
    """The problem through the package, its weights packed, with their sums where zero points need them."""
    packed, options = pack(p), {"n": p.shape[1]} | p.keywords | keywords
    if p.w.dtype != torch.int8:
        assert p.a_scale is not None
        assert p.w_scale is not None
        return qcutlass.gemm_fp8(p.a, packed, p.a_scale, p.w_scale, **options)
    if p.azp is not None:
        options = {"w_sums": qcutlass.weight_sums(p.w)} | options
    return qcutlass.gemm_w8a8(p.a, packed, p.a_scale, p.w_scale, **options)


def is_aligned(p: testing.EightBitProblem) -> bool:
    """Whether asynchronous MMAs add this fp8 product where no tactic is asked for."""
    if not p.a.is_cuda or p.a.dtype == torch.int8 or p.a.numel() == 0:
        return False
    operands = (p.a, pack(p), p.a_scale, p.w_scale)
    return "_sm90a_" in qcutlass.plan(qcutlass.gemm_fp8, *operands, n=p.shape[1], **p.keywords).tactic


def assert_correct(out: Tensor, p: testing.EightBitProblem, label: object = None) -> None:
    """Oracle T, or equality of integer sums."""
    label = p if label is None else label
    if p.out_dtype == torch.int32:
        testing.assert_equal(out.reshape(p.shape[:2]), p.integer_sums(), label=label)
    else:
        testing.assert_close(out, p.reference(), label=label)


def arguments(case: testing.EightBitCase) -> _C.GemmArguments:
    """The types and sizes of a case, as selection sees them."""
    weights = _C.WeightArguments()
    weights.packing = _C.Packing.W8A8
    weights.n, weights.k, weights.group_size = case.n, case.k, case.k
    result = _C.GemmArguments()
    result.m, result.weights, result.a_type = case.m, weights, ACTIVATION_TYPES[case.dtype]
    result.out_type = OUT_TYPES[case.out_dtype]
    return result


def needs_instructions(dtype: torch.dtype) -> None:
    """Skips a test of fp8 products where this GPU, or the code that it runs, has none."""
    capability = _C.device_traits(torch.cuda.current_device()).code_capability
    if dtype != torch.int8 and capability < 89:
        pytest.skip(f"fp8 needs compute capability 8.9, this GPU runs code for {capability / 10}")
