"""A layer on the GPU in every form that a contestant multiplies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import qcutlass
from bench.gpu_timing import Contestant, rotation
from bench.schemes import Scheme
from bench.shapes import Shape
from qcutlass import testing
from qcutlass.selection import weight_dtype


class Layer:
    """Random weights of one scheme and shape: packed and dequantised."""

    def __init__(self, scheme: Scheme, shape: Shape, most_rows: int) -> None:
        self.scheme = scheme
        self.case = scheme.case(most_rows, *shape, torch.float16)
        self.problem = self.case.random(device="cuda", seed=1)
        self.weight = self.problem.weight(self.case.dtype)
        self._references: dict[torch.dtype, testing.Reference] = {}

    def reference(self, weight_dtype: torch.dtype | None = None) -> testing.Reference:
        """The answer for all rows, with weights rounded to `weight_dtype` (None: the activations' type)."""
        dtype = weight_dtype or self.case.dtype
        if dtype not in self._references:
            self._references[dtype] = self.problem.reference(dtype)
        return self._references[dtype]

    @property
    def shape(self) -> str:
        return f"{self.case.n}x{self.case.k}"

    @property
    def name(self) -> str:
        return f"{self.scheme.name} {self.shape}"

    @cached_property
    def packed(self) -> list[list[Tensor]]:
        """Copies of (packed codes, scales, zeros if there are any)."""
        packed = qcutlass.preprocess_weights(self.problem.codes, bits=self.case.bits)
        return rotation([t for t in (packed, self.problem.scales, self.problem.zeros) if t is not None])

    @cached_property
    def dense(self) -> list[list[Tensor]]:
        return rotation([self.weight])

    def qcutlass_contestant(self, a: Tensor, tactic: str = "", split_k: int = 0) -> Contestant:
        """The fused product, through the public function; the tactic is the selected one or forced by name."""
        keywords: dict[str, Any] = self.problem.keywords | ({"tactic": tactic, "split_k": split_k} if tactic else {})

        def launch(index: int, out: Tensor) -> Tensor:
            return qcutlass.gemm(a, *self.packed[index], out=out, **keywords)

        plan = qcutlass.plan(a, *self.packed[0], **keywords)
        name = plan.tactic if plan.split_k == 1 else f"{plan.tactic} split {plan.split_k}"
        return Contestant(name, launch, len(self.packed), weight_dtype(a, *self.packed[0], **keywords))

    def forced_contestants(self, a: Tensor, wanted: str, splits: Sequence[int]) -> Iterator[Contestant]:
        """Each tactic whose name contains `wanted`, with each split-K, as far as the GPU and K allow."""
        for tactic in qcutlass.tactics(a, *self.packed[0], **self.problem.keywords):
            for split in splits if wanted in tactic else ():
                with contextlib.suppress(qcutlass.UnsupportedError):
                    yield self.qcutlass_contestant(a, tactic, split)

    def moved_bytes(self, m: int) -> int:
        """What m rows have to move: weights, scales, zeros and activations read once, the output written once."""
        return sum(t.nbytes for t in self.packed[0]) + 2 * m * (self.case.k + self.case.n)

    def flop(self, m: int) -> int:
        return 2 * m * self.case.n * self.case.k
