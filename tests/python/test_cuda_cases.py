"""Products of every kind on CUDA tensors: every tactic by name against oracles E and T, inside poisoned memory.

The checks run on the CPU too, with few sizes: there a tactic's name changes nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import ACTIVATIONS, EXACT, H200, MANY_ROWS, Description, Draw, Product, fits
from tests.python.running import VIEWS, misaligned, run_poisoned, view_of
from torch import Tensor

import qcutlass
from qcutlass import testing

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
variants = pytest.mark.parametrize(
    ("kind", "variant"),
    [pytest.param(kind, name, id=f"{kind.name}-{name}") for kind in DESCRIPTIONS.values() for name in kind.variants],
)
families = pytest.mark.parametrize(
    ("kind", "draw"),
    [
        pytest.param(kind, draw, id=f"{kind.name}-{name}")
        for kind in DESCRIPTIONS.values()
        for name, draw in kind.families.items()
    ],
)


def families_and_tactics() -> list[Any]:
    return [
        pytest.param(kind, draw, index, id=f"{kind.name}-{name}-{traits.name}")
        for kind in DESCRIPTIONS.values()
        for name, draw in kind.families.items()
        for index, traits in enumerate(kind.traits(draw(1, 4096, 4096, random.Random(0))))
    ]


@pytest.fixture
def checks(request: pytest.FixtureRequest) -> Any:
    """The record of the checks of a test, which is skipped on GPUs without the kind's instructions."""
    if not request.node.get_closest_marker("gpu"):
        return request.getfixturevalue("ledger_of_the_cpu")
    params = request.node.callspec.params
    case = params["draw"](1, 32, 64, random.Random(0)) if "draw" in params else None
    params["kind"].skip_without_instructions(case)
    return request.getfixturevalue("ledger")


def assert_exact(
    outs: Sequence[Tensor], expected: Sequence[Tensor], product: Product, checks: Any, label: object = ""
) -> None:
    """Oracle E."""
    label = f"{label}: {product.problem}"
    product.description.assert_exact(outs, expected, product, label)
    checks.record(0.0, label)


def assert_close(
    outs: Sequence[Tensor], problem: Any, kind: Description, checks: Any, label: Any = "", **forced: Any
) -> None:
    """Oracle T."""
    checks.record(kind.assert_correct(outs, problem, label, **forced), f"{label} {forced}: {problem}")


def assert_served(
    kind: Description, draw: Draw, index: int, rows: Sequence[int], device: str, seeds: Iterator[int], checks: Any
) -> set[str]:
    """Both oracles for so many rows, each with sizes of its own, in row `index` of the table; names of the kernels."""
    choose, few = random.Random(next(seeds)), 16 // kind.kind.activations[0].itemsize  # columns: 16 bytes
    names: set[str] = set()
    for m in rows:
        case = draw(m, 4096, 4096, choose)
        traits = kind.traits(case)[index]
        if not fits(traits, device):
            continue
        channels, columns = max(traits.channels, kind.granule), max(traits.k, kind.granule)
        n = max(1, channels * choose.randrange(3) + choose.randrange(-17, 18))
        k = max(1, columns * choose.randrange(4) + choose.choice([0, 0, few, 2 * few, choose.randrange(-65, 66)]))
        case = replace(case, n=n, k=k)
        traits = kind.traits(case)[index]  # a short k makes one group of many: another kind of kernel
        if not fits(traits, device):
            continue
        name = traits.name
        splits = choose.choice([0, 0, 1, min(choose.randrange(2, 9), -(-k // traits.k))])
        forced = {"tactic": name, "split_k": splits}
        try:
            exact = kind.with_activation(case, EXACT, choose)
            product, expected = kind.products(exact, device, next(seeds))
            outs = run_poisoned(product, choose, **forced)
        except qcutlass.UnsupportedError:  # blocks of the output that this tile has not, or too many shares
            if not kind.may_refuse:
                raise
            continue
        names.add(name)
        assert_exact(outs, expected, product, checks, forced)
        assert_close(outs, product.problem, kind, checks, **forced)
        product = kind.random(kind.with_activation(case, ACTIVATIONS, choose), device, next(seeds))
        outs = run_poisoned(product, choose, **forced)
        assert_close(outs, product.problem, kind, checks, **forced)
    return names


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "draw", "index"), families_and_tactics())
def test_every_tactic(kind: Description, draw: Draw, index: int, seeds: Iterator[int], checks: Any) -> None:
    testing.poison_free_memory("cuda")
    names = assert_served(kind, draw, index, MANY_ROWS, "cuda", seeds, checks)
    checks.tactics |= names
    if not names:
        traits = kind.traits(draw(1, 4096, 4096, random.Random(0)))[index]
        assert not (kind.has_out and fits(traits, "cuda")), f"{traits.name} serves no product"
        pytest.skip(f"row {index} of the table needs what this GPU has not, or quantises no outputs")


@families
def test_the_checks_of_every_tactic_on_the_cpu(
    kind: Description, draw: Draw, seeds: Iterator[int], checks: Any
) -> None:
    assert assert_served(kind, draw, 0, (0, 1, 9), "cpu", seeds, checks)
    assert checks.cases == 9


@families
def test_tactics_are_those_of_the_function(kind: Description, draw: Draw, seed: int) -> None:
    """The table that the tests above go through has every tactic that a caller can name."""
    case = draw(2, 300, 512, random.Random(seed))
    names = [traits.name for traits in kind.traits(case)]
    product = kind.random(case, seed=seed)
    assert [name for name in product.tactics() if not name.endswith("_dense")] == names


@families
def test_every_tactic_serves_a_product(kind: Description, draw: Draw, seed: int) -> None:
    """On the GPU that it is for; where tactics may refuse, all but those that quantise no outputs."""
    choose = random.Random(seed)
    cases = [draw(16, 256, 1024, choose) for _ in range(9 if kind.may_refuse else 1)]
    products = [kind.random(case, seed=seed) for case in cases]
    there = [index for index, traits in enumerate(kind.traits(cases[0])) if fits(traits, "cpu")]
    unserved = []
    for index in there:
        served = False
        for case, product in zip(cases, products, strict=True):
            forced = {"tactic": kind.traits(case)[index].name, "split_k": 1}
            try:
                served |= product.explain(device=H200, **forced).plan.tactic == forced["tactic"]
            except qcutlass.UnsupportedError:
                assert kind.may_refuse, forced
        unserved += [] if served else [index]
    assert unserved == [] or not kind.has_out
    assert len(unserved) < len(there)


LAYERS = [("cpu", 4, 1536, 576)]
LARGE = ((4096, 4096), (28672, 4096), (4096, 14336), (1536, 576))
LAYERS += [("cuda", m, n, k) for n, k in LARGE for m in (1, 16, 64, 512)]


@pytest.mark.parametrize(
    ("device", "m", "n", "k"),
    [pytest.param(*layer, marks=pytest.mark.gpu if layer[0] == "cuda" else []) for layer in LAYERS],
)
@pytest.mark.parametrize("kind", DESCRIPTIONS.values(), ids=list(DESCRIPTIONS))
def test_layers(kind: Description, device: str, m: int, n: int, k: int, seeds: Iterator[int], checks: Any) -> None:
    choose = random.Random(next(seeds))
    for variant in kind.layers:
        case = kind.layer(variant, m, n, k, choose)
        product = kind.random(case, device, next(seeds))
        assert_close(product.outs(), product.problem, kind, checks)
        product, expected = kind.products(case, device, next(seeds))
        assert_exact(product.outs(), expected, product, checks)


@devices
@variants
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_activations(kind: Description, variant: str, view: str, device: str, seed: int, checks: Any) -> None:
    problem = kind.case(24, 72, 128, **kind.variants[variant]).random(device=device, seed=seed)
    changes = {"a": view_of(problem.a, view)}
    if view == "batch":  # whose rows stand in another order
        there = [name for name in kind.of_rows if getattr(problem, name) is not None]
        changes |= {name: getattr(problem, name).unflatten(0, (4, 6)).transpose(0, 1) for name in there}
    problem = replace(problem, **changes)
    assert_close(kind.product(problem).outs(), problem, kind, checks, view)


@devices
@variants
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_misaligned_packed_weights(
    kind: Description, variant: str, offset: int, device: str, seed: int, checks: Any
) -> None:
    """And zero points of bytes."""
    for m in (1, 40, 200) if device == "cuda" else (5,):
        case = kind.case(m, 100, 200, **kind.variants[variant] | kind.finely)
        product, expected = kind.products(case, device, seed + m)
        bytes_ = {name: t for name, t in product.operands.items() if t.dtype.itemsize == 1 and t is not product.a}
        assert product.weights in bytes_
        outs = product.outs(**{name: misaligned(tensor, offset) for name, tensor in bytes_.items()})
        assert_exact(outs, expected, product, checks)


@devices
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("kind", "variant", "name"),
    [
        pytest.param(kind, variant, name, id=f"{kind.name}-{variant}-{name}")
        for kind in DESCRIPTIONS.values()
        for variant in kind.variants
        for name in kind.not_finite
    ],
)
def test_nan_and_infinity_propagate(
    kind: Description, variant: str, name: str, value: float, device: str, seed: int, checks: Any
) -> None:
    for m in (1, 20, 150) if device == "cuda" else (6,):
        for activation in ACTIVATIONS:
            case = kind.case(m, 72, 192, **kind.variants[variant] | {"bias": True, "activation": activation})
            problem = case.random(device=device, seed=seed)
            tensor = getattr(problem, name)
            if name == "a":
                tensor[m // 2, 100] = value
                if tensor.dtype == torch.float8_e4m3fn and math.isinf(value):
                    continue  # which it has not
            else:
                tensor[..., -1] = value
            assert_close(kind.product(problem).outs(), problem, kind, checks, name)


@devices
@variants
def test_repeats_bit_for_bit(kind: Description, variant: str, device: str, seed: int, checks: Any) -> None:
    sizes = [(1, 512, 8192), (16, 200, 4096), (64, 1024, 2048), (200, 4096, 1024)]
    for m, n, k in sizes if device == "cuda" else [(16, 200, 512)]:
        case = kind.case(m, n, k, **kind.variants[variant])
        product, served = kind.random(case, device, seed), 0
        for traits in kind.traits(case) if device == "cuda" else kind.traits(case)[:2]:
            if not fits(traits, device):
                continue
            try:
                first = product.outs(tactic=traits.name)
            except qcutlass.UnsupportedError:  # a tile of fewer channels than a block of the output
                if not kind.may_refuse:
                    raise
                continue
            served += 1
            for _ in range(20 if device == "cuda" else 2):
                for out, expected in zip(product.outs(tactic=traits.name), first, strict=True):
                    checks.equal(out, expected, f"{traits.name}: {product.problem}")
        assert served > 0


@devices
@pytest.mark.parametrize("m", [3, 40, 200])
@pytest.mark.parametrize("kind", [pytest.param(k, id=k.name) for k in DESCRIPTIONS.values() if k.has_out])
def test_out_of_any_strides(kind: Description, m: int, device: str, seed: int, checks: Any) -> None:
    product, (expected,) = kind.products(kind.case(m, 72, 128), device, seed)
    wide = torch.zeros(2 * m, 144, dtype=expected.dtype, device=device)
    for out in (torch.zeros_like(expected).T.contiguous().T, wide[:m, ::2], wide[::2, :72], wide[:m, 1:73]):
        assert product(out=out) is out
        assert_exact((out,), (expected,), product, checks)
