"""Products of int8 or fp8 activations by packed codes of 4 bits, with scales of groups: `qcutlass.gemm_w4a8`."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass._C import Operand
from qcutlass.products.checks import (
    DEVICES,
    FLOATING,
    check_activations,
    check_integer,
    check_operand,
    check_options,
    check_out,
    check_vector,
    names_of,
)
from qcutlass.products.eight_bit import SCALES, check_out_dtype, check_per_row
from qcutlass.products.epilogue import check_epilogue
from qcutlass.products.kind import Description, Kind, Size
from qcutlass.products.packing import PackedWeights, WeightShape, check_weights, weight_arguments
from qcutlass.products.weight_only import describe_codes, describe_scales

TYPES: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Types of activations by the name that `preprocess_weights` and schemes have for them."""
_ACTIVATIONS: Final = tuple(TYPES.values())
_ZEROS: Final = (torch.uint8, torch.int8, torch.int32)


class Int4Call(NamedTuple):
    """The arguments of one product, in the order of the schema; `qcutlass.gemm_w4a8` describes them."""

    a_q: Annotated[Tensor, Operand.A]
    w_packed: Annotated[Tensor, Operand.WEIGHTS]
    a_scale: Annotated[Tensor, Operand.A_SCALE]
    scales: Annotated[Tensor, Operand.SCALES]
    zeros: Annotated[Tensor | None, Operand.ZEROS] = None
    bias: Annotated[Tensor | None, Operand.BIAS] = None
    activation: str | None = None
    out_dtype: torch.dtype = torch.bfloat16
    group_size: int | None = None
    n: Size | None = None
    tactic: str | None = None
    split_k: int = 0
    batch_invariant: bool = False
    residual: Annotated[Tensor | None, Operand.RESIDUAL] = None

    @property
    def a(self) -> Tensor:
        return self.a_q

    @property
    def weights(self) -> PackedWeights:
        return PackedWeights(self.w_packed, self.scales, self.zeros, self.group_size, bits=4)

    def check(self, out: Tensor | None) -> WeightShape:
        """Checks every argument but what needs memory addresses."""
        a, w_packed, bias = self.a_q, self.w_packed, self.bias
        device = check_activations("a_q", a, dict.fromkeys(DEVICES, _ACTIVATIONS))
        if isinstance(w_packed, Tensor) and w_packed.dtype in _ACTIVATIONS:
            raise ValueError(
                f"w_packed holds weights of 8 bits (dtype {names_of([w_packed.dtype])}), but this product takes those "
                "of 4 bits (dtype uint8): pack their codes with preprocess_weights(codes, bits=4, activations='int8' "
                "or 'fp8')"
            )
        shape = check_weights(self.weights, a.shape[-1], device, "a_q")
        if self.zeros is not None and self.zeros.dtype not in _ZEROS:
            raise TypeError(
                f"zeros: expected a tensor of {names_of(_ZEROS)}, or None, got {names_of([self.zeros.dtype])}; weights "
                "with real zeros multiply 16-bit activations (gemm)"
            )
        check_operand("a_scale", self.a_scale, SCALES, device, "a_q")
        check_per_row("a_scale", self.a_scale, "a_q", a)
        if bias is not None:
            check_operand("bias", bias, FLOATING, device, "a_q")
            check_vector("bias", bias, shape.n, "N")
        if self.n is not None:
            check_integer("n", self.n, minimum=0)
            if self.n != shape.n:
                raise ValueError(f"n: expected None or N = {shape.n} of scales, got {self.n}")
        check_out_dtype(self.out_dtype, FLOATING)
        check_options(self.activation, self.tactic, self.split_k, self.batch_invariant, takes_gates=True)
        columns = check_epilogue(self, shape.n, "a_q")
        if out is not None:
            check_out("a_q", a, out, columns, self.out_dtype, " (out_dtype)")
        return shape

    def prepared(self, shape: WeightShape) -> Int4Call:
        return self

    def fill(self, arguments: _C.GemmArguments, shape: WeightShape) -> list[Tensor]:
        arguments.weights, operands = weight_arguments(shape, self.weights)
        a_scale, sums = self.a_scale.reshape(-1).contiguous(), arguments.sums
        sums.a_scale, sums.a_scale_stride = a_scale.data_ptr(), int(a_scale.numel() > 1)
        return [*operands, a_scale]

    def describe(self, shape: WeightShape) -> Description:
        parts = [*describe_scales(shape, self.weights), f"{names_of([self.out_dtype])} out"]
        return Description(describe_codes(shape), parts if self.bias is None else [*parts, "bias"])


INT4: Final = Kind("gemm_w4a8", Int4Call, activations=_ACTIVATIONS)
