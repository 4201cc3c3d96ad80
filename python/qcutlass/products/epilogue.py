"""What follows the sums of a product besides bias and activation: gates of gated MLPs, residuals.

Both are computed where the sums are finished, in fp32. The CPU rounds once; kernels for GPUs round before each of them
as well, and so give the bits that separate operators give.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import ACTIVATION_OF_GATE, ACTIVATIONS, check_operand, shape_of
from qcutlass.products.memory import as_rows

GATE_STEP: Final = 16
"""Channels of the gate that lie together, before as many of what they multiply."""


class Finishing(Protocol):
    """The part of a call that is read here."""

    @property
    def a(self) -> Tensor: ...

    @property
    def activation(self) -> str | None: ...

    @property
    def residual(self) -> Tensor | None: ...

    @property
    def out_dtype(self) -> torch.dtype: ...


def is_gate(activation: str | None) -> bool:
    """Whether channels come in pairs, of which each gives one column of the output."""
    return isinstance(activation, str) and activation in ACTIVATION_OF_GATE


def columns(call: Finishing, n: int) -> int:
    """Of the output, from a product of `n` channels."""
    return n // 2 if is_gate(call.activation) else n


def check_epilogue(call: Finishing, n: int, first: str) -> int:
    """Checks gate and residual of a call, whose activations are called `first`; returns the columns of the output."""
    if is_gate(call.activation) and n % (2 * GATE_STEP):
        raise ValueError(
            f"activation: {call.activation!r} takes gate and up in turns of {GATE_STEP} channels, N a multiple of "
            f"{2 * GATE_STEP}, got N = {n}: see qcutlass.interleave_gate_up"
        )
    width, residual = columns(call, n), call.residual
    if residual is not None:
        check_operand("residual", residual, (call.out_dtype,), call.a.device, first, " (that of the output)")
        expected = (*call.a.shape[:-1], width)
        if residual.shape != expected:
            raise ValueError(f"residual: expected the output's shape {list(expected)}, got {shape_of(residual)}")
    return width


def fill_epilogue(call: Finishing, arguments: _C.GemmArguments) -> list[Tensor]:
    """Adds activation, gate and residual to `arguments`; returns the tensors that these point into."""
    if call.activation in ACTIVATION_OF_GATE:
        arguments.activation = ACTIVATION_OF_GATE[call.activation]
        arguments.gate = _C.Gate.HALVES if arguments.experts.count else _C.Gate.INTERLEAVED
    else:
        arguments.activation = ACTIVATIONS[call.activation]
    if call.residual is None:
        return []
    residual = as_rows(call.residual)
    arguments.residual, arguments.residual_stride = residual.data_ptr(), residual.stride(0)
    return [residual]
