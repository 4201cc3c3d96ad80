"""How states hold the buffers of weight-only layers where fewer bytes say the same, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass.formats.affine import are_minima, minima_of, zeros_of
from qcutlass.formats.specs import CODE_TABLE
from qcutlass.layers.packed import Parts
from qcutlass.layers.short_codes import (
    TABLE_BITS,
    as_places,
    code_table,
    from_places,
    least_bits,
    restored,
    shortened,
    stored_bits,
)
from qcutlass.products.checks import check_tensor, check_vector, shape_of, short
from qcutlass.products.packing import TILE

STORED: Final = ("minima", "levels", "code_table")
"""Tensors that stand in a state for buffers."""
_LEVEL_BITS: Final = 4
_LEVELS: Final = ("scales", "minimums")


class StoredForm(NamedTuple):
    """What a state has in place of a layer's buffers.

    Attributes:
        minima: in place of float32 `zeros`, in the type of scales: `zeros = -minima / scales`.
        levels: in place of integer `scales` and `minimums` of super-blocks one byte for both, `scales` in its low half.
            Those of Q2_K are 4 bits.
        code_bits: of the codes in `w_packed`; None: as products take them.
        code_table: those are places in the table of this name: IQ4 has 16 numbers of 8 bits.
    """

    minima: bool = False
    levels: bool = False
    code_bits: int | None = None
    code_table: bool = False

    @staticmethod
    def smallest(parts: Parts, bits: int, weight_dtype: str | None, *, is_padded: bool) -> StoredForm:
        """The form of the fewest bytes. Codes of padded weights stay as they are: the padding has codes of its own."""
        scales, minimums, w_packed = _part(parts, "scales"), parts.get("minimums"), _part(parts, "w_packed")
        minima = are_minima(scales, parts.get("zeros"), bits)
        levels = minimums is not None and _have_few_bits(scales, minimums)
        if is_padded:
            return StoredForm(minima, levels)
        least = least_bits(w_packed, bits, _is_symmetric(parts, weight_dtype))
        if _may_have_table(bits, weight_dtype) and least >= TABLE_BITS and code_table(w_packed) is not None:
            return StoredForm(minima, levels, TABLE_BITS, code_table=True)
        return StoredForm(minima, levels, least if least < bits else None)

    @staticmethod
    def of(stored: Parts, bits: int) -> StoredForm:
        """That of the tensors of a state."""
        w_packed = stored.get("w_packed")
        code_bits = None if w_packed is None else stored_bits(tuple(w_packed.shape), bits)
        minima, levels, table = (stored.get(name) is not None for name in STORED)
        return StoredForm(minima, levels, code_bits, table)

    def fitting(self, parts: Parts) -> StoredForm:
        """The form that holds these buffers, which may have been changed since this one was chosen."""
        form, w_packed = self, parts.get("w_packed")
        levels = [level for level in map(parts.get, _LEVELS) if level is not None]
        if self.levels and not _have_few_bits(*levels):
            form = form._replace(levels=False)
        if self.code_table and w_packed is not None and w_packed.shape[-1] == TILE[-1] and code_table(w_packed) is None:
            form = form._replace(code_bits=None, code_table=False)
        return form

    def stored(self, parts: Parts, bits: int, weight_dtype: str | None) -> dict[str, Tensor | None]:
        """The tensors of the state, of buffers that this form fits; None for those that others stand for."""
        found, is_symmetric = dict(parts), _is_symmetric(parts, weight_dtype)
        zeros, scales, minimums = (parts.get(name) for name in ("zeros", *_LEVELS))
        if self.minima and scales is not None and zeros is not None:
            found |= {"minima": minima_of(scales, zeros), "zeros": None}
        if self.levels and scales is not None and minimums is not None:
            found |= {"levels": scales | minimums << _LEVEL_BITS, **dict.fromkeys(_LEVELS)}
        w_packed = parts.get("w_packed")
        if self.code_bits is not None and w_packed is not None and w_packed.shape[-1] == TILE[-1]:
            table = code_table(w_packed) if self.code_table else None
            if table is not None:
                found["code_table"], w_packed = table, as_places(w_packed, table)
            found["w_packed"] = shortened(w_packed, bits, self.code_bits, is_symmetric and table is None)
        return found


def from_stored(stored: Parts, bits: int, weight_dtype: str | None) -> dict[str, Tensor | None]:
    """The buffers, of the tensors of a state: the inverse of `StoredForm.stored`. Those absent, or None, stay so.

    Raises:
        TypeError, ValueError: the state's tensors do not go together.
    """
    found = {name: part for name, part in stored.items() if name not in STORED}
    minima, levels, table = map(stored.get, STORED)
    scales, w_packed = stored.get("scales"), stored.get("w_packed")
    if minima is not None:
        if stored.get("zeros") is not None:
            raise ValueError("minima: expected these or zeros, which follow from them, got both")
        if scales is None or minima.shape != scales.shape or not minima.is_floating_point():
            shape = "none" if scales is None else shape_of(scales)
            expected = f"floating, of the shape of scales, {shape}"
            raise ValueError(f"minima: expected {expected}, got {short(minima.dtype)} {shape_of(minima)}")
        found["zeros"] = zeros_of(scales, minima, bits)
    if levels is not None:
        check_tensor("levels", levels, (torch.uint8,))
        if any(stored.get(name) is not None for name in _LEVELS):
            raise ValueError("levels: expected these alone, got scales or minimums as well")
        supers = [name for name in ("super_scales", "super_minimums") if stored.get(name) is not None]
        if levels.dim() != 2 or len(supers) != 2:
            raise ValueError(
                f"levels: expected shape [G, N] beside super_scales and super_minimums, got {shape_of(levels)} beside "
                f"{' and '.join(supers) or 'neither'}"
            )
        found |= {"scales": levels & 2**_LEVEL_BITS - 1, "minimums": levels >> _LEVEL_BITS}
    code_bits = None
    if w_packed is not None and w_packed.dtype == torch.uint8:
        code_bits = stored_bits(tuple(w_packed.shape), bits)
    if code_bits == TABLE_BITS and _may_have_table(bits, weight_dtype) and table is None:
        raise ValueError(f"code_table: expected it beside w_packed of {TABLE_BITS} bits; it is absent")
    if code_bits is not None:
        assert w_packed is not None
        found["w_packed"] = restored(w_packed, bits, _is_symmetric(stored, weight_dtype) and table is None)
    if table is not None and w_packed is not None:
        check_tensor("code_table", table, (torch.uint8,))
        check_vector("code_table", table, CODE_TABLE, "codes")
        if code_bits != TABLE_BITS:
            raise ValueError(
                f"w_packed: expected places of {TABLE_BITS} bits beside a code_table, got {shape_of(w_packed)}"
            )
        found["w_packed"] = from_places(_part(found, "w_packed"), table)
    return found


def _is_symmetric(parts: Parts, weight_dtype: str | None) -> bool:
    """Whether codes lie around their middle."""
    offsets = ("zeros", "minima", "minimums", "levels")
    return weight_dtype is None and all(parts.get(name) is None for name in offsets)


def _may_have_table(bits: int, weight_dtype: str | None) -> bool:
    """Whether codes may be stored as places in a table; 4 bits of others are these."""
    return bits == 8 and weight_dtype is None


def _have_few_bits(*levels: Tensor) -> bool:
    """Whether half a byte holds each of these integers."""
    if any(level.dtype != torch.uint8 or not level.numel() for level in levels):
        return False
    return all(level.is_meta or int(level.max()) < 2**_LEVEL_BITS for level in levels)


def _part(parts: Mapping[str, Any], name: str) -> Tensor:
    found = parts[name]
    assert isinstance(found, Tensor)
    return found
