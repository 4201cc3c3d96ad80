"""What a decoder block computes between its products: `torch.ops.qcutlass.add_rms_norm`, `rms_norm`, `silu_mul`
and `gelu_tanh_mul`; rotations are in `rotary_operators`.

Each is one pass of the extension, computed in fp32 and rounded once. On a GPU of sm_90 a pass lets the kernel behind it
start early: a product then loads its first weights meanwhile. The functions here call the extension directly where
nothing traces.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import (
    ACTIVATION_OF_GATE,
    FLOATING,
    check_device,
    check_inference,
    check_memory,
    check_operand,
    check_tensor,
    check_vector,
    shape_of,
)
from qcutlass.products.extension import DTYPES, current_device, device_traits
from qcutlass.products.library import is_eager, register
from qcutlass.products.memory import as_rows, counted

Pair: TypeAlias = tuple[Tensor, Tensor]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Pair:
    """The residual stream and its norm: `sum = x + residual`, `sum * weight / sqrt(mean(sum^2) + eps)`.

    The norm is that of Zhang and Sennrich, "Root mean square layer normalization" (2019), over the last dimension.

    Args:
        x: float16, bfloat16 or float32 `[..., K]`.
        residual: of the same shape and type.
        weight: floating `[K]`.
        eps: added to the mean square, at least 0.

    Returns:
        The sum, rounded to the type of `x`, and its norm, of that type too.

    Raises:
        TypeError, ValueError: types, shapes or devices do not fit.
        RuntimeError: autograd would have to record it.

    Example:
        >>> import torch
        >>> from qcutlass.products.decoder_operators import add_rms_norm
        >>> x, residual = torch.ones(2, 64), torch.ones(2, 64)
        >>> [float(out[0, 0]) for out in add_rms_norm(x, residual, torch.ones(64), 0.0)]
        [2.0, 1.0]
    """
    if is_eager(x, residual, weight):
        return _add_rms_norm(x, residual, weight, eps)
    found: Pair = torch.ops.qcutlass.add_rms_norm(x, residual, weight, eps)
    return found


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm alone; arguments and errors are those of `add_rms_norm`.

    Example:
        >>> import torch
        >>> from qcutlass.products.decoder_operators import rms_norm
        >>> float(rms_norm(torch.full((1, 64), 3.0), torch.ones(64), 0.0)[0, 0])
        1.0
    """
    if is_eager(x, weight):
        return _rms_norm(x, weight, eps)
    found: Tensor = torch.ops.qcutlass.rms_norm(x, weight, eps)
    return found


def gate(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` or `gelu_tanh(gate) * up`, of a gated MLP (Shazeer, "GLU variants improve transformer", 2020).

    Args:
        name: "silu_mul" or "gelu_tanh_mul".
        gate, up: float16, bfloat16 or float32, of one shape and type; parts of a tensor's rows need no copy.

    Returns:
        Of that shape and type.

    Raises:
        TypeError, ValueError, RuntimeError: as for `add_rms_norm`; KeyError: of another name.

    Example:
        >>> import torch
        >>> from qcutlass.products.decoder_operators import gate
        >>> float(gate("silu_mul", torch.full((1,), 100.0), torch.full((1,), 2.0)))
        200.0
    """
    if is_eager(gate, up):
        return _gate(name, gate, up)
    found: Tensor = getattr(torch.ops.qcutlass, name)(gate, up)
    return found


def _check_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> None:
    check_tensor("x", x, FLOATING)
    check_device("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape [..., K] with K at least 1, got {shape_of(x)}")
    if residual is not None:
        check_alike("residual", residual, "x", x)
    check_operand("weight", weight, FLOATING, x.device, "x")
    check_vector("weight", weight, x.shape[-1], "K")
    if not eps >= 0:
        raise ValueError(f"eps: expected at least 0, got {eps}")


def check_alike(name: str, tensor: Tensor, first: str, x: Tensor) -> None:
    check_operand(name, tensor, (x.dtype,), x.device, first)
    if tensor.shape != x.shape:
        raise ValueError(f"{name}: expected the shape of {first}, {shape_of(x)}, got {shape_of(tensor)}")


def _check_gate(gate: Tensor, up: Tensor) -> None:
    check_tensor("gate", gate, FLOATING)
    check_device("gate", gate)
    if gate.dim() == 0:
        raise ValueError("gate: expected shape [..., N], got a tensor without dimensions")
    check_alike("up", up, "gate", gate)


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """`[..., K]` with unit stride along K and one distance of rows, and that distance."""
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    rows = as_rows(tensor)
    return rows, rows.stride(0)


def ready(**tensors: Tensor | None) -> None:
    """Raises unless the tensors can be read by address, and nothing records gradients."""
    check_memory(tensors)
    if torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0:
        check_inference(**tensors)


def backend(tensor: Tensor) -> tuple[int, int, int]:
    """Threads on the CPU, device and stream on a GPU: the last three arguments of the extension's functions."""
    if not tensor.is_cuda:
        return torch.get_num_threads(), -1, 0
    index = tensor.get_device()
    device_traits(index)
    return 1, index, torch._C._cuda_getCurrentRawStream(index)


def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
    _check_norm(x, weight, eps, residual)
    ready(x=x, residual=residual, weight=weight)
    out, *sums = counted(x, 1 if residual is None else 2)  # norms are computed ahead of what may change the sum
    total = sums[0] if sums else None
    if out.numel():
        columns = x.shape[-1]
        x, stride = _rows(x)
        added, added_stride = (None, 0) if residual is None else _rows(residual)
        weight = weight.contiguous()
        with current_device(x):
            _C.add_rms_norm(
                out.numel() // columns,
                columns,
                DTYPES[out.dtype],
                x.data_ptr(),
                stride,
                0 if added is None else added.data_ptr(),
                added_stride,
                DTYPES[weight.dtype],
                weight.data_ptr(),
                eps,
                0 if total is None else total.data_ptr(),
                out.data_ptr(),
                *backend(x),
            )
    return total, out


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Pair:
    total, out = _launch_norm(x, residual, weight, eps)
    assert total is not None
    return total, out


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch_norm(x, None, weight, eps)[1]


def _gate(name: str, gate: Tensor, up: Tensor) -> Tensor:
    activation = ACTIVATION_OF_GATE[name]
    _check_gate(gate, up)
    ready(gate=gate, up=up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        columns = gate.shape[-1]
        gate, gate_stride = _rows(gate)
        up, up_stride = _rows(up)
        with current_device(gate):
            _C.gate(
                out.numel() // columns,
                columns,
                DTYPES[out.dtype],
                activation,
                gate.data_ptr(),
                gate_stride,
                up.data_ptr(),
                up_stride,
                out.data_ptr(),
                *backend(gate),
            )
    return out


def _add_rms_norm_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Pair:
    _check_norm(x, weight, eps, residual)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check_norm(x, weight, eps, None)
    return x.new_empty(x.shape)


def _gate_fake(gate: Tensor, up: Tensor) -> Tensor:
    _check_gate(gate, up)
    return gate.new_empty(gate.shape)


def _register() -> None:
    register(
        "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        _add_rms_norm,
        _add_rms_norm_fake,
    )
    register("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _rms_norm_fake)
    for name in ACTIVATION_OF_GATE:

        def implementation(gate: Tensor, up: Tensor, name: str = name) -> Tensor:
            return _gate(name, gate, up)

        register(f"{name}(Tensor gate, Tensor up) -> Tensor", implementation, _gate_fake)


_register()
