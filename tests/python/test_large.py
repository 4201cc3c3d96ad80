"""More than 2^31 elements in an operand or the result of a product: both ends are judged, all between them are 0."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.kinds import DESCRIPTIONS
from torch import Tensor

import qcutlass
from qcutlass import testing
from qcutlass.testing import Case, Problem

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)
MANY, LONG = 66_000, 32_832
NOTHING = 8
"""The 4-bit code that stands for 0: the zero point where there are none."""


def needs_memory(device: str, gigabytes: int) -> None:
    """Skips a test for which too little is free."""
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0] / 2**30
    else:
        found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        assert found
        free = int(found[1]) / 2**20
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GiB of memory of {device}, {free:.1f} are free")


def assert_zeros(out: Tensor) -> None:
    assert not any(bool(part.any()) for part in out.split(4096))


def apart(first: Tensor, last: Tensor, size: int, dim: int = 0, fill: int = 0) -> Tensor:
    """Two tensors at the ends of a dimension of so many, and the same number everywhere between them."""
    shape = [*first.shape[:dim], size, *first.shape[dim + 1 :]]
    whole = torch.full(shape, fill, dtype=first.dtype, device=first.device)
    whole.narrow(dim, 0, first.shape[dim]).copy_(first)
    whole.narrow(dim, size - last.shape[dim], last.shape[dim]).copy_(last)
    return whole


def rounded(device: str, function: Any, *operands: Any, **options: Any) -> torch.dtype | None:
    """What the product rounds weights to: on the CPU nothing."""
    plan = qcutlass.plan(function, *operands, **options) if device == "cuda" else None
    return operands[0].dtype if plan is not None and plan.rounds_weights else None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemm_w8a8", {"azp": "none"}),
        ("gemm_fp8", {}),
        ("gemm_w4a8", {"group_size": 64}),
        ("gemm_w4a8", {"group_size": LONG, "dtype": torch.float8_e4m3fn}),
    ],
    ids=["w8a8", "fp8", "w4a8", "w4a8 fp8"],
)
def test_activations(name: str, options: dict[str, Any], device: str, seed: int) -> None:
    needs_memory(device, 8)
    kind = DESCRIPTIONS[name]
    if device == "cuda":
        kind.skip_without_instructions()
    case = kind.case(4, 16, LONG, bias=False, **options)
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


@pytest.mark.parametrize("group_size", [64, LONG])
def test_weights_of_8_bit_activations(group_size: int, device: str, seed: int) -> None:
    needs_memory(device, 12)
    kind = DESCRIPTIONS["gemm_w4a8"]
    if device == "cuda":
        kind.skip_without_instructions()
    problem = kind.case(2, 64, LONG, bias=False, group_size=group_size, zeros="none").random(device=device, seed=seed)
    codes = apart(problem.codes, problem.codes.flip(0), MANY, fill=NOTHING)
    assert codes.numel() > 2**31
    packed = qcutlass.preprocess_weights(codes, 4, "int8")
    assert torch.equal(qcutlass.unpack_weights(packed, 4, (MANY, LONG))[-64:], problem.codes.flip(0))
    del codes
    scales = apart(problem.scales, problem.scales.flip(1), MANY, dim=1, fill=1)
    product = kind.product(problem)
    out = product(w_packed=packed, scales=scales)
    kind.assert_correct((out[:, :64].contiguous(),), problem)
    kind.assert_correct((out[:, -64:].flip(1),), problem)
    assert_zeros(out.T[64:-64])


def test_outputs_of_8_bit_activations(device: str, seed: int) -> None:
    needs_memory(device, 12)
    kind = DESCRIPTIONS["gemm_w4a8"]
    if device == "cuda":
        kind.skip_without_instructions()
    problem = kind.case(4, MANY, 64, bias=False, group_size=64).random(device=device, seed=seed)
    product = kind.product(problem)
    a = apart(problem.a, problem.a.flip(0), LONG)
    a_scale = apart(problem.a_scale, problem.a_scale.flip(0), LONG, fill=1)
    out = product(**{product.activations: a, "a_scale": a_scale})
    assert out.numel() > 2**31
    kind.assert_correct((out[:4],), problem)
    kind.assert_correct((out[-4:].flip(0),), problem)
    assert_zeros(out[4:-4])


def test_scales_and_zeros(device: str, seed: int) -> None:
    """In the smallest groups that kernels and the CPU take: of 16 columns, which makes 2^35 codes, and of one."""
    size = 16 if device == "cuda" else 1
    needs_memory(device, 40 if device == "cuda" else 14)
    problem = testing.random_problem(2, 64, LONG * size, group_size=size, device=device, seed=seed)
    first, last = (qcutlass.preprocess_weights(codes, 4) for codes in (problem.codes, problem.codes.flip(0)))
    nothing = qcutlass.preprocess_weights(torch.full_like(problem.codes[:16], NOTHING), 4)
    packed = torch.cat((first, nothing.expand(MANY // 16 - len(first) - len(last), *nothing.shape[1:]), last))
    assert problem.zeros is not None
    scales = apart(problem.scales, problem.scales.flip(1), MANY, dim=1, fill=1)
    zeros = apart(problem.zeros, problem.zeros.flip(1), MANY, dim=1, fill=NOTHING)
    assert scales.numel() == zeros.numel() > 2**31
    out = qcutlass.gemm(problem.a, packed, scales, zeros)
    reference = problem.reference(rounded(device, qcutlass.gemm, problem.a, packed, scales, zeros))
    testing.assert_close(out[:, :64].contiguous(), reference, label=problem)
    testing.assert_close(out[:, -64:].flip(1), reference, label=problem)
    assert_zeros(out.T[64:-64])
    rows = qcutlass.dequantize(packed, scales, zeros, k=LONG * size, rows=(MANY - 64, MANY))
    testing.assert_equal(rows, problem.weight(rows.dtype).flip(0))


def two_experts(n: int, k: int, device: str, seed: int, group_size: int = LONG) -> tuple[Problem, Problem]:
    """Products of four rows each by the weights of an expert, without zero points."""
    case = Case(4, n, k, group_size=group_size, zeros="none")
    first, second = (case.random(device=device, seed=seed + number) for number in range(2))
    return first, second


def offsets_of(counts: list[int], device: str) -> Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0).int()


def test_weights_of_experts(device: str, seed: int) -> None:
    """The first expert, one between them whose weights are 0, and the last, all of whose weights are beyond 2^31."""
    needs_memory(device, 12)
    experts, n = 66, 1008
    assert (experts - 1) * n * LONG > 2**31
    first, last = two_experts(n, LONG, device, seed)
    codes = apart(first.codes[None], last.codes[None], experts, fill=NOTHING)
    packed = qcutlass.preprocess_weights(codes, 4)
    del codes
    scales = apart(first.scales[None], last.scales[None], experts, fill=1)
    counts = [0] * experts
    counts[0], counts[40], counts[-1] = 4, 2, 4
    operands = torch.cat((first.a, first.a[:2], last.a)), packed, scales
    options: dict[str, Any] = {"offsets": offsets_of(counts, device)}
    out = qcutlass.gemm_grouped(*operands, **options)
    dtype = rounded(device, qcutlass.gemm_grouped, *operands, **options)
    testing.assert_close(out[:4], first.reference(dtype), label=first)
    testing.assert_close(out[-4:], last.reference(dtype), label=last)
    assert_zeros(out[4:-4])


@pytest.mark.parametrize("gathers", [True, False])
def test_rows_of_experts(gathers: bool, device: str, seed: int) -> None:
    """Activations: all of them, or a few that are gathered from either end."""
    needs_memory(device, 8)
    first, last = two_experts(16, LONG, device, seed)
    a = apart(first.a, last.a, MANY)
    assert a.numel() > 2**31
    packed = qcutlass.preprocess_weights(torch.stack((first.codes, last.codes)), 4)
    operands = a, packed, torch.stack((first.scales, last.scales))
    rows = torch.tensor([0, 1, 2, 3, 5, MANY - 5, *range(MANY - 4, MANY)], device=device).int() if gathers else None
    each = 5 if gathers else MANY // 2
    options: dict[str, Any] = {"rows": rows, "offsets": offsets_of([each, each], device)}
    out = qcutlass.gemm_grouped(*operands, **options)
    dtype = rounded(device, qcutlass.gemm_grouped, *operands, **options)
    testing.assert_close(out[:4], first.reference(dtype), label=first)
    testing.assert_close(out[-4:], last.reference(dtype), label=last)
    assert_zeros(out[4:-4])


def test_outputs_of_experts(device: str, seed: int) -> None:
    needs_memory(device, 12)
    first, last = two_experts(MANY, 16, device, seed, group_size=16)
    packed = qcutlass.preprocess_weights(torch.stack((first.codes, last.codes)), 4)
    operands = apart(first.a, last.a, LONG), packed, torch.stack((first.scales, last.scales))
    options: dict[str, Any] = {"offsets": offsets_of([LONG // 2, LONG // 2], device), **first.ambiguous}
    out = qcutlass.gemm_grouped(*operands, **options)
    assert out.numel() > 2**31
    dtype = rounded(device, qcutlass.gemm_grouped, *operands, **options)
    testing.assert_close(out[:4], first.reference(dtype), label=first)
    testing.assert_close(out[-4:], last.reference(dtype), label=last)
    assert_zeros(out[4:-4])
