"""gemm_grouped with columns in an order of each expert's own: in the core, and by torch before the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from tests.python.test_grouped import COUNTS, arguments, assert_right, int32, of_another_expert, product

import qcutlass
from qcutlass import testing
from qcutlass.products import grouped, launching
from qcutlass.testing import Case, GroupedCase, GroupedProblem

ORDERED = Case(9, 72, 256, 4, 64, "int", torch.float16, bias=True, perm=True)


@pytest.fixture(params=["in the core", "by torch"])
def gather(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where columns are put in order: on the CPU in the core, or as for other devices."""
    if request.param == "by torch":
        monkeypatch.setattr(grouped, "IN_ANY_ORDER", ())
    launching.forget()
    yield request.param
    launching.forget()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("counts", ["empty experts", "a row each"])
@pytest.mark.usefixtures("gather")
def test_both_oracles_of_columns_in_other_orders(bits: int, counts: str, seed: int) -> None:
    for gathered, dtype in ((True, torch.float16), (False, torch.float32)):
        case = replace(ORDERED, bits=bits, dtype=dtype, activation="silu")
        assert_right(GroupedCase(case, COUNTS[counts], 2, 5, gathered, scaled=True), "cpu", seed)


@pytest.mark.gpu
def test_both_oracles_of_columns_in_other_orders_on_cuda(seed: int) -> None:
    assert_right(GroupedCase(ORDERED, COUNTS["empty experts"], 2, 5, scaled=True), "cuda", seed)


def test_the_gather_of_torch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    problem = GroupedCase(ORDERED, (3, 0, 9, 40), 1, 2, scaled=True).random(seed=seed)
    whole = product(problem)
    monkeypatch.setattr(grouped, "IN_ANY_ORDER", ())
    launching.forget()
    testing.assert_equal(product(problem), whole)
    launching.forget()


def test_the_gather_of_torch_clamps_indices(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As kernels clamp them: wrong results, and no other memory."""
    problem = GroupedCase(ORDERED, (3, 4, 0)).random(seed=seed)
    operands, options = arguments(problem)
    wild = torch.tensor([2**31 - 1, -(2**31), 9, 100, 0, -1, 8], dtype=torch.int32)
    changed = options | {"rows": wild, "perm": options["perm"] * 2**20 - 2**27, "offsets": int32(-5, 9, 2**30, 2)}
    call = qcutlass.products.kind.FUNCTIONS[qcutlass.gemm_grouped].call(*operands, **changed)
    monkeypatch.setattr(grouped, "IN_ANY_ORDER", ())
    found = call.prepared(call.check(None))
    assert found.a.shape == (7, 256)
    assert found.rows is found.perm is None  # type: ignore[attr-defined]


def order_of_expert_0(p: GroupedProblem) -> GroupedProblem:
    return replace(p, experts=tuple(replace(each, perm=p.experts[0].perm) for each in p.experts))


def inverse_orders(p: GroupedProblem) -> GroupedProblem:
    experts = (replace(each, perm=each.perm.argsort().int()) for each in p.experts if each.perm is not None)
    return replace(p, experts=tuple(experts))


def no_orders(p: GroupedProblem) -> GroupedProblem:
    return replace(p, experts=tuple(replace(each, perm=None) for each in p.experts))


@pytest.mark.parametrize("fault", [of_another_expert("perm"), order_of_expert_0, inverse_orders, no_orders])
@pytest.mark.usefixtures("gather")
def test_faults_of_orders_are_rejected(fault: Callable[[GroupedProblem], GroupedProblem], seed: int) -> None:
    case = GroupedCase(ORDERED, (4, 3, 6), scaled=True)
    exact, expected = case.exact(seed=seed)
    assert torch.equal(product(exact), expected)
    assert not torch.equal(product(fault(exact)), expected)
    problem = case.random(seed=seed)
    assert problem.error_ratio(product(problem)) <= 1
    assert problem.error_ratio(product(fault(problem))) > 1


def test_choices_for_columns_in_other_orders_are_those_behind_the_gather() -> None:
    case = Case(16, 512, 1024, dtype=torch.bfloat16, perm=True)
    found = []
    cases = GroupedCase(case, (2,) * 16), GroupedCase(replace(case, perm=False), (2,) * 16, gathered=False)
    for problem in (each.random() for each in cases):
        operands, options = arguments(problem)
        found.append(qcutlass.explain(qcutlass.gemm_grouped, *operands, **options, device="h200"))
        assert ("perm" in found[-1].problem) == (problem.experts[0].perm is not None)
    assert found[0].plan.tactic == found[1].plan.tactic
