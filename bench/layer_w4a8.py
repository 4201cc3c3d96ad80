"""A layer of 8-bit activations by 4-bit weights."""

from __future__ import annotations

import functools
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import qcutlass
from bench.gpu_timing import Contestant, rotation
from bench.layer import Call, Layer, plan_name
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

    def plan(self, m: int, tactic: str = "", split_k: int = 0) -> Contestant:
        forced: dict[str, Any] = {"tactic": tactic, "split_k": split_k} if tactic else {}
        products = [self.call(m, index) for index in range(len(self.packed))]
        calls = [functools.partial(call.function, *call.operands, **call.options, **forced) for call in products]

        def launch(index: int, out: Tensor) -> Tensor:
            result: Tensor = calls[index](out=out)
            return result

        function, operands, options = products[0]
        plan = qcutlass.plan(function, *operands, **options, **forced)
        return Contestant(plan_name(plan.tactic, plan.split_k), launch, len(calls))

    def moved_bytes(self, m: int) -> int:
        return sum(t.nbytes for t in self.packed[0]) + m * (self.k + 4 + 2 * self.n)
