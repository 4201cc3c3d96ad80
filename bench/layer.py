"""A layer on the GPU in every form that a contestant multiplies."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import qcutlass
from bench.gpu_timing import Contestant, rotation
from bench.schemes import Scheme, WeightOnly
from bench.shapes import Shape
from qcutlass import testing
from qcutlass.products.selection import weight_dtype


class Call(NamedTuple):
    """A public function of qcutlass with its arguments, but for `out`, `tactic` and `split_k`."""

    function: Callable[..., Any]
    operands: tuple[Tensor, ...]
    options: dict[str, Any]


class Layer(ABC):
    """Random weights and activations of one scheme and shape.

    Attributes:
        kind: what such a layer multiplies, in words.
        scheme, n, k: what it is.
        dtype: 16-bit type of the output, and of the dense forms.
        bias: `[N]` or None.
    """

    kind: ClassVar[str]

    def __init__(self, scheme: Scheme, shape: Shape, dtype: torch.dtype, bias: Tensor | None) -> None:
        self.scheme = scheme
        self.n, self.k = shape
        self.dtype = dtype
        self.bias = bias
        self._references: dict[torch.dtype, testing.Reference] = {}

    @property
    def shape(self) -> str:
        return f"{self.n}x{self.k}"

    @property
    def name(self) -> str:
        return f"{self.scheme.name} {self.shape}"

    @cached_property
    def dense(self) -> list[list[Tensor]]:
        """Copies of the weights in 16 bits, `[N, K]`."""
        return rotation([self.dense_weight()])

    @property
    @abstractmethod
    def packed(self) -> list[list[Tensor]]:
        """Copies of what qcutlass reads of the weights."""

    @abstractmethod
    def dense_weight(self) -> Tensor:
        """The weights in 16 bits, `[N, K]`."""

    @abstractmethod
    def dense_rows(self, m: int) -> Tensor:
        """The first m activations in 16 bits, `[m, K]`."""

    @abstractmethod
    def reference(self, weight_dtype: torch.dtype) -> testing.Reference:
        """The answer for all rows, with weights rounded to `weight_dtype` where they are rounded."""

    def _rows(self, weight_dtype: torch.dtype, m: int) -> testing.Reference:
        if weight_dtype not in self._references:
            self._references[weight_dtype] = self.reference(weight_dtype)
        return self._references[weight_dtype].rows(0, m)

    def expected(self, m: int) -> Tensor:
        """float64 `[m, N]`: what the first m rows give."""
        return self._rows(self.dtype, m).value

    def check(self, contestant: Contestant, out: Tensor) -> float:
        """The largest error of qcutlass's result for the first rows, as a share of its bound.

        Raises:
            AssertionError: it is out of its bound.
        """
        reference = self._rows(contestant.weight_dtype or self.dtype, len(out))
        return testing.assert_close(out, reference, label=(contestant.name, self.name))

    def plan(self, m: int, tactic: str = "", split_k: int = 0, batch_invariant: bool = False) -> Contestant:
        """qcutlass on the first m rows, through the public function; the tactic is the selected one or forced."""
        forced = choice(tactic, split_k, batch_invariant)
        products = [self.call(m, index) for index in range(len(self.packed))]
        calls = [functools.partial(call.function, *call.operands, **call.options, **forced) for call in products]

        def launch(index: int, out: Tensor) -> Tensor:
            result: Tensor = calls[index](out=out)
            return result

        function, operands, options = products[0]
        plan = qcutlass.plan(function, *operands, **options, **forced)
        return Contestant(plan_name(plan.tactic, plan.split_k), launch, len(calls))

    @abstractmethod
    def call(self, m: int, index: int = 0) -> Call:
        """The product of the first m rows and copy `index` of the weights."""

    def with_quantizer(self, m: int) -> Contestant | None:
        """The selected kernel behind the quantiser of its m rows; None: this bench has none for them."""
        return None

    def tactics(self, m: int) -> list[str]:
        """Names of all tactics."""
        function, operands, options = self.call(m)
        return qcutlass.tactics(function, *operands, **options)

    @abstractmethod
    def moved_bytes(self, m: int) -> int:
        """The bytes that a product of m rows moves at least: every operand read once, the output written once."""

    def forced(self, m: int, wanted: str, splits: Sequence[int], within: float | None = None) -> Iterator[Contestant]:
        """Each tactic whose name contains `wanted`, with each split-K, as far as the GPU and K allow.

        Args:
            within: in place of `splits`, what selection compares and predicts to take at most so many times the least.
        """
        if within is not None:
            function, operands, options = self.call(m)
            candidates = qcutlass.explain(function, *operands, **options).candidates
            most = within * min(candidate.cost.total for candidate in candidates)
            near = (one.plan for one in candidates if wanted in one.plan.tactic and one.cost.total <= most)
            yield from (self.plan(m, plan.tactic, plan.split_k) for plan in near)
            return
        for tactic in self.tactics(m):
            for split in splits if wanted in tactic else ():
                with contextlib.suppress(qcutlass.UnsupportedError):
                    yield self.plan(m, tactic, split)

    def invariant(self, m: int) -> Contestant:
        """The kernel of the batch-invariant product."""
        chosen = self.plan(m, batch_invariant=True)
        return replace(chosen, name=f"{chosen.name} batch-invariant")

    def operations(self, m: int) -> int:
        return 2 * m * self.n * self.k


def choice(tactic: str, split_k: int, batch_invariant: bool) -> dict[str, Any]:
    """The options of a product that say which kernel it takes: none, where it is free to."""
    forced: dict[str, Any] = {"tactic": tactic, "split_k": split_k} if tactic else {}
    return forced | ({"batch_invariant": True} if batch_invariant else {})


def plan_name(tactic: str, split_k: int) -> str:
    """A tactic with its split in words."""
    return tactic if split_k == 1 else f"{tactic} split {split_k}"


class WeightOnlyLayer(Layer):
    """16-bit activations; weights packed and dequantised."""

    kind = "16-bit activations by quantised weights"

    def __init__(self, scheme: WeightOnly, shape: Shape, most_rows: int, device: str = "cuda") -> None:
        self.case = scheme.case(most_rows, *shape, torch.float16)
        self.problem = self.case.random(device=device, seed=1)
        super().__init__(scheme, shape, self.case.dtype, self.problem.bias)

    def reference(self, weight_dtype: torch.dtype) -> testing.Reference:
        return self.problem.reference(weight_dtype)

    @cached_property
    def packed(self) -> list[list[Tensor]]:
        """Copies of packed codes, scales, and what there is of zeros, minimums, a second level and a global scale."""
        packed = qcutlass.preprocess_weights(self.problem.codes, bits=self.case.bits)
        return rotation([packed, *(getattr(self.problem, name) for name in self._names[1:])])

    @property
    def _names(self) -> list[str]:
        names = ("zeros", "minimums", "super_scales", "super_minimums", "global_scale")
        return ["w_packed", "scales", *(name for name in names if getattr(self.problem, name) is not None)]

    def operands(self, index: int) -> dict[str, Tensor]:
        """A copy, by the names that `gemm` has for them."""
        return dict(zip(self._names, self.packed[index], strict=True))

    def dense_weight(self) -> Tensor:
        return self.problem.weight(self.dtype)

    def dense_rows(self, m: int) -> Tensor:
        return self.problem.a[:m]

    def call(self, m: int, index: int = 0) -> Call:
        return Call(qcutlass.gemm, (self.problem.a[:m],), self.problem.keywords | self.operands(index))

    def plan(self, m: int, tactic: str = "", split_k: int = 0, batch_invariant: bool = False) -> Contestant:
        a = self.problem.a[:m]
        keywords: dict[str, Any] = self.problem.keywords | choice(tactic, split_k, batch_invariant)

        def launch(index: int, out: Tensor) -> Tensor:
            return qcutlass.gemm(a, out=out, **keywords | self.operands(index))

        plan = qcutlass.plan(qcutlass.gemm, a, **keywords | self.operands(0))
        rounded = weight_dtype(a, **keywords | self.operands(0))
        return Contestant(plan_name(plan.tactic, plan.split_k), launch, len(self.packed), weight_dtype=rounded)

    def moved_bytes(self, m: int) -> int:
        return sum(t.nbytes for t in self.packed[0]) + 2 * m * (self.k + self.n)
