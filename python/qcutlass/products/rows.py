"""Single rows of packed weights, for embeddings: plain torch operators on any device, none of which waits for it."""

from __future__ import annotations

import torch
from torch import Tensor

from qcutlass.products.library import is_traced
from qcutlass.products.packing import TILE_N, expand_scales

# A tile's bytes by what they hold; see position_in_tile in cpp/include/qcutlass/layout.h. A lane is 4 * g + t with
# g = row % 8; a step is 16 columns, of two halves of 8; t picks a pair of columns in a half, `odd` one of the pair.
_TILE_4 = (8, 4, 4, 2, 2)  # g, t, step, odd, half; the low nibble is row g, the high one row g + 8
_TILE_8 = (8, 4, 2, 2, 2, 2)  # g, t, step, half, upper (row g + 8), odd


def dequantize_rows(
    w_packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rows: Tensor,
    *,
    k: int,
    group_size: int,
    bits: int,
    dtype: torch.dtype,
    minimums: Tensor | None = None,
    super_scales: Tensor | None = None,
    super_minimums: Tensor | None = None,
) -> Tensor:
    """Some rows of the matrix that packed weights stand for, the same bits that `qcutlass.dequantize` gives.

    Only bytes of tiles that hold these rows are read, two rows for one. All shapes follow from those of the arguments,
    so that the call can be captured in a CUDA graph and compiled as a whole. It takes memory for about 16 bytes for
    each number of the result.

    Args:
        w_packed, scales, zeros: of `[N, K]`, as `qcutlass.dequantize` takes them.
        rows: integers `[T]` in [0, N), on the same device.
        k, group_size, bits, dtype, minimums, super_scales, super_minimums: as for `qcutlass.dequantize`.

    Returns:
        `[T, K]`.

    Raises:
        IndexError: a row is outside [0, N); on the CPU. On other devices torch's indexing looks after that.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.products.rows import dequantize_rows
        >>> q = qcutlass.quantize(torch.randn(48, 256), bits=8, group_size=64)
        >>> packed, rows = qcutlass.preprocess_weights(q.codes, bits=8), torch.tensor([3, 40, 3])
        >>> options = {"k": 256, "group_size": 64, "bits": 8, "dtype": torch.float32}
        >>> found = dequantize_rows(packed, q.scales, q.zeros, rows, **options)
        >>> torch.equal(found, q.dequantize(torch.float32)[rows])
        True
    """
    n = scales.shape[-1]
    if rows.is_cpu and not is_traced() and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < n:
        raise IndexError(f"rows: expected integers in [0, {n}), got {int(rows.min())} to {int(rows.max())}")
    codes = (_codes_4 if bits == 4 else _codes_8)(w_packed, rows.long())[:, :k].float()
    scale = _spread(scales, rows, k, group_size, super_scales)
    if minimums is not None:
        return (codes.double() * scale - _spread(minimums, rows, k, group_size, super_minimums)).float().to(dtype)
    zero = 2.0 ** (bits - 1) if zeros is None else _spread(zeros, rows, k, group_size)
    return ((codes - zero) * scale).to(dtype)


def _codes_4(w_packed: Tensor, rows: Tensor) -> Tensor:
    """uint8 `[T, tiles * 64]`."""
    strips, tiles = w_packed.shape[:2]
    strip, row = rows // TILE_N, rows % TILE_N
    found = w_packed.view(strips, tiles, *_TILE_4)[strip, :, row % 8]  # T, tile, t, step, odd, half
    shift = (row // 8 * 4).to(torch.uint8).view(-1, 1, 1, 1, 1, 1)
    return (found >> shift & 15).permute(0, 1, 3, 5, 2, 4).reshape(rows.shape[0], 64 * tiles)


def _codes_8(w_packed: Tensor, rows: Tensor) -> Tensor:
    """uint8 `[T, tiles * 32]`."""
    strips, tiles = w_packed.shape[:2]
    strip, row = rows // TILE_N, rows % TILE_N
    # T, tile, t, step, half, odd
    found = w_packed.view(strips, tiles, *_TILE_8)[strip, :, row % 8, :, :, :, row // 8]
    return found.permute(0, 1, 3, 4, 2, 5).reshape(rows.shape[0], 32 * tiles)


def _spread(parameters: Tensor, rows: Tensor, k: int, group_size: int, supers: Tensor | None = None) -> Tensor:
    """Scales, zeros or minimums of these rows, float32: `[T, K]`, or `[T, 1]` where one group holds all columns."""
    found = parameters.view(-1, parameters.shape[-1])[:, rows]
    found = expand_scales(found, None if supers is None else supers[:, rows]).float().T
    if found.shape[1] == 1:
        return found
    return found.repeat_interleave(group_size, dim=1, output_size=found.shape[1] * group_size)[:, :k]
