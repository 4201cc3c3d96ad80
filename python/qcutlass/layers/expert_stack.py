"""One layer of every expert, stacked, and how it is made of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from qcutlass.layers.base import copied
from qcutlass.layers.packed import PackedModule, Parts
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.moe import ExpertWeights
from qcutlass.products import preprocess_weights
from qcutlass.products.checks import FLOATING, check_integer, check_iterable, check_tensor, shape_of, span_of
from qcutlass.products.packing import TILE_N, PackedWeights, check_weights
from qcutlass.quantized import QuantizedTensor, check_zeros

_DIMENSIONS: Final = {
    "w_packed": 5, "scales": 3, "zeros": 3, "minimums": 3, "super_scales": 3, "super_minimums": 3, "global_scale": 2,
    "bias": 2, "perm": 2
}  # fmt: skip


class ExpertStack(PackedModule):
    """One linear layer of each expert: weights `[E, N, K]`.

    Buffers: `w_packed` uint8 `[E, ceil(N/16), ceil(K/kt), 32, 16]`, `scales`, `zeros` and `minimums` `[E, G, N]`,
    `super_scales` and `super_minimums` `[E, B, N]`, `global_scale` `[E, 1]`, `bias` `[E, N]`, `perm` int32
    `[E, K]`; all but the first two may be None. `layout` is that of a `QuantLinear` and the number of experts, and of
    the first one.
    """

    OPTIONAL: ClassVar = ("zeros", "bias", "global_scale", "minimums", "super_scales", "super_minimums", "perm")
    _LAYOUT: ClassVar = (*PackedModule._LAYOUT, "experts", "first")

    w_packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    global_scale: Tensor | None
    minimums: Tensor | None
    super_scales: Tensor | None
    super_minimums: Tensor | None
    perm: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int,
        group_size: int,
        first: int,
        parts: Parts,
        weight_dtype: str | None = None,
    ) -> None:
        """`parts`: the buffers by their names but `layout`; `first`: the number of the first expert in the model."""
        super().__init__()
        packed = parts["w_packed"]
        assert packed is not None
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.group_size = bits, min(group_size, in_features)
        self.experts, self.first = len(packed), first
        self.weight_dtype = weight_dtype
        absent = [name for name in self.OPTIONAL if name not in parts]
        self._register({**parts, **dict.fromkeys(absent)})

    @staticmethod
    def of_layers(layers: Iterable[WeightOnlyLinear], count: int, first: int = 0) -> ExpertStack:
        """The weights of `count` layers of one shape and scheme, each of which is in memory for a while.

        Raises:
            TypeError: a layer is no `WeightOnlyLinear`, or a number no integer.
            ValueError: there are more layers, or fewer, one of another shape or scheme than the first one, on another
                device, or with an activation or factors of its input, which are no part of a stack.
        """
        check_iterable("layers", layers, "WeightOnlyLinear, one an expert")
        stacking = Stacking(count, first)
        for index, layer in enumerate(layers):
            stacking.add(layer, f"layers[{index}]")
        return stacking.finish()

    @property
    def _layout(self) -> list[int]:
        return [*super()._layout, self.experts, self.first]

    def _check(self, parts: Parts) -> None:
        w_packed, bias, perm = parts["w_packed"], parts["bias"], parts["perm"]
        if w_packed is None or parts["scales"] is None:
            raise TypeError("w_packed, scales: expected tensors, got None")
        for name, part in parts.items():
            dims = _DIMENSIONS[name]
            if part is not None and (part.dim() != dims or len(part) != self.experts):
                raise ValueError(f"{name}: expected {self.experts} experts, {dims} dimensions, got {shape_of(part)}")
        one: dict[str, Any] = {name: part if part is None else part[0] for name, part in parts.items()}
        del one["bias"], one["perm"]
        weights = PackedWeights(**one, group_size=self.group_size, bits=self.bits, weight_dtype=self.weight_dtype)
        shape = check_weights(weights, self.in_features, w_packed.device, "w_packed")
        if shape.n != self.out_features:
            raise ValueError(f"scales: expected N = {self.out_features} channels, got {shape.n}")
        if bias is not None:
            check_tensor("bias", bias, FLOATING)
            if bias.shape[1] != shape.n:
                raise ValueError(
                    f"bias: expected shape [experts, N] = [{self.experts}, {shape.n}], got {shape_of(bias)}"
                )
        if perm is not None:
            _check_orders(perm, self.experts, self.in_features)
        check_zeros(parts["zeros"], self.bits)

    @property
    def _numbers(self) -> dict[str, Any]:
        """What belongs to the weights besides tensors."""
        return {"group_size": self.group_size, "bits": self.bits, "weight_dtype": self.weight_dtype}

    @property
    def _parts(self) -> dict[str, Any]:
        return {name: part for name, part in self._buffers.items() if name != "layout"}

    @property
    def weights(self) -> ExpertWeights:
        """The operand of `qcutlass.moe.experts`."""
        return ExpertWeights(**self._parts, **self._numbers)

    def layer(self, expert: int) -> WeightOnlyLinear:
        """One expert's layer, which shares memory with the stack; TypeError or ValueError where there is none."""
        check_integer("expert", expert, minimum=0)
        if expert >= self.experts:
            raise ValueError(f"expert: expected a number in [0, {self.experts}), got {expert}")
        parts = {name: part if part is None else part[expert] for name, part in self._parts.items()}
        sizes = self.in_features, self.out_features
        return WeightOnlyLinear.of_parts(*sizes, activation=None, parts=parts, **self._numbers)

    def some(self, part: slice) -> ExpertStack:
        """Some of the experts, at least one, neighbours, which share no memory with these."""
        chosen = span_of("part", part, self.experts)
        if chosen.step != 1 or not len(chosen):
            raise ValueError(f"part: expected neighbours among {self.experts} experts, at least one, got {part}")
        return ExpertStack.of_layers(map(self.layer, chosen), len(chosen), self.first + chosen.start)

    def changed(self, change: Callable[[int, WeightOnlyLinear], WeightOnlyLinear]) -> ExpertStack:
        """The same experts with other layers, which `change` makes of the place of each here and its layer."""
        layers = (change(expert, self.layer(expert)) for expert in range(self.experts))
        return ExpertStack.of_layers(layers, self.experts, self.first)

    def extra_repr(self) -> str:
        zeros = None if self.zeros is None else str(self.zeros.dtype).removeprefix("torch.")
        codes = f"zeros={zeros}" if self.weight_dtype is None else f"weight_dtype={self.weight_dtype!r}"
        minimums = "" if self.minimums is None else ", minimums=True"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, {codes}{minimums}, bias={self.bias is not None}"
        )


def _check_orders(perm: Tensor, experts: int, k: int) -> None:
    check_tensor("perm", perm, (torch.int32,))
    if perm.shape != (experts, k):
        raise ValueError(f"perm: expected shape [experts, K] = [{experts}, {k}], got {shape_of(perm)}")
    if not perm.is_meta and not bool(((perm >= 0) & (perm < k)).all()):
        raise ValueError(f"perm: expected values in [0, {k}), got others")


class Stacking:
    """Makes a stack, layer by layer."""

    def __init__(self, count: int, first: int = 0) -> None:
        check_integer("count", count, minimum=1)
        check_integer("first", first, minimum=0)
        self._count, self._first = count, first
        self._weights: list[QuantizedTensor] = []  # without their codes
        self._bias: list[Tensor | None] = []
        self._perm: list[Tensor | None] = []

    def add(self, layer: WeightOnlyLinear, name: str) -> None:
        """Takes in a layer, which is called `name` in messages; raises unless it is one like the first."""
        if len(self._weights) == self._count:
            raise ValueError(f"count: expected as many as there are layers, got {self._count}, and there are more")
        numbers = numbers_of(layer, name)
        if not self._weights:
            self._model, self._numbers = layer, numbers
        check_alike(name, numbers, self._numbers)
        if layer.w_packed.device != self._model.w_packed.device:
            raise ValueError(
                f"{name} is on {layer.w_packed.device}, the first layer is on {self._model.w_packed.device}: move one "
                "of them"
            )
        if not self._weights:
            self._packed = layer.w_packed.new_empty((self._count, *layer.w_packed.shape))
        self._packed[len(self._weights)] = layer.w_packed
        weight = _without_codes(layer)
        names = "scales", "zeros", "global_scale", "minimums", "super_scales", "super_minimums"
        own: dict[str, Any] = {name: copied(getattr(weight, name)) for name in names}
        self._weights.append(replace(weight, **own))
        self._bias.append(copied(layer.bias))
        self._perm.append(copied(layer.perm))

    def finish(self) -> ExpertStack:
        """The stack of what came; ValueError where layers are absent."""
        if len(self._weights) != self._count:
            raise ValueError(f"count: expected as many as there are layers, {len(self._weights)}, got {self._count}")
        model = self._model
        bias, perm = _stacked(self._bias, _no_bias(model)), _stacked(self._perm, _in_order(model))
        parts = {"w_packed": self._packed, "bias": bias, "perm": perm, **_parts_of(self._weights)}
        sizes = model.in_features, model.out_features, model.bits, model.group_size
        return ExpertStack(*sizes, self._first, parts, model.weight_dtype)


def numbers_of(layer: object, name: str) -> tuple[object, ...]:
    """What layers must have in common to be stacked: [N, K, bits, group_size, codes]; raises where they have more."""
    if not isinstance(layer, WeightOnlyLinear):
        raise TypeError(f"{name}: expected a WeightOnlyLinear, got {type(layer).__name__}")
    if layer.act_scale is not None:
        raise ValueError(f"{name} scales its input (act_scale), which no product of experts does")
    if layer.activation is not None:
        raise ValueError(f"{name} has an activation, {layer.activation!r}, which is no part of a product of experts")
    codes = layer.weight_dtype or ("integers" if layer.minimums is None else "integers with minimums")
    return layer.out_features, layer.in_features, layer.bits, layer.group_size, codes


def check_alike(name: str, numbers: tuple[object, ...], expected: tuple[object, ...]) -> None:
    """Raises ValueError unless the layer called `name` has the numbers of the first one."""
    if numbers != expected:
        raise ValueError(
            f"{name} has [N, K, bits, group_size, codes] = {_listed(numbers)}, not {_listed(expected)}; the experts of "
            "a block need one shape and one scheme"
        )


def _listed(numbers: tuple[object, ...]) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def _without_codes(layer: WeightOnlyLinear) -> QuantizedTensor:
    """Its scales and all that belongs to them; the codes take no memory and have no values."""
    return layer._weight(layer.w_packed.new_empty(()).expand(layer.out_features, layer.in_features))


def _parts_of(weights: Sequence[QuantizedTensor]) -> dict[str, Tensor | None]:
    """Scales and all that belongs to them of several matrices, one after the other."""
    kinds = {(weight.scales.dtype, weight.global_scale is None, _super_kind(weight)) for weight in weights}
    if len(kinds) > 1:
        weights = [_with_floating_scales(weight) for weight in weights]
    zeros = None if weights[0].minimums is not None else _middle(weights[0])
    return {
        "scales": _stacked([weight.scales for weight in weights]),
        "zeros": _stacked([weight.zeros for weight in weights], zeros),
        "global_scale": _stacked([weight.global_scale for weight in weights]),
        "minimums": _stacked([weight.minimums for weight in weights]),
        "super_scales": _stacked([weight.super_scales for weight in weights]),
        "super_minimums": _stacked([weight.super_minimums for weight in weights]),
    }


def _super_kind(weight: QuantizedTensor) -> tuple[Any, ...] | None:
    """What the second levels of scales must have in common to be stacked."""
    return None if weight.super_scales is None else (len(weight.super_scales), weight.minimums is None)


def _with_floating_scales(weight: QuantizedTensor) -> QuantizedTensor:
    """The same numbers with scales of one level that need no global one, float32 where they have 8 bits."""
    weight = weight.expanded()
    if weight.scales.dtype in FLOATING:
        return weight
    scales = weight.scales.float() if weight.global_scale is None else weight.scales.float() * weight.global_scale
    return replace(weight, scales=scales, global_scale=None)


def _stacked(parts: Sequence[Tensor | None], default: Tensor | None = None) -> Tensor | None:
    """Tensors of one shape in one type that holds the numbers of all; `default` where one lacks what others have."""
    if all(part is None for part in parts):
        return None
    filled = [part for part in (default if part is None else part for part in parts) if part is not None]
    dtype = filled[0].dtype
    if all(part.dtype == dtype for part in filled):
        return (
            torch.stack([part.view(torch.uint8) for part in filled]).view(dtype)
            if dtype.itemsize == 1
            else (torch.stack(filled))
        )
    dtype = reduce(torch.promote_types, (part.dtype for part in filled))
    return torch.stack([part.to(dtype) for part in filled])


def _middle(weight: QuantizedTensor) -> Tensor:
    """The zeros of weights that have none."""
    return torch.full_like(weight.scales, 2 ** (weight.bits - 1), dtype=torch.uint8)


def _no_bias(layer: WeightOnlyLinear) -> Tensor:
    return layer.scales.new_zeros(layer.out_features)


def _in_order(layer: WeightOnlyLinear) -> Tensor:
    """The order of the columns of a layer that has them as its input has."""
    return torch.arange(layer.in_features, dtype=torch.int32, device=layer.w_packed.device)


def joined(gate: WeightOnlyLinear, up: WeightOnlyLinear) -> WeightOnlyLinear:
    """One layer with the channels of both, whose columns are in one order."""
    weights = [_without_codes(gate), _without_codes(up)]
    wholes = [weight.global_scale for weight in weights]
    if wholes[0] is not None and wholes[1] is not None and not torch.equal(wholes[0], wholes[1]):
        weights = [_with_floating_scales(weight) for weight in weights]
    bias = _stacked([gate.bias, up.bias], _no_bias(gate))
    n = gate.out_features
    if n % TILE_N == 0:
        packed = torch.cat([gate.w_packed, up.w_packed])
    else:
        packed = preprocess_weights(torch.cat([gate._codes(), up._codes()]), gate.bits)
    found = _parts_of(weights)
    whole = found.pop("global_scale")
    parts: dict[str, Tensor | None] = {
        "w_packed": packed,
        "global_scale": None if whole is None else whole[0],
        "bias": None if bias is None else bias.flatten(),
        "perm": copied(gate.perm),
        **{name: None if part is None else _side_by_side(part) for name, part in found.items()},
    }
    return WeightOnlyLinear.of_parts(
        gate.in_features, 2 * n, gate.bits, gate.group_size, None, parts, gate.weight_dtype
    )


def _side_by_side(part: Tensor) -> Tensor:
    """`[2, G, N]` as `[G, 2 N]`."""
    return part.transpose(0, 1).flatten(1)
