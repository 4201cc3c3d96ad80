"""From a checked call to the extension's argument struct."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from qcutlass import _C
from qcutlass.products import dense, invariance, tuned_plans
from qcutlass.products.epilogue import fill_epilogue
from qcutlass.products.extension import DTYPES, device_traits
from qcutlass.products.kind import Call, Kind
from qcutlass.products.memory import as_rows
from qcutlass.products.packing import WeightShape


class Product:
    """A checked product of operands in memory; keeps alive what its arguments point into.

    Attributes:
        kind, call: as it was made with.
        a: the activations, `[M, K]` with unit stride along K.
        out: `[M, N]` with unit stride along N.
        arguments: the extension's struct.
    """

    def __init__(self, kind: Kind, call: Call, shape: WeightShape, out: Tensor) -> None:
        """`call`: prepared. `out`: `[M, N]` with unit stride along N."""
        self.kind: Final = kind
        self.call: Final = call
        self.out: Final = out
        a = self.a = as_rows(call.a)
        arguments = self.arguments = _C.GemmArguments()
        arguments.m = out.shape[0]
        arguments.a_type = DTYPES[a.dtype]
        arguments.out_type = DTYPES[out.dtype]
        arguments.a, arguments.a_stride = a.data_ptr(), a.stride(0)
        arguments.out, arguments.out_stride = out.data_ptr(), out.stride(0)
        arguments.batch_invariant = call.batch_invariant or invariance.is_on()
        self._alive: Final = [*call.fill(arguments, shape), *fill_epilogue(call, arguments)]
        if call.bias is not None:
            bias = call.bias.contiguous()
            arguments.bias, arguments.bias_type = bias.data_ptr(), DTYPES[bias.dtype]
            self._alive.append(bias)

    def rebinding(self) -> _C.Rebinding:
        """The product of operands elsewhere in memory, in the order of its call."""
        return _C.Rebinding(self.arguments, self.kind.roles)

    def can_be_dense(self) -> bool:
        """Whether a dense product of dequantised weights may serve it."""
        can_be_dense = self.kind.dequantises and not self.arguments.batch_invariant
        return can_be_dense and dense.is_available(self.call.bias, self.call.activation, self.call.residual)

    def can_be_tuned(self) -> bool:
        """Whether plans that were measured may serve it: each for some numbers of rows, so not where those may not
        matter."""
        return not self.arguments.batch_invariant

    def plan(self, device: int) -> _C.Plan:
        """The configuration for GPU `device`: the one asked for, the tuned one, or the cost model's."""
        call, traits = self.call, device_traits(device)
        can_be_dense = self.can_be_dense() and (bool(call.tactic) or dense.is_ready(device))
        if self.can_be_tuned() and not call.tactic and not call.split_k:
            tuned = tuned_plans.lookup(self.arguments, traits, device)
            if tuned is not None and (can_be_dense or not tuned.dense):
                return tuned
        return _C.select(self.arguments, traits, call.tactic or "", call.split_k, can_be_dense)
