"""A plain Triton kernel of blockwise int8 and fp8: one tile of 128 x 128 a program, one step of 128 columns at a time.

The textbook form: operands through `tl.dot`, the sums of each step scaled in fp32, and no special path for few rows.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(
    a,
    a_s,
    b,
    b_s,
    out,
    out_s,
    m,
    n,
    k,
    TILE: tl.constexpr,
    BAND: tl.constexpr,
    QUANTIZE: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """out [m, n] = blocks of a [m, k] by those of b [n, k]; codes and out_s [m, ceil(n / TILE)] with QUANTIZE.

    FLOATS: the operands are e4m3 numbers.

    Programs go through bands of BAND tiles of rows, so that neighbouring ones share operands in L2.
    """
    program, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(m, TILE), tl.cdiv(n, TILE)
    band = program // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    tile_m = band * BAND + program % (BAND * tiles_n) % height
    tile_n = program % (BAND * tiles_n) // height

    rows, channels, columns = tile_m * TILE + tl.arange(0, TILE), tile_n * TILE + tl.arange(0, TILE), tl.arange(0, TILE)
    blocks = tl.cdiv(k, TILE)
    a_tile = a + rows[:, None].to(tl.int64) * k + columns[None, :]
    b_tile = b + channels[None, :].to(tl.int64) * k + columns[:, None]
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for block in range(blocks):
        left = k - block * TILE
        a_codes = tl.load(a_tile, mask=(rows[:, None] < m) & (columns[None, :] < left), other=0.0 if FLOATS else 0)
        b_codes = tl.load(b_tile, mask=(channels[None, :] < n) & (columns[:, None] < left), other=0.0 if FLOATS else 0)
        row_scales = tl.load(a_s + rows * blocks + block, mask=rows < m, other=0.0)
        scale = tl.load(b_s + tile_n * blocks + block)
        if FLOATS:
            total += tl.dot(a_codes, b_codes) * (row_scales * scale)[:, None]
        else:
            total += tl.dot(a_codes, b_codes, out_dtype=tl.int32).to(tl.float32) * (row_scales * scale)[:, None]
        a_tile += TILE
        b_tile += TILE

    place = out + rows[:, None].to(tl.int64) * n + channels[None, :]
    inside = (rows[:, None] < m) & (channels[None, :] < n)
    if QUANTIZE:
        scales = tl.max(tl.abs(total), axis=1) / 127.0
        scales = tl.where(scales == 0.0, 1.0, scales)
        rounder = 12582912.0  # 1.5 * 2^23: the sum has the nearest integer, the even one of two, in its last bits
        codes = (total / scales[:, None] + rounder) - rounder
        tl.store(place, codes.to(tl.int8), mask=inside)
        tl.store(out_s + rows * tiles_n + tile_n, scales, mask=rows < m)
    else:
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)
