"""What a decoder block computes between its products: `torch.ops.qcutlass.add_rms_norm`, `rms_norm`, the same with
`_quantized`, `silu_mul` and `gelu_tanh_mul`; rotations are in `rotary_operators`.

Each is one pass of the extension, computed in fp32 and rounded once. On a GPU of sm_90 a pass lets the kernel behind it
start early: a product then loads its first weights meanwhile. The functions here call the extension directly where
nothing traces.
"""

from __future__ import annotations

from typing import Final, TypeAlias

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
from qcutlass.products.quantizer_operators import CODES

Pair: TypeAlias = tuple[Tensor, Tensor]
Quantized: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""A norm, its codes and their scale."""

NORM_CODES: Final = (torch.int8, torch.float8_e4m3fn)
"""Types of codes that norms are quantised to."""


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


def add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`add_rms_norm`, and `quantize_activations` of the norm, by one kernel: the bits are those of both in turn.

    Args:
        x, residual, weight, eps: as for `add_rms_norm`.
        dtype: of the codes: int8, symmetric, or float8_e4m3fn.
        scale: float32 `[]` or `[1]`: a static scale; None: each row of K gets one.

    Returns:
        The sum and its norm, as `add_rms_norm` returns them; the norm's codes, and their scales, float32
        `x.shape[:-1]`, or `[1]` with `scale`. NaN and infinities become what `quantize_activations` makes of them.

    Raises:
        TypeError, ValueError, RuntimeError: as for `add_rms_norm`; `dtype` or `scale` are others.

    Example:
        >>> import torch
        >>> from qcutlass.products.decoder_operators import add_rms_norm_quantized
        >>> x, weight = torch.tensor([[3.0, -3.0, 0.0, 0.0]]), 63.5 * torch.ones(4)
        >>> _, normed, codes, scale = add_rms_norm_quantized(x, x, weight, 0.0, torch.int8)
        >>> codes.tolist(), round(float(normed[0, 0] / scale[0]))
        ([[127, -127, 0, 0]], 127)
    """
    if is_eager(x, residual, weight, scale):
        return _add_rms_norm_quantized(x, residual, weight, eps, dtype, scale)
    found: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.qcutlass.add_rms_norm_quantized(
        x, residual, weight, eps, dtype, scale
    )
    return found


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scale: Tensor | None = None
) -> Quantized:
    """The norm, its codes and scales alone; arguments and errors are those of `add_rms_norm_quantized`.

    Example:
        >>> import torch
        >>> from qcutlass.products.decoder_operators import rms_norm_quantized
        >>> rms_norm_quantized(torch.full((1, 4), 3.0), torch.ones(4), 0.0, torch.int8)[1].tolist()
        [[127, 127, 127, 127]]
    """
    if is_eager(x, weight, scale):
        return _rms_norm_quantized(x, weight, eps, dtype, scale)
    found: Quantized = torch.ops.qcutlass.rms_norm_quantized(x, weight, eps, dtype, scale)
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


def _check_codes(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> None:
    if dtype not in NORM_CODES:
        raise TypeError(
            f"dtype: expected torch.int8 or torch.float8_e4m3fn, got {dtype}; quantize_activations takes others"
        )
    if scale is None:
        return
    check_operand("scale", scale, (torch.float32,), x.device, "x")
    if scale.shape not in ((), (1,)):
        raise ValueError(
            f"scale: expected one element, shape [] or [1], got {shape_of(scale)}; leave it out for one a row"
        )


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


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Pair | None]:
    """The sum, its norm, and the norm's codes of a type with their scale."""
    _check_norm(x, weight, eps, residual)
    if dtype is not None:
        _check_codes(x, dtype, scale)
    ready(x=x, residual=residual, weight=weight, scale=scale)
    out, *sums = counted(x, 1 if residual is None else 2)  # norms are computed ahead of what may change the sum
    total, quantised = sums[0] if sums else None, None if dtype is None else _new_codes(x, dtype, scale)
    if out.numel():
        columns = x.shape[-1]
        x, stride = _rows(x)
        added, added_stride = (None, 0) if residual is None else _rows(residual)
        weight = weight.contiguous()
        arguments = (
            out.numel() // columns,
            columns,
            DTYPES[out.dtype],
            x.data_ptr(),
            stride,
            _address(added),
            added_stride,
            DTYPES[weight.dtype],
            weight.data_ptr(),
            eps,
            _address(total),
            out.data_ptr(),
        )
        with current_device(x):
            if dtype is None or quantised is None:
                _C.add_rms_norm(*arguments, *backend(x))
            else:
                codes, scales = (tensor.data_ptr() for tensor in quantised)
                _C.add_rms_norm_quantized(*arguments, CODES[dtype], codes, _address(scale), scales, *backend(x))
    elif quantised is not None and scale is not None:
        quantised[1].copy_(scale)
    return total, out, quantised


def _new_codes(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Pair:
    """Codes and scales of a norm, to be written."""
    scales = x.shape[:-1] if scale is None else (1,)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(scales, dtype=torch.float32)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Pair:
    total, out, _ = _launch_norm(x, residual, weight, eps)
    assert total is not None
    return total, out


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch_norm(x, None, weight, eps)[1]


def _add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, out, quantised = _launch_norm(x, residual, weight, eps, dtype, scale)
    assert total is not None
    assert quantised is not None
    return total, out, *quantised


def _rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scale: Tensor | None = None
) -> Quantized:
    _, out, quantised = _launch_norm(x, None, weight, eps, dtype, scale)
    assert quantised is not None
    return out, *quantised


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


def _add_rms_norm_quantized_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, normed = _add_rms_norm_fake(x, residual, weight, eps)
    _check_codes(x, dtype, scale)
    return total, normed, *_new_codes(x, dtype, scale)


def _rms_norm_quantized_fake(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scale: Tensor | None = None
) -> Quantized:
    normed = _rms_norm_fake(x, weight, eps)
    _check_codes(x, dtype, scale)
    return normed, *_new_codes(x, dtype, scale)


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
    register(
        "add_rms_norm_quantized(Tensor x, Tensor residual, Tensor weight, float eps, ScalarType dtype, "
        "Tensor? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
        _add_rms_norm_quantized,
        _add_rms_norm_quantized_fake,
    )
    register(
        "rms_norm_quantized(Tensor x, Tensor weight, float eps, ScalarType dtype, Tensor? scale=None) "
        "-> (Tensor, Tensor, Tensor)",
        _rms_norm_quantized,
        _rms_norm_quantized_fake,
    )
    for name in ACTIVATION_OF_GATE:

        def implementation(gate: Tensor, up: Tensor, name: str = name) -> Tensor:
            return _gate(name, gate, up)

        register(f"{name}(Tensor gate, Tensor up) -> Tensor", implementation, _gate_fake)


_register()
