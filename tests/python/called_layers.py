"""Layers that are called, and what they remember of it, for tests of both."""

from __future__ import annotations

import copy
from typing import Any, Final

import pytest
import torch
from tests.python.modules import randn
from torch import Tensor, nn

import qcutlass
from qcutlass import FP8, W4A8, W8A8, Blockwise, QuantLinear, WeightOnly
from qcutlass.layers import Int8Linear
from qcutlass.products.layer_calls import CALLS
from qcutlass.schemes import Scheme

N, K = 48, 128
SCHEMES: Final[dict[str, Scheme]] = {
    "w4": WeightOnly(4, 32),
    "w8": WeightOnly(8, None, symmetric=True),
    "w8a8": W8A8(),
    "w8a8-zeros": W8A8(symmetric=False),
    "fp8": FP8(),
    "w4a8-fp8": W4A8(32),
    "w4a8-int8": W4A8(32, "int8"),
    "blockwise": Blockwise(32),
    "blockwise-fp8": Blockwise(128, "fp8"),  # GPUs take no others
}
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


class Own(Tensor):
    """Whose operators tell their type."""


def layer_of(scheme: Scheme, seed: int, device: str = "cpu") -> Any:
    linear = nn.Linear(K, N)
    with torch.no_grad():
        linear.weight.copy_(randn(N, K, seed=seed))
    return QuantLinear.from_linear(linear, scheme).to(device)


def static_layer(seed: int) -> Int8Linear:
    """With everything that a layer of 8-bit activations may have."""
    w_q, w_scale = qcutlass.quantize_weights_int8(randn(N, K, seed=seed))
    return Int8Linear(
        w_q,
        w_scale,
        bias=randn(N, seed=seed + 1),
        a_scale=torch.tensor([0.03]),
        azp=torch.tensor([5], dtype=torch.int32),
        smooth=randn(K, seed=seed + 2).abs() + 0.5,
        activation="silu",
    )


def remembered(layer: Any) -> int:
    """How many calls of a layer are."""
    calls = vars(layer).get(CALLS)
    return 0 if calls is None else len(calls)


def fresh(layer: Any, a: Tensor) -> Tensor:
    """The output of a layer that was not called before."""
    twin = copy.deepcopy(layer)
    assert remembered(twin) == 0
    out: Tensor = twin(a)
    return out
