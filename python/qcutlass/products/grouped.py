"""Products of a mixture of experts, rows by the packed codes of their experts: `qcutlass.gemm_grouped`."""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass._C import Operand
from qcutlass.products.checks import (
    FLOATING,
    check_activations,
    check_operand,
    check_options,
    check_out,
    check_vector,
    shape_of,
)
from qcutlass.products.epilogue import GATE_STEP, columns, is_gate
from qcutlass.products.kind import Description, Kind
from qcutlass.products.packing import PackedWeights, WeightShape, check_contiguous, check_weights, weight_arguments
from qcutlass.products.weight_only import ACTIVATIONS_ON, PERM, check_groups, describe_codes, describe_scales

_INDICES: Final = (torch.int32,)
IN_ANY_ORDER: Final = ("cpu",)
"""Devices whose products reorder columns themselves; on others torch does it before them."""
GATHER_BYTES: Final = 4 + 8
"""Of a 16-bit activation that torch gathers, at most: its column, and its place as torch takes it, which stands beside
the activation itself."""
GATHER_ROW_BYTES: Final = 4 + 8 + 4 + 2 * 8
"""Of a row that torch gathers: its number, its expert, its source, and the place of that."""

_PARAMETERS: Final = (2, 3), "[E, G, N] or [E, N]"
_SUPERS: Final = (3,), "[E, B, N]"
_STACKED: Final = {
    "w_packed": ((5,), "[E, ceil(N/16), tiles along K, 32, 16]"),
    "scales": _PARAMETERS,
    "zeros": _PARAMETERS,
    "minimums": _PARAMETERS,
    "super_scales": _SUPERS,
    "super_minimums": _SUPERS,
    "global_scale": ((1, 2), "[E] or [E, 1]"),
}
"""The parts of packed weights that each expert has one of: numbers of dimensions, and shapes."""


def _first(name: str, value: Any) -> Tensor | None:
    """The first expert's part; what is no tensor as it is, to be refused by its type."""
    if not isinstance(value, Tensor):
        return cast(None, value)
    dimensions, form = _STACKED[name]
    if value.dim() not in dimensions or not value.shape[0]:
        raise ValueError(f"{name}: expected shape {form}, of at least one expert, got {shape_of(value)}")
    return value[:1].flatten() if name == "global_scale" else value[0]


def _flat(part: Tensor | None) -> Tensor | None:
    """The rows of all experts, one after the other."""
    return None if part is None else part.contiguous().flatten(0, -2)


class GroupedCall(NamedTuple):
    """The arguments of one product, in the order of the operator's schema; `qcutlass.gemm_grouped` describes them."""

    a: Annotated[Tensor, Operand.A]
    w_packed: Annotated[Tensor, Operand.WEIGHTS]
    scales: Annotated[Tensor, Operand.SCALES]
    offsets: Annotated[Tensor, Operand.EXPERT_OFFSETS]
    zeros: Annotated[Tensor | None, Operand.ZEROS] = None
    rows: Annotated[Tensor | None, Operand.EXPERT_ROWS] = None
    row_scale: Annotated[Tensor | None, Operand.ROW_SCALE] = None
    bias: Annotated[Tensor | None, Operand.BIAS] = None
    activation: str | None = None
    group_size: int | None = None
    bits: int | None = None
    tactic: str | None = None
    weight_dtype: str | None = None
    global_scale: Annotated[Tensor | None, Operand.GLOBAL_SCALE] = None
    minimums: Annotated[Tensor | None, Operand.MINIMUMS] = None
    batch_invariant: bool = False
    super_scales: Annotated[Tensor | None, Operand.SUPER_SCALES] = None
    super_minimums: Annotated[Tensor | None, Operand.SUPER_MINIMUMS] = None
    perm: Annotated[Tensor | None, Operand.PERM] = None

    @property
    def out_dtype(self) -> torch.dtype:
        return self.a.dtype

    @property
    def residual(self) -> None:
        """There is none."""

    @property
    def split_k(self) -> int:
        """Chosen: experts are blocks enough."""
        return 0

    @property
    def out_rows(self) -> int:
        """Rows of the output, R."""
        return self.a.shape[0] if self.rows is None else self.rows.shape[0]

    def check(self, out: Tensor | None) -> WeightShape:
        """Checks every argument but what needs memory addresses."""
        device = check_activations("a", self.a, ACTIVATIONS_ON)
        if self.a.dim() != 2:
            raise ValueError(f"a: expected shape [T, K], got {shape_of(self.a)}")
        shape = self._check_weights(device)
        self._check_rows(device)
        check_options(self.activation, self.tactic, self.split_k, self.batch_invariant, takes_gates=True)
        if self.bias is not None:
            check_operand("bias", self.bias, FLOATING, device, "a")
            if self.bias.shape != (self.experts, shape.n):
                raise ValueError(f"bias: expected shape [E, N] = {[self.experts, shape.n]}, got {shape_of(self.bias)}")
        if self.perm is not None:
            check_operand("perm", self.perm, PERM, device, "a")
            if self.perm.shape != (self.experts, shape.k):
                raise ValueError(f"perm: expected shape [E, K] = {[self.experts, shape.k]}, got {shape_of(self.perm)}")
        self._check_gate(shape.n)
        if out is not None:
            check_out("a", self.a, out, columns(self, shape.n), self.a.dtype, rows=self.out_rows)
        check_groups(shape, device)
        return shape

    def _check_gate(self, n: int) -> None:
        if not is_gate(self.activation):
            return
        if n % (2 * GATE_STEP):
            raise ValueError(
                f"activation: {self.activation!r} takes I channels of gate, then I of up, I a multiple of {GATE_STEP}; "
                f"got N = {n}"
            )
        if self.row_scale is not None:
            raise ValueError(f"row_scale: expected None with {self.activation!r}; the product of down takes it")

    @property
    def experts(self) -> int:
        return self.w_packed.shape[0]

    def _check_weights(self, device: torch.device) -> WeightShape:
        """Checks the weights: the first expert's are like those of `gemm`, and the others' like them."""
        stacked = {name: getattr(self, name) for name in _STACKED}
        first: dict[str, Any] = {name: _first(name, part) for name, part in stacked.items()}
        shape = check_weights(PackedWeights.of(self)._replace(**first), self.a.shape[-1], device, "a")
        check_contiguous("w_packed", self.w_packed)
        for name, part in stacked.items():
            if part is not None and part.shape[0] != self.experts:
                raise ValueError(
                    f"{name}: expected those of E = {self.experts} experts, as many as w_packed has, "
                    f"got {shape_of(part)}"
                )
        return shape

    def _check_rows(self, device: torch.device) -> None:
        check_operand("offsets", self.offsets, _INDICES, device, "a")
        check_vector("offsets", self.offsets, self.experts + 1, "E + 1")
        if self.rows is not None:
            check_operand("rows", self.rows, _INDICES, device, "a")
            if self.rows.dim() != 1:
                raise ValueError(f"rows: expected shape [R], got {shape_of(self.rows)}")
        if self.row_scale is not None:
            check_operand("row_scale", self.row_scale, (torch.float32,), device, "a")
            check_vector("row_scale", self.row_scale, self.out_rows, "R")

    def prepared(self, shape: WeightShape) -> GroupedCall:
        return self if self.perm is None or self.a.device.type in IN_ANY_ORDER else self._ordered(self.perm)

    def _ordered(self, perm: Tensor) -> GroupedCall:
        """The call with rows gathered and their columns in the order of their experts; nothing waits for a GPU.

        Indices are clamped, as kernels clamp them. Rows of nobody have the order of some expert.
        """
        if not self.a.numel():
            return self._replace(perm=None)
        row = torch.arange(self.out_rows, device=self.a.device, dtype=torch.int32)
        expert = torch.searchsorted(self.offsets.contiguous(), row, right=True).sub_(1).clamp_(0, self.experts - 1)
        source = (row if self.rows is None else self.rows).clamp(0, self.a.shape[0] - 1)
        places = perm[expert].clamp_(0, self.a.shape[1] - 1).long()
        places += source[:, None].long() * self.a.shape[1]
        return self._replace(a=self.a.take(places), rows=None, perm=None)

    def fill(self, arguments: _C.GemmArguments, shape: WeightShape) -> list[Tensor]:
        names = "scales", "zeros", "minimums", "super_scales", "super_minimums"
        flat: dict[str, Any] = {name: _flat(getattr(self, name)) for name in names}
        whole = None if self.global_scale is None else self.global_scale.contiguous()
        stacked = PackedWeights.of(self)._replace(**flat, global_scale=whole)
        weights, operands = weight_arguments(shape, stacked)
        weights.scale_stride = weights.zero_stride = weights.minimum_stride = shape.n
        weights.super_scale_stride = weights.super_minimum_stride = shape.n
        arguments.weights = weights
        experts = _C.ExpertRows()
        experts.count, experts.a_rows = self.experts, self.a.shape[0]
        offsets = self.offsets.contiguous()
        experts.offsets = offsets.data_ptr()
        operands.append(offsets)
        if self.rows is not None:
            rows = self.rows.contiguous()
            experts.rows = rows.data_ptr()
            operands.append(rows)
        if self.row_scale is not None:
            row_scale = self.row_scale.contiguous()
            experts.row_scale = row_scale.data_ptr()
            operands.append(row_scale)
        if self.perm is not None:
            perm = self.perm.contiguous()
            arguments.perm = perm.data_ptr()
            operands.append(perm)
        arguments.experts = experts
        return operands

    def describe(self, shape: WeightShape) -> Description:
        parts = [f"grouped, {self.experts} experts", *describe_scales(shape, PackedWeights.of(self))]
        optional = {"rows gathered": self.rows, "bias": self.bias, "rows scaled": self.row_scale, "perm": self.perm}
        parts += [name for name, operand in optional.items() if operand is not None]
        return Description(describe_codes(shape), parts)


def _leading(call: GroupedCall) -> tuple[int]:
    return (call.out_rows,)


def _planned(call: GroupedCall) -> GroupedCall:
    """The call behind the gather that puts columns in order."""
    if call.perm is None:
        return call
    return call._replace(a=call.a.new_empty((call.out_rows, call.a.shape[1])), rows=None, perm=None)


GROUPED: Final = Kind("gemm_grouped", GroupedCall, activations=FLOATING, leading=_leading, planned=_planned)
