"""Linear layers in canonical form, which loaders yield."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from qcutlass.formats.specs import LAYER_KINDS, LayerSpec
from qcutlass.formats.tensors import REQUANTIZE
from qcutlass.products.checks import check_dtype, check_index, short
from qcutlass.quantized import DEQUANTIZED, QuantizedTensor

_OPTIONAL: Final = ("zeros", "global_scale", "minimums", "super_scales", "super_minimums")
"""Tensors that weights may have beside codes and scales."""


@dataclass(frozen=True, eq=False)
class CanonicalLinear:
    """A linear layer with low-bit weights: `y = (x * act_scale)[..., perm] @ weight.T + bias`.

    The members are arguments of `qcutlass.gemm`, once `weight.codes` are packed.

    Attributes:
        weight: codes `[N, K]`, scales and zeros or minimums `[G, N]`.
        bias: float16, bfloat16 or float32 `[N]`, or None.
        perm: int32 `[K]`, or None: column k of the codes meets activation column `perm[k]` (act-order).
        act_scale: floating `[K]`, or None: multiplies the activations, in their own column order.
    """

    kind: ClassVar = "weight_only"
    quantises_activations: ClassVar = LAYER_KINDS[kind].quantises_activations

    weight: QuantizedTensor
    bias: Tensor | None = None
    perm: Tensor | None = None
    act_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape

    @property
    def spec(self) -> LayerSpec:
        """The description that a converted folder has of it."""
        held = {**vars(self), **vars(self.weight)}
        weight = self.weight
        return LayerSpec.of(self.kind, weight.bits, weight.group_size, self.shape[1], held, weight.weight_dtype)

    @property
    def words(self) -> str:
        """The scheme in words."""
        return self.spec.words

    @property
    def nbytes(self) -> float:
        """Bytes of weights, scales and zeros, codes packed without padding."""
        n, k = self.shape
        return self.weight.bits_per_weight * n * k / 8

    @property
    def options(self) -> dict[str, Any]:
        """The numbers beside the tensors, and the type of floating codes, for `of`."""
        codes = {} if self.weight.weight_dtype is None else {"weight_dtype": self.weight.weight_dtype}
        return {"bits": self.weight.bits, "group_size": self.weight.group_size, **codes}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it has, by name, for `of`."""
        held = {**vars(self), **vars(self.weight)}
        return _present(held, "codes", "scales", *_OPTIONAL, "bias", "perm", "act_scale")

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], bits: int, group_size: int, weight_dtype: str | None = None
    ) -> CanonicalLinear:
        """The layer with these `tensors` and `options`."""
        others = dict(tensors)
        codes, scales = others.pop("codes"), others.pop("scales")
        optional = {name: others.pop(name, None) for name in _OPTIONAL}
        weight = QuantizedTensor(codes, scales, bits=bits, group_size=group_size, weight_dtype=weight_dtype, **optional)
        return cls(weight, **others)

    def rows(self, index: Tensor) -> CanonicalLinear:
        """The layer with its output channels in another order, or some of them, as `QuantizedTensor.rows` has it."""
        weight = self.weight.rows(index)
        return replace(self, weight=weight, bias=None if self.bias is None else self.bias[index])

    def with_zeros(self) -> CanonicalLinear:
        """The layer with its zero points written out where they are all in the middle; else as it is."""
        weight = self.weight
        if weight.zeros is not None or weight.minimums is not None or weight.weight_dtype is not None:
            return self
        zeros = torch.full_like(weight.scales, 2 ** (weight.bits - 1), dtype=torch.uint8)
        return replace(self, weight=replace(weight, zeros=zeros))

    def effective_weight(self) -> Tensor:
        """float32 `[N, K]`: the weights that activations are multiplied by, `act_scale` included."""
        weight = self.dequantize(torch.float32)
        return weight if self.act_scale is None else weight * self.act_scale

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights `[N, K]` with columns in the order of the activations, without `act_scale`.

        Computed in fp32 and rounded once to `dtype` (None: the type of the scales).
        """
        weight = self.weight.dequantize(dtype)
        if self.perm is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.perm.long()] = weight
        return ordered


class CanonicalInt4(CanonicalLinear):
    """A linear layer with 4-bit weights for activations of 8 bits, which are quantised after `act_scale` and `perm`.

    Attributes:
        weight, bias, perm, act_scale: as those of `CanonicalLinear`; zeros are integers, or there are none.
    """

    activations: ClassVar[Literal["fp8", "int8"]]

    def weights_alone(self) -> CanonicalLinear:
        """The same codes for activations that stay as they are."""
        return CanonicalLinear(self.weight, self.bias, self.perm, self.act_scale)


class CanonicalInt4Fp8(CanonicalInt4):
    """A `CanonicalInt4` for e4m3 activations."""

    kind: ClassVar = "w4a8_fp8"
    quantises_activations: ClassVar = LAYER_KINDS[kind].quantises_activations
    activations: ClassVar = "fp8"


class CanonicalInt4Int8(CanonicalInt4):
    """A `CanonicalInt4` for int8 activations."""

    kind: ClassVar = "w4a8_int8"
    quantises_activations: ClassVar = LAYER_KINDS[kind].quantises_activations
    activations: ClassVar = "int8"


def canonical_int4(activations: str) -> type[CanonicalInt4]:
    """The form for "fp8" or "int8" activations."""
    return CanonicalInt4Fp8 if activations == "fp8" else CanonicalInt4Int8


def for_eight_bits(layer: CanonicalLinear, activations: str) -> CanonicalInt4 | None:
    """A weight-only layer for such activations; None: its codes have not 4 bits, or zeros that are no integers.

    Their product takes scales of one level: two, as those of GGUF's Q3_K, become one, exactly, in float32.
    """
    weight = layer.weight
    integers = weight.bits == 4 and weight.weight_dtype is None and weight.minimums is None
    if type(layer) is not CanonicalLinear or not integers:
        return None
    if weight.zeros is not None and weight.zeros.is_floating_point():
        return None
    return canonical_int4(activations)(weight.expanded(), layer.bias, layer.perm, layer.act_scale)


_AnyEightBit = TypeVar("_AnyEightBit", bound="_EightBit")


class _Codes:
    """What linear layers with 8-bit codes for 8-bit activations share, whatever their scales are of."""

    quantises_activations: ClassVar = True
    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    @property
    def spec(self) -> LayerSpec:
        """The description that a converted folder has of it."""
        raise NotImplementedError

    def _alone(self, scales: Tensor, group_size: int, act_scale: Tensor | None = None) -> CanonicalLinear:
        """The same codes for activations that stay as they are, with scales `[G, N]` of groups."""
        is_int8, codes = self.codes.dtype == torch.int8, self.codes.view(torch.uint8)
        plain, weight_dtype = (codes ^ 0x80, None) if is_int8 else (codes, "e4m3")  # of int8, zeros in the middle
        weight = QuantizedTensor(plain, scales.contiguous(), None, 8, group_size, weight_dtype)
        return CanonicalLinear(weight, self.bias, None, act_scale)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.codes.shape
        return n, k

    @property
    def words(self) -> str:
        """The scheme in words."""
        return self.spec.words

    @property
    def nbytes(self) -> float:
        """Bytes of weights and scales."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, eq=False)
class _EightBit(_Codes):
    """What linear layers with 8-bit weights for 8-bit activations share; each subclass is a kind."""

    kind: ClassVar[str]
    options: ClassVar[dict[str, int]] = {}

    codes: Tensor
    scales: Tensor
    input_scale: Tensor | None = None
    bias: Tensor | None = None
    smooth: Tensor | None = None

    @property
    def spec(self) -> LayerSpec:
        """The description that a converted folder has of it."""
        k = self.shape[1]
        return LayerSpec.of(self.kind, 8, k, k, {**vars(self), "a_scale": self.input_scale})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it has, by name, for `of`."""
        return _present(vars(self), "codes", "scales", "bias", "smooth", "input_scale")

    @classmethod
    def of(cls: type[_AnyEightBit], tensors: Mapping[str, Tensor]) -> _AnyEightBit:
        """The layer with these `tensors`."""
        return cls(**tensors)

    def rows(self: _AnyEightBit, index: Tensor) -> _AnyEightBit:
        """The layer with its output channels in another order, or some of them."""
        check_index("index", index, self.shape[0])
        bias = None if self.bias is None else self.bias[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], bias=bias)

    def effective_weight(self) -> Tensor:
        """float32 `[N, K]`: the weights that activations are multiplied by, `smooth` included."""
        weight = self.dequantize()
        return weight if self.smooth is None else weight / self.smooth

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights `[N, K]`, computed in fp32 and rounded once to `dtype`."""
        check_dtype("dtype", dtype, DEQUANTIZED)
        return (self.codes.float() * self.scales[:, None]).to(dtype)

    def weights_alone(self) -> CanonicalLinear:
        """The same codes for activations that stay as they are, but for the factors 1 / `smooth` that they get."""
        act_scale = None if self.smooth is None else self.smooth.reciprocal()
        return self._alone(self.scales[None], self.shape[1], act_scale)


class CanonicalInt8(_EightBit):
    """A linear layer with int8 weights for int8 activations (W8A8).

    Attributes:
        codes: int8 `[N, K]`; `w[n, k] = codes[n, k] * scales[n]`.
        scales: float32 `[N]`.
        input_scale: float32 `[1]`, of all activations; None: each token's is computed when it comes.
        bias: float16, bfloat16 or float32 `[N]`, or None.
        smooth: float32 `[K]`, or None: the activations are divided by it first.
    """

    kind: ClassVar = "int8"


class CanonicalFp8(_EightBit):
    """A linear layer with e4m3 weights for e4m3 activations.

    Attributes:
        codes: float8_e4m3fn `[N, K]`; `w[n, k] = codes[n, k] * scales[n]`.
        scales, input_scale, bias, smooth: as those of `CanonicalInt8`.
    """

    kind: ClassVar = "fp8"


@dataclass(frozen=True, eq=False)
class CanonicalBlockwise(_Codes):
    """A linear layer with int8 or e4m3 weights in square blocks, for such activations in blocks of as many columns.

    Attributes:
        codes: int8 or float8_e4m3fn `[N, K]`; `w[n, k] = codes[n, k] * scales[n // block_size, k // block_size]`.
        scales: float32 `[ceil(N / block_size), ceil(K / block_size)]`.
        block_size: 32, 64 or 128.
        bias: float16, bfloat16 or float32 `[N]`, or None.
    """

    kind: ClassVar = "blockwise"

    codes: Tensor
    scales: Tensor
    block_size: int
    bias: Tensor | None = None

    @property
    def spec(self) -> LayerSpec:
        """The description that a converted folder has of it."""
        weight_dtype = None if self.codes.dtype == torch.int8 else "e4m3"
        return LayerSpec.of(self.kind, 8, self.block_size, self.shape[1], vars(self), weight_dtype)

    @property
    def options(self) -> dict[str, int]:
        """The numbers beside the tensors, for `of`."""
        return {"block_size": self.block_size}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it has, by name, for `of`."""
        return _present(vars(self), "codes", "scales", "bias")

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], block_size: int) -> CanonicalBlockwise:
        """The layer with these `tensors` and `options`."""
        return cls(**tensors, block_size=block_size)

    def effective_weight(self) -> Tensor:
        """float32 `[N, K]`: the weights."""
        return self.dequantize()

    def weights_alone(self) -> CanonicalLinear:
        """The same codes for activations that stay as they are: each channel has the scales of its blocks."""
        n, k = self.shape
        return self._alone(self.scales.repeat_interleave(self.block_size, 0)[:n].T, min(self.block_size, k))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights `[N, K]`, computed in fp32 and rounded once to `dtype`."""
        check_dtype("dtype", dtype, DEQUANTIZED)
        return (self.codes.float() * each_weights_scale(self.scales, self.shape, self.block_size)).to(dtype)


@dataclass(frozen=True, eq=False)
class FloatLinear:
    """A linear layer that is not quantised.

    Attributes:
        weight: float16, bfloat16 or float32 `[N, K]`.
        bias: such a type, `[N]`, or None.
        is_transposed: whether `tensors`, as files, have the weight as `[K, N]`: that of transformers' `Conv1D`.
    """

    kind: ClassVar = "float"
    quantises_activations: ClassVar = False

    weight: Tensor
    bias: Tensor | None = None
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.weight.shape
        return n, k

    @property
    def words(self) -> str:
        """The type of the weights."""
        return short(self.weight.dtype)

    @property
    def nbytes(self) -> float:
        """Bytes of the weights."""
        return self.weight.nbytes

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it has, by name, for `of`."""
        weight = self.weight.T.contiguous() if self.is_transposed else self.weight
        return _present({**vars(self), "weight": weight}, "weight", "bias")

    @property
    def options(self) -> dict[str, Any]:
        """What `of` takes beside the tensors."""
        return {"is_transposed": True} if self.is_transposed else {}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], is_transposed: bool = False) -> FloatLinear:
        """The layer with these `tensors` and `options`."""
        weight = tensors["weight"].T.contiguous() if is_transposed else tensors["weight"]
        return cls(**{**tensors, "weight": weight}, is_transposed=is_transposed)

    def rows(self, index: Tensor) -> FloatLinear:
        """The layer with its output channels in another order, or some of them."""
        check_index("index", index, self.shape[0])
        return replace(self, weight=self.weight[index], bias=None if self.bias is None else self.bias[index])

    def effective_weight(self) -> Tensor:
        """float32 `[N, K]`: the weights."""
        return self.dequantize(torch.float32)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights `[N, K]` in `dtype` (None: their own)."""
        dtype = self.weight.dtype if dtype is None else dtype
        check_dtype("dtype", dtype, DEQUANTIZED)
        return self.weight.to(dtype)


@dataclass(frozen=True, eq=False)
class DequantizedLinear(FloatLinear):
    """A linear layer that is stored in codes for which there are no products: dequantised, to be quantised anew.

    Attributes:
        weight, bias: as those of `FloatLinear`.
        stored: the form in which the file holds the weights, in words.
        stored_bytes: of weights and scales there.
    """

    kind: ClassVar = "dequantized"

    stored: str = ""
    stored_bytes: int = 0

    @property
    def words(self) -> str:
        """The form in which the file holds the weights."""
        return self.stored

    @property
    def nbytes(self) -> float:
        """Bytes of weights and scales in the file."""
        return self.stored_bytes

    @property
    def obstacle(self) -> str:
        """The reason why it isn't a layer of packed weights, and the way out."""
        return f"no product multiplies {self.stored} weights as they are; {REQUANTIZE}"


QuantizedLayer: TypeAlias = CanonicalLinear | CanonicalInt8 | CanonicalFp8 | CanonicalBlockwise
Layer: TypeAlias = QuantizedLayer | FloatLinear
LAYERS: Final[dict[str, type[Layer]]] = {
    layer.kind: layer
    for layer in (
        CanonicalLinear,
        CanonicalInt4Fp8,
        CanonicalInt4Int8,
        CanonicalInt8,
        CanonicalFp8,
        CanonicalBlockwise,
        FloatLinear,
    )
}


def each_weights_scale(scales: Tensor, shape: tuple[int, int], block_size: int) -> Tensor:
    """`[N, K]`: the scales of square blocks, each where its weights are."""
    rows, columns = (torch.arange(extent, device=scales.device) // block_size for extent in shape)
    return scales[rows[:, None], columns]


def _present(held: Mapping[str, Any], *names: str) -> dict[str, Tensor]:
    return {name: held[name] for name in names if held[name] is not None}
