"""More than 2^31 elements in an operand or the result of a product: both ends are judged, all between them are 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.python.kinds import DESCRIPTIONS
from torch import Tensor

import qcutlass
from qcutlass import testing

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)
MANY, LONG = 66_000, 32_832


def assert_zeros(out: Tensor) -> None:
    assert not any(bool(part.any()) for part in out.split(4096))


@pytest.mark.parametrize("name", ["gemm_w8a8", "gemm_fp8"])
def test_activations(name: str, device: str, seed: int) -> None:
    kind = DESCRIPTIONS[name]
    if device == "cuda":
        kind.skip_without_instructions()
    case = kind.case(4, 16, LONG, bias=False) if name == "gemm_fp8" else kind.case(4, 16, LONG, bias=False, azp="none")
    problem = case.random(device=device, seed=seed)
    product = kind.product(problem)
    a = torch.zeros(MANY, LONG, dtype=torch.int8, device=device).view(problem.a.dtype)
    assert a.numel() > 2**31
    a[:4], a[-4:] = problem.a, problem.a
    scales = problem.a_scale.repeat(-(-MANY // 4))[:MANY].clone()
    scales[-4:] = problem.a_scale
    large = {product.activations: a, "a_scale": scales}
    out = product(**large)
    # The bound is that of the kernel for so many rows, not of the one for four.
    chosen = {"tactic": qcutlass.plan(kind.function, **product.values | large).tactic} if device == "cuda" else {}
    for ends in (out[:4], out[-4:]):
        kind.assert_correct((ends,), problem, **chosen)
    assert_zeros(out[4:-4])


@pytest.mark.parametrize("bits", [4, 8])
def test_weights(bits: int, device: str, seed: int) -> None:
    problem = testing.random_problem(2, 64, LONG, bits=bits, group_size=LONG, zeros="none", device=device, seed=seed)
    codes = torch.full((MANY, LONG), 2 ** (bits - 1), dtype=torch.uint8, device=device)  # they stand for 0
    assert codes.numel() > 2**31
    codes[:64], codes[-64:] = problem.codes, problem.codes.flip(0)
    packed = qcutlass.preprocess_weights(codes, bits)
    del codes
    scales = torch.ones(1, MANY, dtype=problem.scales.dtype, device=device)
    scales[:, :64], scales[:, -64:] = problem.scales, problem.scales.flip(1)
    options: dict[str, Any] = {} if device == "cpu" else {"weight_dtype": problem.a.dtype}
    out = qcutlass.gemm(problem.a, packed, scales)
    assert_zeros(out.T[64:-64])
    testing.assert_close(out[:, :64].contiguous(), problem.reference(**options), label=problem)
    testing.assert_close(out[:, -64:].flip(1), problem.reference(**options), label=problem)
    rows = qcutlass.dequantize(packed, scales, k=LONG, rows=(MANY - 64, MANY))
    testing.assert_equal(rows, problem.weight(rows.dtype).flip(0))


def test_outputs(device: str, seed: int) -> None:
    problem = testing.random_problem(4, MANY, 16, group_size=16, device=device, seed=seed)
    packed = qcutlass.preprocess_weights(problem.codes, 4)
    a = torch.zeros(LONG, 16, dtype=problem.a.dtype, device=device)
    a[:4], a[-4:] = problem.a, problem.a.flip(0)
    out = qcutlass.gemm(a, packed, problem.scales, problem.zeros, **problem.ambiguous)
    assert out.numel() > 2**31
    dtype = None if device == "cpu" else problem.a.dtype
    testing.assert_close(out[:4], problem.reference(dtype), label=problem)
    testing.assert_close(out[-4:].flip(0), problem.reference(dtype), label=problem)
    assert_zeros(out[4:-4])
