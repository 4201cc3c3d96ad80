"""A plain Triton kernel of grouped products with int4 weights: one tile of slots by channels a program.

The textbook form: slots sorted by expert and filled up to whole tiles, codes turned into numbers and scaled before
`tl.dot`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(
    a,
    codes,
    scales,
    out,
    slots,
    experts,
    weights,
    n,
    k,
    count,
    top_k,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[slot] = a[slot // top_k] by the codes [E, n, k / 2] of the slot's expert, scales [E, n, k / GROUP].

    Neighbouring programs share weights in L2.
    """
    tiles_n = tl.cdiv(n, CHANNELS)
    tile, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    expert = tl.load(experts + tile).to(tl.int64)
    slot = tl.load(slots + tile * ROWS + tl.arange(0, ROWS))
    valid = slot < count
    channels = tile_n * CHANNELS + tl.arange(0, CHANNELS)
    inside, groups = channels < n, tl.cdiv(k, GROUP)
    columns, pairs = tl.arange(0, COLUMNS), tl.arange(0, COLUMNS // 2)

    a_tile = a + (slot // top_k)[:, None].to(tl.int64) * k + columns[None, :]
    w_tile = codes + (expert * n + channels[:, None]) * (k // 2) + pairs[None, :]
    s_tile = scales + (expert * n + channels) * groups
    total = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    for block in range(tl.cdiv(k, COLUMNS)):
        left = k - block * COLUMNS
        rows = tl.load(a_tile, mask=valid[:, None] & (columns[None, :] < left), other=0.0)
        packed = tl.load(w_tile, mask=inside[:, None] & (pairs[None, :] < left // 2), other=0)
        scale = tl.load(s_tile + block * COLUMNS // GROUP, mask=inside, other=0.0)
        numbers = tl.interleave(packed & 15, packed >> 4).to(tl.float16) - 8.0
        total += tl.dot(rows, tl.trans(numbers * scale[:, None]))
        a_tile += COLUMNS
        w_tile += COLUMNS // 2
    if WEIGHTED:
        total *= tl.load(weights + slot, mask=valid, other=0.0)[:, None]
    place = out + slot[:, None].to(tl.int64) * n + channels[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])
