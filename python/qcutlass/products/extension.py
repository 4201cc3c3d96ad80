"""Arguments of the extension's functions besides addresses: types, traits of GPUs, threads and streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import E8M0

DTYPES: Final[dict[torch.dtype, _C.DType]] = {
    torch.float16: _C.DType.FLOAT16,
    torch.bfloat16: _C.DType.BFLOAT16,
    torch.float32: _C.DType.FLOAT32,
    torch.uint8: _C.DType.UINT8,
    torch.int8: _C.DType.INT8,
    torch.int32: _C.DType.INT32,
    torch.float8_e4m3fn: _C.DType.FLOAT8_E4M3,
    torch.float8_e5m2: _C.DType.FLOAT8_E5M2,
    **dict.fromkeys(E8M0, _C.DType.FLOAT8_E8M0),
}

_devices: dict[int, _C.DeviceTraits] = {}


def device_traits(index: int) -> _C.DeviceTraits:
    """Traits of a GPU; UnsupportedError, naming what was built, where no kernel was built for it."""
    traits = _devices.get(index)
    if traits is None:
        traits = _devices[index] = _C.device_traits(index)
    return traits


def current_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the device of `tensor` current, which the extension's CUDA functions expect."""
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
        return nullcontext()
    return torch.cuda.device(tensor.get_device())


def backend(tensor: Tensor) -> dict[str, int]:
    """Keyword arguments for the extension's functions on weights: threads on the CPU, device and stream on a GPU."""
    if not tensor.is_cuda:
        return {"threads": torch.get_num_threads()}
    index = tensor.get_device()
    device_traits(index)
    return {"device": index, "stream": torch._C._cuda_getCurrentRawStream(index)}
