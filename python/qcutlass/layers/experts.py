"""The experts of a mixture, with quantised weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from qcutlass.layers.expert_stack import ExpertStack, Stacking, check_alike, joined, numbers_of
from qcutlass.layers.offloading import is_offloaded, present
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.moe import experts
from qcutlass.products.checks import (
    FLOATING,
    check_integer,
    check_iterable,
    check_operand,
    check_strided,
    check_tensor,
    shape_of,
)
from qcutlass.products.moe_operators import check_gate
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
    "GptOssExperts",
)
"""The classes of transformers whose place `QuantExperts` takes: all but the last compute the same."""
_GPT_OSS: Final = "GptOssExperts"  # weights [E, in, out] with biases, channels of gate and up in turns
_GATES: Final = (*dict.fromkeys(ACTIVATIONS.values()), "swigluoai")


class Gate(NamedTuple):
    """What an expert computes between its products; `qcutlass.moe.experts` describes it."""

    activation: str = "silu"
    limit: float | None = None
    alpha: float | None = None


class Expert(NamedTuple):
    """The layers of one expert: `down(activation(gate(x)) * up(x))`."""

    gate: WeightOnlyLinear
    up: WeightOnlyLinear
    down: WeightOnlyLinear


class QuantExperts(nn.Module):
    """The experts of a mixture, `down(activation(gate(x)) * up(x))`, with quantised weights; for inference.

    It takes the place of the experts' module in Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and -V3 of
    transformers 5, which holds float weights `[E, 2 I, H]` and `[E, H, I]`, and of gpt-oss's, whose gate and up take
    turns there. Routers are not part of it.
    `replace_linear` puts it in; so does `from_pretrained` of converted folders.

    Tensors are buffers, as those of a `QuantLinear`: those of `gate_up` (2 I channels: gate, then up) and of `down`.

    Args:
        gate_up, down: the weights.
        activation: "silu", "gelu_tanh" or "swigluoai".
        num_experts: of the model; None: as many as there are here, which are all.
        limit, alpha: of the activation, as for `qcutlass.moe.experts`.

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
        self,
        gate_up: ExpertStack,
        down: ExpertStack,
        activation: str = "silu",
        num_experts: int | None = None,
        limit: float | None = None,
        alpha: float | None = None,
    ) -> None:
        super().__init__()
        if activation not in _GATES:
            raise ValueError(f"activation: expected {', '.join(_GATES[:-1])} or {_GATES[-1]}, got {activation!r}")
        check_gate(activation, limit, alpha, interleaved=False)
        for name, stack in (("gate_up", gate_up), ("down", down)):
            if not isinstance(stack, ExpertStack):
                raise TypeError(f"{name}: expected an ExpertStack, got {type(stack).__name__}")
        shapes = [(stack.experts, stack.first, *sizes) for stack, sizes in (
            (gate_up, (gate_up.out_features, gate_up.in_features)), (down, (2 * down.in_features, down.out_features))
        )]  # fmt: skip
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"gate_up, down: expected [2 I, H] and [H, I] of the same experts, got {gate_up} and {down}"
            )
        if num_experts is not None:
            check_integer("num_experts", num_experts, minimum=gate_up.first + gate_up.experts)
        self.gate_up, self.down = gate_up, down
        self.activation, self.limit, self.alpha = activation, limit, alpha
        self.num_experts = gate_up.experts if num_experts is None else num_experts

    @staticmethod
    def from_weights(
        gate_up: Tensor,
        down: Tensor,
        scheme: WeightOnly,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float | None = None,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> QuantExperts:
        """Quantises float experts to the nearest.

        Args:
            gate_up: floating `[E, 2 I, H]`: I channels of gate, then I of up.
            down: floating `[E, H, I]`.
            scheme: `WeightOnly(...)`.
            activation, limit, alpha: as for `qcutlass.moe.experts`.
            gate_up_bias: floating `[E, 2 I]`, or None.
            down_bias: floating `[E, H]`, or None.

        Raises:
            TypeError: `scheme` is another one, or weights are not floating.
            ValueError: shapes disagree, or weights are not finite.
        """
        if not isinstance(scheme, WeightOnly):
            raise TypeError(f"scheme: expected qcutlass.WeightOnly for experts, got {type(scheme).__name__}")
        for name, weight in {"gate_up": gate_up, "down": down}.items():
            check_tensor(name, weight, FLOATING)
            check_strided(name, weight)
        check_gate(activation, limit, alpha, False)
        count, n, k = gate_up.shape if gate_up.dim() == 3 else (0, 0, 0)
        if not count or n % 2 or down.shape != (count, k, n // 2):
            raise ValueError(
                f"gate_up, down: expected [E, 2 I, H] and [E, H, I], got {shape_of(gate_up)} and {shape_of(down)}"
            )
        if down.device != gate_up.device:
            raise ValueError(f"down is on {down.device}, gate_up is on {gate_up.device}: move one of them")
        for name, bias, size in (("gate_up_bias", gate_up_bias, n), ("down_bias", down_bias, k)):
            if bias is not None:
                check_operand(name, bias, FLOATING, gate_up.device, "gate_up")
                check_strided(name, bias)
                if bias.shape != (count, size):
                    raise ValueError(f"{name}: expected shape {[count, size]}, got {shape_of(bias)}")
        for name, weight in {"gate_up": gate_up, "down": down}.items():
            if not weight.is_meta and not bool(weight.isfinite().all()):
                raise ValueError(f"{name}: expected finite values, got NaN or infinity")
        with torch.no_grad():
            both, last = _quantized(gate_up, scheme, gate_up_bias), _quantized(down, scheme, down_bias)
        return QuantExperts(both, last, activation, None, limit, alpha)

    @staticmethod
    def from_layers(layers: Iterable[Expert], count: int, gate: Gate = Gate()) -> QuantExperts:  # noqa: B008
        """Joins the layers of `count` experts, which are read one expert at a time.

        Raises:
            TypeError: what comes is no `Expert` of `WeightOnlyLinear`, `count` no integer or `gate` no `Gate`.
            ValueError: there are more experts, or fewer; one differs from the first one in shape, bits or group size,
                its layers scale their input or have activations, or gate and up reorder it differently; it names the
                expert and what differs.
        """
        if not isinstance(gate, Gate):
            raise TypeError(f"gate: expected a Gate, got {type(gate).__name__}")
        check_gate(*gate, interleaved=False)
        check_iterable("layers", layers, "Expert")
        gate_up, down = Stacking(count), Stacking(count)
        first: list[tuple[object, ...]] = []
        for index, expert in enumerate(layers):
            if not isinstance(expert, Expert):
                raise TypeError(f"expert {index}: expected an Expert (gate, up, down), got {type(expert).__name__}")
            names = [f"expert {index}: {name}" for name in Expert._fields]
            numbers = [numbers_of(layer, name) for layer, name in zip(expert, names, strict=True)]
            first = first or [numbers[0], numbers[0], numbers[2]]
            for name, found, expected in zip(names, numbers, first, strict=True):
                check_alike(name, found, expected)
            if not have_one_order(expert.gate.perm, expert.up.perm):
                raise ValueError(
                    f"expert {index}: gate and up reorder their input (perm) differently, and one product multiplies "
                    "both"
                )
            gate_up.add(joined(expert.gate, expert.up), names[0])
            down.add(expert.down, names[2])
        return QuantExperts(gate_up.finish(), down.finish(), gate.activation, None, gate.limit, gate.alpha)

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
        if is_offloaded(self.gate_up, self.down):
            with present(self.gate_up, self.down):
                return self._sums(hidden_states, top_k_index, top_k_weights)
        return self._sums(hidden_states, top_k_index, top_k_weights)

    def _sums(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        for name, value in (("hidden_states", hidden_states), ("top_k_index", top_k_index)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
        check_tensor("top_k_weights", top_k_weights, (*FLOATING, torch.float64))
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        first = self.gate_up.first
        ids = top_k_index - first if first else top_k_index
        out = experts(
            x,
            self.gate_up.weights,
            self.down.weights,
            _slots(ids),
            _slots(top_k_weights).float(),
            activation=self.activation,
            limit=self.limit,
            alpha=self.alpha,
        )
        return out.view(hidden_states.shape)

    def check(self) -> None:
        """Raises TypeError or ValueError unless the buffers are those of such experts; as for `QuantLinear`."""
        self.gate_up.check()
        self.down.check()

    def _shard(self, part: slice, axis: Literal["intermediate", "experts"]) -> QuantExperts:
        """The part with these intermediate channels, or these experts; see `qcutlass.layers.shard`."""
        if axis == "experts":
            gate_up, down = self.gate_up.some(part), self.down.some(part)
        else:
            gate_up = self.gate_up.changed(lambda expert, layer: layer.rows(self._channels(expert, part)))
            down = self.down.changed(lambda expert, layer: layer.columns(part))
        return QuantExperts(gate_up, down, self.activation, self.num_experts, self.limit, self.alpha)

    def _channels(self, expert: int, part: slice) -> Tensor:
        """Those of gate and up, int64, that meet some columns of down, in the order in which its codes lie.

        Which channels these are is the expert's own affair, so that act-order needs no order between the parts.
        """
        perm, size = self.down.perm, self.down.in_features
        order = torch.arange(size, device=self.down.w_packed.device) if perm is None else perm[expert].long()
        return torch.cat([order[part], order[part] + size])

    def extra_repr(self) -> str:
        here = range(self.gate_up.first, self.gate_up.first + self.gate_up.experts)
        numbers = "" if len(here) == self.num_experts else f", experts={here.start}..{here.stop - 1}"
        return f"num_experts={self.num_experts}{numbers}, activation={self.activation!r}"


def _slots(values: Tensor) -> Tensor:
    """`[T, k]` of `[..., k]`; how many tokens that are, the product checks."""
    return values.flatten(0, -2) if values.dim() > 2 else values


def have_one_order(gate: Tensor | None, up: Tensor | None) -> bool:
    """Whether the columns of gate and up, in the orders `perm`, meet the same activations."""
    if gate is None or up is None:
        return gate is up
    return gate.is_meta or torch.equal(gate, up)


def gate_of(module: nn.Module) -> Gate | None:
    """What a float module of experts computes between its products; None: there are no such quantised ones."""
    held: Any = module
    if type(module).__name__ == _GPT_OSS:
        return Gate("swigluoai", float(held.limit), float(held.alpha))
    activation = ACTIVATIONS.get(type(getattr(held, "act_fn", None)).__name__)
    return None if type(module).__name__ not in REPLACED or activation is None else Gate(activation)


def sizes_of(module: Any) -> tuple[int, int, int]:
    """(E, H, I) of a float module of experts."""
    count, hidden, intermediate = module.down_proj.shape
    return (count, intermediate, hidden) if type(module).__name__ == _GPT_OSS else (count, hidden, intermediate)


def is_replaced(module: nn.Module, scheme: Scheme) -> bool:
    """Whether there are quantised experts of this scheme for a module."""
    return isinstance(scheme, WeightOnly) and gate_of(module) is not None


def quantized_experts(module: nn.Module, scheme: Any) -> QuantExperts:
    """The quantised experts for a module that `is_replaced`; ValueError for weights that can't be quantised."""
    gate = gate_of(module)
    assert gate is not None
    gate_up, down = (module.get_parameter(name) for name in ("gate_up_proj", "down_proj"))
    if type(module).__name__ != _GPT_OSS:
        return QuantExperts.from_weights(gate_up, down, scheme, *gate)
    biases = [module.get_parameter(name) for name in ("gate_up_proj_bias", "down_proj_bias")]
    return QuantExperts.from_weights(
        _apart(gate_up.transpose(1, 2)),
        down.transpose(1, 2).contiguous(),
        scheme,
        *gate,
        gate_up_bias=_apart(biases[0]),
        down_bias=biases[1].clone(),
    )


def _apart(both: Tensor) -> Tensor:
    """Channels of gate and up, the second dimension, in turns: those of gate, then those of up."""
    return torch.cat([both[:, ::2], both[:, 1::2]], dim=1)


def _quantized(weights: Tensor, scheme: WeightOnly, bias: Tensor | None) -> ExpertStack:
    biases = [None] * len(weights) if bias is None else bias
    layers = (WeightOnlyLinear.of_weight(weight, scheme, own) for weight, own in zip(weights, biases, strict=True))
    return ExpertStack.of_layers(layers, len(weights))
