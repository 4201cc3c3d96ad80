"""A layer of 8-bit activations by 4-bit weights."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

import qcutlass
from bench.gpu_timing import rotation
from bench.layer import Call, Layer
from bench.schemes import FourByEight
from bench.shapes import Shape
from qcutlass import testing


class FourByEightLayer(Layer):
    """int8 or e4m3 activations with a scale for each token, codes of 4 bits with scales and zeros of groups."""

    kind = "8-bit activations by 4-bit weights"

    def __init__(self, scheme: FourByEight, shape: Shape, most_rows: int, device: str = "cuda") -> None:
        self.problem = scheme.case(most_rows, *shape).random(device=device, seed=1)
        super().__init__(scheme, shape, scheme.dtype, None)

    def reference(self, weight_dtype: torch.dtype) -> testing.Reference:
        size = self.problem.group_size
        return self.problem.reference(promoted=128 if size >= self.k or size % 128 == 0 else 32)

    @cached_property
    def packed(self) -> list[list[Tensor]]:
        """Copies of (packed codes, scales, zeros if there are any)."""
        p = self.problem
        packed = qcutlass.preprocess_weights(p.codes, 4, self.scheme.operands)
        return rotation([t for t in (packed, p.scales, p.zeros) if t is not None])

    def dense_weight(self) -> Tensor:
        return self.problem.weight().to(self.dtype)

    def dense_rows(self, m: int) -> Tensor:
        return (self.problem.rows()[:m] * self.problem.row_scale()[:m]).to(self.dtype)

    def call(self, m: int, index: int = 0) -> Call:
        p, (packed, *groups) = self.problem, self.packed[index]
        options = {"out_dtype": self.dtype, "group_size": -1 if p.group_size >= self.k else p.group_size}
        return Call(qcutlass.gemm_w4a8, (p.a[:m], packed, p.a_scale[:m], *groups), options)

    def moved_bytes(self, m: int) -> int:
        return sum(t.nbytes for t in self.packed[0]) + m * (self.k + 4 + 2 * self.n)
