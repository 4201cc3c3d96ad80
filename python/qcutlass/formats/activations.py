"""The same weights for other activations: quantised ones, or such as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from qcutlass.formats.fp8 import in_blocks
from qcutlass.formats.layers import CanonicalBlockwise, CanonicalLinear, Layer, canonical_int4, for_eight_bits
from qcutlass.formats.specs import LAYER_KINDS


class Activations(NamedTuple):
    """What layers do with their input.

    Attributes:
        form: the same weights for it; None where a layer stays as it is.
        kinds: of layers that do so, as converted folders call them.
        expected: the layers that become so, in words.
        quantise: whether the input is quantised, so that what no product takes then stays as it is.
    """

    form: Callable[[Any], Layer | None]
    kinds: tuple[str, ...]
    expected: str
    quantise: bool


def _alone(layer: Any) -> CanonicalLinear | None:
    found: CanonicalLinear | None = layer.weights_alone() if layer.quantises_activations else None
    return found


def _of_eight_bits(activations: str, layer: Layer) -> Layer | None:
    return for_eight_bits(layer, activations) if isinstance(layer, CanonicalLinear) else None


def _of_fp8(layer: Layer) -> Layer | None:
    found = _of_eight_bits("fp8", layer)
    return in_blocks(layer) if found is None and type(layer) is CanonicalLinear else found


def _kinds(quantise: bool) -> tuple[str, ...]:
    return tuple(name for name, kind in LAYER_KINDS.items() if kind.quantises_activations is quantise)


_INTEGERS: Final = "layers of 4-bit codes with integer zeros, or none"
STORED_ACTIVATIONS: Final = {
    "none": Activations(_alone, _kinds(False), "layers", False),
    "int8": Activations(partial(_of_eight_bits, "int8"), (canonical_int4("int8").kind,), _INTEGERS, True),
    "fp8": Activations(
        _of_fp8,
        (canonical_int4("fp8").kind, CanonicalBlockwise.kind),
        f"{_INTEGERS}, or of e4m3 weights with scales of square blocks of 32, 64 or 128",
        True,
    ),
}
"""What layers of converted folders can do with their input, by the name of the option."""
