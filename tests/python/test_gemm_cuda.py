"""qcutlass.gemm on CUDA tensors: every tactic by name against oracles E and T, inside poisoned memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.python.running import VIEWS, misaligned, view_of
from torch import Tensor

import qcutlass
from qcutlass import _C, testing

pytestmark = pytest.mark.gpu

Multiply = Callable[..., Tensor]
Expect = Callable[..., testing.Reference]
TYPES = {
    torch.float16: _C.DType.FLOAT16,
    torch.bfloat16: _C.DType.BFLOAT16,
    torch.float32: _C.DType.FLOAT32,
    torch.uint8: _C.DType.UINT8,
    torch.int8: _C.DType.INT8,
    torch.int32: _C.DType.INT32,
}
ROWS = [*range(18), 33, 64, 65, 127, 128, 129, 257, 512]
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True)
class Scheme:
    """A kind of scales and zeros that kernels tell apart."""

    name: str
    groups: tuple[int, ...]
    zeros: tuple[testing.Zeros, ...]
    zero_dtypes: tuple[torch.dtype | None, ...] = (None,)
    scale_dtypes: tuple[torch.dtype | None, ...] = (None,)

    def options(self, choose: random.Random) -> dict[str, Any]:
        zeros = choose.choice(self.zeros)
        dtypes = [d for d in self.zero_dtypes if d is None or d.is_floating_point == (zeros == "real")]
        return {
            "group_size": choose.choice(self.groups),
            "zeros": zeros,
            "zero_dtype": choose.choice(dtypes or [None]),
            "scale_dtype": choose.choice(self.scale_dtypes),
        }


ONE = 10**6  # one group a channel
INTEGERS, FLOATS = (torch.int8, torch.int32), (torch.float16, torch.bfloat16, torch.float32)
SCHEMES = [
    Scheme("per channel", (ONE,), ("none", "int")),
    Scheme("groups of 64 and more", (64, 128, 192, 256), ("none", "int")),
    Scheme("groups of 16 and more", (16, 32, 48, 80, 144), ("none", "int")),
    Scheme("real zeros", (16, 32, 64, 128, ONE), ("real",), (None, *FLOATS)),
    Scheme("mixed types", (32, 64, 128, ONE), ("int", "real"), (None, *INTEGERS, *FLOATS), FLOATS),
]


def arguments(case: testing.Case) -> _C.GemmArguments:
    """The types and sizes of a case, as selection sees them."""
    weights = _C.WeightArguments()
    weights.packing = _C.Packing.W4A16 if case.bits == 4 else _C.Packing.W8A16
    weights.n, weights.k, weights.group_size = case.n, case.k, case.group_size
    weights.scale_type = TYPES[case.scale_dtype or case.dtype]
    weights.zero_type = _C.DType.NONE
    if case.zeros != "none":
        default = torch.uint8 if case.zeros == "int" else case.scale_dtype or case.dtype
        weights.zero_type = TYPES[case.zero_dtype or default]
    result = _C.GemmArguments()
    result.m, result.weights, result.a_type = case.m, weights, TYPES[case.dtype]
    return result


FAMILIES = [(dtype, bits, scheme) for dtype in (torch.float16, torch.bfloat16) for bits in (4, 8) for scheme in SCHEMES]
TACTICS = range(len(_C.tactics(arguments(testing.Case(1, 4096, 4096)))))


def family_id(value: object) -> str:
    return value.name.replace(" ", "-") if isinstance(value, Scheme) else str(value).removeprefix("torch.")


def families_and_tactics() -> list[Any]:
    found = []
    for dtype, bits, scheme in FAMILIES:
        case = testing.Case(1, 4096, 4096, bits, dtype=dtype, **scheme.options(random.Random(0)))
        for index, traits in enumerate(_C.tactics(arguments(case))):
            found.append(pytest.param(dtype, bits, scheme, index, id=f"{traits.name}-{family_id(scheme)}"))
    return found


def tactic_of(case: testing.Case, index: int) -> _C.TacticTraits | None:
    """The configuration in row `index` of the table, None where this GPU has not what it needs."""
    traits = _C.tactics(arguments(case))[index]
    device = _C.device_traits(torch.cuda.current_device())
    fits = traits.shared_memory <= device.shared_memory_per_block and traits.wgmma <= device.wgmma
    return traits if fits else None


def run_poisoned(problem: testing.Problem, choose: random.Random, multiply: Multiply, **keywords: Any) -> Tensor:
    """The product with NaN around everything read and in everything written, at offsets that break alignment."""

    def around(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        offset, padding = choose.choice([0, 0, 8, 1, 3]), choose.choice([0, 0, 8, 5])
        return testing.Poisoned.around(tensor, offset=offset, padding=padding).tensor

    names = ("a", "scales", "zeros", "bias", "act_scale")
    boxed = replace(problem, **{name: around(getattr(problem, name)) for name in names})
    (m, n, _), dtype = problem.shape, problem.a.dtype
    offset, padding = choose.choice([0, 0, 8, 1]), choose.choice([0, 0, 8, 3])
    box = testing.Poisoned((m, n), dtype, "cuda", offset=offset, padding=padding)
    multiply(boxed, out=box.tensor, **keywords)
    box.check(f"{problem} {keywords}")
    return box.tensor


@pytest.mark.parametrize(("dtype", "bits", "scheme", "index"), families_and_tactics())
def test_every_tactic(
    dtype: torch.dtype,
    bits: int,
    scheme: Scheme,
    index: int,
    multiply: Multiply,
    seeds: Iterator[int],
    reference: Expect,
    ledger: Any,
) -> None:
    choose = random.Random(next(seeds))
    names: set[str] = set()
    testing.poison_free_memory("cuda")
    for m in ROWS:
        options = scheme.options(choose)
        tactic = tactic_of(testing.Case(m, 4096, 4096, bits, dtype=dtype, **options), index)
        if tactic is None:
            continue
        n = max(1, tactic.channels * choose.randrange(3) + choose.randrange(-17, 18))
        k = max(1, tactic.k * choose.randrange(4) + choose.choice([0, 0, 8, 16, choose.randrange(-65, 66)]))
        epilogue = {name: choose.random() < 0.3 for name in ("bias", "act_scale", "perm")}
        case = testing.Case(m, n, k, bits, dtype=dtype, **options, **epilogue)
        name = _C.tactics(arguments(case))[index].name  # a short k makes one group of many: another kind of kernel
        names.add(name)
        forced = {"tactic": name, "split_k": choose.choice([0, 0, 1, min(choose.randrange(2, 9), -(-k // tactic.k))])}
        problem, expected = replace(case, activation=choose.choice([None, "relu"])).exact(
            device="cuda", seed=next(seeds)
        )
        ledger.equal(run_poisoned(problem, choose, multiply, **forced), expected, f"{forced}: {problem}")
        problem = replace(case, activation=choose.choice(ACTIVATIONS)).random(device="cuda", seed=next(seeds))
        out = run_poisoned(problem, choose, multiply, **forced)
        ledger.close(out, reference(problem, **forced), f"{forced}: {problem}")
    ledger.tactics |= names
    if not names:
        pytest.skip(f"row {index} of the table needs what this GPU has not")


@pytest.mark.parametrize(("dtype", "bits", "scheme"), FAMILIES, ids=family_id)
def test_identity_returns_every_code_from_every_position(
    dtype: torch.dtype, bits: int, scheme: Scheme, multiply: Multiply, seeds: Iterator[int], ledger: Any
) -> None:
    """With identity activations the outputs are the dequantised weights, bit for bit, for every code at every place."""
    choose = random.Random(next(seeds))
    n, k = torch.arange(16 * 2**bits, device="cuda")[:, None], torch.arange(576, device="cuda")
    codes = ((n // 16 + 5 * n + 3 * k) % 2**bits).to(torch.uint8)
    for index in TACTICS:
        case = testing.Case(576, 16 * 2**bits, 576, bits, dtype=dtype, **scheme.options(choose))
        tactic = tactic_of(case, index)
        if tactic is None:
            continue
        p = case.random(device="cuda", seed=next(seeds))
        p = replace(p, a=torch.eye(case.k, dtype=dtype, device="cuda"), codes=codes)
        ledger.identity(multiply(p, tactic=tactic.name), p.weight(dtype).T, f"{tactic.name}: {p}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(
    activation: str | None,
    bits: int,
    dtype: torch.dtype,
    multiply: Multiply,
    seeds: Iterator[int],
    reference: Expect,
    ledger: Any,
) -> None:
    for m in (1, 16, 100):
        for bias in (False, True):
            case = testing.Case(m, 200, 256, bits, dtype=dtype, activation=activation, bias=bias)
            problem = case.random(device="cuda", seed=next(seeds))
            ledger.close(multiply(problem), reference(problem), problem)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_residue(bits: int, dtype: torch.dtype, multiply: Multiply, seeds: Iterator[int], ledger: Any) -> None:
    choose = random.Random(next(seeds))
    sizes = [(n, choose.randrange(1, 300)) for n in range(1, 70)] + [
        (choose.randrange(1, 300), k) for k in range(1, 140)
    ]
    for n, k in sizes:
        case = testing.Case(choose.choice(ROWS), n, k, bits, choose.choice([16, 64, 128]), dtype=dtype)
        problem, expected = case.exact(device="cuda", seed=next(seeds))
        ledger.equal(run_poisoned(problem, choose, multiply), expected, problem)


@pytest.mark.parametrize("m", [1, 16, 64, 512])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336), (1536, 576)])
def test_layers(
    n: int, k: int, m: int, multiply: Multiply, seeds: Iterator[int], reference: Expect, ledger: Any
) -> None:
    for dtype, bits in [(torch.float16, 4), (torch.bfloat16, 4), (torch.float16, 8)]:
        case = testing.Case(m, n, k, bits, dtype=dtype)
        problem = case.random(device="cuda", seed=next(seeds))
        ledger.close(multiply(problem), reference(problem), problem)
        problem, expected = case.exact(device="cuda", seed=next(seeds))
        ledger.equal(multiply(problem), expected, problem)


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_activations(view: str, multiply: Multiply, seed: int, reference: Expect, ledger: Any) -> None:
    p = testing.random_problem(24, 72, 128, device="cuda", seed=seed)
    problem = replace(p, a=view_of(p.a, view))
    ledger.close(multiply(problem), reference(problem), f"{view}: {problem}")


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_misaligned_packed_weights(offset: int, seed: int, ledger: Any) -> None:
    for m in (1, 40, 200):
        problem, expected = testing.exact_problem(m, 100, 200, group_size=32, device="cuda", seed=seed + m)
        assert problem.zeros is not None
        weights, zeros = qcutlass.preprocess_weights(problem.codes, bits=4), problem.zeros
        weights, zeros = misaligned(weights, offset), misaligned(zeros, offset)
        out = qcutlass.gemm(problem.a, weights, problem.scales, zeros, **problem.keywords)
        ledger.equal(out, expected, problem)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nan_and_infinity_propagate(
    dtype: torch.dtype, value: float, multiply: Multiply, seed: int, reference: Expect, ledger: Any
) -> None:
    for m in (1, 20, 150):
        for activation in ACTIVATIONS:
            p = testing.random_problem(
                m, 72, 192, dtype=dtype, bias=True, activation=activation, device="cuda", seed=seed
            )
            p.a[m // 2, 100] = value
            ledger.close(multiply(p), reference(p), p)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_repeats_bit_for_bit(dtype: torch.dtype, bits: int, multiply: Multiply, seed: int, ledger: Any) -> None:
    for m, n, k in [(1, 512, 8192), (16, 200, 4096), (64, 1024, 2048), (200, 4096, 1024)]:
        case = testing.Case(m, n, k, bits, dtype=dtype)
        problem = case.random(device="cuda", seed=seed)
        for traits in filter(None, (tactic_of(case, index) for index in TACTICS)):
            first = multiply(problem, tactic=traits.name)
            for _ in range(20):
                ledger.equal(multiply(problem, tactic=traits.name), first, f"{traits.name}: {problem}")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 63), (17, 65), (300, 333), (4096, 4096)])
def test_packing_equals_the_cpu(n: int, k: int, bits: int, seed: int, ledger: Any) -> None:
    p = testing.random_problem(1, n, k, bits=bits, seed=seed)
    packed = qcutlass.preprocess_weights(p.codes, bits=bits)
    on_gpu = qcutlass.preprocess_weights(p.codes.cuda(), bits=bits)
    ledger.equal(on_gpu.cpu(), packed, p)
    ledger.equal(qcutlass.unpack_weights(on_gpu, bits=bits, shape=(n, k)).cpu(), p.codes, p)
    strided = torch.zeros(n, 2 * k + 1, dtype=torch.uint8)[:, : 2 * k : 2].copy_(p.codes)
    ledger.equal(qcutlass.preprocess_weights(strided.cuda(), bits=bits).cpu(), packed, p)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantising_equals_the_cpu(bits: int, out_dtype: torch.dtype, seeds: Iterator[int], ledger: Any) -> None:
    choose = random.Random(next(seeds))
    for scheme in SCHEMES:
        for n, k in [(1, 1), (33, 100), (200, 1000), (4096, 512)]:
            case = testing.Case(1, n, k, bits, dtype=choose.choice(FLOATS), **scheme.options(choose))
            p = case.random(device="cuda", seed=next(seeds))
            packed = qcutlass.preprocess_weights(p.codes, bits=bits)
            out = qcutlass.dequantize(packed, p.scales, p.zeros, k=k, dtype=out_dtype, **p.ambiguous)
            ledger.equal(out, p.weight(out_dtype), p)
            zeros = None if p.zeros is None else p.zeros.cpu()
            on_cpu = qcutlass.dequantize(packed.cpu(), p.scales.cpu(), zeros, k=k, dtype=out_dtype, **p.ambiguous)
            ledger.equal(out.cpu(), on_cpu, p)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantising_every_code_zero_and_float16_scale(out_dtype: torch.dtype, ledger: Any) -> None:
    scales = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(torch.float16)
    scales = scales[scales.isfinite()][None]
    codes = torch.arange(16, dtype=torch.uint8, device="cuda").repeat(scales.shape[1], 1)
    packed = qcutlass.preprocess_weights(codes, bits=4)
    for zero in range(16):
        zeros = torch.full_like(scales, zero, dtype=torch.uint8)
        out = qcutlass.dequantize(packed, scales, zeros, k=16, bits=4, dtype=out_dtype)
        ledger.equal(out, testing.dequantized_weight(codes, scales, zeros, 16, 4, out_dtype), f"zero {zero}")


@pytest.mark.parametrize("m", [3, 40, 200])
def test_out_of_any_strides(m: int, multiply: Multiply, seed: int, ledger: Any) -> None:
    problem, expected = testing.exact_problem(m, 72, 128, device="cuda", seed=seed)
    wide = torch.zeros(2 * m, 144, dtype=problem.a.dtype, device="cuda")
    for out in (torch.zeros_like(expected).T.contiguous().T, wide[:m, ::2], wide[::2, :72], wide[:m, 1:73]):
        assert multiply(problem, out=out) is out
        ledger.equal(out, expected, problem)
