"""The experts of a mixture, with quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from qcutlass.layers.base import copied
from qcutlass.layers.packed import PackedModule, Parts
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.moe import ExpertWeights, experts
from qcutlass.products import preprocess_weights
from qcutlass.products.checks import FLOATING, check_tensor, shape_of
from qcutlass.products.packing import TILE_N, PackedWeights, check_weights
from qcutlass.quantized import QuantizedTensor, check_zeros
from qcutlass.schemes import Scheme, WeightOnly

ACTIVATIONS: Final = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh"}
"""The activation of experts, by the class of their module."""
REPLACED: Final = (
    "MixtralExperts",
    "Qwen2MoeExperts",
    "Qwen3MoeExperts",
    "OlmoeExperts",
    "DeepseekV2Experts",
    "DeepseekV3Experts",
)
"""The classes of transformers whose place `QuantExperts` takes: all compute the same."""


_DIMENSIONS: Final = {
    "w_packed": 5, "scales": 3, "zeros": 3, "minimums": 3, "global_scale": 2, "bias": 2
}  # fmt: skip


class Expert(NamedTuple):
    """The layers of one expert: `down(activation(gate(x)) * up(x))`."""

    gate: WeightOnlyLinear
    up: WeightOnlyLinear
    down: WeightOnlyLinear


class ExpertStack(PackedModule):
    """One linear layer of each expert: weights `[E, N, K]`.

    Buffers: `w_packed` uint8 `[E, ceil(N/16), ceil(K/kt), 32, 16]`, `scales`, `zeros` and `minimums` `[E, G, N]`,
    `global_scale` `[E, 1]`, `bias` `[E, N]`; all but the first two may be None. `layout` is that of a `QuantLinear` and
    the number of experts, and of the first one.
    """

    OPTIONAL: ClassVar = ("zeros", "bias", "global_scale", "minimums")
    _LAYOUT: ClassVar = (*PackedModule._LAYOUT, "experts", "first")

    w_packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    global_scale: Tensor | None
    minimums: Tensor | None

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
        """The weights of `count` layers of one shape and scheme, each of which is in memory for a while."""
        stacking = _Stacking(count, first)
        for layer in layers:
            stacking.add(layer)
        return stacking.finish()

    @property
    def _layout(self) -> list[int]:
        return [*super()._layout, self.experts, self.first]

    def _check(self, parts: Parts) -> None:
        w_packed, bias = parts["w_packed"], parts["bias"]
        if w_packed is None or parts["scales"] is None:
            raise TypeError("w_packed, scales: expected tensors, got None")
        for name, part in parts.items():
            dims = _DIMENSIONS[name]
            if part is not None and (part.dim() != dims or len(part) != self.experts):
                raise ValueError(f"{name}: expected {self.experts} experts, {dims} dimensions, got {shape_of(part)}")
        one: dict[str, Any] = {name: part if part is None else part[0] for name, part in parts.items()}
        del one["bias"]
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
        """One expert's layer, which shares memory with the stack."""
        parts = {name: part if part is None else part[expert] for name, part in self._parts.items()}
        sizes = self.in_features, self.out_features
        return WeightOnlyLinear.of_parts(*sizes, activation=None, parts=parts, **self._numbers)

    def changed(self, part: slice, change: Callable[[WeightOnlyLinear], WeightOnlyLinear] | None = None) -> ExpertStack:
        """Some of the experts, each with another layer; they share no memory with these."""
        chosen = range(self.experts)[part]
        layers = (self.layer(expert) if change is None else change(self.layer(expert)) for expert in chosen)
        return ExpertStack.of_layers(layers, len(chosen), self.first + part.start)

    def extra_repr(self) -> str:
        zeros = None if self.zeros is None else str(self.zeros.dtype).removeprefix("torch.")
        codes = f"zeros={zeros}" if self.weight_dtype is None else f"weight_dtype={self.weight_dtype!r}"
        minimums = "" if self.minimums is None else ", minimums=True"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, {codes}{minimums}, bias={self.bias is not None}"
        )


class _Stacking:
    """Makes a stack, layer by layer."""

    def __init__(self, count: int, first: int = 0) -> None:
        self._count, self._first = count, first
        self._weights: list[QuantizedTensor] = []  # without their codes
        self._bias: list[Tensor | None] = []

    def add(self, layer: WeightOnlyLinear) -> None:
        if not self._weights:
            self._model = layer
            self._packed = layer.w_packed.new_empty((self._count, *layer.w_packed.shape))
        self._packed[len(self._weights)] = layer.w_packed
        weight = layer._weight(layer.w_packed[:0])
        names = "scales", "zeros", "global_scale", "minimums"
        own: dict[str, Any] = {name: copied(getattr(weight, name)) for name in names}
        self._weights.append(replace(weight, **own))
        self._bias.append(copied(layer.bias))

    def finish(self) -> ExpertStack:
        model = self._model
        parts = {"w_packed": self._packed, "bias": _stacked(self._bias, _no_bias(model)), **_parts_of(self._weights)}
        sizes = model.in_features, model.out_features, model.bits, model.group_size
        return ExpertStack(*sizes, self._first, parts, model.weight_dtype)


class QuantExperts(nn.Module):
    """The experts of a mixture, `down(activation(gate(x)) * up(x))`, with quantised weights; for inference.

    It takes the place of the experts' module in Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and -V3 of
    transformers 5, which holds float weights `[E, 2 I, H]` and `[E, H, I]`. Routers are not part of it.
    `replace_linear` puts it in; so does `from_pretrained` of converted folders.

    Tensors are buffers, as those of a `QuantLinear`: those of `gate_up` (2 I channels: gate, then up) and of `down`.

    Args:
        gate_up, down: the weights.
        activation: "silu" or "gelu_tanh".
        num_experts: of the model; None: as many as there are here, which are all.

    Attributes:
        num_experts: of the model, the range of expert numbers; those that are not here add nothing.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers import QuantExperts
        >>> gate_up, down = torch.randn(4, 64, 32) / 8, torch.randn(4, 32, 32) / 8
        >>> experts = QuantExperts.from_weights(gate_up, down, qcutlass.WeightOnly(bits=4, group_size=32))
        >>> x, ids, weights = torch.randn(5, 32), torch.tensor([[0, 3]] * 5), torch.full((5, 2), 0.5)
        >>> experts(x, ids, weights).shape
        torch.Size([5, 32])
    """

    gate_up: ExpertStack
    down: ExpertStack

    def __init__(
        self, gate_up: ExpertStack, down: ExpertStack, activation: str = "silu", num_experts: int | None = None
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS.values():
            raise ValueError(f"activation: expected silu or gelu_tanh, got {activation!r}")
        shapes = [(stack.experts, stack.first, *sizes) for stack, sizes in (
            (gate_up, (gate_up.out_features, gate_up.in_features)), (down, (2 * down.in_features, down.out_features))
        )]  # fmt: skip
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"gate_up, down: expected [2 I, H] and [H, I] of the same experts, got {gate_up} and {down}"
            )
        self.gate_up, self.down = gate_up, down
        self.activation = activation
        self.num_experts = gate_up.experts if num_experts is None else num_experts

    @staticmethod
    def from_weights(gate_up: Tensor, down: Tensor, scheme: WeightOnly, activation: str = "silu") -> QuantExperts:
        """Quantises float experts to the nearest.

        Args:
            gate_up: floating `[E, 2 I, H]`: I channels of gate, then I of up.
            down: floating `[E, H, I]`.
            scheme: `WeightOnly(...)`.
            activation: "silu" or "gelu_tanh".

        Raises:
            TypeError: `scheme` is another one, or weights are not floating.
            ValueError: shapes disagree, or weights are not finite.
        """
        if not isinstance(scheme, WeightOnly):
            raise TypeError(f"scheme: expected qcutlass.WeightOnly for experts, got {type(scheme).__name__}")
        count, n, k = gate_up.shape if gate_up.dim() == 3 else (0, 0, 0)
        if not count or n % 2 or down.shape != (count, k, n // 2):
            raise ValueError(
                f"gate_up, down: expected [E, 2 I, H] and [E, H, I], got {shape_of(gate_up)} and {shape_of(down)}"
            )
        for name, weight in {"gate_up": gate_up, "down": down}.items():
            check_tensor(name, weight, FLOATING)
            if not weight.is_meta and not bool(weight.isfinite().all()):
                raise ValueError(f"{name}: expected finite values, got NaN or infinity")
        with torch.no_grad():
            stacks = [_quantized(weight, scheme) for weight in (gate_up, down)]
        return QuantExperts(stacks[0], stacks[1], activation)

    @staticmethod
    def from_layers(layers: Iterable[Expert], count: int, activation: str = "silu") -> QuantExperts:
        """Joins the layers of `count` experts, which are read one expert at a time.

        Raises:
            ValueError: an expert differs from the first one in shape, bits or group size, or its layers scale or
                reorder their input; it names the expert and what differs.
        """
        gate_up, down = _Stacking(count), _Stacking(count)
        first: list[tuple[object, ...]] = []
        for index, expert in enumerate(layers):
            numbers = [_numbers(expert, name, index) for name in Expert._fields]
            first = first or [numbers[0], numbers[0], numbers[2]]
            for name, found, expected in zip(Expert._fields, numbers, first, strict=True):
                if found != expected:
                    raise ValueError(
                        f"expert {index}: {name} has [N, K, bits, group_size, codes] = {_listed(found)}, not "
                        f"{_listed(expected)}; the experts of a block need one shape and one scheme"
                    )
            gate_up.add(_both(expert.gate, expert.up))
            down.add(expert.down)
        return QuantExperts(gate_up.finish(), down.finish(), activation)

    def expert(self, index: int) -> Expert:
        """The layers of one of the experts here, counted from 0; gate and up share no memory with these."""
        both = self.gate_up.layer(index)
        size = self.down.in_features
        gate, up = (both._shard(slice(begin, begin + size), "out") for begin in (0, size))
        return Expert(gate, up, self.down.layer(index))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, `[..., H]`.

        Args:
            hidden_states: `[..., H]`.
            top_k_index: integer `[T, k]`: numbers of experts; those that are not here add nothing.
            top_k_weights: floating `[T, k]`.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        first = self.gate_up.first
        ids = top_k_index - first if first else top_k_index
        out = experts(
            x,
            self.gate_up.weights,
            self.down.weights,
            ids.reshape(len(x), -1),
            top_k_weights.reshape(len(x), -1).float(),
            activation=self.activation,
        )
        return out.view(hidden_states.shape)

    def check(self) -> None:
        """Raises TypeError or ValueError unless the buffers are those of such experts; as for `QuantLinear`."""
        self.gate_up.check()
        self.down.check()

    def _shard(self, part: slice, axis: Literal["intermediate", "experts"]) -> QuantExperts:
        """The part with these intermediate channels, or these experts; see `qcutlass.layers.shard`."""
        if axis == "experts":
            stacks = [stack.changed(part) for stack in (self.gate_up, self.down)]
        else:
            size, whole = self.down.in_features, slice(0, self.gate_up.experts)

            def channels(layer: WeightOnlyLinear) -> WeightOnlyLinear:
                halves = [layer._shard(slice(begin + part.start, begin + part.stop), "out") for begin in (0, size)]
                return _both(halves[0], halves[1])

            stacks = [
                self.gate_up.changed(whole, channels),
                self.down.changed(whole, lambda layer: layer._shard(part, "in")),
            ]
        return QuantExperts(stacks[0], stacks[1], self.activation, self.num_experts)

    def extra_repr(self) -> str:
        here = range(self.gate_up.first, self.gate_up.first + self.gate_up.experts)
        numbers = "" if len(here) == self.num_experts else f", experts={here.start}..{here.stop - 1}"
        return f"num_experts={self.num_experts}{numbers}, activation={self.activation!r}"


def activation_of(module: nn.Module) -> str | None:
    """The activation of a float module of experts, as `QuantExperts` calls it; None: it has no such module."""
    if type(module).__name__ not in REPLACED:
        return None
    return ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)


def is_replaced(module: nn.Module, scheme: Scheme) -> bool:
    """Whether there are quantised experts of this scheme for a module; on CUDA no products take floating codes."""
    if not isinstance(scheme, WeightOnly) or activation_of(module) is None:
        return False
    return scheme.weight_dtype is None or not any(parameter.is_cuda for parameter in module.parameters())


def quantized_experts(module: nn.Module, scheme: Any) -> QuantExperts:
    """The quantised experts for a module that `is_replaced`; ValueError for weights that can't be quantised."""
    weights = [module.get_parameter(name) for name in ("gate_up_proj", "down_proj")]
    return QuantExperts.from_weights(weights[0], weights[1], scheme, activation_of(module) or "")


def _quantized(weights: Tensor, scheme: WeightOnly) -> ExpertStack:
    return ExpertStack.of_layers((WeightOnlyLinear.of_weight(weight, scheme) for weight in weights), len(weights))


def _parts_of(weights: Sequence[QuantizedTensor]) -> dict[str, Tensor | None]:
    """Scales and all that belongs to them of several matrices, one after the other."""
    types = {(weight.scales.dtype, weight.global_scale is None) for weight in weights}
    if len(types) > 1:
        weights = [_with_floating_scales(weight) for weight in weights]
    zeros = None if weights[0].minimums is not None else _middle(weights[0])
    return {
        "scales": _stacked([weight.scales for weight in weights]),
        "zeros": _stacked([weight.zeros for weight in weights], zeros),
        "global_scale": _stacked([weight.global_scale for weight in weights]),
        "minimums": _stacked([weight.minimums for weight in weights]),
    }


def _with_floating_scales(weight: QuantizedTensor) -> QuantizedTensor:
    """The same numbers with scales that need no global one, float32 where they have 8 bits."""
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


def _listed(numbers: tuple[object, ...]) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def _numbers(expert: Expert, name: str, index: int) -> tuple[object, ...]:
    layer: WeightOnlyLinear = getattr(expert, name)
    for buffer, words in {"perm": "reorders", "act_scale": "scales"}.items():
        if layer._buffers[buffer] is not None:
            raise ValueError(f"expert {index}: {name} {words} its input ({buffer}), which no product of experts does")
    codes = layer.weight_dtype or ("integers" if layer.minimums is None else "integers with minimums")
    return layer.out_features, layer.in_features, layer.bits, layer.group_size, codes


def _both(gate: WeightOnlyLinear, up: WeightOnlyLinear) -> WeightOnlyLinear:
    """One layer with the channels of both."""
    weights = [gate._weight(gate.w_packed[:0]), up._weight(up.w_packed[:0])]
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
        **{name: None if part is None else _side_by_side(part) for name, part in found.items()},
    }
    return WeightOnlyLinear.of_parts(
        gate.in_features, 2 * n, gate.bits, gate.group_size, None, parts, gate.weight_dtype
    )


def _side_by_side(part: Tensor) -> Tensor:
    """`[2, G, N]` as `[G, 2 N]`."""
    return part.transpose(0, 1).flatten(1)
