"""The bench multiplies what the tests know: layers of every kind, without measurements."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import schemes
from bench.gpu import layer_of
from bench.layer import Layer
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import Description, Product

import qcutlass
from qcutlass import testing

M, N, K = 20, 192, 256

benched = pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, name, id=name) for kind in DESCRIPTIONS.values() for name in kind.benched],
)


def layer_and_product(kind: Description, name: str) -> tuple[Layer, Product]:
    """A layer on the CPU, and the product of all its rows."""
    layer: Any = layer_of(schemes.parse(name), (N, K), M, device="cpu")
    problem = layer.problem if hasattr(layer, "problem") else layer._problem
    return layer, kind.product(kind.of_layer(problem))


@benched
def test_bytes_and_operations_are_those_of_the_product(kind: Description, name: str) -> None:
    layer, product = layer_and_product(kind, name)
    assert layer.moved_bytes(M) == product.moved_bytes
    assert layer.operations(M) == product.operations
    assert layer.tactics(M) == product.tactics()


@benched
def test_tactics_within_a_share_are_those_of_the_cost_model(
    kind: Description, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _ = layer_and_product(kind, name)
    monkeypatch.setattr(qcutlass, "explain", functools.partial(qcutlass.explain, device="h200"))
    function, operands, options = layer.call(M)
    candidates = qcutlass.explain(function, *operands, **options).candidates
    times = [one.cost.total for one in candidates]
    within = sorted(times)[len(times) // 2] / min(times)
    wanted = {(one.plan.tactic, one.plan.split_k) for one in candidates if one.cost.total <= within * min(times)}
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(layer, "plan", lambda m, tactic, split_k: asked.append((tactic, split_k)))
    assert len(list(layer.forced(M, "", [1], within))) == len(wanted)
    assert set(asked) == wanted
    assert 0 < len(wanted) < len(candidates) or len(set(times)) < 3
    part = next(iter(wanted))[0]
    asked.clear()
    list(layer.forced(M, part, [1], within))
    assert {tactic for tactic, _ in asked} == {one for one, _ in wanted if part in one}


@benched
def test_our_product_is_the_layers(kind: Description, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, product = layer_and_product(kind, name)
    plan = SimpleNamespace(tactic="stream", split_k=2)  # as on a GPU, though the products run on the CPU
    monkeypatch.setattr(qcutlass, "plan", lambda *operands, **options: plan)
    whole = product.outs()[0]
    for m in (1, M):
        contestant = layer.plan(m)
        assert contestant.name == "stream split 2"
        assert contestant.splits == (2 if kind.may_refuse else 1)
        assert contestant.copies == len(layer.packed) == len(layer.dense) > 1
        target = torch.full((m, N), torch.nan, dtype=layer.dtype)
        out = contestant.launch(contestant.copies - 1, target)
        assert (out is target) == kind.has_out
        if m == M:
            testing.assert_equal(out, whole, label=name)
        assert layer.check(contestant, out) <= 1
        out.copy_(out.roll(1, 1))
        with pytest.raises(AssertionError, match=r"out of bounds|times what is allowed"):
            layer.check(contestant, out)
    assert layer.tactics(1)
