"""Parts of layers, for tensor parallelism: the same weights to the bit, and cuts that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.python.modules import randn

import qcutlass
from qcutlass import QuantLinear, UnsupportedError, models
from qcutlass.layers import WeightOnlyLinear, shard

N, K = 48, 384


def layer(seed: int, *, bits: int = 4, group_size: int | None = 64, **options: Any) -> WeightOnlyLinear:
    q = qcutlass.quantize(randn(N, K, seed=seed), bits, group_size)
    made = QuantLinear.from_quantized(q, bias=randn(N, seed=seed + 1), **options)
    assert isinstance(made, WeightOnlyLinear)
    return made


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [64, None])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_hold_the_weights_of_the_whole(bits: int, group_size: int | None, world_size: int, seed: int) -> None:
    whole = layer(seed, bits=bits, group_size=group_size)
    weight = models.weights_of(whole)
    for axis, dim in (("out", 0), ("in", 1)):
        parts = [shard(whole, rank, world_size, axis) for rank in range(world_size)]  # type: ignore[arg-type]
        assert torch.equal(torch.cat([models.weights_of(part) for part in parts], dim), weight)
        for part in parts:
            part.check()
            assert part.w_packed.data_ptr() != whole.w_packed.data_ptr()  # type: ignore[operator]


def test_outputs_are_those_of_the_whole(seed: int) -> None:
    """Integers, so that sums in any order are exact."""
    codes = torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    weight = qcutlass.QuantizedTensor(codes, torch.ones(6, N), None, 4, 64)
    whole = QuantLinear.from_quantized(weight, bias=torch.arange(float(N)), act_scale=torch.arange(float(K)) % 4 + 1)
    x = torch.randint(-4, 5, (5, K), generator=torch.Generator().manual_seed(seed)).float()
    by_channel = [shard(whole, rank, 3, "out")(x) for rank in range(3)]
    assert torch.equal(torch.cat(by_channel, dim=1), whole(x))
    parts = [shard(whole, rank, 3, "in") for rank in range(3)]
    assert torch.equal(sum(part(x[:, i * 128 : (i + 1) * 128]) for i, part in enumerate(parts)), whole(x))
    assert [part.bias is not None for part in parts] == [True, False, False]


def test_act_order_and_activations_go_with_the_channels(seed: int) -> None:
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(seed)).int()
    whole = layer(seed, perm=perm, activation="silu")
    x = randn(4, K, seed=seed + 2)
    parts = [shard(whole, rank, 2, "out")(x) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole(x))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 4, "in"), {}, "parts of 96 columns cut through groups of 64"),
        ((0, 5, "out"), {}, "divisor of N = 48"),
        ((0, 5, "in"), {}, "divisor of K = 384"),
        ((0, 2, "in"), {"perm": torch.arange(K - 1, -1, -1, dtype=torch.int32)}, "act-order"),
        ((0, 2, "in"), {"activation": "relu"}, "must follow the sum"),
        ((2, 2, "in"), {}, "rank"),
        ((0, 2, "across"), {}, "expected 'out' or 'in'"),
    ],
)
def test_cuts_that_are_refused(arguments: Any, options: dict[str, Any], message: str, seed: int) -> None:
    with pytest.raises(ValueError, match=message):
        shard(layer(seed, **options), *arguments)


def test_other_layers_are_refused(seed: int) -> None:
    linear = torch.nn.Linear(64, 16)
    with pytest.raises(UnsupportedError, match="Int8Linear"):
        shard(QuantLinear.from_linear(linear, qcutlass.W8A8()), 0, 2, "out")
    with pytest.raises(TypeError, match="expected a QuantLinear"):
        shard(linear, 0, 2, "out")  # type: ignore[arg-type]
