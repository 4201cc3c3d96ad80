"""A layer of 8-bit activations by 8-bit weights."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import qcutlass
from bench.gpu_timing import rotation
from bench.layer import Call, Layer
from bench.schemes import EightBit
from bench.shapes import Shape
from qcutlass import testing


class EightBitLayer(Layer):
    """8-bit activations and weights, a scale for each token, a scale and a bias for each channel.

    Attributes:
        a, w: codes, `[M, K]` and `[N, K]`.
        a_scale, w_scale: `[M]` and `[N]`.
        azp: zero points of the activations, `[M]`, or None.
    """

    kind = "8-bit activations by 8-bit weights"
    bias: Tensor

    def __init__(self, scheme: EightBit, shape: Shape, most_rows: int, device: str = "cuda") -> None:
        problem = self._problem = scheme.case(most_rows, *shape).random(device=device, seed=1)
        assert problem.a_scale is not None
        assert problem.w_scale is not None
        super().__init__(scheme, shape, scheme.dtype, problem.bias)
        self.a, self.w = problem.a, problem.w
        self.a_scale, self.w_scale = problem.a_scale, problem.w_scale
        self.azp = problem.azp

    def reference(self, weight_dtype: torch.dtype) -> testing.Reference:
        return self._problem.reference(aligned=self.scheme.operands == "fp8")

    def completed(self, sums: Tensor) -> Tensor:
        """float64 `[m, N]`: what the first m rows give, from their sums of products of codes."""
        m = len(sums)
        total = sums.double()
        if self.azp is not None:
            total -= self.azp[:m, None].double() * self.w.double().sum(1)
        return total * self.a_scale[:m, None] * self.w_scale + self.bias

    @cached_property
    def packed(self) -> list[list[Tensor]]:
        """Copies of (packed codes, scales, bias, sums of the codes if there are zero points)."""
        packed = qcutlass.preprocess_weights(self.w, bits=8, activations=self.scheme.operands)
        sums = [] if self.azp is None else [qcutlass.weight_sums(self.w)]
        return rotation([packed, self.w_scale, self.bias, *sums])

    def dense_weight(self) -> Tensor:
        return (self.w.float() * self.w_scale[:, None]).to(self.dtype)

    def dense_rows(self, m: int) -> Tensor:
        a = self.a[:m].float()
        if self.azp is not None:
            a = a - self.azp[:m, None]
        return (a * self.a_scale[:m, None]).to(self.dtype)

    def call(self, m: int, index: int = 0) -> Call:
        w_packed, w_scale, bias, *w_sums = self.packed[index]
        options: dict[str, Any] = {"bias": bias, "out_dtype": self.dtype}
        if self.azp is not None:
            options |= {"azp": self.azp[:m], "w_sums": w_sums[0]}
        multiply = qcutlass.gemm_w8a8 if self.scheme.operands == "int8" else qcutlass.gemm_fp8
        return Call(multiply, (self.a[:m], w_packed, self.a_scale[:m], w_scale), options)

    def moved_bytes(self, m: int) -> int:
        of_rows = [t[:m] for t in (self.a, self.a_scale, self.azp) if t is not None]
        return sum(t.nbytes for t in (*self.packed[0], *of_rows)) + 2 * m * self.n
