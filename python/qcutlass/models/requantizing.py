"""Layers of a source that converted folders can't hold as they are, or no GPU multiplies: which they are, and what they
become, with loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from torch import Tensor

from qcutlass.algorithms.floating import quantize_nearest
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import CanonicalFp8, CanonicalInt8, CanonicalLinear, DequantizedLinear, FloatLinear, Layer
from qcutlass.formats.affine import from_minima
from qcutlass.formats.layers import CanonicalInt4
from qcutlass.formats.specs import LayerSpec, Requantized
from qcutlass.models.experts import ExpertBlocks, expert_layer, is_router
from qcutlass.models.sources import ModelSource
from qcutlass.schemes import WeightOnly

Change = Callable[[Layer, WeightOnly], Layer]
_MINIMUMS: Final = ("minimums", "super_minimums")


def to_nearest(layer: Layer, scheme: WeightOnly) -> Layer:
    """Rounds the weights that activations are multiplied by; ValueError for a scale that its type does not hold."""
    return CanonicalLinear(quantize_nearest(layer.effective_weight(), scheme), layer.bias)


def to_zeros(layer: Layer, scheme: WeightOnly) -> Layer:
    """Has real-valued zeros in place of minimums, whose rounding to fp32 is all that is lost."""
    assert isinstance(layer, CanonicalLinear)
    weight = layer.weight.expanded()
    if weight.minimums is None:
        return layer
    minima = (-weight.minimums).to(weight.scales.dtype)
    return replace(
        layer, weight=from_minima(weight.codes.clone(), weight.scales, minima, weight.bits, weight.group_size)
    )


def to_weights_alone(layer: Layer, scheme: WeightOnly | None = None) -> Layer:
    """Has activations stay as they are, and the codes too; what divides its activations first is left as it is."""
    return layer.weights_alone() if isinstance(layer, CanonicalInt4 | CanonicalInt8 | CanonicalFp8) else layer


class Requantizer:
    """Decides what becomes of a source's quantised layers, and notes what is lost.

    Args:
        source: of the layers.
        scheme: that they get where they can't be kept.
        allowed: whether any may lose something.

    Attributes:
        done: what became of those that did, by name.
    """

    def __init__(self, source: ModelSource, scheme: WeightOnly, allowed: bool) -> None:
        self._source, self._scheme, self._allowed = source, scheme, allowed
        self._changes: dict[tuple[str, str], Change | None] = {}
        self.done: dict[str, Requantized] = {}

    def layer(self, name: str, layer: Layer, keep: bool) -> Layer:
        """The layer that a converted folder gets for one of the source.

        Args:
            keep: whether the layer is to stay as it is, in floats where it can't stay in its codes.

        Raises:
            UnsupportedError: no product multiplies it as it is, and nothing may be lost.
        """
        if isinstance(layer, DequantizedLinear) and not self._allowed:
            raise UnsupportedError(f"{name}: {layer.obstacle}")
        if not self._allowed:
            return layer
        if is_router(name):
            return layer if _spec(layer) is None else FloatLinear(layer.effective_weight(), layer.bias)
        change = self._change(name, layer)
        if change is None:
            return layer
        if keep:
            return FloatLinear(layer.effective_weight(), layer.bias)
        try:
            found = change(layer, self._scheme)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
        if found is not layer:
            self.done[name] = Requantized(layer.words, _lost(layer, found))
        return found

    def _change(self, name: str, layer: Layer) -> Change | None:
        place = expert_layer(name)
        if place is None:
            return to_nearest if isinstance(layer, DequantizedLinear) else None
        key = place.block, place.part.replace("up", "gate")  # gate and up are one matrix
        if key not in self._changes:
            self._changes |= self._of_block(place.block)
        return self._changes[key]

    def _of_block(self, block: str) -> dict[tuple[str, str], Change | None]:
        """The changes after which the experts of a block are what their product takes: the least for each matrix."""
        told: dict[tuple[str, str], list[_Told]] = {}
        for name in self._source.names:
            place = expert_layer(name)
            if place is not None and place.block == block:
                layer = self._source.layer(name)
                perm = getattr(layer, "perm", None)
                alone = _spec(to_weights_alone(layer))
                found = _Told(name, _spec(layer), alone, layer.shape, isinstance(layer, DequantizedLinear), perm)
                told.setdefault((block, place.part.replace("up", "gate")), []).append(found)
        is_quantised = any(each.spec is not None or each.is_dequantized for found in told.values() for each in found)
        return {key: _least_change(found) if is_quantised else None for key, found in told.items()}


class _Told(NamedTuple):
    """What decides about an expert's layer."""

    name: str
    spec: LayerSpec | None
    of_weights_alone: LayerSpec | None
    shape: tuple[int, int]
    is_dequantized: bool
    perm: Tensor | None


def _least_change(layers: list[_Told]) -> Change | None:
    """The change that one matrix of a block with quantised experts needs; floats among them are changed, too."""
    if any(layer.spec is None for layer in layers):
        return to_nearest
    if _are_taken(layers):
        return None
    if _are_taken([each._replace(spec=_without_minimums(each.spec)) for each in layers]):
        return to_zeros
    return (
        to_weights_alone if _are_taken([each._replace(spec=each.of_weights_alone) for each in layers]) else to_nearest
    )


def take_float_experts(source: ModelSource) -> None:
    """Has float weights that are experts of a block with quantised ones be layers of the source, as those are."""
    places = filter(None, map(expert_layer, source.names))
    blocks = {place.block for place in places}
    for tensor in list(source.rest):
        name = tensor.removesuffix(".weight")
        place = expert_layer(name)
        if place is not None and place.block in blocks:
            source.names[name] = source.rest.pop(tensor).removesuffix(".weight")


def _are_taken(layers: list[_Told]) -> bool:
    """Whether one product takes all of these experts' layers."""
    blocks = ExpertBlocks()
    try:
        for layer in layers:
            blocks.add(layer.name, layer.spec, layer.shape, layer.perm)
    except UnsupportedError:
        return False
    return True


def _spec(layer: Layer) -> LayerSpec | None:
    return None if isinstance(layer, FloatLinear) else layer.spec


def _without_minimums(spec: LayerSpec | None) -> LayerSpec | None:
    return spec and replace(spec, buffers=tuple((name, kind) for name, kind in spec.buffers if name not in _MINIMUMS))


def _lost(layer: Layer, found: Layer) -> float:
    """The norm of the difference of the weights, over that of the weights."""
    weight = layer.effective_weight().double()
    size = float(weight.norm())
    lost = float(weight.sub_(found.effective_weight()).norm())
    return lost / size if size else lost
