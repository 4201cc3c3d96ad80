"""A kind of product: a call whose annotations say which operand each tensor is, and all that follows from them."""

from __future__ import annotations

import inspect
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass._C import Operand
from qcutlass.products.packing import WeightShape

_SYMBOLIC: Final = "SymInt"

Size: TypeAlias = Annotated[int, _SYMBOLIC]
"""An extent of a tensor, which torch.compile may keep as a symbol."""

SETTLING: Final = frozenset(
    {
        Operand.WEIGHTS,
        Operand.SCALES,
        Operand.ZEROS,
        Operand.MINIMUMS,
        Operand.SUPER_SCALES,
        Operand.SUPER_MINIMUMS,
        Operand.W_SCALE,
        Operand.W_SUMS,
        Operand.BLOCK_W,
    }
)
"""The weights and what belongs to them: what kernels may read while the kernel before them in the stream ends."""

_SETTLED_BEFORE: Final = frozenset({Operand.EXPERT_OFFSETS, Operand.EXPERT_ROWS})
"""Which rows are whose expert's: the same, where a product since their routing has read them."""

_OUTPUTS: Final = frozenset({Operand.OUT_SCALES})
"""Operands that a product writes besides `out`; none is an argument of its operator."""

MOST_LAUNCHES: Final = 4096
"""Calls of a kind that are remembered, some 4 KB each."""

_TYPES: Final = {Tensor: "Tensor", str: "str", int: "int", float: "float", bool: "bool", torch.dtype: "ScalarType"}
"""Types of arguments as schemas write them."""


class Description(NamedTuple):
    """A product in words.

    Attributes:
        weights: their type.
        parts: how they are scaled, the type of the output, optional operands that are there.
    """

    weights: str
    parts: list[str]


class Call(Protocol):
    """The arguments of one product, in the order of its operator's schema: a NamedTuple for each kind.

    A field that is a tensor is annotated with the operand that it is, `Annotated[Tensor, Operand.A]`.
    """

    @property
    def a(self) -> Tensor:
        """The activations, the first argument."""

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def activation(self) -> str | None: ...

    @property
    def residual(self) -> Tensor | None: ...

    @property
    def out_dtype(self) -> torch.dtype: ...

    @property
    def tactic(self) -> str | None: ...

    @property
    def split_k(self) -> int: ...

    @property
    def batch_invariant(self) -> bool: ...

    def check(self, out: Tensor | None) -> WeightShape:
        """Checks every argument but what needs memory addresses."""

    def prepared(self, shape: WeightShape) -> Call:
        """The checked call, with what the caller left to be computed at each call."""

    def fill(self, arguments: _C.GemmArguments, shape: WeightShape) -> list[Tensor]:
        """Adds weights and scales of a prepared call to `arguments`; returns the tensors that these point into."""

    def describe(self, shape: WeightShape) -> Description:
        """The product in words, for `explain`."""

    def __iter__(self) -> Iterator[Any]: ...

    def _asdict(self) -> dict[str, Any]: ...

    @property
    def _replace(self) -> Callable[..., Call]: ...


class _Argument(NamedTuple):
    """A field of a call.

    Attributes:
        type: as schemas write it.
        operand: which one a tensor is; None: no operand of a product.
        default: `inspect.Parameter.empty` if there is none.
    """

    name: str
    type: str
    operand: Operand | None
    default: Any

    @property
    def has_schema_default(self) -> bool:
        """Whether a schema can say what it is by default: schemas write no types as defaults."""
        return self.default is not inspect.Parameter.empty and not isinstance(self.default, torch.dtype)

    def declared(self, with_default: bool) -> str:
        return f"{self.type} {self.name}={self.default}" if with_default else f"{self.type} {self.name}"


def _argument(name: str, hint: Any, default: Any) -> _Argument:
    notes: list[Any] = []
    suffix = ""
    while hint not in _TYPES:
        if typing.get_origin(hint) is Annotated:
            hint, *more = typing.get_args(hint)
            notes += more
        else:
            assert typing.get_origin(hint) in (typing.Union, types.UnionType), f"{name}: {hint}"
            suffix = "?"
            hint, _ = typing.get_args(hint)  # X | None
    base = _SYMBOLIC if _SYMBOLIC in notes else _TYPES[hint]
    found = [note for note in notes if isinstance(note, Operand)]
    return _Argument(name, base + suffix, found[0] if found else None, default)


def _arguments_of(call: Callable[..., Any]) -> list[_Argument]:
    """Those of a NamedTuple; what is one itself is as many arguments, whose names begin with its own."""
    hints = typing.get_type_hints(call, include_extras=True)
    found: list[_Argument] = []
    for name, parameter in inspect.signature(call).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and issubclass(hint, tuple):
            found += [inner._replace(name=f"{name}_{inner.name}") for inner in _arguments_of(hint)]
        else:
            found.append(_argument(name, hint, parameter.default))
    return found


def _schema(arguments: list[_Argument]) -> str:
    first = max((place for place, one in enumerate(arguments, 1) if not one.has_schema_default), default=0)
    return ", ".join(one.declared(with_default=place >= first) for place, one in enumerate(arguments))


def _access(role: Operand) -> _C.Access:
    if role in _OUTPUTS:
        return _C.Access.WRITTEN
    if role in _SETTLED_BEFORE:
        return _C.Access.READ_AGAIN
    return _C.Access.READ_EARLY if role in SETTLING else _C.Access.READ


def schema_of(call: Callable[..., Any]) -> str:
    """The arguments of an operator, from the NamedTuple that holds them."""
    return _schema(_arguments_of(call))


def _leading_of_activations(call: Call) -> Sequence[int]:
    """Those of an output with a row for each row of the activations."""
    return call.a.shape[:-1]


def _whole(call: Call) -> Call:
    """Kernels compute all of it."""
    return call


class Kind:
    """A kind of product.

    Attributes:
        name: of its operator, `torch.ops.qcutlass.<name>`.
        call: makes a call of its arguments.
        activations: types of activations that it takes.
        dequantises: its weights can be dequantised for a dense product.
        leading: the extents of the output before N, of a call.
        planned: what is left of a call for the kernels of GPUs, to be planned; its operands may be uninitialised.
        schema: its operator's arguments.
        roles: which operand each tensor of a call is, in the call's order.
        operands: the tensors of a call, in the same order.
        options: all of a call that is no tensor.
        accesses: how kernels meet each operand, in the same order.
        places: of the operands, and of the options, in a call.
        launches: how calls of the kind were run before.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Call],
        activations: tuple[torch.dtype, ...],
        dequantises: bool = False,
        leading: Callable[[Any], Sequence[int]] = _leading_of_activations,
        planned: Callable[[Any], Call] = _whole,
    ) -> None:
        self.name: Final = name
        self.call: Final = call
        self.activations: Final = activations
        self.dequantises: Final = dequantises
        self.leading: Final = leading
        self.planned: Final = planned
        fields = _arguments_of(call)
        unnamed = [field.name for field in fields if field.type.startswith("Tensor") and field.operand is None]
        if unnamed:
            raise TypeError(
                f"{name}: annotate {', '.join(unnamed)} with the operand that it is, Annotated[Tensor, ...]"
            )
        inputs = [field for field in fields if field.operand not in _OUTPUTS]
        assert fields[: len(inputs)] == inputs, f"{name}: outputs follow the operator's arguments"
        self.schema: Final = _schema(inputs)
        self._most_arguments: Final = len(inputs)
        self.roles: Final = [field.operand for field in fields if field.operand is not None]
        self._of_weights: Final = [field.name for field in fields if field.operand in SETTLING]
        self.operands: Final = _getter(fields, lambda field: field.operand is not None)
        self.options: Final = _getter(fields, lambda field: field.operand is None)
        self.accesses: Final = [_access(role) for role in self.roles]
        operands = [place for place, field in enumerate(fields) if field.operand is not None]
        self.places: Final = operands, [place for place in range(len(fields)) if place not in operands]
        self.launches: Final = _C.Launches(*self.places, MOST_LAUNCHES)

    def __repr__(self) -> str:
        return f"Kind({self.name!r})"

    def arguments(self, call: Call) -> tuple[Any, ...]:
        """Those of the operator, from a call."""
        return tuple(call)[: self._most_arguments]

    def weights(self, call: Call) -> dict[str, Tensor]:
        """The weights of a call and what belongs to them, by the names of its fields."""
        found = {name: getattr(call, name) for name in self._of_weights}
        return {name: operand for name, operand in found.items() if operand is not None}

    def rows(self, call: Call) -> int:
        """Rows of the output, M."""
        return math.prod(self.leading(call))


_Item = TypeVar("_Item")


def _getter(items: list[_Item], wanted: Callable[[_Item], bool]) -> Callable[[Any], tuple[Any, ...]]:
    """Takes from a sequence what stands in the places of the wanted items, which are several."""
    return operator.itemgetter(*(place for place, item in enumerate(items) if wanted(item)))


class Function(NamedTuple):
    """A public function that computes products of a kind.

    Attributes:
        name: in full.
        kind: of its products.
        signature: that of the function.
        fixed: arguments of the call that the function does not take.
    """

    name: str
    kind: Kind
    signature: inspect.Signature
    fixed: dict[str, Any]

    @property
    def activations(self) -> tuple[torch.dtype, ...]:
        """Types of activations that it takes: those of its kind, or the one that it fixes."""
        return (self.fixed["dtype"],) if "dtype" in self.fixed else self.kind.activations

    def call(self, *arguments: Any, **options: Any) -> Call:
        """The call that the function makes of its arguments, `out` left out.

        Raises:
            TypeError: they are not its arguments.
        """
        try:
            bound = self.signature.bind(*arguments, **options)
            if "out" in bound.arguments:
                raise TypeError("got 'out' too")
        except TypeError as error:
            raise TypeError(f"expected the arguments of {self.name} but out: {error}") from None
        bound.apply_defaults()
        bound.arguments.pop("out", None)
        return self.kind.call(**bound.arguments, **self.fixed)


FUNCTIONS: Final[dict[Callable[..., Any], Function]] = {}
"""The public functions that compute products."""

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def computes(kind: Kind, **fixed: Any) -> Callable[[_Decorated], _Decorated]:
    """Decorator: a public function whose parameters are fields of the calls of `kind`, but for `fixed`, and `out`."""

    def enter(function: _Decorated) -> _Decorated:
        name = f"{function.__module__}.{function.__name__}".replace(".products.functions.", ".")
        FUNCTIONS[function] = Function(name, kind, inspect.signature(function), fixed)
        return function

    return enter
