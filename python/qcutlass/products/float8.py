"""Products of fp8 activations by fp8 weights, with scales of rows and channels: `qcutlass.gemm_fp8`."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass._C import Operand
from qcutlass.products.checks import DEVICES, FLOATING, check_activations, check_operand, check_out, names_of
from qcutlass.products.eight_bit import check_out_dtype, check_packed, check_plain, check_scaled, fill_scaled
from qcutlass.products.epilogue import check_epilogue
from qcutlass.products.kind import Description, Kind, Size
from qcutlass.products.packing import WeightShape
from qcutlass.products.weight_operators import pack

_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_WEIGHTS: Final = (torch.float8_e4m3fn,)


class Float8Call(NamedTuple):
    """The arguments of one fp8 product, in the order of the schema; `qcutlass.gemm_fp8` describes them."""

    a: Annotated[Tensor, Operand.A]
    w: Annotated[Tensor, Operand.WEIGHTS]
    a_scale: Annotated[Tensor, Operand.A_SCALE]
    w_scale: Annotated[Tensor, Operand.W_SCALE]
    bias: Annotated[Tensor | None, Operand.BIAS] = None
    activation: str | None = None
    out_dtype: torch.dtype = torch.bfloat16
    n: Size | None = None
    tactic: str | None = None
    split_k: int = 0
    batch_invariant: bool = False
    residual: Annotated[Tensor | None, Operand.RESIDUAL] = None

    def check(self, out: Tensor | None) -> WeightShape:
        """Checks every argument but what needs memory addresses."""
        a, w = self.a, self.w
        device = check_activations("a", a, dict.fromkeys(DEVICES, _FLOAT8))
        check_operand("w", w, _WEIGHTS, device, "a")
        k = a.shape[-1]
        if w.dim() == 2:
            check_plain("w", w, k)
        else:
            check_packed("w", w, k)
        check_out_dtype(self.out_dtype, FLOATING)
        n = check_scaled(self, w, "a", "w")
        columns = check_epilogue(self, n, "a")
        if out is not None:
            check_out("a", a, out, columns, self.out_dtype, " (out_dtype)")
        return WeightShape(n, k, 8, k)

    def prepared(self, shape: WeightShape) -> Float8Call:
        """With packed weights."""
        return self._replace(w=pack(self.w, 8, "fp8"), n=shape.n) if self.w.dim() == 2 else self

    def fill(self, arguments: _C.GemmArguments, shape: WeightShape) -> list[Tensor]:
        return fill_scaled(self, arguments, shape, self.w)

    def describe(self, shape: WeightShape) -> Description:
        parts = [f"{names_of([self.out_dtype])} out", *([] if self.bias is None else ["bias"])]
        return Description(f"{names_of([self.w.dtype])} weights", parts)


FLOAT8: Final = Kind("gemm_fp8", Float8Call, activations=_FLOAT8)
