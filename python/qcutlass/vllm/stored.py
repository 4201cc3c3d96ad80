"""Layers of tensors that an engine hands over one at a time, under the names that they have in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass import formats
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import CanonicalLinear, FloatLinear, Layer
from qcutlass.formats.specs import METHOD, PARTS, LayerSpec
from qcutlass.layers.base import from_spec
from qcutlass.products.packing import one_level

FORMATS: Final = ("gptq", "awq", "compressed-tensors")
"""The formats of other makers, keys of `qcutlass.formats.FORMATS`, of which layers are read here."""
SUFFIXES: Final = tuple(sorted(PARTS.union(*(formats.FORMATS[name].suffixes for name in FORMATS)) - {"bias"}))
"""Suffixes of all tensors that a layer may have in a checkpoint; biases are loaded by the engine."""
_NAME: Final = "layer"
_ROUNDED: Final = {torch.float16, torch.bfloat16, torch.float32}
_FLOATS_OF: Final = {-4: "e2m1", -8: "e4m3"}
"""The types of codes that are floats, by the bits that `layout` has of them."""
_KIND_OF_PACKED: Final = {torch.uint8: "weight_only", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


def obstacle(config: Mapping[str, Any], experts: bool = False) -> str | None:
    """The reason why layers of a folder are not read here; None if they are.

    Args:
        config: `quantization_config` of the folder.
        experts: whether the model is a mixture of experts.

    Example:
        >>> from qcutlass.vllm.stored import obstacle
        >>> obstacle({"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True})
        >>> obstacle({"quant_method": "gptq", "bits": 3})
        'gptq of 3 bits, only 4 and 8 are read'
    """
    method = str(config.get("quant_method", "")).lower()
    if method == METHOD:
        return None
    if experts and _has_int8_activations(config):
        return "experts of int8 activations are left to the engine"
    return _OBSTACLES[method](config) if method in _OBSTACLES else f"quant_method {method!r} is not read"


def layer_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any], name: str, device: torch.device) -> Layer:
    """The layer of canonical form that a checkpoint's tensors make, whichever format they have.

    Args:
        tensors: by suffix: `qweight`, `scales`, ...; of one layer.
        config: `quantization_config` of the folder.
        name: for errors.
        device: on which the layer is.

    Raises:
        CheckpointError: the tensors are none of a layer, or contradict each other.
        UnsupportedError: they are whole, but of a kind that is not read.
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
        stored = {f"{_NAME}.{suffix}": tensor for suffix, tensor in tensors.items()}
        try:
            read = formats.load(stored, config=config)[_NAME]
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
    held = {suffix: tensor for suffix, tensor in one_level(held).items() if tensor is not None}
    if not {"layout", "w_packed"} <= set(held):
        raise CheckpointError(f"{name}: expected layout and w_packed of a packed layer, got {', '.join(held)}")
    _, bits, n, k, group_size = held["layout"].tolist()
    kind = _KIND_OF_PACKED.get(held["w_packed"].dtype)
    scale = held.get("w_scale")  # `[N]`, but of blocks a matrix, also where a block has all columns
    if kind is None or (kind != "weight_only" and (group_size != k or (scale is not None and scale.dim() == 2))):
        blocks = " with scales of blocks" if kind else ""
        raise UnsupportedError(f"{name}: packed weights of type {held['w_packed'].dtype}{blocks} are not read")
    codes = _FLOATS_OF.get(bits) if kind == "weight_only" else None
    spec = LayerSpec.of(kind, abs(bits), group_size, k, held, codes)
    layer = from_spec(spec, n, k)
    try:
        layer.load_state_dict(held, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{name}: {error}; convert the model again") from error
    canonical = layer.canonical()
    make: Any = type(canonical).of
    found: Layer = make(
        {part: tensor for part, tensor in canonical.tensors.items() if part != "bias"}, **canonical.options
    )
    return found


def _gptq_obstacle(config: Mapping[str, Any]) -> str | None:
    bits, version = config.get("bits"), config.get("checkpoint_format") or "gptq"
    if bits not in (4, 8):
        return f"gptq of {bits} bits, only 4 and 8 are read"
    return None if version in ("gptq", "gptq_v2") else f"checkpoint_format {version!r} is not read"


def _awq_obstacle(config: Mapping[str, Any]) -> str | None:
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version") or "gemm").lower()
    if bits != 4:
        return f"awq of {bits} bits, only 4 are read"
    return None if version == "gemm" else f"awq of version {version!r}, only 'gemm' is read"


def _compressed_tensors_obstacle(config: Mapping[str, Any]) -> str | None:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "compressed-tensors without config_groups"
    for key in ("transform_config", "sparsity_config"):
        section = config.get(key)
        if section and section.get("format") != "dense":
            return f"{key} is not read"
    if config.get("kv_cache_scheme"):
        return "kv_cache_scheme is left to the engine"
    reasons = [_group_obstacle(group) for group in groups.values()]
    return next((reason for reason in reasons if reason), None)


def _has_int8_activations(config: Mapping[str, Any]) -> bool:
    groups = config.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    return any((group.get("input_activations") or {}).get("type") == "int" for group in groups)


def _group_obstacle(group: Mapping[str, Any]) -> str | None:
    """The reason why one of compressed-tensors' groups of layers is not read."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if weights.get("type") != "int" or weights.get("num_bits") not in (4, 8):
        return f"weights of {weights.get('num_bits')} bits of type {weights.get('type')!r}"
    if group.get("output_activations"):
        return "quantised outputs"
    if inputs is None:
        return None
    whole = weights["num_bits"] == 8 and weights.get("strategy") == "channel"
    plain = inputs.get("type") == "int" and inputs.get("num_bits") == 8 and inputs.get("symmetric", True)
    return None if whole and plain else "activations that are quantised other than to symmetric int8"


_OBSTACLES: Final = {"gptq": _gptq_obstacle, "awq": _awq_obstacle, "compressed-tensors": _compressed_tensors_obstacle}
