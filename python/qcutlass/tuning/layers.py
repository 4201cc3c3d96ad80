"""Layers that plans are tuned for: kinds of packed weights, from shapes or from the layers of a module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from qcutlass import _C
from qcutlass.products.checks import check_integer
from qcutlass.products.extension import DTYPES
from qcutlass.products.packing import PACKINGS, PackedWeights, check_weights, one_level

_ACTIVATIONS: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Layer:
    """A kind of weights.

    Attributes:
        n, k: shape of the weights.
        bits: 4 or 8.
        group_size: columns that share a scale; k: one group.
        dtype: of the activations.
        scale_dtype: of the scales.
        zero_dtype: of the zeros; None: symmetric, or there are minimums.
        minimum_dtype: of the minimums; None: there are none.
    """

    n: int
    k: int
    bits: int = 4
    group_size: int = 128
    dtype: torch.dtype = torch.float16
    scale_dtype: torch.dtype = torch.float16
    zero_dtype: torch.dtype | None = None
    minimum_dtype: torch.dtype | None = None

    def arguments(self, m: int) -> _C.GemmArguments:
        """A product of m rows as selection sees it: every operand aligned, no epilogue."""
        weights = _C.WeightArguments()
        weights.packing = PACKINGS[self.bits]
        weights.n, weights.k, weights.group_size = self.n, self.k, self.group_size
        weights.scale_type, weights.scale_stride = DTYPES[self.scale_dtype], self.n
        if self.zero_dtype is not None:
            weights.zero_type, weights.zero_stride = DTYPES[self.zero_dtype], self.n
        if self.minimum_dtype is not None:
            weights.minimum_type, weights.minimum_stride = DTYPES[self.minimum_dtype], self.n
        arguments = _C.GemmArguments()
        arguments.m, arguments.weights = m, weights
        arguments.a_type, arguments.a_stride, arguments.out_stride = DTYPES[self.dtype], self.k, self.n
        return arguments

    def __str__(self) -> str:
        group = "per channel" if self.group_size >= self.k else f"group {self.group_size}"
        return f"{self.n}x{self.k} {self.bits}-bit {group}"


def layers_of(model: nn.Module, dtype: torch.dtype | None) -> list[Layer]:
    """Each kind of packed layer in a module once: submodules with `w_packed`, `scales`, `zeros` and `in_features`."""
    found = []
    for name, module in model.named_modules():
        part: Any = module
        if not all(hasattr(part, attribute) for attribute in ("w_packed", "scales", "zeros", "in_features")):
            continue
        if getattr(part, "weight_dtype", None) is not None:  # there are too few configurations to choose from
            continue
        parts: dict[str, Any] = {name: getattr(part, name, None) for name in PackedWeights._fields}
        weights = PackedWeights(**one_level(parts))  # as the layer has them on a GPU
        try:
            shape = check_weights(weights, part.in_features, part.w_packed.device, "w_packed")
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name or 'the module'}: {error}") from error
        scale_dtype, minimums = weights.scales.dtype, weights.minimums
        activations = dtype or (scale_dtype if scale_dtype in _ACTIVATIONS else torch.float16)
        types = [None if values is None else values.dtype for values in (part.zeros, minimums)]
        found.append(Layer(shape.n, shape.k, shape.bits, shape.group_size, activations, scale_dtype, *types))
    if not found:
        raise ValueError(
            "model_or_shapes: the module has no submodule with w_packed, scales, zeros and in_features; "
            "pass a list of (N, K) shapes instead"
        )
    return list(dict.fromkeys(found))


def layers_from(
    shapes: Iterable[tuple[int, int]],
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    zero_dtype: torch.dtype | None,
) -> list[Layer]:
    """Layers of one scheme, each once; group_size -1: one group a channel."""
    check_integer("bits", bits, PACKINGS)
    check_integer("group_size", group_size)
    if group_size < 1 and group_size != -1:
        raise ValueError(f"group_size: expected at least 1, or -1 for one group a channel, got {group_size}")
    found = []
    for shape in shapes:
        if not isinstance(shape, tuple | list) or len(shape) != 2:
            raise TypeError(f"model_or_shapes: expected a module or pairs (N, K), got {shape!r}")
        n, k = shape
        check_integer("N", n, minimum=1)
        check_integer("K", k, minimum=1)
        group = k if group_size == -1 else min(group_size, k)
        found.append(Layer(n, k, bits, group, dtype, scale_dtype, zero_dtype))
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
        if value is not None and value not in allowed:
            raise TypeError(f"{name}: expected one of {', '.join(map(str, allowed))}, got {value!r}")
