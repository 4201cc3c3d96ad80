"""Quantisation schemes by name: ``w4a16_g128``, ``w4a8_g128``, ``w8a8``, ``fp8_e5m2``, ``blockwise_quant``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import torch

from bench.limits import Operands
from qcutlass import testing

_DTYPE: Final = r"(?:_(f16|bf16))?"
_WEIGHT_ONLY: Final = re.compile(r"w([48])a16_(?:g([1-9]\d*)|channel)(?:_(int|real|min))?(?:_(f16|bf16|f32))?")
_INT8: Final = re.compile(r"w8a8(_azp)?" + _DTYPE)
_FLOAT8: Final = re.compile(r"fp8(?:_(e5m2))?" + _DTYPE)
_BLOCKWISE: Final = re.compile(r"blockwise(_quant|_fp8)?" + _DTYPE)
_FOUR_BY_EIGHT: Final = re.compile(r"w4a8(_int8)?_(?:g([1-9]\d*)|channel)(_int)?" + _DTYPE)
_TYPES: Final = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "int8",
    torch.float8_e4m3fn: "fp8 e4m3", torch.float8_e5m2: "fp8 e5m2",
}  # fmt: skip
_DTYPES: Final = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class WeightOnly:
    """16-bit activations by codes.

    Attributes:
        name: as given.
        bits: of a weight.
        group_size: columns that share a scale; None: one scale a channel.
        zeros: "none" (symmetric), "int" or "real"; "minimum": minimums, float32 as the scales, as K-quants have them.
        dtype: of the activations; None: the bench's default (float16 on a GPU, float32 on the CPU).
        weight_dtype: of floating codes, "e2m1" or "e4m3"; None: integers.
        scale_dtype: of the scales; None: the activations', but float32 with minimums.
        super_groups: groups of a super-block, of scales and minimums of two levels; 0: they have one.
    """

    name: str
    bits: int
    group_size: int | None
    zeros: testing.Zeros
    dtype: torch.dtype | None
    weight_dtype: str | None = None
    scale_dtype: torch.dtype | None = None
    super_groups: int = 0

    @property
    def operands(self) -> Operands:
        """The type of the tensor cores' operands."""
        return "16-bit"

    @property
    def words(self) -> str:
        """For the titles of figures."""
        groups = "a scale a channel" if self.group_size is None else f"groups of {self.group_size}"
        named = {"none": "", "int": ", integer zeros", "real": ", real zeros", "minimum": ", minimums"}
        codes = self.weight_dtype or f"int{self.bits}"
        levels = ", two levels" if self.super_groups else ""
        return (
            f"{codes} weights ({groups}{named[self.zeros]}{levels}), {_TYPES[self.dtype or torch.float16]} activations"
        )

    def case(self, m: int, n: int, k: int, default_dtype: torch.dtype) -> testing.Case:
        """The product of this scheme at (m, n, k)."""
        return testing.Case(
            m,
            n,
            k,
            bits=self.bits,
            group_size=self.group_size or k,
            zeros=self.zeros,
            dtype=self.dtype or default_dtype,
            scale_dtype=self.scale_dtype or (torch.float32 if self.zeros == "minimum" else None),
            weight_dtype=self.weight_dtype,
            super_groups=self.super_groups,
        )


_FORMATS: Final = {  # of checkpoints
    "mxfp4": WeightOnly("", 4, 32, "none", None, "e2m1", torch.float8_e8m0fnu),
    "nvfp4": WeightOnly("", 4, 16, "none", None, "e2m1", torch.float8_e4m3fn),
    "e4m3": WeightOnly("", 8, None, "none", None, "e4m3"),
    "e4m3_g128": WeightOnly("", 8, 128, "none", None, "e4m3", torch.float32),  # fp8 in blocks, as it is held
    "q2_k": WeightOnly("", 4, 16, "minimum", None, super_groups=16),
    "q3_k": WeightOnly("", 4, 16, "none", None, super_groups=16),
    "q4_k": WeightOnly("", 4, 32, "minimum", None, super_groups=8),
    "q5_k": WeightOnly("", 8, 32, "minimum", None, super_groups=8),
    "q6_k": WeightOnly("", 8, 16, "none", None, super_groups=16),
    "iq4_nl": WeightOnly("", 8, 32, "none", None, None, torch.float16),
    "iq4_xs": WeightOnly("", 8, 32, "none", None, super_groups=8),
}
_OF_FILES: Final = re.compile(rf"({'|'.join(_FORMATS)})(?:_(f16|bf16|f32))?")
PATTERNS: Final = (
    "w<4|8>a16_<g<size>|channel>[_int|_real|_min][_f16|_bf16|_f32], "
    f"<{'|'.join(_FORMATS)}>[_f16|_bf16|_f32], "
    "w8a8[_azp][_f16|_bf16], fp8[_e5m2][_f16|_bf16], blockwise[_quant|_fp8][_f16|_bf16], "
    "w4a8[_int8]_<g<size>|channel>[_int][_f16|_bf16]"
)


class _EightBitActivations:
    """Schemes whose activations are int8 or fp8."""

    a_dtype: torch.dtype

    @property
    def operands(self) -> Operands:
        """The type of the tensor cores' operands."""
        return "int8" if self.a_dtype == torch.int8 else "fp8"


@dataclass(frozen=True)
class EightBit(_EightBitActivations):
    """8-bit activations by 8-bit weights, a scale for each token, a scale and a bias for each channel.

    Attributes:
        name: as given.
        a_dtype: of the activations: int8, which the weights are then too, float8_e4m3fn or float8_e5m2.
        azp: whether each token has a zero point.
        dtype: of the output and the bias.
    """

    name: str
    a_dtype: torch.dtype
    azp: bool
    dtype: torch.dtype

    @property
    def words(self) -> str:
        """For the titles of figures."""
        zeros = " with zero points" if self.azp else ""
        return (
            f"{_TYPES[self.a_dtype]} activations{zeros} by {_TYPES[self.a_dtype]} weights, {_TYPES[self.dtype]} output"
        )

    def case(self, m: int, n: int, k: int) -> testing.EightBitCase:
        """The product of this scheme at (m, n, k)."""
        return testing.EightBitCase(
            m,
            n,
            k,
            dtype=self.a_dtype,
            out_dtype=self.dtype,
            azp="each" if self.azp else "none",
            bias=True,
            bias_dtype=self.dtype,
            growing=False,  # peers that sum up in 14 bits would be out of every bound
        )


@dataclass(frozen=True)
class Blockwise(_EightBitActivations):
    """int8 by int8 or fp8 by fp8, a scale for each block of 1 x 128 and of 128 x 128.

    Attributes:
        name: as given.
        quantizes: whether the output is int8 in blocks, too.
        dtype: of the output otherwise, and of the dense forms.
        a_dtype: of the activations and weights: int8 or float8_e4m3fn.
    """

    name: str
    quantizes: bool
    dtype: torch.dtype
    a_dtype: torch.dtype = torch.int8

    @property
    def words(self) -> str:
        """For the titles of figures."""
        output, kind = "int8 in blocks" if self.quantizes else _TYPES[self.dtype], _TYPES[self.a_dtype]
        return f"{kind} activations by {kind} weights, a scale for each block of 128, {output} output"

    def case(self, m: int, n: int, k: int) -> testing.BlockwiseCase:
        """The product of this scheme at (m, n, k)."""
        return testing.BlockwiseCase(m, n, k, out_dtype=self.dtype, dtype=self.a_dtype)


@dataclass(frozen=True)
class FourByEight(_EightBitActivations):
    """8-bit activations with a scale for each token, by 4-bit codes.

    Attributes:
        name: as given.
        a_dtype: of the activations: int8 or float8_e4m3fn.
        group_size: columns that share a scale; None: one scale a channel.
        zeros: "none" (symmetric) or "int".
        dtype: of the output.
    """

    name: str
    a_dtype: torch.dtype
    group_size: int | None
    zeros: Literal["none", "int"]
    dtype: torch.dtype

    @property
    def words(self) -> str:
        """For the titles of figures."""
        groups = "a scale a channel" if self.group_size is None else f"groups of {self.group_size}"
        zeros = ", integer zeros" if self.zeros == "int" else ""
        return f"int4 weights ({groups}{zeros}), {_TYPES[self.a_dtype]} activations, {_TYPES[self.dtype]} output"

    def case(self, m: int, n: int, k: int) -> testing.Int4Case:
        """The product of this scheme at (m, n, k)."""
        return testing.Int4Case(m, n, k, self.a_dtype, self.dtype, self.group_size or k, self.zeros)


Scheme: TypeAlias = WeightOnly | EightBit | Blockwise | FourByEight


def shape_words(shape: str) -> str:
    """For the titles of figures.

    Example:
        >>> shape_words("8192x8192"), shape_words("28672x4096")
        ('N = K = 8192', 'N = 28672, K = 4096')
    """
    n, _, k = shape.partition("x")
    return f"N = K = {n}" if n == k else f"N = {n}, K = {k}"


def parse(name: str) -> Scheme:
    """A scheme from its name.

    Raises:
        ValueError: the name follows none of the patterns.

    Example:
        >>> parse("w4a16_g64_int").group_size
        64
        >>> parse("w8a8_azp").dtype
        torch.bfloat16
    """
    if match := _WEIGHT_ONLY.fullmatch(name):
        bits, group, zeros, dtype = match.groups()
        kinds: dict[str | None, testing.Zeros] = {
            None: "none", "int": "int", "real": "real", "min": "minimum"
        }  # fmt: skip
        return WeightOnly(name, int(bits), int(group) if group else None, kinds[zeros], _DTYPES.get(dtype))
    if match := _OF_FILES.fullmatch(name):
        return replace(_FORMATS[match[1]], name=name, dtype=_DTYPES.get(match[2]))
    if match := _INT8.fullmatch(name):
        azp, dtype = match.groups()
        return EightBit(name, torch.int8, azp is not None, _DTYPES[dtype or "bf16"])
    if match := _FLOAT8.fullmatch(name):
        e5m2, dtype = match.groups()
        return EightBit(name, torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn, False, _DTYPES[dtype or "bf16"])
    if match := _BLOCKWISE.fullmatch(name):
        form, dtype = match.groups()
        a_dtype = torch.float8_e4m3fn if form == "_fp8" else torch.int8
        return Blockwise(name, form == "_quant", _DTYPES[dtype or "f16"], a_dtype)
    if match := _FOUR_BY_EIGHT.fullmatch(name):
        int8, group, zeros, dtype = match.groups()
        return FourByEight(
            name,
            torch.int8 if int8 else torch.float8_e4m3fn,
            int(group) if group else None,
            "int" if zeros else "none",
            _DTYPES[dtype or "bf16"],
        )
    if name.startswith("moe_"):
        weights = name.removeprefix("moe_")
        raise ValueError(f"scheme {name!r}: blocks of experts have a command: python -m bench moe --scheme {weights}")
    raise ValueError(f"scheme {name!r}: expected {PATTERNS}, say w4a16_g128 or w8a8")


def parse_dtype(name: str) -> torch.dtype:
    """f16, bf16 or f32; ValueError for another name."""
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r}: expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def parse_weight_only(name: str) -> WeightOnly:
    """The same for benches of weight-only products alone."""
    scheme = parse(name)
    if not isinstance(scheme, WeightOnly):
        raise ValueError(f"scheme {name!r}: this bench measures weight-only schemes, say w4a16_g128")
    return scheme
