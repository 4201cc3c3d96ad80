"""A kind of weights that plans are tuned for, and its products as calls with random operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.blockwise import BLOCKWISE
from qcutlass.products.checks import ceil_div, names_of
from qcutlass.products.float8 import FLOAT8
from qcutlass.products.grouped import GROUPED
from qcutlass.products.int4 import INT4
from qcutlass.products.int8 import INT8
from qcutlass.products.kind import Call, Kind
from qcutlass.products.packing import PACKINGS, packed_shape
from qcutlass.products.selection import arguments_of_call
from qcutlass.products.weight_only import WEIGHT_ONLY

SLOTS: Final = 4
"""Rows that experts gather for each token, where it matters: between the 2 and 8 experts a token of most mixtures."""
_E4M3: Final = torch.float8_e4m3fn


@dataclass(frozen=True)
class Layer:
    """A kind of weights.

    Attributes:
        n, k: shape of the weights.
        bits: 4 or 8.
        group_size: columns that share a scale, of blocks rows too; k: one group.
        dtype: of the activations that are multiplied.
        scale_dtype: of the scales.
        zero_dtype: of the zeros; None: symmetric, or there are minimums.
        minimum_dtype: of the minimums; None: there are none.
        super_groups: groups of a super-block, where scales and minimums are integers of two levels; 0: they have one.
        kind: of the products.
        experts: which have such weights each; 0: there are none.
        gathers: whether products gather the rows of experts among tokens, as those of gate and up do.
        weight_dtype: of floating codes, "e2m1" or "e4m3"; None: integers.
    """

    n: int
    k: int
    bits: int = 4
    group_size: int = 128
    dtype: torch.dtype = torch.float16
    scale_dtype: torch.dtype = torch.float16
    zero_dtype: torch.dtype | None = None
    minimum_dtype: torch.dtype | None = None
    super_groups: int = 0
    kind: Kind = WEIGHT_ONLY
    experts: int = 0
    gathers: bool = False
    weight_dtype: str | None = None

    def call(self, m: int, device: torch.device | str) -> Call:
        """A product of m rows: random operands on `device`, every one aligned, no epilogue; any expert as likely."""
        return self.kind.call(**_OPERANDS[self.kind](self, m, torch.device(device)))

    def arguments(self, m: int) -> _C.GemmArguments:
        """The same as selection sees it."""
        arguments = arguments_of_call(self.kind, self.call(m, "meta"))
        arguments.batch_invariant = False  # whatever the environment says: only free choices are tuned
        return arguments

    def __str__(self) -> str:
        group = "per channel" if self.group_size >= self.k else f"group {self.group_size}"
        experts = f", {self.experts} experts" if self.experts else ""
        codes = self.weight_dtype or f"{self.bits}-bit"
        return f"{self.n}x{self.k} {codes} {group} by {names_of([self.dtype])}{experts}"

    def offsets(self, m: int, device: torch.device | str) -> Tensor:
        """Those of m rows whose experts are chosen uniformly."""
        chosen = torch.randint(0, self.experts, (m, 1), device=device)
        return (chosen < torch.arange(self.experts + 1, device=device)).sum(0, dtype=torch.int32)

    def share_read(self, m: int) -> float:
        """The share of the weights that products of m rows read: of experts, those that have rows."""
        return 1 - (1 - 1 / self.experts) ** m if self.experts else 1.0

    @property
    def _stack(self) -> tuple[int, ...]:
        """The extents of weights and scales before those of one matrix."""
        return (self.experts,) if self.experts else ()


Operands: TypeAlias = Callable[[Layer, int, torch.device], dict[str, Any]]
"""The arguments of a call with so many rows, operands at random."""


def _numbers(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers without NaN; all integers of a type are equally frequent."""
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float16, device=device).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype, device=device)


def _scales(layer: Layer, *shape: int, device: torch.device) -> Tensor:
    """Random scales of weights that keep sums of K products small; e4m3, too coarse for that, beside a global one."""
    numbers = _floats(layer, *shape, device=device)
    return (numbers.mul_(layer.k) if layer.scale_dtype == _E4M3 else numbers).to(layer.scale_dtype)


def _floats(layer: Layer, *shape: int, device: torch.device) -> Tensor:
    return torch.rand(shape, device=device).add_(0.5).div_(layer.k)


def _codes(layer: Layer, device: torch.device) -> dict[str, Any]:
    """Packed codes with scales of groups, and zeros."""
    groups = (*layer._stack, ceil_div(layer.k, layer.group_size), layer.n)
    zeros = None
    if layer.zero_dtype is not None:
        zeros = torch.randint(0, 16, groups, device=device).to(layer.zero_dtype)
    shape = (*layer._stack, *packed_shape(layer.n, layer.k, PACKINGS[layer.bits]))
    code_type = _E4M3 if layer.weight_dtype == "e4m3" else torch.uint8  # without NaN; any other byte is a code
    return {
        "w_packed": _numbers(shape, code_type, device).view(torch.uint8),
        "scales": _scales(layer, *groups, device=device),
        "zeros": zeros,
        "group_size": layer.group_size,
    }


def _packed(layer: Layer, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Packed weights for activations of 8 bits."""
    return _numbers(packed_shape(layer.n, layer.k, _C.Packing.W8A8), dtype, device)


def _weight_only(layer: Layer, m: int, device: torch.device) -> dict[str, Any]:
    codes = _codes(layer, device)
    if layer.minimum_dtype is not None:
        codes["minimums"] = (8 * codes["scales"]).to(layer.minimum_dtype)
    if layer.super_groups:
        blocks = (*layer._stack, codes["scales"].shape[-2] // layer.super_groups, layer.n)
        for name in ("scales", "minimums"):
            if name in codes:
                codes[f"super_{name}"] = _floats(layer, *blocks, device=device).half()
                codes[name] = _numbers(codes[name].shape, codes[name].dtype, device)
    if layer.scale_dtype == _E4M3:
        codes["global_scale"] = torch.full((*layer._stack, 1), 1 / layer.k, device=device)
    a = _numbers((m, layer.k), layer.dtype, device)
    return {"a": a, **codes, "bits": layer.bits, "weight_dtype": layer.weight_dtype}


def _grouped(layer: Layer, m: int, device: torch.device) -> dict[str, Any]:
    tokens = ceil_div(m, SLOTS) if layer.gathers else m
    operands = _weight_only(layer, tokens, device) | {"offsets": layer.offsets(m, device)}
    if layer.gathers:
        operands["rows"] = torch.randint(0, tokens, (m,), dtype=torch.int32, device=device)
    return operands


def _int4(layer: Layer, m: int, device: torch.device) -> dict[str, Any]:
    a_q = _numbers((m, layer.k), layer.dtype, device)
    return {"a_q": a_q, "a_scale": torch.rand(m, device=device), **_codes(layer, device)}


def _scaled(a: str, w: str, w_dtype: torch.dtype) -> Operands:
    """Those of products with a scale for each row and channel; `a`, `w`: the names that calls have for these."""

    def operands(layer: Layer, m: int, device: torch.device) -> dict[str, Any]:
        return {
            a: _numbers((m, layer.k), layer.dtype, device),
            w: _packed(layer, w_dtype, device),
            "a_scale": torch.rand(m, device=device),
            "w_scale": _scales(layer, layer.n, device=device),
            "n": layer.n,
        }

    return operands


def _blockwise(layer: Layer, m: int, device: torch.device) -> dict[str, Any]:
    size = layer.group_size
    blocks = ceil_div(layer.k, size)
    return {
        "a": _numbers((m, layer.k), layer.dtype, device),
        "a_s": torch.rand(m, blocks, device=device),
        "b": _packed(layer, layer.dtype, device),
        "b_s": _scales(layer, ceil_div(layer.n, size), blocks, device=device),
        "n": layer.n,
        "dtype": layer.dtype,
        "block_size": size,
    }


_OPERANDS: Final[dict[Kind, Operands]] = {
    WEIGHT_ONLY: _weight_only,
    GROUPED: _grouped,
    INT4: _int4,
    INT8: _scaled("a_q", "w_packed", torch.int8),
    FLOAT8: _scaled("a", "w", _E4M3),
    BLOCKWISE: _blockwise,
}
"""How products of each kind are made."""
