"""Products by way of dense 16-bit weights: slices of channels are dequantised, then multiplied by torch.

What comes out keeps the promise of the fused kernels: weights rounded once to the type of the activations, fp32
accumulation, one rounding at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass import _C

_VECTOR: Final = 8  # rows of fp32 sums are read in vectors of so many
_REDUCTION: Final = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}
_HAS_OUT_DTYPE: Final = hasattr(torch.ops.aten.mm, "dtype_out")
_flags: Any = torch.backends.cuda.matmul
_flags_lock: Final = threading.Lock()


class _Started(threading.local):
    """GPUs on which this thread has used cuBLAS."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_started: Final = _Started()


def is_available(*follows: object) -> bool:
    """Whether this torch can: what `follows` the sum in fp32, if it is not None, needs a product of 16-bit matrices
    with an fp32 result."""
    return _HAS_OUT_DTYPE or all(each is None for each in follows)


def is_ready(device: int) -> bool:
    """Whether this thread can run dense plans on GPU `device` now: cuBLAS cannot start while a graph is captured."""
    return device in _started.devices or not torch.cuda.is_current_stream_capturing()


def _get_flag(name: str) -> Any:
    """A setting in the form in which it can be set again: newer versions of torch keep pairs."""
    split_k = getattr(_flags, f"{name}_split_k", None)
    return getattr(_flags, name) if split_k is None else (getattr(_flags, name), split_k)


@contextmanager
def _full_precision(dtype: torch.dtype) -> Iterator[None]:
    """Products enqueued by this thread accumulate in fp32 throughout.

    By default torch lets cuBLAS add the partial sums of a split K in 16 bits, and users may allow it to accumulate in
    fp16. The settings belong to the process: they are put back at once, and a lock keeps two threads of ours from
    putting back each other's. A product that another thread enqueues meanwhile is at worst more accurate.
    """
    wanted: dict[str, Any] = {_REDUCTION[dtype]: False}
    if hasattr(_flags, "allow_fp16_accumulation"):
        wanted["allow_fp16_accumulation"] = False
    with _flags_lock:
        before = {name: _get_flag(name) for name in wanted}
        try:
            for name, value in wanted.items():
                setattr(_flags, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(_flags, name, value)


def run(arguments: _C.GemmArguments, plan: _C.Plan, a: Tensor, out: Tensor) -> None:
    """Enqueues a dense plan on the current stream of the current device.

    Args:
        arguments: of the product, with the addresses of its operands.
        plan: a dense one.
        a: `[M, K]`, the activations that `arguments` points to.
        out: `[M, columns]` with unit stride along them, where `arguments` has the result written.
    """
    weights, device = arguments.weights, out.get_device()
    m, n, k, stream = arguments.m, weights.n, weights.k, torch._C._cuda_getCurrentRawStream(device)
    with torch.inference_mode(), _full_precision(a.dtype):  # neither views nor writes of an output are for autograd
        if arguments.act_scale or arguments.perm:
            a = a.new_empty((m, k))
            _C.prepare_activations(arguments, a.data_ptr(), k, stream)
        follows = arguments.bias_type != _C.DType.NONE, arguments.activation != _C.Activation.NONE, arguments.residual
        finishes = any(follows)
        dequantized = a.new_empty((plan.slice, k))
        sums = a.new_empty((m, -(-plan.slice // _VECTOR) * _VECTOR), dtype=torch.float32) if finishes else out
        for begin in range(0, n, plan.slice):
            end = min(begin + plan.slice, n)
            w = dequantized[: end - begin]
            _C.dequantize(weights, begin, end, arguments.a_type, w.data_ptr(), k, device=device, stream=stream)
            if finishes:
                torch.mm(a, w.T, out_dtype=torch.float32, out=sums[:, : end - begin])
                _C.finish(arguments, sums.data_ptr(), sums.stride(0), begin, end, stream)
            else:
                torch.mm(a, w.T, out=out[:, begin:end])
    _started.devices.add(device)
