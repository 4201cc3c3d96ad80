"""Shares of experts: those of all ranks together compute what the whole expert does, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.vllm.expert_parts import HIDDEN, expert, layer, of_layers, of_module

import qcutlass
from qcutlass.formats import CanonicalInt8, FloatLinear
from qcutlass.layers.experts import Gate
from qcutlass.vllm.experts import ExpertLayers, cut_expert, experts_of, of_weights_alone

CUTS: dict[str, dict[str, Any]] = {
    "groups": {"size": 128, "group_size": 32},
    "act-order": {"size": 128, "group_size": 32, "order": True},
    "groups are cut": {"size": 96, "group_size": 64},
    "act-order, groups are cut": {"size": 96, "group_size": 64, "order": True},
    "cut at no multiple of 16": {"size": 80, "group_size": 16},
    "act-order, cut at no multiple of 16": {"size": 80, "group_size": 16, "order": True},
    "floating codes": {"size": 64, "group_size": 16, "weight_dtype": "e2m1", "zeros": None},
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", CUTS)
def test_ranks_together_are_the_expert(name: str, world_size: int) -> None:
    whole = expert(**CUTS[name])
    size = whole.down.shape[1] // world_size
    shares = [cut_expert(whole, rank * size, size) for rank in range(world_size)]
    total = sum((of_layers(share) for share in shares), torch.zeros(()))
    assert torch.equal(total, of_layers(whole))
    assert all(share.down.perm is None for share in shares)


def test_minimums_are_cut_with_their_groups() -> None:
    whole = expert(64, 16, zeros=None)
    whole = ExpertLayers(*(replace(each, weight=replace(each.weight, minimums=each.weight.scales)) for each in whole))
    shares = [cut_expert(whole, begin, 32) for begin in (0, 32)]
    assert torch.equal(of_layers(shares[0]) + of_layers(shares[1]), of_layers(whole))


def test_the_first_rank_has_the_bias() -> None:
    plain, bias = expert(64, 16), torch.ones(HIDDEN)
    between = torch.arange(64.0)
    whole = ExpertLayers(replace(plain.gate, bias=between), plain.up, replace(plain.down, bias=bias))
    first, second = (cut_expert(whole, begin, 32) for begin in (0, 32))
    assert first.down.bias is not None
    assert torch.equal(first.down.bias, bias)
    assert second.down.bias is None
    assert second.gate.bias is not None
    assert torch.equal(second.gate.bias, between[32:])


class TestModules:
    def test_experts_are_stacked(self) -> None:
        wholes = [expert(64, 16, order=True) for _ in range(3)]
        module = experts_of((cut_expert(whole, 0, 64) for whole in wholes), 3, Gate(), torch.float16, "block")
        assert module.gate_up.scales.dtype == torch.float16
        for index, whole in enumerate(wholes):
            assert torch.equal(of_module(module, index), of_layers(whole))

    def test_experts_that_differ_are_named(self) -> None:
        one, other = expert(64, 16), expert(64, 32)
        with pytest.raises(qcutlass.UnsupportedError, match=r"block: expert 1: down"):
            experts_of([one, other], 2, Gate(), torch.float16, "block")

    @pytest.mark.parametrize(
        "other",
        [FloatLinear(torch.randn(32, 32)), CanonicalInt8(*qcutlass.quantize_weights_int8(torch.randn(32, 32)))],
    )
    def test_other_layers_are_refused(self, other: Any) -> None:
        taken = layer(32, 32, 16)
        assert of_weights_alone(taken, "block: gate") is taken
        with pytest.raises(qcutlass.UnsupportedError, match=r"block: gate.*quantised alone"):
            of_weights_alone(other, "block: gate")
