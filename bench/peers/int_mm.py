"""torch._int_mm: cuBLAS's int8 product, whose int32 sums nobody scales."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from bench.gpu_timing import Contestant, rotation
from bench.layer import Layer
from bench.layer_w8a8 import EightBitLayer
from bench.peers.base import Peer, Product, Skip, require, require_gpu

_LEAST_ROWS: Final = 17
_MULTIPLE: Final = 8


class IntMm(Peer):
    """`torch._int_mm`, which does less than the others: no zero points, scales and bias, twice the bytes written."""

    key = "int_mm"
    label = "torch._int_mm (no scales)"

    def load(self) -> str:
        require_gpu()
        return f"torch {torch.__version__}, int32 sums without scales"

    def prepare(self, layer: Layer) -> Product:
        ours = require(layer, EightBitLayer)
        if ours.scheme.operands != "int8":
            raise Skip("multiplies int8 alone")
        if ours.n % _MULTIPLE != 0 or ours.k % _MULTIPLE != 0:
            raise Skip(f"takes N and K that are multiples of {_MULTIPLE}")
        weights = rotation([ours.w])

        def contestants(m: int) -> list[Contestant]:
            if m < _LEAST_ROWS:
                raise Skip(f"M < {_LEAST_ROWS}: refused by torch")
            a = ours.a[:m]

            def launch(index: int, out: Tensor) -> Tensor:  # allocates its output
                return torch._int_mm(a, weights[index][0].T)

            return [Contestant(self.key, launch, len(weights), complete=ours.completed)]

        return contestants
