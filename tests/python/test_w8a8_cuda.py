"""8-by-8-bit products on CUDA tensors: every tactic by name against the oracles, inside poisoned memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.eight_bit import (
    ACTIVATIONS,
    FLOAT8,
    FLOATS,
    ROWS,
    arguments,
    is_aligned,
    multiply,
    needs_instructions,
    pack,
)
from tests.python.running import VIEWS, misaligned, view_of
from torch import Tensor

import qcutlass
from qcutlass import _C, testing
from qcutlass.testing import EightBitCase, EightBitProblem, Scope

pytestmark = pytest.mark.gpu

DTYPES = (torch.int8, *FLOAT8)
SCOPES: tuple[Scope, ...] = ("one", "each")


def out_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (*FLOATS, torch.int32) if dtype == torch.int8 else FLOATS


def any_case(m: int, n: int, k: int, dtype: torch.dtype, choose: random.Random) -> EightBitCase:
    """A case of these sizes with everything else at random."""
    out_dtype = choose.choice(out_dtypes(dtype))
    case = EightBitCase(m, n, k, dtype, out_dtype, choose.choice(SCOPES), choose.choice(SCOPES))
    if dtype == torch.int8:
        case = replace(case, azp=choose.choice(("none", *SCOPES)))
    if out_dtype == torch.int32:
        return case
    return replace(case, bias=choose.random() < 0.5, bias_dtype=choose.choice(FLOATS))


def with_activation(case: EightBitCase, *names: str | None, choose: random.Random) -> EightBitCase:
    return case if case.out_dtype == torch.int32 else replace(case, activation=choose.choice(names))


def tactics_and_types() -> list[Any]:
    return [
        pytest.param(dtype, index, id=traits.name)
        for dtype in DTYPES
        for index, traits in enumerate(_C.tactics(arguments(EightBitCase(1, 4096, 4096, dtype))))
    ]


TACTICS = range(len(_C.tactics(arguments(EightBitCase(1, 4096, 4096)))))


def tactic_of(dtype: torch.dtype, index: int, m: int = 1) -> _C.TacticTraits | None:
    """A type's configuration number `index`, None where there is none, or it and m rows need what this GPU has not."""
    of_type = _C.tactics(arguments(EightBitCase(m, 4096, 4096, dtype)))
    if index >= len(of_type):
        return None
    traits = of_type[index]
    device = _C.device_traits(torch.cuda.current_device())
    fits = traits.shared_memory <= device.shared_memory_per_block and traits.wgmma <= device.wgmma
    return traits if fits else None


def assert_correct(
    out: Tensor, p: EightBitProblem, ledger: Any, label: object = None, aligned: bool | None = None
) -> None:
    label = p if label is None else f"{label}: {p}"
    if p.out_dtype == torch.int32:
        ledger.equal(out.reshape(p.shape[:2]), p.integer_sums(), label)
    else:
        ledger.close(out, p.reference(aligned=is_aligned(p) if aligned is None else aligned), label)


def run_poisoned(p: EightBitProblem, choose: random.Random, **keywords: Any) -> Tensor:
    """The product with sentinels around everything read and in everything written, at offsets that break alignment."""

    def around(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        offset, padding = choose.choice([0, 0, 16, 1, 3]), choose.choice([0, 0, 16, 5])
        return testing.Poisoned.around(tensor, offset=offset, padding=padding).tensor

    names = ("a", "a_scale", "w_scale", "bias", "azp")
    boxed = replace(p, **{name: around(getattr(p, name)) for name in names})
    offset, padding = choose.choice([0, 0, 8, 1]), choose.choice([0, 0, 8, 3])
    box = testing.Poisoned(p.shape[:2], p.out_dtype, "cuda", offset=offset, padding=padding)
    multiply(boxed, out=box.tensor, **keywords)
    box.check(f"{p} {keywords}")
    return box.tensor


@pytest.mark.parametrize(("dtype", "index"), tactics_and_types())
def test_every_tactic(dtype: torch.dtype, index: int, seeds: Iterator[int], ledger: Any) -> None:
    needs_instructions(dtype)
    tactic = tactic_of(dtype, index)
    if tactic is None:
        pytest.skip(f"row {index} of the table needs what this GPU has not")
    choose = random.Random(next(seeds))
    testing.poison_free_memory("cuda")
    for m in [*ROWS, 257, 512]:
        if tactic_of(dtype, index, m) is None:
            continue
        n = max(1, tactic.channels * choose.randrange(3) + choose.randrange(-17, 18))
        k = max(1, tactic.k * choose.randrange(4) + choose.choice([0, 0, 16, 32, choose.randrange(-65, 66)]))
        case = any_case(m, n, k, dtype, choose)
        splits = choose.choice([0, 0, 1, min(choose.randrange(2, 9), -(-k // tactic.k))])
        forced = {"tactic": tactic.name, "split_k": splits}
        problem, expected = with_activation(case, None, "relu", choose=choose).exact(device="cuda", seed=next(seeds))
        ledger.equal(run_poisoned(problem, choose, **forced), expected, f"{forced}: {problem}")
        case = with_activation(case, *ACTIVATIONS, choose=choose)
        problem = case.random(device="cuda", seed=next(seeds))
        assert_correct(run_poisoned(problem, choose, **forced), problem, ledger, forced, aligned=tactic.wgmma)
    ledger.tactics.add(tactic.name)


@pytest.mark.parametrize("tiles", [3, 4, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rings_go_round_and_blocks_take_more_tiles(
    dtype: torch.dtype, tiles: int, seeds: Iterator[int], ledger: Any
) -> None:
    """More stages than a ring has places, an odd number of them; more tiles than SMs, which persistent blocks share.

    Blocks with 3 tiles of tokens side by side work alone, with 4 in pairs that share weights, with 9 in pairs the last
    of which has one tile. Results of 16 bits leave through memory that the next tile's take, too."""
    needs_instructions(dtype)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for index in TACTICS:
        tactic = tactic_of(dtype, index, 512)
        if tactic is None or not tactic.wgmma:
            continue
        m, n = (tiles - 1) * tactic.tokens + 5, tactic.channels * (sms // (tiles - 1))
        k = tactic.k * (tactic.stages + 3 - tactic.stages % 2) - 7
        for more, out_dtype in ((9, torch.float32), (9, torch.bfloat16), (16, torch.float16)):
            case = EightBitCase(m, n + more, k, dtype, out_dtype, bias=True)
            problem, expected = case.exact(device="cuda", seed=next(seeds))
            ledger.equal(multiply(problem, tactic=tactic.name, split_k=1), expected, f"{tactic.name}: {problem}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_returns_every_number_from_every_position(dtype: torch.dtype, ledger: Any) -> None:
    """With identity activations the outputs are the weights, bit for bit, for every code at every place."""
    needs_instructions(dtype)
    n, k = 256, 1056
    codes = (torch.arange(n, device="cuda")[:, None] * 5 + torch.arange(k, device="cuda") * 3) % 256
    w = codes.to(torch.uint8).view(torch.int8)
    if dtype != torch.int8:
        w = w.clone().masked_fill_((w & 127) == 127, 0).view(torch.float8_e4m3fn)  # a NaN would fill its row
    one = torch.ones(1, device="cuda")
    a = torch.eye(k, device="cuda").to(dtype)
    for index in TACTICS:
        tactic = tactic_of(dtype, index, k)
        if tactic is None:
            continue
        p = EightBitProblem(a, w, one, one, out_dtype=torch.float32)
        ledger.identity(multiply(p, tactic=tactic.name), w.float().T.contiguous(), f"{tactic.name}: {p}")


@pytest.mark.parametrize("split_k", [0, 1, 3])
def test_the_largest_sums(split_k: int, ledger: Any) -> None:
    """-128 times -128 over the longest K: the sums end just below 2^31, in every tactic."""
    k = 131071
    a, w = (torch.full((rows, k), -128, dtype=torch.int8, device="cuda") for rows in (9, 40))
    a[1], w[3] = 127, 127
    p = EightBitProblem(a, w, None, None, out_dtype=torch.int32)
    packed = pack(p)
    for tactic in filter(None, (tactic_of(torch.int8, index, len(a)) for index in TACTICS)):
        out = qcutlass.gemm_w8a8(
            a, packed, None, None, out_dtype=torch.int32, n=40, tactic=tactic.name, split_k=split_k
        )
        ledger.equal(out, p.integer_sums(), tactic.name)


@pytest.mark.parametrize("zero_point", [2**31 - 1, -(2**31), 2**24 + 1])
def test_zero_points_of_any_size(zero_point: int, seed: int, ledger: Any) -> None:
    for m in (3, 100):
        for out_dtype in (torch.int32, torch.float32):
            p = EightBitCase(m, 40, 1000, torch.int8, out_dtype, azp="each").random(device="cuda", seed=seed)
            assert p.azp is not None
            p.azp[1] = zero_point
            assert_correct(multiply(p), p, ledger)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_combination(activation: str | None, dtype: torch.dtype, seeds: Iterator[int], ledger: Any) -> None:
    needs_instructions(dtype)
    zero_points: tuple[Scope, ...] = ("none", *SCOPES) if dtype == torch.int8 else ("none",)
    kinds = itertools.product((1, 16, 100), FLOATS, SCOPES, SCOPES, zero_points, (False, True))
    for m, out_dtype, a_scale, w_scale, azp, bias in kinds:
        case = EightBitCase(m, 200, 256, dtype, out_dtype, a_scale, w_scale, azp, bias, activation=activation)
        assert_correct(multiply(p := case.random(device="cuda", seed=next(seeds))), p, ledger)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_residue(dtype: torch.dtype, seeds: Iterator[int], ledger: Any) -> None:
    needs_instructions(dtype)
    choose = random.Random(next(seeds))
    sizes = [(n, choose.randrange(1, 300)) for n in range(1, 70)]
    sizes += [(choose.randrange(1, 300), k) for k in range(1, 140)]
    for n, k in sizes:
        case = any_case(choose.choice(ROWS), n, k, dtype, choose)
        problem, expected = case.exact(device="cuda", seed=next(seeds))
        ledger.equal(run_poisoned(problem, choose), expected, problem)


@pytest.mark.parametrize("m", [1, 16, 64, 512])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336), (1536, 576)])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_layers(dtype: torch.dtype, n: int, k: int, m: int, seeds: Iterator[int], ledger: Any) -> None:
    needs_instructions(dtype)
    choose = random.Random(next(seeds))
    for _ in range(2):
        case = any_case(m, n, k, dtype, choose)
        assert_correct(multiply(p := case.random(device="cuda", seed=next(seeds))), p, ledger)
        problem, expected = case.exact(device="cuda", seed=next(seeds))
        ledger.equal(multiply(problem), expected, problem)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_activations(view: str, dtype: torch.dtype, seed: int, ledger: Any) -> None:
    needs_instructions(dtype)
    p = EightBitCase(24, 72, 128, dtype, a_scale="one").random(device="cuda", seed=seed)
    problem = replace(p, a=view_of(p.a, view))
    assert_correct(multiply(problem), problem, ledger, view)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_rows_that_overlap(dtype: torch.dtype, seed: int, ledger: Any) -> None:
    """Every tactic takes rows that overlap, though TMA takes no stride below a row's length."""
    needs_instructions(dtype)
    p = EightBitCase(130, 72, 256, dtype).random(device="cuda", seed=seed)
    for stride in (0, 16, 240):
        a = p.a.reshape(-1).as_strided(p.a.shape, (stride, 1))
        for index in TACTICS:
            if (tactic := tactic_of(dtype, index, len(a))) is not None:
                expected = multiply(replace(p, a=a.clone()), tactic=tactic.name)
                ledger.equal(multiply(replace(p, a=a), tactic=tactic.name), expected, f"{stride} {tactic.name}: {p}")


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_misaligned_packed_weights(offset: int, dtype: torch.dtype, seed: int, ledger: Any) -> None:
    needs_instructions(dtype)
    for m in (1, 40, 200):
        problem, expected = EightBitCase(m, 100, 200, dtype).exact(device="cuda", seed=seed + m)
        packed = misaligned(pack(problem), offset)
        function = qcutlass.gemm_w8a8 if dtype == torch.int8 else qcutlass.gemm_fp8
        assert problem.a_scale is not None
        assert problem.w_scale is not None
        out = function(problem.a, packed, problem.a_scale, problem.w_scale, **problem.keywords)
        ledger.equal(out, expected, problem)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_propagate(value: float, seed: int, ledger: Any) -> None:
    dtypes = DTYPES if torch.cuda.get_device_capability() >= (8, 9) else DTYPES[:1]
    for m, dtype, activation in itertools.product((1, 20, 150), dtypes, ACTIVATIONS):
        names = ["a_scale", "w_scale", "bias"]
        if dtype == torch.float8_e5m2 or (dtype == torch.float8_e4m3fn and value != value):
            names += ["a"]  # which holds such a number
        for name in names:
            case = EightBitCase(m, 72, 192, dtype, bias=True, activation=activation)
            p = case.random(device="cuda", seed=seed)
            getattr(p, name)[..., -1] = value
            assert_correct(multiply(p), p, ledger, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_bit_for_bit(dtype: torch.dtype, seed: int, ledger: Any) -> None:
    needs_instructions(dtype)
    for m, n, k in [(1, 512, 8192), (16, 200, 4096), (64, 1024, 2048), (200, 4096, 1024)]:
        p = EightBitCase(m, n, k, dtype).random(device="cuda", seed=seed)
        for traits in filter(None, (tactic_of(dtype, index, m) for index in TACTICS)):
            first = multiply(p, tactic=traits.name)
            for _ in range(20):
                ledger.equal(multiply(p, tactic=traits.name), first, f"{traits.name}: {p}")


@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 31), (17, 33), (300, 333), (4096, 4096)])
def test_packing_and_sums_equal_the_cpu(n: int, k: int, seed: int, ledger: Any) -> None:
    p = EightBitCase(1, n, k).random(seed=seed)
    packed = pack(p)
    on_gpu = qcutlass.preprocess_weights(p.w.cuda(), 8, activations="int8")
    ledger.equal(on_gpu.cpu(), packed, p)
    ledger.equal(qcutlass.unpack_weights(on_gpu, bits=8, shape=(n, k)).cpu(), p.w, p)
    ledger.equal(qcutlass.weight_sums(on_gpu, n).cpu(), qcutlass.weight_sums(p.w), p)
    w = p.w.cuda().view(torch.float8_e4m3fn)
    of_fp8 = qcutlass.preprocess_weights(w, 8, activations="fp8")
    ledger.equal(of_fp8.view(torch.int8).cpu(), packed, p)
    ledger.equal(qcutlass.unpack_weights(of_fp8, bits=8, shape=(n, k)).view(torch.int8).cpu(), p.w, p)


def test_plain_fp8_weights_and_missing_sums(seed: int, ledger: Any) -> None:
    p = EightBitCase(5, 40, 100, azp="each").random(device="cuda", seed=seed)
    ledger.equal(multiply(p, w_sums=None), multiply(p), p)
    needs_instructions(torch.float8_e4m3fn)
    p = EightBitCase(5, 40, 100, torch.float8_e4m3fn).random(device="cuda", seed=seed)
    assert p.a_scale is not None
    assert p.w_scale is not None
    ledger.equal(qcutlass.gemm_fp8(p.a, p.w, p.a_scale, p.w_scale, **p.keywords), multiply(p), p)


@pytest.mark.parametrize("m", [3, 40, 200])
def test_out_of_any_strides(m: int, seed: int, ledger: Any) -> None:
    problem, expected = EightBitCase(m, 72, 128).exact(device="cuda", seed=seed)
    wide = torch.zeros(2 * m, 144, dtype=expected.dtype, device="cuda")
    for out in (torch.zeros_like(expected).T.contiguous().T, wide[:m, ::2], wide[::2, :72], wide[:m, 1:73]):
        assert multiply(problem, out=out) is out
        ledger.equal(out, expected, problem)
