"""Products of int8 by int8, and of e4m3 by e4m3, with scales of blocks: `qcutlass.blockwise`."""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass._C import Operand
from qcutlass.products import launching
from qcutlass.products.block_operators import TYPES, QuantizedBlocks, check_block_size, check_weight_scales
from qcutlass.products.checks import (
    DEVICES,
    FLOATING,
    ceil_div,
    check_activations,
    check_integer,
    check_memory,
    check_operand,
    check_options,
    check_out,
    check_vector,
    names_of,
    shape_of,
    tensors_of,
)
from qcutlass.products.eight_bit import SCALES, check_out_dtype, check_packed, check_plain, fill_weights
from qcutlass.products.epilogue import GATE_STEP, check_epilogue, is_gate
from qcutlass.products.kind import Description, Kind, Size
from qcutlass.products.library import register
from qcutlass.products.memory import as_rows, as_separate_rows
from qcutlass.products.multiplying import multiply
from qcutlass.products.packing import TILE_N, WeightShape, check_channels
from qcutlass.products.weight_operators import pack

_NAMES: Final = {dtype: name for name, dtype in TYPES.items()}


class BlockwiseCall(NamedTuple):
    """The arguments of one blockwise product, in the order of the schemas; `qcutlass.blockwise` describes them.

    `dtype` is that of both operands, int8 or float8_e4m3fn.
    With `out_block_size` the output is quantised, `out_dtype` is int8, and `out_s` takes the scales of the output.
    """

    a: Annotated[Tensor, Operand.A]
    a_s: Annotated[Tensor, Operand.BLOCK_A]
    b: Annotated[Tensor, Operand.WEIGHTS]
    b_s: Annotated[Tensor, Operand.BLOCK_W]
    bias: Annotated[Tensor | None, Operand.BIAS] = None
    activation: str | None = None
    out_dtype: torch.dtype = torch.float16
    dtype: torch.dtype = torch.int8
    n: Size | None = None
    block_size: int = 128
    out_block_size: int | None = None
    tactic: str | None = None
    split_k: int = 0
    batch_invariant: bool = False
    residual: Annotated[Tensor | None, Operand.RESIDUAL] = None
    out_s: Annotated[Tensor | None, Operand.OUT_SCALES] = None

    def check(self, out: Tensor | None) -> WeightShape:
        """Checks every argument but what needs memory addresses."""
        a, b, bias, size = self.a, self.b, self.bias, self.block_size
        device = check_activations("a", a, dict.fromkeys(DEVICES, (self.dtype,)))
        check_block_size("block_size", size)
        check_operand("a_s", self.a_s, SCALES, device, "a")
        if isinstance(b, Tensor) and b.dtype == torch.uint8:
            kind = _NAMES[self.dtype]
            raise ValueError(
                f"b was packed for 16-bit activations (dtype uint8), but this product takes {kind} weights, plain "
                f"[N, K] or packed for {kind} activations: preprocess_weights(b, bits=8, activations={kind!r})"
            )
        check_operand("b", b, (self.dtype,), device, "a")
        check_operand("b_s", self.b_s, SCALES, device, "a")
        if bias is not None:
            check_operand("bias", bias, FLOATING, device, "a")
        k = a.shape[-1]
        n = _channels(self, k)
        blocks = ceil_div(k, size)
        _check_row_scales(self.a_s, a.shape[:-1], blocks, size)
        _check_weight_scales(self.b_s, n, k, size)
        if bias is not None:
            check_vector("bias", bias, n, "N")
        check_options(self.activation, self.tactic, self.split_k, self.batch_invariant, takes_gates=True)
        if self.out_block_size is None:
            check_out_dtype(self.out_dtype, FLOATING)
        else:
            self._check_quantized()
        columns = check_epilogue(self, n, "a")
        if out is not None:
            check_out("a", a, out, columns, self.out_dtype, " (out_dtype)")
        return WeightShape(n, k, 8, k)

    def _check_quantized(self) -> None:
        """Checks what outputs that are quantised take."""
        check_block_size("out_block_size", self.out_block_size)
        if self.dtype != torch.int8:
            raise ValueError(f"out_block_size: only products of int8 quantise their output, got {self.dtype}")
        if is_gate(self.activation):
            raise ValueError(
                f"activation: outputs that are quantised take no gates, got {self.activation!r}; use int8_addmm, then "
                "act_quant"
            )
        if self.residual is not None:
            raise ValueError(
                "residual: expected None with an output that is quantised, got a tensor; use int8_addmm, then act_quant"
            )

    def prepared(self, shape: WeightShape) -> BlockwiseCall:
        """With packed weights."""
        if self.b.dim() != 2:
            return self
        return self._replace(b=pack(self.b, 8, _NAMES[self.dtype]), n=shape.n)

    def fill(self, arguments: _C.GemmArguments, shape: WeightShape) -> list[Tensor]:
        alive = fill_weights(arguments, shape, self.b)
        a_s, b_s = as_rows(self.a_s), as_separate_rows(as_rows(self.b_s))
        blocks, quantized = arguments.blocks, arguments.quantized
        blocks.size = self.block_size
        blocks.a, blocks.a_stride = a_s.data_ptr(), a_s.stride(0)
        blocks.w, blocks.w_stride = b_s.data_ptr(), b_s.stride(0)
        if self.b_s.dim() == 3:
            blocks.up_offset = self.b_s.shape[1] * b_s.stride(0)
        if self.out_block_size is not None:
            quantized.size = self.out_block_size
            quantized.stride = ceil_div(shape.n, self.out_block_size)
            quantized.scales = 0 if self.out_s is None else self.out_s.data_ptr()
        return [*alive, a_s, b_s]

    def describe(self, shape: WeightShape) -> Description:
        out = f"{names_of([self.out_dtype])} out"
        if self.out_block_size is not None:
            out += f" in blocks of {self.out_block_size}"
        parts = [f"blocks of {self.block_size}", out, *([] if self.bias is None else ["bias"])]
        return Description(f"{names_of([self.dtype])} weights", parts)

    def out_scales(self, n: int) -> Tensor:
        """Memory for the scales of a quantised output."""
        assert self.out_block_size is not None
        return self.a.new_empty((*self.a.shape[:-1], ceil_div(n, self.out_block_size)), dtype=torch.float32)


BLOCKWISE: Final = Kind("blockwise_gemm", BlockwiseCall, activations=tuple(_NAMES))


def _check_row_scales(scales: Tensor, leading: torch.Size, blocks: int, size: int) -> None:
    """Raises ValueError unless there is one for each block of each row of the activations."""
    if scales.shape == (*leading, blocks):
        return
    if scales.shape != (leading.numel(), blocks):  # which makes torch compile for this number of rows alone
        expected = [*leading, blocks]
        raise ValueError(f"a_s: expected shape [..., ceil(K / {size})] = {expected}, got {shape_of(scales)}")


def _check_weight_scales(scales: Tensor, n: int, k: int, size: int) -> None:
    """Raises ValueError unless there is one for each block of the weights, or of the gate's and of up's."""
    if scales.dim() != 3:
        return check_weight_scales("b_s", scales, n, k, size)
    expected = (2, ceil_div(n // 2, size), ceil_div(k, size))
    if n % (2 * GATE_STEP):
        raise ValueError(
            f"b_s: scales of gate and of up, shape {shape_of(scales)}, take their channels in turns of {GATE_STEP}, "
            f"N a multiple of {2 * GATE_STEP}, got N = {n}: see qcutlass.interleave_gate_up"
        )
    if scales.shape != expected:
        raise ValueError(
            f"b_s: expected scales of gate and of up, shape [2, ceil(N / 2 / {size}), ceil(K / {size})] = "
            f"{list(expected)}, got {shape_of(scales)}"
        )
    return None


def _channels(call: BlockwiseCall, k: int) -> int:
    """N, after a check of the weights' form."""
    b, n = call.b, call.n
    if n is not None:
        check_integer("n", n, minimum=0)
    if b.dim() != 2:
        check_packed("b", b, k)
        if n is None:
            n = call.bias.shape[0] if call.bias is not None and call.bias.dim() == 1 else b.shape[0] * TILE_N
        check_channels(f"n: N = {n}", n, "b", b)
        return n
    check_plain("b", b, k)
    if n is not None and n != b.shape[0]:
        raise ValueError(f"n: expected None or N = {b.shape[0]} of b, got {n}")
    return b.shape[0]


def multiply_quantized(call: BlockwiseCall) -> QuantizedBlocks:
    """The product, quantised, and its scales."""
    shape = call.check(None)
    check_memory(tensors_of(call))
    scales = call.out_scales(shape.n)
    call = call.prepared(shape)._replace(out_s=scales)
    out = launching.repeat(BLOCKWISE, call, None)
    return (multiply(BLOCKWISE, call) if out is None else out), scales


def _quantized(*arguments: Any) -> QuantizedBlocks:
    return multiply_quantized(BlockwiseCall(*arguments))


def _quantized_fake(*arguments: Any) -> QuantizedBlocks:
    call = BlockwiseCall(*arguments)
    n = call.check(None).n
    return call.a.new_empty((*call.a.shape[:-1], n)), call.out_scales(n)


register(f"{BLOCKWISE.name}_quant({BLOCKWISE.schema}) -> (Tensor, Tensor)", _quantized, _quantized_fake)
