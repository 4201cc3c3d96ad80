"""Whether the memory of an output meets itself or that of an input."""

from __future__ import annotations

from torch import Tensor

from qcutlass._validation import Call, tensors_of


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
    if tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


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


def check_out_memory(out: Tensor, call: Call) -> None:
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
