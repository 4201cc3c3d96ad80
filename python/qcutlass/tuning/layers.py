"""Layers that plans are tuned for: kinds of packed weights, from shapes or from the layers of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from qcutlass.layers import BlockwiseLinear, Fp8Linear, Int4Linear, Int8Linear, QuantExperts, QuantLinear
from qcutlass.layers.expert_stack import ExpertStack
from qcutlass.products import block_operators, int4
from qcutlass.products.blockwise import BLOCKWISE
from qcutlass.products.checks import check_integer, check_iterable, names_of
from qcutlass.products.float8 import FLOAT8
from qcutlass.products.grouped import GROUPED
from qcutlass.products.int4 import INT4
from qcutlass.products.int8 import INT8
from qcutlass.products.kind import Kind
from qcutlass.products.packing import PACKINGS, PackedWeights, check_weights, fit_cuda, one_level
from qcutlass.schemes import FP8, W4A8, W8A8, Blockwise
from qcutlass.tuning.layer import Layer

_ACTIVATIONS: Final = (torch.float16, torch.bfloat16)


def _of_eight_bits(kind: Kind) -> Callable[[Any], Layer]:
    """Makes the kind of weights of a layer whose weights and activations have 8 bits."""

    def make(layer: Any) -> Layer:
        sizes = layer.out_features, layer.in_features, layer.bits, layer.group_size
        return Layer(*sizes, layer.w_packed.dtype, torch.float32, kind=kind)

    return make


def _of_int4(layer: Int4Linear) -> Layer:
    sizes = layer.out_features, layer.in_features, layer.bits, layer.group_size
    zero_dtype = None if layer.zeros is None else layer.zeros.dtype
    return Layer(*sizes, int4.TYPES[layer.activations], layer.scales.dtype, zero_dtype, kind=INT4)


_QUANTIZING: Final[dict[type[QuantLinear], Callable[[Any], Layer]]] = {
    Int8Linear: _of_eight_bits(INT8),
    Fp8Linear: _of_eight_bits(FLOAT8),
    BlockwiseLinear: _of_eight_bits(BLOCKWISE),
    Int4Linear: _of_int4,
}
"""The kind of weights of each layer that quantises its activations."""


def layers_of(model: nn.Module, dtype: torch.dtype | None) -> list[Layer]:
    """Each kind of packed layer in a module once.

    These are layers that quantise their activations, both layers of experts, and submodules with `w_packed`, `scales`,
    `zeros` and `in_features`.
    """
    found: list[Layer] = []
    for name, module in model.named_modules():
        try:
            found += _of_module(module, dtype)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name or 'the module'}: {error}") from error
    if not found:
        names = ", ".join(kind.__name__ for kind in (*_QUANTIZING, QuantExperts))
        raise ValueError(
            "model_or_shapes: the module has no submodule with w_packed, scales, zeros and in_features, nor one of "
            f"{names}; pass a list of (N, K) shapes instead"
        )
    return list(dict.fromkeys(found))


def _of_module(module: nn.Module, dtype: torch.dtype | None) -> Iterator[Layer]:
    """The kinds of weights of a module, those of submodules left out."""
    if isinstance(module, QuantExperts):
        for stack, gathers in ((module.gate_up, True), (module.down, False)):
            layer = _weight_only(stack.layer(0), dtype)
            if layer is not None:  # torch gathers rows whose columns have another order
                in_order = stack.perm is None
                yield replace(layer, kind=GROUPED, experts=stack.experts, gathers=gathers and in_order)
    elif not isinstance(module, ExpertStack):
        make = next((make for kind, make in _QUANTIZING.items() if isinstance(module, kind)), None)
        layer = _weight_only(module, dtype) if make is None else make(module)
        if layer is not None:
            yield layer


def _weight_only(part: Any, dtype: torch.dtype | None) -> Layer | None:
    """The kind of weights of a module that multiplies 16-bit activations by packed codes; None: it is none."""
    if not all(hasattr(part, attribute) for attribute in ("w_packed", "scales", "zeros", "in_features")):
        return None
    parts: dict[str, Any] = {name: getattr(part, name, None) for name in PackedWeights._fields}
    if not fit_cuda(parts["scales"], parts["super_scales"], parts["group_size"] or part.in_features):
        parts = one_level(parts)  # as the layer has them on a GPU
    weights = PackedWeights(**parts)
    shape = check_weights(weights, part.in_features, part.w_packed.device, "w_packed")
    supers = weights.super_scales
    scale_dtype, minimums = weights.scales.dtype, weights.minimums
    activations = dtype or (scale_dtype if scale_dtype in _ACTIVATIONS else torch.float16)
    zero_dtype, minimum_dtype = (None if values is None else values.dtype for values in (part.zeros, minimums))
    types = activations, scale_dtype, zero_dtype, minimum_dtype
    super_groups = 0 if supers is None else len(weights.scales) // len(supers)
    sizes = shape.n, shape.k, shape.bits, shape.group_size
    return Layer(*sizes, *types, super_groups, weight_dtype=shape.weight_dtype)


Weights: TypeAlias = Callable[[int, int], Layer]
"""Makes the kind of weights of a scheme that has these N and K."""

_SCHEMES: Final[dict[type, Callable[[Any, int, int], Layer]]] = {
    W8A8: lambda scheme, n, k: Layer(n, k, 8, k, torch.int8, torch.float32, kind=INT8),
    FP8: lambda scheme, n, k: Layer(n, k, 8, k, torch.float8_e4m3fn, torch.float32, kind=FLOAT8),
    Blockwise: lambda scheme, n, k: Layer(
        n, k, 8, scheme.block_size, block_operators.TYPES[scheme.type], torch.float32, kind=BLOCKWISE
    ),
    W4A8: lambda scheme, n, k: Layer(
        n,
        k,
        4,
        _columns(scheme.group_size, k),
        int4.TYPES[scheme.activations],
        scheme.scale_dtype or torch.float16,
        None if scheme.symmetric else torch.uint8,
        kind=INT4,
    ),
}
"""The kind of weights of each scheme with activations of 8 bits, from the scheme, N and K."""


def _columns(group_size: int | None, k: int) -> int:
    """Columns that share a scale; None and -1: all."""
    return k if group_size is None or group_size == -1 else min(group_size, k)


def of_scheme(scheme: object, dtype: torch.dtype | None) -> Weights:
    """The weights of a scheme with activations of 8 bits, of another type of these if `dtype` says so.

    Raises:
        TypeError: it is no such scheme, or multiplies no activations of this type.
    """
    make = _SCHEMES.get(type(scheme))
    if make is None:
        names = ", ".join(kind.__name__ for kind in _SCHEMES)
        raise TypeError(
            f"scheme: expected one of qcutlass.{names}, or None for weight-only products, got {scheme!r}; say which "
            "these are by bits, group_size, dtype, scale_dtype and zero_dtype"
        )
    usual = make(scheme, 1, 1)
    allowed = [one for one in usual.kind.activations if one.is_floating_point == usual.dtype.is_floating_point]
    if dtype is not None and dtype not in allowed:
        raise TypeError(
            f"dtype: the products of {scheme} multiply activations of {names_of(allowed)}, got {dtype}; leave it out: "
            "their plans serve outputs of float16 and bfloat16 alike"
        )
    return lambda n, k: replace(make(scheme, n, k), dtype=dtype or usual.dtype)


def of_options(
    bits: int, group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype, zero_dtype: torch.dtype | None
) -> Weights:
    """The weights of a weight-only scheme; group_size -1: one group a channel."""
    check_integer("bits", bits, PACKINGS)
    check_integer("group_size", group_size)
    if group_size < 1 and group_size != -1:
        raise ValueError(f"group_size: expected at least 1, or -1 for one group a channel, got {group_size}")
    return lambda n, k: Layer(n, k, bits, _columns(group_size, k), dtype, scale_dtype, zero_dtype)


def layers_from(shapes: Iterable[tuple[int, int]], weights: Weights) -> list[Layer]:
    """Layers of one scheme, each once."""
    check_iterable("model_or_shapes", shapes, "pairs (N, K), or a module")
    found = []
    for shape in shapes:
        if not isinstance(shape, tuple | list) or len(shape) != 2:
            raise TypeError(f"model_or_shapes: expected a module or pairs (N, K), got {shape!r}")
        n, k = shape
        check_integer("N", n, minimum=1)
        check_integer("K", k, minimum=1)
        found.append(weights(n, k))
    if not found:
        raise ValueError("model_or_shapes: expected at least one pair (N, K), got none")
    return list(dict.fromkeys(found))


def check_types(dtype: object, scale_dtype: object, zero_dtype: object) -> None:
    """Raises TypeError unless these are types of activations, scales and zeros."""
    floating = (*_ACTIVATIONS, torch.float32)
    integers = (torch.uint8, torch.int8, torch.int32)
    for name, value, allowed in (
        ("dtype", dtype, _ACTIVATIONS),
        ("scale_dtype", scale_dtype, floating),
        ("zero_dtype", zero_dtype, (*integers, *floating)),
    ):
        if value is not None and not (isinstance(value, torch.dtype) and value in allowed):
            raise TypeError(f"{name}: expected one of {', '.join(map(str, allowed))}, got {value!r}")
