"""From checked tensors to the extension's argument structs: the one place that takes addresses of operands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Final

import torch
from torch import Tensor

from qcutlass import _C, _dense, tuning
from qcutlass._blockwise import BlockwiseCall, QuantizedCall
from qcutlass._eight_bit import Float8Call, Int8Call
from qcutlass._validation import ACTIVATIONS, PACKINGS, Call, GemmCall, WeightShape, ceil_div

DTYPES: Final[dict[torch.dtype, _C.DType]] = {
    torch.float16: _C.DType.FLOAT16,
    torch.bfloat16: _C.DType.BFLOAT16,
    torch.float32: _C.DType.FLOAT32,
    torch.uint8: _C.DType.UINT8,
    torch.int8: _C.DType.INT8,
    torch.int32: _C.DType.INT32,
    torch.float8_e4m3fn: _C.DType.FLOAT8_E4M3,
    torch.float8_e5m2: _C.DType.FLOAT8_E5M2,
}
ALIGNMENT: Final = 16  # bytes of a vector access

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
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % ALIGNMENT else tensor


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


class AnyProduct:
    """A checked product of operands in memory; keeps alive what its arguments point into."""

    SETTLING: ClassVar[tuple[int, ...]]
    """Places of the weights, and of what belongs to them, among the addresses: what kernels may read early."""

    def __init__(self, call: Call, shape: WeightShape, out: Tensor) -> None:
        """`out`: `[M, N]` with unit stride along N."""
        self.shape, self.out = shape, out
        a = self.a = as_rows(call.a)
        arguments = self.arguments = _C.GemmArguments()
        arguments.m = out.shape[0]
        arguments.a_type = DTYPES[a.dtype]
        arguments.out_type = DTYPES[out.dtype]
        arguments.a, arguments.a_stride = a.data_ptr(), a.stride(0)
        arguments.out, arguments.out_stride = out.data_ptr(), out.stride(0)
        self.operands: list[Tensor] = []
        if call.activation is not None:
            arguments.activation = ACTIVATIONS[call.activation]
        if call.bias is not None:
            bias = self._vector(call.bias)
            arguments.bias, arguments.bias_type = bias.data_ptr(), DTYPES[bias.dtype]

    def _vector(self, vector: Tensor) -> Tensor:
        vector = vector.contiguous()
        self.operands.append(vector)
        return vector

    @property
    def call(self) -> Call:
        raise NotImplementedError

    @property
    def addresses(self) -> list[int]:
        """Of the operands, in the order of `at`; 0 for those it has not."""
        raise NotImplementedError

    @property
    def at(self) -> Callable[[list[int], int, bool], _C.GemmArguments]:
        """The arguments for operands elsewhere in memory."""
        raise NotImplementedError

    def plan(self, device: int) -> _C.Plan:
        """The configuration for this product on GPU `device`."""
        raise NotImplementedError


class Product(AnyProduct):
    """A weight-only product."""

    SETTLING = (1, 2, 3)

    def __init__(self, call: GemmCall, shape: WeightShape, out: Tensor) -> None:
        super().__init__(call, shape, out)
        self._call = call
        arguments = self.arguments
        arguments.weights, operands = weight_arguments(shape, call.w_packed, call.scales, call.zeros)
        self.operands += operands
        if call.act_scale is not None:
            act_scale = self._vector(call.act_scale)
            arguments.act_scale, arguments.act_scale_type = act_scale.data_ptr(), DTYPES[act_scale.dtype]
        if call.perm is not None:
            arguments.perm = self._vector(call.perm).data_ptr()

    @property
    def call(self) -> GemmCall:
        return self._call

    @property
    def addresses(self) -> list[int]:
        arguments, weights = self.arguments, self.arguments.weights
        of_weights = [weights.packed, weights.scales, weights.zeros]
        return [arguments.a, *of_weights, arguments.bias, arguments.act_scale, arguments.perm]

    @property
    def at(self) -> Callable[[list[int], int, bool], _C.GemmArguments]:
        return self.arguments.at

    def plan(self, device: int) -> _C.Plan:
        """The one asked for, the tuned one, or the cost model's."""
        call, traits = self.call, device_traits(device)
        dense = _dense.is_available(call.bias, call.activation) and (bool(call.tactic) or _dense.is_ready(device))
        if not call.tactic and not call.split_k:
            tuned = tuning.lookup(self.arguments, traits, device)
            if tuned is not None and (dense or not tuned.dense):
                return tuned
        return _C.select(self.arguments, traits, call.tactic or "", call.split_k, dense)


class EightBitProduct(AnyProduct):
    """A product of 8-bit activations by packed weights of 8 bits."""

    SETTLING = (1, 3, 5)

    def __init__(self, call: Int8Call | Float8Call, shape: WeightShape, out: Tensor) -> None:
        """`call`: with weights that are packed, and with `w_sums` where there are zero points."""
        super().__init__(call, shape, out)
        self._call = call
        w_packed = aligned(call.weights)
        self.operands.append(w_packed)
        weights = self.arguments.weights
        weights.packing = _C.Packing.W8A8
        weights.n, weights.k, weights.group_size = shape.n, shape.k, shape.k
        weights.packed = w_packed.data_ptr()
        sums = self.arguments.sums
        sums.a_scale, sums.a_scale_stride = self._spread(call.a_scale)
        sums.w_scale, sums.w_scale_stride = self._spread(call.w_scale)
        sums.azp, sums.azp_stride = self._spread(call.azp)
        sums.channel_sums, _ = self._spread(call.w_sums)

    def _spread(self, value: Tensor | None) -> tuple[int, int]:
        """Address and stride of one element for all, or of one for each row or channel."""
        if value is None:
            return 0, 0
        vector = self._vector(value.reshape(-1))
        return vector.data_ptr(), int(vector.numel() > 1)

    @property
    def call(self) -> Int8Call | Float8Call:
        return self._call

    @property
    def addresses(self) -> list[int]:
        arguments, sums = self.arguments, self.arguments.sums
        of_sums = [sums.a_scale, sums.w_scale, sums.azp, sums.channel_sums]
        return [arguments.a, arguments.weights.packed, *of_sums, arguments.bias]

    @property
    def at(self) -> Callable[[list[int], int, bool], _C.GemmArguments]:
        return self.arguments.at_sums

    def plan(self, device: int) -> _C.Plan:
        """The one asked for, or the cost model's."""
        call = self.call
        return _C.select(self.arguments, device_traits(device), call.tactic or "", call.split_k)


class BlockwiseProduct(AnyProduct):
    """A product of int8 activations by packed int8 weights, both with scales of their blocks."""

    SETTLING = (1, 3)

    def __init__(self, call: BlockwiseCall, shape: WeightShape, out: Tensor) -> None:
        """`call`: with weights that are packed; a `QuantizedCall` where the output is quantised."""
        super().__init__(call, shape, out)
        self._call = call
        arguments, weights = self.arguments, self.arguments.weights
        b, a_s, b_s = aligned(call.b), as_rows(call.a_s), as_separate_rows(call.b_s)
        self.operands += [b, a_s, b_s]
        weights.packing = _C.Packing.W8A8
        weights.n, weights.k, weights.group_size = shape.n, shape.k, shape.k
        weights.packed = b.data_ptr()
        blocks, quantized = arguments.blocks, arguments.quantized
        blocks.size = call.block_size
        blocks.a, blocks.a_stride = a_s.data_ptr(), a_s.stride(0)
        blocks.w, blocks.w_stride = b_s.data_ptr(), b_s.stride(0)
        if call.out_block_size is not None:
            quantized.size = call.out_block_size
            quantized.stride = ceil_div(shape.n, call.out_block_size)
            quantized.scales = call.out_s.data_ptr() if isinstance(call, QuantizedCall) else 0

    @property
    def call(self) -> BlockwiseCall:
        return self._call

    @property
    def addresses(self) -> list[int]:
        arguments, blocks = self.arguments, self.arguments.blocks
        of_blocks = [arguments.weights.packed, blocks.a, blocks.w]
        return [arguments.a, *of_blocks, arguments.bias, arguments.quantized.scales]

    @property
    def at(self) -> Callable[[list[int], int, bool], _C.GemmArguments]:
        return self.arguments.at_blocks

    def plan(self, device: int) -> _C.Plan:
        """The one asked for, or the cost model's."""
        call = self.call
        return _C.select(self.arguments, device_traits(device), call.tactic or "", call.split_k)
