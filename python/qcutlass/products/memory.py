"""Where tensors lie in memory: rows, alignment, and whether an output meets itself or an input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from qcutlass.products.checks import Arguments, tensors_of

ALIGNMENT: Final = 16  # bytes of a vector access


def as_rows(tensor: Tensor) -> Tensor:
    """`[..., K]` as `[M, K]` with unit stride along K; copied only where the strides leave no other way."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def are_rows(tensor: Tensor) -> bool:
    """Whether `as_rows` copies nothing."""
    if tensor.is_contiguous():
        return True
    try:
        matrix = tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return False
    return matrix.stride(1) == 1 or matrix.shape[1] == 1


def as_separate_rows(matrix: Tensor) -> Tensor:
    """A matrix with unit stride along rows that do not overlap; a vector as its only row."""
    if matrix.dim() == 1:
        matrix = matrix.unsqueeze(0)
    if matrix.is_contiguous():
        return matrix
    rows, columns = matrix.shape
    row_stride, stride = matrix.stride()
    return matrix if (stride == 1 or columns == 1) and (row_stride >= columns or rows == 1) else matrix.contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy where it is on a GPU at an address that kernels cannot read in vectors."""
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % ALIGNMENT else tensor


def counted(tensor: Tensor, number: int) -> list[Tensor]:
    """So many new tensors like this one, without gaps, whose changes in place torch counts, even in inference mode."""
    if torch.is_inference_mode_enabled():
        with torch._C._InferenceMode(False):  # what torch.inference_mode enters, without its two microseconds
            return counted(tensor, number)
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(number)]


def extent(tensor: Tensor) -> int:
    """Bytes from the first to past the last element."""
    if tensor.numel() == 0:
        return 0
    return tensor.element_size() * (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and past the last."""
    begin = tensor.data_ptr()
    return begin, begin + (tensor.nbytes if tensor.is_contiguous() else extent(tensor))


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share memory; exact where dimensions are nested, as in slices of a larger tensor."""
    return tensor.numel() > 0 and _meet(zip(tensor.stride(), tensor.shape, strict=True))


def _meet(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether elements of these (stride, size) may lie on each other: each dimension must reach past all smaller."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in dimensions if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def interlace(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape, type and strides are slices side by side of a larger one, or lie apart."""
    if a.stride() != b.stride() or a.shape != b.shape:
        return not overlap(a, b)
    distance, rest = divmod(abs(a.data_ptr() - b.data_ptr()), a.element_size())
    return a.numel() == 0 or not (rest or _meet([*zip(a.stride(), a.shape, strict=True), (distance, 2)]))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory; exact for matrices with one row pitch, as in column slices of one buffer."""
    (begin_a, end_a), (begin_b, end_b) = _span(a), _span(b)
    if end_a <= begin_b or end_b <= begin_a or not a.numel() or not b.numel():
        return False
    if a.dim() != 2 or b.dim() != 2 or a.stride(1) != 1 or b.stride(1) != 1:
        return True
    pitch = a.stride(0) * a.element_size()
    width_a, width_b = a.shape[1] * a.element_size(), b.shape[1] * b.element_size()
    if pitch != b.stride(0) * b.element_size() or pitch < width_a + width_b:
        return True
    offset = (begin_b - begin_a) % pitch  # where b's rows start in a's
    return offset < width_a or offset + width_b > pitch


def check_out_memory(out: Tensor, call: Arguments) -> None:
    """Raises ValueError if writing `out` would change an input, or one element of `out` with another."""
    if not out.is_contiguous() and overlaps_itself(out):
        raise ValueError(
            f"out: expected elements that do not overlap, got shape {list(out.shape)} with strides "
            f"{list(out.stride())}; pass out.clone()"
        )
    begin, end = _span(out)
    for name, value in tensors_of(call).items():
        other_begin, other_end = _span(value)  # almost always apart: no need to look closer
        if begin < other_end and other_begin < end and overlap(out, value):
            raise ValueError(f"out overlaps {name} in memory: pass a tensor with memory of its own")
