"""Layers of tensors that an engine hands over one at a time, under the names that they have in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass import formats
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import CanonicalFp8, CanonicalLinear, FloatLinear, Layer
from qcutlass.formats.specs import PARTS, LayerSpec
from qcutlass.layers.base import from_spec
from qcutlass.layers.stored_form import from_stored
from qcutlass.vllm import naming

FORMATS: Final = ("gptq", "awq", "compressed-tensors", "fp8", "nvfp4")
"""The formats of other makers, keys of `qcutlass.formats.FORMATS`, of which layers are read here."""
SUFFIXES: Final = tuple(sorted(PARTS.union(*(formats.FORMATS[name].suffixes for name in FORMATS)) - {"bias"}))
"""Suffixes of all tensors that a layer may have in a checkpoint; biases are loaded by the engine."""
_NAME: Final = "layer"
_ROUNDED: Final = {torch.float16, torch.bfloat16, torch.float32}
_FLOATS_OF: Final = {-4: "e2m1", -8: "e4m3"}
"""The types of codes that are floats, by the bits that `layout` has of them."""
_KIND_OF_PACKED: Final = {torch.uint8: "weight_only", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
_BLOCKS: Final = "blockwise"


def layer_of(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], name: str, device: torch.device, *modules: str
) -> Layer:
    """The layer of canonical form that a checkpoint's tensors make, whichever format they have.

    Args:
        tensors: by suffix: `qweight`, `scales`, ...; of one layer.
        config: `quantization_config` of the folder.
        name: for errors.
        device: on which the layer is.
        modules: names that the layer may have in the checkpoint, by which the configuration may describe it apart;
            `name` where there are none.

    Raises:
        CheckpointError: the tensors are none of a layer, or contradict each other.
        UnsupportedError: they are whole, but of a kind that is not read.

    Example:
        >>> import torch
        >>> from qcutlass.vllm.stored import layer_of
        >>> tensors = {"weight": torch.zeros(64, 32, dtype=torch.float8_e4m3fn), "weight_scale": torch.ones(64, 1)}
        >>> layer_of(tensors, {"quant_method": "fp8"}, "up", torch.device("cpu")).words
        'e4m3 channel'
    """
    if not tensors:
        raise CheckpointError(
            f"{name}: the checkpoint holds no tensors of this layer; load_format 'dummy' makes none: write a random "
            "checkpoint instead"
        )
    with torch.device("cpu"):  # the engine may have set another default
        if "layout" in tensors or "w_packed" in tensors:
            return _of_packed(tensors, name, device)
        if is_float(tensors):
            return FloatLinear(tensors["weight"].to(device))

        def load(module: str, described: Mapping[str, Any]) -> Layer:
            stored = {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
            read = formats.load(stored, config=described)[module]
            return _ALONE.get(read.kind, _as_it_is)(read)

        try:
            named = [module for module in modules if module]  # layers of some models have no prefix
            read = naming.read(load, config, named or [name or _NAME])
        except (CheckpointError, UnsupportedError, KeyError) as error:
            raise type(error)(f"{name}: {error}") from error
    return moved(read, device)


def is_float(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a layer of these tensors is not quantised."""
    return set(tensors) == {"weight"} and tensors["weight"].dtype in _ROUNDED


def moved(layer: Layer, device: torch.device) -> Layer:
    """The layer on a device."""
    make: Any = type(layer).of
    found: Layer = make({name: tensor.to(device) for name, tensor in layer.tensors.items()}, **layer.options)
    return found


def with_scales(layer: Layer, dtype: torch.dtype) -> Layer:
    """The layer with scales in the type of the activations, for which kernels are fastest.

    bfloat16 has 8 bits of precision, so nothing is less exact than in it; scales that float16 holds less exactly stay.
    """
    if not isinstance(layer, CanonicalLinear) or layer.weight.scales.dtype not in _ROUNDED - {dtype}:
        return layer
    weight = layer.weight
    if weight.minimums is not None:  # whose kernels take scales of any type
        return layer
    exact, rounded = weight.scales.float(), weight.scales.to(dtype)
    if not bool(((rounded.float() - exact).abs() <= exact.abs() * 2**-8).all()):
        return layer
    tensors = layer.tensors | {"scales": rounded}
    return CanonicalLinear.of(tensors, **layer.options)


def _of_packed(tensors: Mapping[str, Tensor], name: str, device: torch.device) -> Layer:
    """The layer of a converted folder."""
    held = {suffix: tensor.detach().to(device) for suffix, tensor in tensors.items() if suffix != "weight"}  # the guard
    if not {"layout", "w_packed"} <= set(held):
        raise CheckpointError(f"{name}: expected layout and w_packed of a packed layer, got {', '.join(held)}")
    _, bits, n, k, group_size = held["layout"].tolist()
    weight_dtype = _FLOATS_OF.get(bits)
    try:
        parts = from_stored(held, abs(bits), weight_dtype)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name}: {error}; convert the model again") from error
    held = {suffix: tensor for suffix, tensor in parts.items() if tensor is not None}
    kind = _KIND_OF_PACKED.get(held["w_packed"].dtype)
    if kind is None:
        raise UnsupportedError(f"{name}: packed weights of type {held['w_packed'].dtype} are not read")
    scale = held.get("w_scale")  # `[N]`, but of blocks a matrix, also where a block has all columns
    if scale is not None and scale.dim() == 2:
        kind = _BLOCKS
    spec = LayerSpec.of(kind, abs(bits), group_size, k, held, weight_dtype)
    layer = from_spec(spec, n, k)
    try:
        layer.load_state_dict(held, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{name}: {error}; convert the model again") from error
    return layer.canonical()


def _as_it_is(layer: Layer) -> Layer:
    return layer


_ALONE: Final[dict[str, Callable[[Any], Layer]]] = {CanonicalFp8.kind: CanonicalFp8.weights_alone}
"""Layers of other makers that are multiplied otherwise than they say: what theirs say of activations is left out."""
