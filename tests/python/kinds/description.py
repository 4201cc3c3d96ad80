"""What the facets of the tests know of a kind of product: errors, faults, torch, CUDA, streams, `explain`, benches.

A kind is one `Description`, an entry of `tests.python.kinds.DESCRIPTIONS`; no facet knows another way to it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import _C, testing
from qcutlass.products import selection
from qcutlass.products.kind import FUNCTIONS, Kind

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
EXACT = (None, "relu")  # activations that are
MANY_ROWS = (*range(18), 33, 64, 65, 127, 128, 129, 257, 512)
H200 = selection.GPUS["h200"]
TYPES = {torch.float16: _C.DType.FLOAT16, torch.bfloat16: _C.DType.BFLOAT16, torch.float32: _C.DType.FLOAT32}

Values: TypeAlias = dict[str, Any]
Change: TypeAlias = Callable[[Values], object]
Row: TypeAlias = tuple[str, Change, type[Exception], tuple[str, ...]]
"""An argument, its wrong value made from valid ones, the exception, what the message holds besides the name."""
Refusal: TypeAlias = tuple[Callable[[], object], type[Exception], tuple[str, ...]]
"""A wrong call of another function, the exception, what its message holds."""
Draw: TypeAlias = Callable[[int, int, int, random.Random], Any]
"""A case of sizes m, n, k, everything else at random."""


def fits(traits: _C.TacticTraits, device: str) -> bool:
    """Whether the GPU has what a configuration needs; the CPU stands for an H200."""
    there = H200 if device == "cpu" else _C.device_traits(torch.cuda.current_device())
    built = not traits.superseded if there.wgmma else not traits.wgmma
    return built and traits.shared_memory <= there.shared_memory_per_block


def tactics_here(product: Callable[..., Any], *operands: Any, **options: Any) -> list[str]:
    """Names of a product's configurations that the current GPU has, as `qcutlass.tactics` lists them."""
    every = selection.configurations(product, *operands, **options)
    absent = {traits.name for traits in every if not fits(traits, "cuda")}
    return [name for name in qcutlass.tactics(product, *operands, **options) if name not in absent]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def half(*shape: int) -> Tensor:
    return ones(*shape, dtype=torch.float16)


def int8(*shape: int) -> Tensor:
    return ones(*shape, dtype=torch.int8)


@dataclass(frozen=True)
class Judged:
    """A case, and keyword arguments of its problems' `reference` by which a model of the product is judged."""

    case: Any
    reference: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Product:
    """A problem as the arguments of the function that multiplies.

    Attributes:
        operands: its tensors by the function's parameters, the activations first; weights are packed.
        options: all other arguments.
    """

    description: Description
    problem: Any
    operands: dict[str, Tensor]
    options: Values

    @property
    def activations(self) -> str:
        """The parameter's name."""
        return next(iter(self.operands))

    @property
    def weights(self) -> str:
        return list(self.operands)[self.description.place_of_weights]

    @property
    def a(self) -> Tensor:
        return self.operands[self.activations]

    @property
    def values(self) -> Values:
        """Every argument by its name."""
        return self.operands | self.options

    def __call__(self, **changes: Any) -> Any:
        return self.description.function(**self.values | changes)

    def outs(self, **changes: Any) -> tuple[Tensor, ...]:
        """The output, or codes and scales."""
        out = self(**changes)
        return out if isinstance(out, tuple) else (out,)

    def arguments(self) -> tuple[Any, ...]:
        """Those of the operator."""
        function = FUNCTIONS[self.description.function]
        return function.kind.arguments(function.call(**self.values))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Product:
        """With every operand changed, meta tensors say."""
        return replace(self, operands={name: change(tensor) for name, tensor in self.operands.items()})

    def rows(self, a: Tensor) -> dict[str, Tensor]:
        """The operands that go with other activations, so many rows or fewer."""
        others = [name for name in self.description.of_rows if name in self.operands]
        return {name: self.operands[name][: len(a)] for name in others} | {self.activations: a}

    def without_computed(self) -> Product:
        """The operands left out that calls then compute."""
        left = {name: t for name, t in self.operands.items() if name not in self.description.computed}
        return replace(self, operands=left)

    def explain(self, **options: Any) -> qcutlass.Explanation:
        return qcutlass.explain(self.description.function, **self.values | options)

    def tactics(self) -> list[str]:
        return qcutlass.tactics(self.description.function, **self.values)

    @property
    def moved_bytes(self) -> int:
        """Every operand read once, the output written once."""
        return sum(tensor.nbytes for tensor in (*self.operands.values(), *self.outs()))

    @property
    def operations(self) -> int:
        m, n, k = self.problem.shape
        return 2 * m * n * k


class Description(ABC):
    """A kind of product, or that of one of its functions whose output has another form.

    Attributes:
        name: in ids of tests.
        function: the public one that takes every operand; kind, operator and operands follow from it.
        schema: the arguments of the operator.
        settling: the weights and what belongs to them, by name: what kernels may read before the last one ends.
        outputs: operands of its calls that are written.
        excluded: operands that no product takes beside the others.
        finely: options of cases with more scales.
        may_refuse: tactics do not take every shape of blocks and number of shares of K.
        settled: n, k and repetitions of the test that operands are read after they are written.
        of_rows: operands other than the activations with an entry for each row of them.
        scale: an operand whose sign is the output's.
        computed: operands that calls compute where they are not given.
        boxed: operands whose memory is poisoned around; the others are packed.
        not_finite: operands that may hold NaN and infinity.
        granule: channels and columns that share a scale, at most: sizes for tactics go beyond several.
        capability: the least of a GPU, for its instructions.

        variants: options of `case`, by name, for each type of operands that has kernels of its own.
        cases: between them with every operand; a short name each.
        inductor: names of the cases that are compiled to the end.
        whole: the case of wrong arguments: every operand, few rows.
        rows: wrong arguments.
        fake_rows: those of them, or others, that fake tensors must show too.
        refusals: wrong calls of functions around the product.

        model: the sound product in floats, stations of which `faults` replace.
        fault_cases, sound_cases: by name, cases in which each fault is rejected, and the sound product is not.
        narrow: cases with sums past what 16 bits hold; `peak` and `narrowest` say how.

        families: cases of products that share kernels.
        layers: variants and how often each is tried on large layers.
        asynchronous: cases with kernels of asynchronous MMAs, by name.
        explained: options and what `explain` then says behind the sizes.
        benched: schemes of the bench.
    """

    name: str
    function: Callable[..., Any]
    schema: str
    settling: tuple[str, ...]
    place_of_weights = 1
    outputs = 0
    excluded: tuple[str, ...] = ()
    finely: Mapping[str, Any] = MappingProxyType({})
    may_refuse = False
    settled = (2048, 2048, 50)
    of_rows: tuple[str, ...] = ()
    scale: str
    computed: tuple[str, ...] = ()
    boxed: tuple[str, ...]
    not_finite: tuple[str, ...]
    granule = 1
    capability = (8, 0)

    variants: Mapping[str, Values]
    cases: Mapping[str, Any]
    inductor: tuple[str, ...] = ()
    whole: Any
    rows: Sequence[Row]
    fake_rows: Sequence[Row]
    refusals: Sequence[Refusal]

    model: type[Any]
    faults: Sequence[type[Any]]
    fault_cases: Mapping[str, Sequence[Judged]]
    sound_cases: Mapping[str, Sequence[Judged]]
    narrow: Mapping[str, Sequence[Any]]

    families: Mapping[str, Draw]
    layers: Sequence[str]
    asynchronous: Mapping[str, Values]
    explained: Mapping[str, tuple[Values, str]]
    benched: Sequence[str]

    @cached_property
    def kind(self) -> Kind:
        return FUNCTIONS[self.function].kind

    @property
    def most_operands(self) -> int:
        """Of one product."""
        return len(self.kind.roles) - self.outputs - len(self.excluded)

    operator_suffix = ""

    @property
    def operator(self) -> str:
        """`torch.ops.qcutlass.<operator>`."""
        return self.kind.name + self.operator_suffix

    has_out = True

    @abstractmethod
    def case(self, m: int, n: int, k: int, **options: Any) -> Any:
        """A product as layers have it: what `random` and `exact` fill with data."""

    def full(self, m: int, n: int, k: int, **options: Any) -> Any:
        """The same with every operand."""
        return self.case(m, n, k, **options)

    @abstractmethod
    def product(self, problem: Any) -> Product: ...

    def on(self, device: str, case: Any) -> Any:
        """The case as kernels for the device take it."""
        return case

    @abstractmethod
    def arguments(self, case: Any) -> _C.GemmArguments:
        """The types and sizes of a case, as selection sees them."""

    @abstractmethod
    def reference(self, problem: Any, **forced: Any) -> testing.Reference:
        """The float64 answer for the weights that the product works with, on the problem's device."""

    def splits(self, problem: Any, split_k: int) -> int:
        """The shares of K that the bound allows for."""
        return 1

    def peak(self, problem: Any, expected: Tensor) -> float:
        """The largest sum of an exact problem."""
        return float(expected.float().abs().max())

    @abstractmethod
    def narrowest(self, problem: Any) -> float:
        """What it must exceed."""

    def out_dtype(self, problem: Any) -> torch.dtype:
        return problem.out_dtype  # type: ignore[no-any-return]

    def with_activation(self, case: Any, names: Sequence[str | None], choose: random.Random) -> Any:
        return replace(case, activation=choose.choice(names))

    def products(self, case: Any, device: str, seed: int) -> tuple[Product, tuple[Tensor, ...]]:
        """Oracle E: a product whose sums are exact in any order, and its outputs."""
        problem, expected = case.exact(device=device, seed=seed)
        return self.product(problem), (expected,)

    def any_case(self, variant: str, m: int, n: int, k: int, choose: random.Random) -> Any:
        """A case of a variant with everything else at random."""
        return self.families[variant](m, n, k, choose)

    def layer(self, variant: str, m: int, n: int, k: int, choose: random.Random) -> Any:
        """One of a large layer."""
        return self.any_case(variant, m, n, k, choose)

    def traits(self, case: Any) -> list[_C.TacticTraits]:
        """All configurations of its kernels."""
        return _C.tactics(self.arguments(case))

    def random(self, case: Any, device: str = "cpu", seed: int = 0) -> Product:
        return self.product(case.random(device=device, seed=seed))

    def assert_exact(self, outs: Sequence[Tensor], expected: Sequence[Tensor], product: Product, label: object) -> None:
        for out, wanted in zip(outs, expected, strict=True):
            testing.assert_equal(out.reshape(wanted.shape), wanted, label=label)

    def assert_correct(self, outs: Sequence[Tensor], problem: Any, label: object = "", **forced: Any) -> float:
        """Oracle T; returns the largest ratio. `forced`: tactic and split_k."""
        splits = self.splits(problem, forced.get("split_k", 0))
        label = f"{label} {forced}: {problem}"
        return testing.assert_close(outs[0], self.reference(problem, **forced), splits=splits, label=label)

    def accepts_exactly(self, model: type[Any], judged: Judged, seed: int) -> bool:
        """Whether oracle E accepts a model of the product."""
        exact, expected = judged.case.exact(seed=seed)
        return torch.equal(model(exact).run(), expected)

    def verdicts(self, model: type[Any], judged: Judged, seed: int) -> tuple[bool, float]:
        """(oracle E accepts, largest ratio of oracle T) for a model of the product."""
        real = judged.case.random(seed=seed)
        return self.accepts_exactly(model, judged, seed), self.ratio(model(real).run(), real, judged)

    def ratio(self, out: Any, problem: Any, judged: Judged) -> float:
        """The largest ratio of oracle T for the output of a model."""
        return testing.error_ratio(out, problem.reference(**judged.reference))

    def rejects(self, fault: type[Any], judged: Judged, seed: int) -> bool:
        """Whether one of the oracles does."""
        if not self.accepts_exactly(fault, judged, seed):
            return True
        real = judged.case.random(seed=seed)
        return self.ratio(fault(real).run(), real, judged) > 1

    def of_layer(self, problem: Any) -> Any:
        """The problem of a layer of the bench as one of this kind."""
        return problem

    def forms(self, problem: Any) -> list[tuple[Values, Any]]:
        """Options that change the product, and the problem with each."""
        changes: list[Values] = [{"activation": "relu"}]
        changes += [{"bias": None}] if problem.bias is not None else []
        changes += [{"out_dtype": torch.bfloat16}] if self.has_out and hasattr(problem, "out_dtype") else []
        return [({}, problem), *((change, replace(problem, **change)) for change in changes)]

    def serves(self, gpu: _C.DeviceTraits, case: Any = None) -> bool:
        """Whether a GPU, and the code that it runs, have the instructions of a case's kernels; None: of all cases'."""
        return gpu.code_capability >= 10 * self.capability[0] + self.capability[1]

    def has_instructions(self, case: Any = None) -> bool:
        """The same of the current GPU."""
        return self.serves(_C.device_traits(torch.cuda.current_device()), case)

    def skip_without_instructions(self, case: Any = None) -> None:
        if not self.has_instructions(case):
            pytest.skip(f"{self.name} needs kernels, and compute capability {self.capability}")
