"""Schemes: the options of a layer's quantisation. Data alone; `qcutlass.layers` has the layers of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from qcutlass.defaults import FLOAT_FORMATS
from qcutlass.errors import UnsupportedError
from qcutlass.products.block_operators import check_block_size, check_type
from qcutlass.products.checks import E8M0, FLOATING, check_flag, check_group_size, check_integer, names_of
from qcutlass.products.packing import CODE_TYPES, PACKINGS, check_weight_dtype


class Scheme:
    """The quantisation of a linear layer. Subclasses are frozen dataclasses of options."""


@dataclass(frozen=True)
class WeightOnly(Scheme):
    """Codes of 4 or 8 bits with a scale, and a zero point, for each group of columns.

    Attributes:
        bits: 4 or 8.
        group_size: columns that share a scale; None or -1: one scale a channel.
        symmetric: whether the zero point is fixed at 2**(bits - 1).
        scale_dtype: float16, bfloat16 or float32; of "e2m1" also float8_e8m0fnu and float8_e4m3fn; None: the type of
            the weights.
        weight_dtype: None: codes are integers; "e2m1" (4 bits) or "e4m3" (8 bits): floating numbers, without zero
            points.

    Example:
        >>> import qcutlass
        >>> qcutlass.WeightOnly(bits=8, group_size=None)
        WeightOnly(bits=8, group_size=None, symmetric=False, scale_dtype=None, weight_dtype=None)
    """

    bits: int = 4
    group_size: int | None = 128
    symmetric: bool = False
    scale_dtype: torch.dtype | None = None
    weight_dtype: str | None = None

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, PACKINGS)
        check_weight_dtype(self.weight_dtype, self.bits)
        check_group_size(self.group_size)
        check_flag("symmetric", self.symmetric)
        if self.symmetric and self.weight_dtype is not None:
            raise ValueError(f"symmetric: {self.weight_dtype} codes have signs and no zero points; leave it out")
        allowed = FLOATING if self.weight_dtype is None else CODE_TYPES[self.weight_dtype].scales
        if self.scale_dtype not in (None, *allowed):
            raise TypeError(f"scale_dtype: expected {names_of(allowed)} or None, got {self.scale_dtype}")


def float_format(name: str) -> WeightOnly:
    """The scheme of a format of 4-bit floats, by its name in `defaults.FLOAT_FORMATS`.

    Example:
        >>> from qcutlass.schemes import float_format
        >>> float_format("nvfp4").group_size
        16
    """
    if name not in FLOAT_FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FLOAT_FORMATS)}, got {name!r}")
    if name == "mxfp4" and not E8M0:
        raise UnsupportedError("format: the scales of mxfp4 need torch 2.7 or newer; update it, or use nvfp4")
    group_size, scales = (32, E8M0[0]) if name == "mxfp4" else (16, torch.float8_e4m3fn)
    return WeightOnly(4, group_size, scale_dtype=scales, weight_dtype="e2m1")


@dataclass(frozen=True)
class W4A8(Scheme):
    """4-bit weights with a scale, and a zero point, for each group of columns, and activations of 8 bits.

    Each token's activations get their scale when they come. GPUs multiply fp8 from compute capability 8.9 on.

    Attributes:
        group_size: columns that share a scale; None or -1: one scale a channel.
        activations: "fp8": e4m3; "int8".
        symmetric: whether the zero point is fixed at 8.
        scale_dtype: float16, bfloat16 or float32; None: the type of the weights.

    Example:
        >>> import qcutlass
        >>> qcutlass.W4A8(activations="int8")
        W4A8(group_size=128, activations='int8', symmetric=False, scale_dtype=None)
    """

    group_size: int | None = 128
    activations: Literal["fp8", "int8"] = "fp8"
    symmetric: bool = False
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.activations not in ("fp8", "int8"):
            raise ValueError(f"activations: expected 'fp8' or 'int8', got {self.activations!r}")
        _ = self.weights

    @property
    def weights(self) -> WeightOnly:
        """The scheme of the weights."""
        return WeightOnly(4, self.group_size, self.symmetric, self.scale_dtype)


@dataclass(frozen=True)
class W8A8(Scheme):
    """int8 weights, one scale a channel, and int8 activations.

    Attributes:
        activations: "dynamic": each token gets its scale when it comes; "static": one scale from calibration.
        symmetric: whether activations have no zero point. Asymmetric ones suit inputs of one sign, as behind ReLU.

    Example:
        >>> import qcutlass
        >>> qcutlass.W8A8("static", symmetric=False)
        W8A8(activations='static', symmetric=False)
    """

    activations: Literal["dynamic", "static"] = "dynamic"
    symmetric: bool = True

    def __post_init__(self) -> None:
        check_kind_of_activations(self.activations)
        check_flag("symmetric", self.symmetric)


@dataclass(frozen=True)
class FP8(Scheme):
    """e4m3 weights, one scale a channel, and e4m3 activations.

    Attributes:
        activations: "dynamic": each token gets its scale when it comes; "static": one scale from calibration.

    Example:
        >>> import qcutlass
        >>> qcutlass.FP8()
        FP8(activations='dynamic')
    """

    activations: Literal["dynamic", "static"] = "dynamic"

    def __post_init__(self) -> None:
        check_kind_of_activations(self.activations)


@dataclass(frozen=True)
class Blockwise(Scheme):
    """Weights with a scale for each block of rows and columns, such activations with one for each of columns.

    Attributes:
        block_size: 32, 64 or 128.
        type: "int8", or "fp8": both are e4m3, as in DeepSeek-V3; GPUs have its products in blocks of 128.

    Example:
        >>> import qcutlass
        >>> qcutlass.Blockwise(type="fp8")
        Blockwise(block_size=128, type='fp8')
    """

    block_size: int = 128
    type: Literal["int8", "fp8"] = "int8"

    def __post_init__(self) -> None:
        check_block_size("block_size", self.block_size)
        check_type("type", self.type)


def check_kind_of_activations(activations: object) -> None:
    """Raises ValueError unless it is "dynamic" or "static"."""
    if activations not in ("dynamic", "static"):
        raise ValueError(f"activations: expected 'dynamic' or 'static', got {activations!r}")
