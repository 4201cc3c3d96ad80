"""From checked tensors to the extension's argument structs: the one place that takes addresses of operands."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass._validation import ACTIVATIONS, PACKINGS, GemmCall, WeightShape

DTYPES: Final[dict[torch.dtype, _C.DType]] = {
    torch.float16: _C.DType.FLOAT16,
    torch.bfloat16: _C.DType.BFLOAT16,
    torch.float32: _C.DType.FLOAT32,
    torch.uint8: _C.DType.UINT8,
    torch.int8: _C.DType.INT8,
    torch.int32: _C.DType.INT32,
}
_ALIGNMENT: Final = 16  # bytes of a vector access
_CPU_BLOCK: Final = 1 << 20  # fp32 activations that a block of rows holds: 4 MB
_CPU_MIN_ROWS: Final = 16
_MAX_PLANS: Final = 1 << 14

_devices: dict[int, _C.DeviceTraits] = {}
_plans: dict[tuple[Any, ...], _C.Plan] = {}


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


def as_rows(tensor: Tensor) -> Tensor:
    """`[..., K]` as `[M, K]` with unit stride along K; copied only where the strides leave no other way."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


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
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % _ALIGNMENT else tensor


def weight_arguments(
    shape: WeightShape, w_packed: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[_C.WeightArguments, list[Tensor]]:
    """The arguments, and the tensors that they point into: they must outlive the call."""
    w_packed, scales = aligned(w_packed), as_separate_rows(scales)
    arguments = _C.WeightArguments()
    arguments.packing = PACKINGS[shape.bits]
    arguments.n, arguments.k, arguments.group_size = shape.n, shape.k, shape.group_size
    arguments.packed = w_packed.data_ptr()
    arguments.scale_type = DTYPES[scales.dtype]
    arguments.scales = scales.data_ptr()
    arguments.scale_stride = scales.stride(0)
    operands = [w_packed, scales]
    if zeros is not None:
        zeros = as_separate_rows(zeros)
        arguments.zero_type = DTYPES[zeros.dtype]
        arguments.zeros = zeros.data_ptr()
        arguments.zero_stride = zeros.stride(0)
        operands.append(zeros)
    return arguments, operands


def _placement(matrix: Tensor) -> tuple[int, int]:
    """What decides whether kernels read a matrix where it lies; apart, as one row has no use for its stride."""
    return matrix.data_ptr() % _ALIGNMENT, matrix.stride(0)


class Product:
    """A product's arguments; keeps the operands that they point into."""

    def __init__(self, call: GemmCall, shape: WeightShape, out: Tensor) -> None:
        """`out`: `[M, N]` with unit stride along N."""
        self.call, self.shape, self.out = call, shape, out
        a = self.a = as_rows(call.a)
        weights, self.operands = weight_arguments(shape, call.w_packed, call.scales, call.zeros)
        arguments = self.arguments = _C.GemmArguments()
        arguments.weights = weights
        arguments.m = out.shape[0]
        arguments.a_type = DTYPES[a.dtype]
        arguments.a, arguments.a_stride = a.data_ptr(), a.stride(0)
        arguments.out, arguments.out_stride = out.data_ptr(), out.stride(0)
        if call.activation is not None:
            arguments.activation = ACTIVATIONS[call.activation]
        if call.bias is not None:
            bias = self._vector(call.bias)
            arguments.bias, arguments.bias_type = bias.data_ptr(), DTYPES[bias.dtype]
        if call.act_scale is not None:
            act_scale = self._vector(call.act_scale)
            arguments.act_scale, arguments.act_scale_type = act_scale.data_ptr(), DTYPES[act_scale.dtype]
        if call.perm is not None:
            arguments.perm = self._vector(call.perm).data_ptr()

    def _vector(self, vector: Tensor) -> Tensor:
        vector = vector.contiguous()
        self.operands.append(vector)
        return vector

    def _key(self, device: int) -> tuple[Any, ...]:
        """All that the choice of a configuration and the size of its workspace depend on."""
        call, a, out = self.call, self.a, self.out
        zeros = self.operands[2] if call.zeros is not None else None
        scales = self.operands[1]
        return (
            device,
            out.shape[0],
            self.shape,
            a.dtype,
            scales.dtype,
            call.activation,
            call.tactic,
            call.split_k,
            call.bias is None,
            call.act_scale is None and call.perm is None,
            _placement(a),
            _placement(scales),
            zeros if zeros is None else (zeros.dtype, _placement(zeros)),
        )

    def plan(self, device: int) -> _C.Plan:
        """The configuration for this product on GPU `device`."""
        key = self._key(device)
        plan = _plans.get(key)
        if plan is None:
            plan = _C.select(self.arguments, device_traits(device), self.call.tactic or "", self.call.split_k)
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
        return plan

    def run(self) -> None:
        """Writes `out`: on the CPU with torch's number of threads, on a GPU on the current stream."""
        if not self.out.is_cuda:
            self._run_cpu()
            return
        device = self.out.get_device()
        if device == torch._C._cuda_getDevice():
            self._launch(device)
        else:
            with torch.cuda.device(device):
                self._launch(device)

    def _launch(self, device: int) -> None:
        plan, arguments = self.plan(device), self.arguments
        if plan.workspace_bytes:
            workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=self.out.device)
            arguments.workspace, arguments.workspace_bytes = workspace.data_ptr(), plan.workspace_bytes
        _C.gemm_cuda(arguments, plan, torch._C._cuda_getCurrentRawStream(device))

    def _run_cpu(self) -> None:
        """In blocks of rows whose fp32 copies stay in cache while all weights pass by.

        Decoding the weights anew for each block costs a few percent; torch's product of dequantised slices was
        measured slower at every number of rows, and its idle threads compete for the cores.
        """
        arguments, rows, threads = self.arguments, self.out.shape[0], torch.get_num_threads()
        block = max(_CPU_MIN_ROWS, _CPU_BLOCK // self.shape.k)
        if rows <= block:
            _C.gemm_host(arguments, threads)
            return
        a, a_pitch = arguments.a, arguments.a_stride * self.a.element_size()
        out, out_pitch = arguments.out, arguments.out_stride * self.out.element_size()
        for row in range(0, rows, block):
            arguments.m = min(block, rows - row)
            arguments.a, arguments.out = a + row * a_pitch, out + row * out_pitch
            _C.gemm_host(arguments, threads)
