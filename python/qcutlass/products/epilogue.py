"""What follows the sums of a product besides bias and activation: gates of gated MLPs, residuals.

The CPU computes them where it finishes the sums, in fp32, and rounds once. No kernel for GPUs has them: there they are
composed of the product without them, rounded, and of torch's operations behind it, in fp32, rounded again.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import ACTIVATION_OF_GATE, ACTIVATIONS, check_operand, shape_of
from qcutlass.products.memory import as_rows

GATE_STEP: Final = 16
"""Channels of the gate that lie together, before as many of what they multiply."""

_ACTIVATE: Final = {
    "silu_mul": torch.nn.functional.silu,
    "gelu_tanh_mul": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


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


_Call = TypeVar("_Call", bound=Finishing)


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
        arguments.gate = _C.Gate.INTERLEAVED
    else:
        arguments.activation = ACTIVATIONS[call.activation]
    if call.residual is None:
        return []
    residual = as_rows(call.residual)
    arguments.residual, arguments.residual_stride = residual.data_ptr(), residual.stride(0)
    return [residual]


def is_composed(call: Finishing) -> bool:
    """Whether gate or residual are left to torch. The call need not be checked."""
    return (call.residual is not None or is_gate(call.activation)) and isinstance(call.a, Tensor) and call.a.is_cuda


def bare(call: _Call) -> _Call:
    """The call without gate and residual: what the kernels of GPUs compute of it."""
    if call.residual is None and not is_gate(call.activation):
        return call
    activation = None if is_gate(call.activation) else call.activation
    without: _Call = call._replace(activation=activation, residual=None)  # type: ignore[attr-defined]
    return without


def finish(call: Finishing, product: Tensor) -> Tensor:
    """Gate and residual of a call, from the bare product: float32, to be rounded."""
    out = product.float()
    if call.activation in _ACTIVATE:
        *leading, n = out.shape
        gate, up = out.view(*leading, n // (2 * GATE_STEP), 2, GATE_STEP).unbind(-2)
        out = (_ACTIVATE[call.activation](gate) * up).flatten(-2)
    return out if call.residual is None else out + call.residual.float()
