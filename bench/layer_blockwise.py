"""A layer of blockwise int8 or fp8."""

from __future__ import annotations

import functools
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

import qcutlass
from bench.gpu_timing import Contestant, rotation
from bench.layer import Call, Layer, choice, plan_name
from bench.schemes import Blockwise
from bench.shapes import Shape
from qcutlass import blockwise, testing

BLOCK: Final = 128


class QuantizedOutputs:
    """Keeps the scales of codes while these are alive in a graph, for a harness that hands on one tensor."""

    def __init__(self) -> None:
        self._scales: dict[int, Tensor] = {}

    def keep(self, codes: Tensor, scales: Tensor) -> Tensor:
        self._scales[codes.data_ptr()] = scales
        return codes

    def scales(self, codes: Tensor) -> Tensor:
        return self._scales[codes.data_ptr()]

    def numbers(self, codes: Tensor) -> Tensor:
        """float64: what the codes stand for."""
        each = self.scales(codes).repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
        return codes.double() * each.double()


class BlockwiseLayer(Layer):
    """int8 by int8, or fp8 by fp8, with a scale for each block of 1 x 128 and of 128 x 128; the output floating, or of
    int8 in such blocks.

    Attributes:
        a, b: codes, `[M, K]` and `[N, K]`.
        a_s, b_s: scales, `[M, ceil(K / 128)]` and `[ceil(N / 128), ceil(K / 128)]`.
        quantizes: whether the output is codes and scales.
    """

    kind = "blockwise int8 or fp8"

    def __init__(self, scheme: Blockwise, shape: Shape, most_rows: int, device: str = "cuda") -> None:
        problem = self._problem = scheme.case(most_rows, *shape).random(device=device, seed=1)
        super().__init__(scheme, shape, scheme.dtype, None)
        self.a, self.a_s, self.b, self.b_s = problem.a, problem.a_s, problem.b, problem.b_s
        self.quantizes = scheme.quantizes
        self._outputs = QuantizedOutputs()

    def reference(self, weight_dtype: torch.dtype) -> testing.Reference:
        aligned = self.scheme.operands == "fp8"
        return self._problem.reference(torch.float32 if self.quantizes else None, aligned=aligned)

    @cached_property
    def packed(self) -> list[list[Tensor]]:
        """Copies of (packed codes, scales)."""
        return rotation([qcutlass.preprocess_weights(self.b, 8, self.scheme.operands), self.b_s])

    def dense_weight(self) -> Tensor:
        fp8 = self.scheme.operands == "fp8"
        dequantize = blockwise.fp8_weight_dequant if fp8 else blockwise.weight_dequant
        return dequantize(self.b, self.b_s, BLOCK, self.dtype)

    def dense_rows(self, m: int) -> Tensor:
        each = self.a_s[:m].repeat_interleave(BLOCK, 1)[:, : self.k]
        return (self.a[:m].float() * each).to(self.dtype)

    def check(self, contestant: Contestant, out: Tensor) -> float:
        reference, splits = self._rows(self.dtype, len(out)), contestant.splits
        label = (contestant.name, self.name)
        if not self.quantizes:
            return testing.assert_close(out, reference, splits=splits, label=label)
        return testing.assert_quantized(out, self._outputs.scales(out), reference, BLOCK, splits=splits, label=label)

    def call(self, m: int, index: int = 0) -> Call:
        operands = (self.a[:m], self.a_s[:m], *self.packed[index])
        if self.quantizes:
            return Call(blockwise.int8_gemm_quant, operands, {"n": self.n, "out_block_size": BLOCK})
        multiply = blockwise.fp8_gemm if self.scheme.operands == "fp8" else blockwise.int8_gemm
        return Call(multiply, operands, {"n": self.n, "out_dtype": self.dtype})

    def plan(self, m: int, tactic: str = "", split_k: int = 0, batch_invariant: bool = False) -> Contestant:
        forced = choice(tactic, split_k, batch_invariant)
        products = [self.call(m, index) for index in range(len(self.packed))]
        calls = [
            functools.partial(multiply, *operands, **options, **forced) for multiply, operands, options in products
        ]

        def launch(index: int, out: Tensor) -> Tensor:
            if self.quantizes:
                return self._outputs.keep(*calls[index]())
            result: Tensor = calls[index](out=out)
            return result

        multiply, operands, options = products[0]
        plan = qcutlass.plan(multiply, *operands, **options, **forced)
        return Contestant(plan_name(plan.tactic, plan.split_k), launch, len(calls), splits=plan.split_k)

    def with_quantizer(self, m: int) -> Contestant | None:
        """The quantiser of 16-bit rows, then the product; None where codes come from the product before."""
        if self.quantizes:
            return None
        quantize = blockwise.fp8_act_quant if self.scheme.operands == "fp8" else blockwise.act_quant
        rows, products = self.dense_rows(m), [self.call(m, index) for index in range(len(self.packed))]

        def launch(index: int, out: Tensor) -> Tensor:
            multiply, (_, _, *weights), options = products[index]
            result: Tensor = multiply(*quantize(rows, BLOCK), *weights, **options, out=out)
            return result

        return Contestant("with quantiser", launch, len(products))

    def moved_bytes(self, m: int) -> int:
        of_output = self.n + 4 * -(-self.n // BLOCK) if self.quantizes else 2 * self.n
        return sum(t.nbytes for t in (*self.packed[0], self.a[:m], self.a_s[:m])) + m * of_output
