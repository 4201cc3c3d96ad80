"""Calls and checks for tests of blockwise int8 and fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import blockwise, testing
from qcutlass.testing import BlockwiseProblem
from qcutlass.testing.blockwise import options_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
SIZES = (32, 64, 128)
MOST_SPLITS = 16  # that selection chooses by itself


def pack(p: BlockwiseProblem) -> Tensor:
    return qcutlass.preprocess_weights(p.b, 8, activations="int8" if p.b.dtype == torch.int8 else "fp8")


def multiply(p: BlockwiseProblem, b: Tensor | None = None, **keywords: Any) -> Tensor:
    """The problem through the package; `b`: other weights than packed ones."""
    options = options_of(p) | {"n": p.shape[1]} | keywords
    product = blockwise.int8_addmm if p.b.dtype == torch.int8 else blockwise.fp8_gemm
    return product(p.a, p.a_s, pack(p) if b is None else b, p.b_s, **options)


def multiply_quantized(
    p: BlockwiseProblem, size: int, b: Tensor | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """The same with an output quantised in blocks of `size`."""
    options = options_of(p) | {"n": p.shape[1], "out_block_size": size} | keywords
    del options["out_dtype"]
    return blockwise.int8_addmm_quant(p.a, p.a_s, pack(p) if b is None else b, p.b_s, **options)


def function_of(out_size: int | None) -> tuple[Callable[..., Any], dict[str, int]]:
    """The function whose output is floating, or quantised in blocks of `out_size`, and the options that say so."""
    if out_size is None:
        return blockwise.int8_addmm, {}
    return blockwise.int8_addmm_quant, {"out_block_size": out_size}


def splits_of(p: BlockwiseProblem, split_k: int = 0) -> int:
    """The most shares of K that a product may have been cut into."""
    return split_k or (MOST_SPLITS if p.a.is_cuda else 1)


def assert_correct(out: Tensor, p: BlockwiseProblem, label: object = None, split_k: int = 0) -> None:
    """Oracle T."""
    testing.assert_close(out, p.reference(), splits=splits_of(p, split_k), label=p if label is None else label)


def assert_quantized(quantized: tuple[Tensor, Tensor], p: BlockwiseProblem, size: int, split_k: int = 0) -> None:
    """The same for a quantised output."""
    n = p.shape[1]
    codes, scales = quantized
    assert codes.shape == (*p.a.shape[:-1], n)
    assert scales.shape == (*p.a.shape[:-1], -(-n // size))
    reference = p.reference(torch.float32)
    testing.assert_quantized(codes, scales, reference, size, splits=splits_of(p, split_k), label=p)
