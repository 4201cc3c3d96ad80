"""Random problems of every kind of product and of the operators beside them, each with the oracle that judges it.

A kind with a description brings its own problems (`kinds/`); those of the others are drawn here from the generators and
oracles of `qcutlass.testing`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from tests.python import test_float_codes as floats
from tests.python import test_grouped as grouped
from tests.python import test_int8_activations as with_int8
from tests.python import test_moe as blocks
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import ACTIVATIONS, EXACT, FLOATS, Description, fits
from tests.python.running import run_poisoned
from torch import Tensor

import qcutlass
from qcutlass import moe, testing
from qcutlass.products.decoder_operators import NORM_CODES, add_rms_norm, gate, rms_norm, rms_norm_quantized
from qcutlass.products.moe_operators import GATES, gate_rows, sum_slots
from qcutlass.products.rotary_operators import rotary, rotary_append
from qcutlass.products.selection import weight_dtype
from qcutlass.testing import Case, GroupedCase
from qcutlass.testing.decoder import Answer, answer_ratio, gate_answer, rms_norm_answer, rotary_answer
from qcutlass.testing.moe import MoeCase, gated_answer, routing_answer, sum_answer

Outs: TypeAlias = Sequence[Tensor]


@dataclass(frozen=True)
class Trial:
    """A problem that can be computed again and again.

    Attributes:
        label: what a failure names.
        run: computes the outputs, each time anew.
        judge: their largest error over its bound; raises AssertionError, or returns more than 1, for wrong ones.
        exact: whether `judge` is an identity: outputs must be what it expects, bit for bit.
    """

    label: object
    run: Callable[[], Outs]
    judge: Callable[[Outs], float]
    exact: bool = False


Trials: TypeAlias = Callable[[random.Random, str], Iterator[Trial]]
"""The trials of one random problem of a kind, on a device."""


def equal(expected: Callable[[], Outs]) -> Callable[[Outs], float]:
    """A judge for what is known bit for bit."""

    def judge(outs: Outs) -> float:
        for out, wanted in zip(outs, expected(), strict=True):
            testing.assert_equal(out.cpu(), wanted.cpu())
        return 0.0

    return judge


def within(*answers: Answer) -> Callable[[Outs], float]:
    """A judge by float64 answers and their bounds."""
    return lambda outs: max(answer_ratio(out, answer) for out, answer in zip(outs, answers, strict=True))


def new_seed(choose: random.Random) -> int:
    return choose.randrange(2**31)


def sizes(choose: random.Random) -> tuple[int, int, int]:
    """M, N and K: mostly small, of every residue; one problem in twenty is larger."""
    m = choose.choice([0, 1, 1, 2, 3, 4, 5, 8, 9, 16, 17, choose.randrange(18, 70)])
    if choose.random() < 0.05:
        return choose.choice([m, 130, 257]), choose.randrange(1, 1500), choose.randrange(1, 4500)
    return m, choose.randrange(1, 150), choose.randrange(1, choose.choice([64, 300, 700]))


def on_the_cpu(case: Any, choose: random.Random) -> Any:
    """At times what only the CPU has: float32 activations, groups of any size."""
    if isinstance(case, Case) and choose.random() < 0.3:
        groups = choose.choice([case.group_size, choose.randrange(1, 200)])
        return replace(case, dtype=torch.float32, group_size=groups)
    return case


def forced(kind: Description, case: Any, device: str, choose: random.Random) -> dict[str, Any]:
    """On a GPU at times one of the tactics that it can run, those of the table that may refuse a problem left out."""
    if device == "cpu" or kind.may_refuse or choose.random() < 0.5:
        return {}
    names = [traits.name for traits in kind.traits(case) if fits(traits, device)]
    return {"tactic": choose.choice(names), "split_k": choose.choice([0, 0, 1])}


def poisoned(kind: Description, product: Any, choose: random.Random) -> Callable[..., Outs]:
    """The product with sentinels around operands and output, at the same addresses relative to 16 bytes each time."""
    seed = new_seed(choose)
    return lambda **more: run_poisoned(product, random.Random(seed), **more)


def described(kind: Description) -> Trials:
    def trials(choose: random.Random, device: str) -> Iterator[Trial]:
        draw = kind.families[choose.choice(list(kind.families))]
        case = draw(*sizes(choose), choose)
        case = on_the_cpu(case, choose) if device == "cpu" else case

        exact = kind.with_activation(case, EXACT, choose)
        product, expected = kind.products(exact, device, new_seed(choose))
        run = poisoned(kind, product, choose)

        def assert_exact(outs: Outs) -> float:
            kind.assert_exact(outs, expected, product, product.problem)
            return 0.0

        yield Trial(product.problem, run, assert_exact, exact=kind.has_out)

        other = kind.random(kind.with_activation(case, ACTIVATIONS, choose), device, new_seed(choose))
        options = forced(kind, case, device, choose)
        judge = partial(kind.assert_correct, problem=other.problem, **options)
        yield Trial(f"{options} {other.problem}", partial(poisoned(kind, other, choose), **options), judge)

    return trials


def weights(choose: random.Random, device: str) -> Iterator[Trial]:
    """Packing and back; dequantised weights, and products with rows of the identity, which are their columns."""
    _, n, k = sizes(choose)
    zeros: testing.Zeros = choose.choice(["none", "int", "real", "minimum"])
    dtype = choose.choice(FLOATS if device == "cpu" else FLOATS[:2])
    case = Case(1, n, k, choose.choice([4, 8]), 16 * choose.randrange(1, 12), zeros, dtype)
    problem = case.random(device=device, seed=new_seed(choose))
    packed = qcutlass.preprocess_weights(problem.codes, bits=problem.bits)
    unpacked = partial(qcutlass.unpack_weights, packed, problem.bits, (n, k))
    yield Trial(f"packed {problem}", lambda: (unpacked(),), equal(lambda: (problem.codes,)), exact=True)
    offsets = {"minimums": problem.minimums, "group_size": problem.group_size, "bits": problem.bits}
    dequantized = partial(qcutlass.dequantize, packed, problem.scales, problem.zeros, k=k, **offsets)
    yield Trial(f"weights {problem}", lambda: (dequantized(),), equal(lambda: (problem.weight(dtype),)), exact=True)
    columns = torch.tensor(choose.sample(range(k), min(k, 9)), device=device)
    rows = torch.zeros(len(columns), k, dtype=dtype, device=device)
    rows[range(len(columns)), columns] = 1
    product = partial(qcutlass.gemm, rows, packed, problem.scales, problem.zeros, **offsets)
    chosen = equal(lambda: (problem.weight(dtype)[:, columns].T,))
    yield Trial(f"columns {columns.tolist()} of {problem}", lambda: (product(),), chosen, exact=True)


def float_codes(choose: random.Random, device: str) -> Iterator[Trial]:
    """Codes of e2m1 and e4m3, with every type of scales."""
    name, group, scales = choose.choice(floats.SCALES)
    m, n, k = sizes(choose)
    k = -(-k // 16) * 16 if device == "cuda" else k
    weight = floats.random_weight(name, n, k, min(group, k), scales, seed := new_seed(choose))
    values = floats.arguments(weight, device)
    dtype = choose.choice(FLOATS if device == "cpu" else FLOATS[:2])
    a = torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    label = f"{weight}, M={m} {dtype} seed={seed}"

    def judge(outs: Outs) -> float:
        rounded = None if device == "cpu" else weight_dtype(a, **values)
        known = floats.exact(weight).float().to(rounded or torch.float32)
        return testing.assert_close(outs[0].cpu(), floats.judged(a, known), label=label)

    yield Trial(label, lambda: (qcutlass.gemm(a, **values),), judge)
    known = equal(lambda: (floats.exact(weight).float().to(dtype),))
    dequantized = partial(qcutlass.dequantize, **values, k=k, dtype=dtype)
    yield Trial(f"weights {label}", lambda: (dequantized(),), known, exact=True)


def int8_activations(choose: random.Random, _device: str) -> Iterator[Trial]:
    m, n, k = sizes(choose)
    dtype, bits, group = choose.choice(FLOATS), choose.choice([4, 8]), choose.choice(with_int8.GROUPS)
    exact = with_int8.exact(m, n, k, group, bits, dtype, new_seed(choose))
    expected = equal(lambda: (exact.reference().value.to(dtype),))
    yield Trial(exact, lambda: (with_int8.multiply(exact),), expected, exact=True)
    epilogue = {name: choose.random() < 0.3 for name in ("bias", "act_scale", "perm")}
    zeros: testing.Zeros = choose.choice(["none", "int", "real"])
    case = Case(m, n, k, bits, group, zeros, dtype, activation=choose.choice(ACTIVATIONS), **epilogue)
    problem = case.random(seed=new_seed(choose))

    def judge(outs: Outs) -> float:
        return testing.assert_close(outs[0], testing.int8_activations_reference(problem), label=problem)

    yield Trial(problem, lambda: (with_int8.multiply(problem),), judge)


def grouped_products(choose: random.Random, device: str) -> Iterator[Trial]:
    m, n, k = sizes(choose)
    name = choose.choice(list(grouped.TYPES))
    case = grouped.case_of(choose.choice(list(grouped.MODES)), name, n, k, max(m, 1), bias=choose.random() < 0.5)
    case = on_the_cpu(case, choose) if device == "cpu" else case
    counts = tuple(choose.choice([0, 0, 1, 2, 7, 20]) for _ in range(choose.randrange(1, 7)))
    before, after = choose.choice([(0, 0), (3, 0), (0, 30), (2, 5)])
    given = before, after, choose.random() < 0.7, choose.random() < 0.7
    exact, expected = GroupedCase(replace(case, activation=choose.choice(EXACT)), counts, *given).exact(
        device=device, seed=new_seed(choose)
    )
    yield Trial(exact, lambda: (grouped.product(exact),), equal(lambda: (expected,)), exact=True)
    problem = GroupedCase(replace(case, activation=choose.choice(ACTIVATIONS)), counts, *given).random(
        device=device, seed=new_seed(choose)
    )
    rounded = grouped.weight_dtype(problem, None)
    yield Trial(problem, lambda: (grouped.product(problem),), lambda outs: problem.error_ratio(outs[0], rounded))


def experts(choose: random.Random, device: str) -> Iterator[Trial]:
    """A block of experts within its bound; tokens in another order, bit for bit."""
    few = choose.randrange(1, 10)
    activation = choose.choice(["silu", "gelu_tanh", "swigluoai"])
    case = MoeCase(
        choose.choice([1, 2, 5, 17, 40]), 16 * choose.randrange(1, 12), 16 * choose.randrange(1, 9), few,
        choose.randrange(1, 5), choose.choice([4, 8]), choose.choice([32, 64, 128]), choose.choice(["none", "int"]),
        choose.choice(FLOATS if device == "cpu" else FLOATS[:2]), choose.random() < 0.5, activation,
        interleaved=activation == "swigluoai" and choose.random() < 0.5, invalid=choose.choice([0.0, 0.0, 0.3, 1.0]),
        limit=choose.choice([None, None, 0.5]), id_dtype=choose.choice([torch.int32, torch.int64]),
    )  # fmt: skip
    problem = case.random(device=device, seed=new_seed(choose))
    answer = partial(blocks.experts_answer, problem, rounds_weights=device == "cuda")
    yield Trial(problem, lambda: (blocks.computed(problem),), lambda outs: answer_ratio(outs[0], answer()))
    order = torch.tensor(choose.sample(range(case.tokens), case.tokens), device=device)
    permuted = problem.tokens(order)
    expected = equal(lambda: (blocks.computed(problem)[order],))
    yield Trial(f"permuted {problem}", lambda: (blocks.computed(permuted),), expected, exact=True)


def steps_of_experts(choose: random.Random, device: str) -> Iterator[Trial]:
    """Routing and sums bit for bit, gates within their bound."""
    g = torch.Generator().manual_seed(seed := new_seed(choose))
    tokens, slots, count = choose.randrange(200), choose.randrange(1, 9), choose.randrange(1, 130)
    ids = torch.randint(-1, count + 1, (tokens, slots), generator=g)
    label = f"T={tokens} k={slots} E={count} seed={seed}"

    def route() -> Outs:
        found = moe.route(ids.to(device), count)
        return found.rows, found.offsets, found.order

    yield Trial(f"route {label}", route, equal(lambda: routing_answer(ids, count)), exact=True)
    dtype = choose.choice(FLOATS if device == "cpu" else FLOATS[:2])
    order = routing_answer(ids, count)[2].to(device)
    y = torch.randn(tokens * slots, choose.randrange(1, 200), generator=g).to(device, dtype)
    summed = equal(lambda: (sum_answer(y, order),))
    yield Trial(f"sum_slots {label} {dtype}", lambda: (sum_slots(y, order),), summed, exact=True)
    both = (6 * torch.randn(1 + tokens, 2 * choose.randrange(1, 300), generator=g)).to(device, dtype)
    name, turns = choose.choice(list(GATES)), choose.random() < 0.5
    known = both, torch.zeros_like(both, dtype=torch.float64)
    gated = within(gated_answer(name, known, turns))
    yield Trial(f"{name} {label} {dtype}", lambda: (gate_rows(both, name, interleaved=turns),), gated)


def decoder_operators(choose: random.Random, device: str) -> Iterator[Trial]:
    g = torch.Generator().manual_seed(seed := new_seed(choose))
    dtype, eps = choose.choice(FLOATS), 1e-5
    rows, columns = choose.randrange(1, 50), choose.choice([choose.randrange(1, 300), choose.randrange(1, 5000)])

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    label = f"{rows} x {columns} {dtype} seed={seed}"
    x, residual, weight = numbers(rows, columns), numbers(rows, columns), numbers(columns)
    total = x + residual
    yield Trial(f"sum {label}", lambda: add_rms_norm(x, residual, weight, eps)[:1], equal(lambda: (total,)), exact=True)
    normed = within(rms_norm_answer(total, weight, eps))
    yield Trial(f"rms_norm {label}", lambda: (rms_norm(total, weight, eps),), normed)
    code, scale = choose.choice(NORM_CODES), choose.choice([None, torch.tensor([0.02], device=device)])

    def in_turn() -> Outs:
        found, *codes = qcutlass.quantize_activations(rms_norm(total, weight, eps), dtype=code, scale=scale)
        return found.view(torch.int8), *codes

    def at_once() -> Outs:
        _, found, scales = rms_norm_quantized(total, weight, eps, code, scale)
        return found.view(torch.int8), scales

    yield Trial(f"rms_norm_quantized {code} {label}", at_once, equal(in_turn), exact=True)
    name, function = choose.choice([("silu_mul", "silu"), ("gelu_tanh_mul", "gelu_tanh")])
    left, up = 8 * numbers(rows, columns), numbers(rows, columns)
    yield Trial(f"{name} {label}", lambda: (gate(name, left, up),), within(gate_answer(function, left, up)))
    size = 2 * choose.randrange(1, 65)
    q, k = numbers(2, rows, 3, size), numbers(2, rows, 1, size)
    half = 10 * torch.randn(2, rows, size // 2, generator=g)
    angles = torch.cat((half, half), dim=-1)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    norm = choose.choice([None, numbers(size)])
    turned = within(*(rotary_answer(part, cos, sin, norm, eps) for part in (q, k)))
    yield Trial(f"rotary {size} {label}", lambda: rotary(q, k, cos, sin, norm, norm, eps=eps), turned)
    room = rows + choose.randrange(1, 9)
    place = torch.tensor([choose.randrange(room - rows + 1)], device=device)

    def appended() -> tuple[Tensor, ...]:
        keys, values = torch.zeros(2, 2, 1, room, size, dtype=dtype, device=device)
        return rotary_append(q, k, k, cos, sin, keys, values, place, norm, norm, eps), keys, values

    def kept() -> tuple[Tensor, ...]:
        turned_q, turned_k = rotary(q, k, cos, sin, norm, norm, eps=eps)
        caches = torch.zeros(2, 2, 1, room, size, dtype=dtype, device=device)
        for cache, part in zip(caches, (turned_k, k), strict=True):
            cache[:, :, int(place) : int(place) + rows] = part.transpose(1, 2)
        return turned_q, *caches

    yield Trial(f"rotary_append {size} {label}", appended, equal(kept), exact=True)


KINDS: dict[str, Trials] = {
    **{kind.name: described(kind) for kind in DESCRIPTIONS.values()},
    "gemm, floating codes": float_codes,
    "gemm, int8 activations": int8_activations,
    "gemm_grouped": grouped_products,
    "moe.experts": experts,
    "steps of experts": steps_of_experts,
    "decoder operators": decoder_operators,
    "weights": weights,
}

ON_THE_CPU_ALONE = {"gemm, int8 activations"}


def kinds_on(device: str) -> list[str]:
    """Those of KINDS that the device has."""
    return [name for name in KINDS if device == "cpu" or name not in ON_THE_CPU_ALONE]
