"""Experts whose sums are exact, and what they compute whatever the order of the channels between their products."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

import qcutlass
from qcutlass.formats import CanonicalLinear
from qcutlass.quantized import QuantizedTensor
from qcutlass.vllm.experts import ExpertLayers

HIDDEN: Final = 32


def layer(n: int, k: int, group_size: int, *, perm: Tensor | None = None, **options: Any) -> CanonicalLinear:
    """Random codes, scales that are powers of two."""
    groups = -(-k // group_size)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-3, 1, (groups, n)).float()).half()
    options.setdefault("zeros", torch.randint(0, 16, (groups, n), dtype=torch.uint8))
    weight = QuantizedTensor(codes, scales, bits=4, group_size=group_size, **options)
    return CanonicalLinear(weight, perm=perm)


def expert(size: int, group_size: int, order: bool = False, **options: Any) -> ExpertLayers:
    """With `size` channels between its products, and an order of columns in `down`."""
    perm = torch.randperm(size).to(torch.int32) if order else None
    gate, up = (layer(size, HIDDEN, 16, **options) for _ in range(2))
    return ExpertLayers(gate, up, layer(HIDDEN, size, group_size, perm=perm, **options))


def computed(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """float64 `[H, H, H]`: what each pair of inputs adds to each output, were the activation the identity."""
    return torch.einsum("hc,ci,cj->hij", down.double(), gate.double(), up.double())


def of_layers(layers: ExpertLayers) -> Tensor:
    return computed(*(each.effective_weight() for each in layers))


def of_module(experts: qcutlass.layers.QuantExperts, index: int) -> Tensor:
    return computed(*(each.weights() for each in experts.expert(index)))
