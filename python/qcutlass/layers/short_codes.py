"""Packed codes as states hold them that were read from few bits: in no more bits than their numbers need.

The codes of Q6_K, Q5_K, Q3_K, Q2_K, Q5_0 and Q5_1 are 6, 5, 3, 2 and 5 bits, where products take 8 or 4. A folder holds
them in so many: each line of a tile, 16 bytes, is `2 * stored * 8 / bits` bytes, the lowest bits first. The last extent
tells how many bits are stored. Those of IQ4 are 16 numbers of 8 bits: a folder has their places in a table.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qcutlass.formats.specs import CODE_TABLE
from qcutlass.products.packing import TILE

_LINE: Final = TILE[1]  # bytes of a lane
_FIELDS: Final = 8  # that are put into a word of 64 bits: so many of `stored` bits are whole bytes
_PART: Final = 1 << 22  # bytes at a time: words take eight times as much
TABLE_BITS: Final = CODE_TABLE.bit_length() - 1
"""Of places in a table of codes."""


def _base(bits: int, stored: int, symmetric: bool) -> int:
    """The code that is stored as 0: codes of symmetric weights lie around their middle, others begin with 0."""
    return 2 ** (bits - 1) - 2 ** (stored - 1) if symmetric else 0


def least_bits(w_packed: Tensor, bits: int, symmetric: bool) -> int:
    """The fewest bits that hold all codes; `bits` where that is none fewer."""
    if not w_packed.numel():
        return bits
    fields = [w_packed] if bits == 8 else [w_packed & 15, w_packed >> 4]
    ends = [int(end) for field in fields for end in field.aminmax()]
    for stored in range(1, bits):
        base = _base(bits, stored, symmetric)
        if base <= min(ends) and max(ends) < base + 2**stored:
            return stored
    return bits


def stored_bits(shape: tuple[int, ...], bits: int) -> int | None:
    """Those of a stored tensor; None where it is as products take it, or no such tensor."""
    if len(shape) != 4 or 0 in shape or shape[2:3] != TILE[:1] or shape[3] >= _LINE or shape[3] * bits % _LINE:
        return None
    return shape[3] * bits // _LINE


def shortened(w_packed: Tensor, bits: int, stored: int, symmetric: bool) -> Tensor:
    """uint8 `[strips, tiles, 32, 16 * stored / bits]` of codes that `stored` bits hold."""
    shape = (*w_packed.shape[:-1], _LINE * stored // bits)
    base, shifts = _base(bits, stored, symmetric), torch.arange(_FIELDS, device=w_packed.device) * stored
    found = w_packed.new_empty(shape)
    if found.is_meta:
        return found
    parts = _parts(w_packed, _PART), _parts(found, _PART // bits * stored)
    for part, to in zip(*parts, strict=True):
        fields = part if bits == 8 else torch.stack([part & 15, part >> 4], dim=1).flatten()
        words = ((fields - base).view(-1, _FIELDS).long() << shifts).sum(1)
        to.view(-1, stored).copy_(words[:, None].view(torch.uint8)[:, :stored])
    return found


def _parts(tensor: Tensor, size: int) -> tuple[Tensor, ...]:
    """Its bytes, so many at a time: views of contiguous ones."""
    return torch.split(tensor.flatten(), size)


def restored(short: Tensor, bits: int, symmetric: bool) -> Tensor:
    """The inverse of `shortened`."""
    stored = short.shape[-1] * bits // _LINE
    base, shifts = _base(bits, stored, symmetric), torch.arange(_FIELDS, device=short.device) * stored
    found = short.new_empty((*short.shape[:-1], _LINE))
    if found.is_meta:
        return found
    parts = _parts(short, _PART // bits * stored), _parts(found, _PART)
    for part, to in zip(*parts, strict=True):
        given = part.view(-1, stored)
        words = torch.nn.functional.pad(given, (0, _FIELDS - stored)).view(torch.int64)
        fields = (words >> shifts & 2**stored - 1).to(torch.uint8).flatten() + base
        to.copy_(fields if bits == 8 else fields[::2] | fields[1::2] << 4)
    return found


def code_table(w_packed: Tensor) -> Tensor | None:
    """The codes of 8 bits that occur, uint8 `[16]`, ascending, the last one repeated; None where they are more."""
    if w_packed.is_meta:
        return w_packed.new_empty(CODE_TABLE)
    counts = torch.zeros(256, dtype=torch.int64, device=w_packed.device)
    for part in _parts(w_packed, _PART):
        counts += part.bincount(minlength=len(counts))
        if int(counts.count_nonzero()) > CODE_TABLE:
            return None
    codes = counts.nonzero().flatten().to(torch.uint8)
    return torch.cat([codes, codes[-1:].expand(CODE_TABLE - len(codes))]) if len(codes) else None


def as_places(w_packed: Tensor, table: Tensor) -> Tensor:
    """The places of codes in their table, packed as these are."""
    places = w_packed.new_zeros(256)
    if not w_packed.is_meta:
        codes: Tensor = table.unique()  # type: ignore[no-untyped-call]  # ascending, as in the table
        places[codes.long()] = torch.arange(len(codes), dtype=torch.uint8, device=table.device)
    return from_places(w_packed, places)


def from_places(w_packed: Tensor, table: Tensor) -> Tensor:
    """Each byte replaced by that of the table at its place; the inverse of `as_places`."""
    found = torch.empty_like(w_packed)
    if not found.is_meta:
        for part, to in zip(_parts(w_packed, _PART), _parts(found, _PART), strict=True):
            to.copy_(table[part.int()])
    return found
