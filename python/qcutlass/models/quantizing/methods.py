"""The methods of quantisation, applied to the layers of one block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from qcutlass.algorithms import (
    InputStatistics,
    awq,
    awq_scales,
    gptq,
    output_error,
    round_to_nearest,
    search_smoothing,
)
from qcutlass.algorithms.blocks import fp8_weight_quant, weight_quant
from qcutlass.algorithms.eight_bit import quantize_activations, quantize_weights_fp8, quantize_weights_int8
from qcutlass.algorithms.floating import quantize_nearest
from qcutlass.algorithms.gptq import DAMPING, check_damping
from qcutlass.defaults import METHODS as METHODS
from qcutlass.formats import CanonicalBlockwise, CanonicalFp8, CanonicalInt8, CanonicalLinear, Layer
from qcutlass.layers.base import from_layer
from qcutlass.models.fitting import is_linear
from qcutlass.models.quantizing.wiring import InputGroup, divide, input_of
from qcutlass.products.checks import check_flag
from qcutlass.schemes import Blockwise, WeightOnly, check_kind_of_activations

READERS: Final = {
    "scheme": ("rtn", "gptq", "awq"),
    "clip": ("rtn", "gptq"),
    "damping": ("gptq",),
    "act_order": ("gptq",),
    "act_scale": ("awq", "smoothquant"),
    "activations": ("smoothquant", "w8a8", "fp8"),
    "calibration": ("gptq", "awq", "smoothquant", "w8a8", "fp8"),
}
"""The methods that an option means something to; the others refuse it."""
_CALIBRATED: Final = ("gptq", "awq", "smoothquant")  # whatever their options are
UNREACHED: Final = "unreached"
"""The note on an expert's layer that got no token in calibration, and was rounded to nearest."""
_ROWS: Final = 512  # of inputs that SmoothQuant looks at


@dataclass(frozen=True)
class Method:
    """A method of quantisation and its options.

    Attributes:
        name: "rtn", "gptq", "awq": weights alone; "smoothquant": int8 weights and activations, smoothed; "w8a8": the
            same, not smoothed; "fp8": e4m3 weights and activations; "blockwise": int8 ones in blocks of 128,
            "blockwise-fp8": e4m3 ones.
        scheme: of weight-only methods; scales are float16 if it does not say.
        clip: whether rtn and gptq search for clipped ranges.
        damping, act_order: of gptq.
        act_scale: whether layers that nothing can take factors for get an `act_scale` (awq) or `smooth` (smoothquant)
            of their own; other formats have no place for them.
        activations: of smoothquant, w8a8 and fp8: "dynamic": each token gets its scale when it comes; "static": a layer
            has one scale, of the largest activation of the calibration.

    Raises:
        TypeError, ValueError: an option has another type or value; one that this method does not read was chosen.

    Example:
        >>> import qcutlass
        >>> from qcutlass import models
        >>> models.Method("gptq", qcutlass.WeightOnly(bits=4, group_size=64), act_order=True).needs_calibration
        True
    """

    name: str = "gptq"
    scheme: WeightOnly = field(default_factory=WeightOnly)
    clip: bool = True
    damping: float = DAMPING
    act_order: bool = False
    act_scale: bool = True
    activations: str = "dynamic"

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.name!r}")
        if not isinstance(self.scheme, WeightOnly):
            raise TypeError(f"scheme: expected a qcutlass.WeightOnly, got {type(self.scheme).__name__}")
        for flag in ("clip", "act_order", "act_scale"):
            check_flag(flag, getattr(self, flag))
        check_damping(self.damping)
        check_kind_of_activations(self.activations)
        for option in fields(self)[1:]:
            default = WeightOnly() if option.name == "scheme" else option.default
            if getattr(self, option.name) != default:
                self.check_read(option.name, option.name)
        if self.scheme.weight_dtype is not None and self.name != "rtn":
            raise ValueError(
                f"scheme: {self.scheme.weight_dtype} codes are rounded to the nearest, by rtn; {self.name} makes "
                "integers"
            )
        if self.is_weight_only and self.scheme.scale_dtype is None:
            object.__setattr__(self, "scheme", replace(self.scheme, scale_dtype=torch.float16))

    def check_read(self, option: str, name: str) -> None:
        """Raises ValueError if an option, a key of `READERS` that the caller calls `name`, means nothing here."""
        readers = READERS[option]
        if self.name not in readers:
            raise ValueError(f"{name}: {self.name} does not read it, only {', '.join(readers)}; leave it out")

    def check_calibrated(self, given: bool, name: str, what: str) -> None:
        """Raises ValueError if calibration, which the caller calls `name`, is missing or of no use."""
        if self.needs_calibration and not given:
            static = "" if self.name in _CALIBRATED else " with static activations"
            raise ValueError(f"{name}: {self.name}{static} needs {what}")
        if given and not self.needs_calibration:
            self.check_read("calibration", name)
            raise ValueError(f"{name}: {self.name} reads it for static activations alone; leave it out")

    @property
    def needs_calibration(self) -> bool:
        return self.name in _CALIBRATED or self.activations == "static"

    @property
    def is_weight_only(self) -> bool:
        return self.name in READERS["scheme"]


@dataclass
class BlockResult:
    """A quantised block.

    Attributes:
        layers: by name in the block.
        changed: norms' parameters that took factors, by name.
        notes: of each layer: its relative output error, exponents, damping; for the user.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, dict[str, float]] = field(default_factory=dict)


def record(
    block: nn.Module, groups: Sequence[InputGroup], method: Method, samples: int, forward: Callable[[], None]
) -> dict[str, InputStatistics]:
    """Statistics of each group's input, by its first linear's name, while `forward` runs the block on all samples."""
    rows = -(-_ROWS // samples) if method.name == "smoothquant" else 0
    found: dict[str, InputStatistics] = {}
    with ExitStack() as hooks:
        for group in groups:
            linear: Any = block.get_submodule(group.linears[0])
            statistics = InputStatistics.empty(linear.in_features, linear.weight.device, rows)
            found[group.linears[0]] = statistics

            hooks.enter_context(linear.register_forward_pre_hook(_adder(statistics), with_kwargs=True))
        forward()
    return found


def _adder(statistics: InputStatistics) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        statistics.add(input_of(arguments, keywords))

    return hook


@torch.no_grad()
def quantize_block(
    block: nn.Module,
    groups: Sequence[InputGroup],
    statistics: Mapping[str, InputStatistics],
    method: Method,
    progress: Callable[[str], None],
) -> BlockResult:
    """Quantises the layers of all groups; folds factors into the block's other layers first.

    Args:
        block: with fp32 weights; what takes factors is changed.
        groups: whose layers are quantised.
        statistics: of `record`; empty where the method needs no calibration. Layers of which there are some, of no
            token, are rounded to nearest.
        progress: called with the name of each finished layer.

    Raises:
        ValueError: weights or statistics that cannot be quantised; it begins with the layer's name.
    """
    result = BlockResult()
    factors: dict[InputGroup, tuple[Tensor | None, Tensor | None]] = {}
    for group in groups if method.name in _FACTORS else ():
        if _is_unreached(group, statistics):
            continue
        with _named(group.linears):
            factors[group] = _fold(block, group, statistics, method, result)
    for group in groups:
        found, chosen = statistics.get(group.linears[0]), method
        if _is_unreached(group, statistics):
            found, chosen = None, Method("rtn", method.scheme, clip=method.clip)
        own, folded = factors.get(group, (None, None))
        if found is not None and folded is not None:
            found = found.divided(folded)
        for name in group.linears:
            linear: Any = block.get_submodule(name)
            bias = None if linear.bias is None else linear.bias.detach().clone()
            with _named((name,)):
                layer, notes = _quantize(linear.weight.detach(), bias, own, found, chosen)
            if chosen is not method:
                notes[UNREACHED] = 1.0
            result.layers[name] = layer
            result.notes[name] = {**result.notes.get(name, {}), **notes}
            progress(name)
    return result


_FACTORS: Final = ("awq", "smoothquant")
_EIGHT_BIT: Final[dict[str, tuple[type[CanonicalInt8] | type[CanonicalFp8], Callable[[Tensor], Any]]]] = {
    "int8": (CanonicalInt8, quantize_weights_int8),
    "fp8": (CanonicalFp8, quantize_weights_fp8),
}
_BLOCKWISE: Final[dict[str, Callable[[Tensor, int], tuple[Tensor, Tensor]]]] = {
    "blockwise": weight_quant,
    "blockwise-fp8": fp8_weight_quant,
}
_BLOCK: Final = Blockwise().block_size


def _is_unreached(group: InputGroup, statistics: Mapping[str, InputStatistics]) -> bool:
    """Whether calibration sent no token there, as it may leave out experts."""
    found = statistics.get(group.linears[0])
    return found is not None and found.count == 0


@contextmanager
def _named(names: Sequence[str]) -> Iterator[None]:
    """Errors of the block begin with these layers' names."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{', '.join(names)}: {error}") from error


def _fold(
    block: nn.Module,
    group: InputGroup,
    statistics: Mapping[str, InputStatistics],
    method: Method,
    result: BlockResult,
) -> tuple[Tensor | None, Tensor | None]:
    """Multiplies a group's columns by factors that are searched; (the layers' own part, all) of them."""
    if group.previous is None and not (method.act_scale and group.has_scales):
        return None, None
    linears: list[Any] = [block.get_submodule(name) for name in group.linears]
    weights = [linear.weight.detach() for linear in linears]
    found = statistics[group.linears[0]]
    if method.name == "awq":
        chosen = awq_scales(weights, found, method.scheme)
        factors, exponent = (chosen.scales if chosen.exponent else None), chosen.exponent
    else:
        smoothing = search_smoothing(weights, found)
        factors, exponent = smoothing.factors, smoothing.alpha or 0.0
    for name in group.linears:
        result.notes[name] = {"exponent": exponent}
    if factors is None:
        return None, None
    for weight in weights:
        weight.mul_(factors)
    if group.previous is None:
        return factors, factors
    previous = block.get_submodule(group.previous)
    divide(previous, factors)
    if not is_linear(previous):
        result.changed |= {f"{group.previous}.{name}": value.detach() for name, value in previous.named_parameters()}
    return None, factors


def _quantize(
    weight: Tensor, bias: Tensor | None, own: Tensor | None, statistics: InputStatistics | None, method: Method
) -> tuple[Layer, dict[str, float]]:
    """One layer, whose weights have been multiplied by the factors; `own`: those that it divides its input by."""
    notes: dict[str, float] = {}
    if method.name in _BLOCKWISE:
        w_q, w_s = _BLOCKWISE[method.name](weight, _BLOCK)
        return CanonicalBlockwise(w_q, w_s, _BLOCK, bias), notes
    if method.name in READERS["activations"]:
        make, quantize = _EIGHT_BIT["fp8" if method.name == "fp8" else "int8"]
        w_q, w_scale = quantize(weight)
        own = None if own is None else own.clone()  # the group's layers have theirs each
        input_scale = None
        if method.activations == "static":
            assert statistics is not None
            input_scale = quantize_activations(statistics.absmax[None], dtype=w_q.dtype, per_tensor=True)[1]
        return make(w_q, w_scale, input_scale, bias, own), notes
    perm = None
    if method.name == "rtn":
        scheme = method.scheme
        integers = scheme.weight_dtype is None
        quantized = round_to_nearest(weight, scheme, clip=method.clip) if integers else quantize_nearest(weight, scheme)
    else:
        assert statistics is not None
        moment = statistics.second_moment
        if method.name == "gptq":
            found = gptq(
                weight, moment, method.scheme, damping=method.damping, act_order=method.act_order, clip=method.clip
            )
            quantized, perm = found.weight, found.perm
            notes["damping"] = found.damping
        else:
            assert method.name == "awq"
            quantized = awq(weight, moment, method.scheme)
    layer = CanonicalLinear(quantized, bias, perm, None if own is None else own.reciprocal())
    if statistics is not None:
        zero = torch.zeros_like(weight)
        error = output_error(weight, layer.dequantize(torch.float32), statistics.second_moment)
        notes["error"] = error / max(output_error(weight, zero, statistics.second_moment), 1e-30)
    return layer, notes


@contextmanager
def in_place(block: nn.Module, layers: Mapping[str, Layer]) -> Iterator[None]:
    """Has a block compute with quantised layers, in fp32: dequantised weights, or int8 layers for a while."""
    before: dict[str, nn.Module] = {}
    try:
        for name, layer in layers.items():
            linear: Any = block.get_submodule(name)
            if layer.quantises_activations:
                before[name] = linear
                block.set_submodule(name, from_layer(layer, name))
                continue
            with torch.no_grad():
                linear.weight.copy_(layer.effective_weight())
        yield
    finally:
        for name, linear in before.items():
            block.set_submodule(name, linear)
