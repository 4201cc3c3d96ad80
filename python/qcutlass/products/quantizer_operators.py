"""The operator behind the quantisers to 8 bits, `torch.ops.qcutlass.quantize_8bit`, and the rules of its arguments."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import (
    FLOATING,
    check_device,
    check_flag,
    check_memory,
    check_tensor,
    shape_of,
)
from qcutlass.products.extension import DTYPES, backend, current_device
from qcutlass.products.kind import schema_of
from qcutlass.products.library import register
from qcutlass.products.memory import are_rows, as_rows

QuantizedRows: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and zero points, where the call asks for these."""

CODES: Final = {
    torch.int8: _C.DType.INT8,
    torch.float8_e4m3fn: _C.DType.FLOAT8_E4M3,
    torch.float8_e5m2: _C.DType.FLOAT8_E5M2,
}


class QuantizeCall(NamedTuple):
    """The arguments of one quantisation, in the order of the schema; `qcutlass.quantize_activations` describes them."""

    a: Tensor
    dtype: torch.dtype
    per_tensor: bool = False
    asymmetric: bool = False
    scale: Tensor | None = None
    azp: Tensor | None = None
    smooth: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """By their names."""
        return {"a": self.a, "scale": self.scale, "azp": self.azp, "smooth": self.smooth}

    @property
    def has_azp(self) -> bool:
        return self.asymmetric or self.azp is not None

    @property
    def has_one_range(self) -> bool:
        return self.per_tensor or self.scale is not None

    @property
    def is_direct(self) -> bool:
        """Whether it reads its tensors and no copies of them."""
        smooth = self.smooth
        return are_rows(self.a) and (smooth is None or (smooth.dtype == torch.float32 and smooth.is_contiguous()))

    def fill(self, codes: Tensor, scale: Tensor, azp: Tensor | None) -> tuple[_C.QuantizeArguments, list[Tensor]]:
        """The extension's struct of a checked call with these outputs, and the tensors that it points into.

        `azp`: takes the zero points, where the call gives none.
        """
        rows, smooth, arguments = as_rows(self.a), self.smooth, _C.QuantizeArguments()
        if smooth is not None:
            smooth = smooth.to(torch.float32).contiguous()
        arguments.rows, arguments.columns = rows.shape
        arguments.a_type, arguments.a, arguments.a_stride = DTYPES[rows.dtype], rows.data_ptr(), rows.stride(0)
        arguments.code_type, arguments.codes = CODES[self.dtype], codes.data_ptr()
        arguments.scale, arguments.azp = scale.data_ptr(), _address(azp if self.azp is None else None)
        arguments.per_tensor, arguments.asymmetric = self.has_one_range, self.has_azp
        arguments.smooth = _address(smooth)
        arguments.given_scale, arguments.given_azp = _address(self.scale), _address(self.azp)
        return arguments, [rows] if smooth is None else [rows, smooth]


def _check_one(name: str, value: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    check_tensor(name, value, (dtype,))
    if value.shape not in ((), (1,)):
        raise ValueError(f"{name}: expected one element, shape [] or [1], got {shape_of(value)}")
    _check_same_device(name, value, device)


def _check_same_device(name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(
            f"{name} is on {value.device}, a is on {device}: move one of them, e.g. {name}.to({str(device)!r})"
        )


def check_quantize(call: QuantizeCall) -> None:
    """Checks every argument but what needs memory addresses."""
    a, dtype, per_tensor, asymmetric, scale, azp, smooth = call
    check_tensor("a", a, FLOATING)
    check_device("a", a)
    if a.dim() == 0:
        raise ValueError("a: expected shape [..., K], got a tensor without dimensions")
    k = a.shape[-1]
    if k < 1:
        raise ValueError(f"a: K must be at least 1, got shape {shape_of(a)}")
    if not isinstance(dtype, torch.dtype) or dtype not in CODES:
        raise TypeError(f"dtype: expected torch.int8, torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}")
    check_flag("per_tensor", per_tensor)
    check_flag("asymmetric", asymmetric)
    if call.has_azp and dtype != torch.int8:
        name = "asymmetric" if azp is None else "azp"
        raise ValueError(f"{name}: only int8 codes have zero points, got dtype {dtype}: leave it out")
    if scale is not None:
        _check_one("scale", scale, torch.float32, a.device)
    if azp is not None:
        _check_one("azp", azp, torch.int32, a.device)
        if scale is None:
            raise ValueError(
                "azp: a given zero point needs a given scale: pass scale=, or asymmetric=True without azp="
            )
    if scale is not None and asymmetric and azp is None:
        raise ValueError("azp: asymmetric=True with a given scale needs a given zero point: pass azp=")
    if smooth is not None:
        check_tensor("smooth", smooth, FLOATING)
        if smooth.shape != (k,):
            raise ValueError(f"smooth: expected shape [K] = [{k}], got {shape_of(smooth)}")
        _check_same_device("smooth", smooth, a.device)


def _outputs(call: QuantizeCall) -> QuantizedRows:
    a = call.a
    ranges = (1,) if call.has_one_range else a.shape[:-1]
    return (
        a.new_empty(a.shape, dtype=call.dtype),
        a.new_empty(ranges, dtype=torch.float32),
        a.new_empty(ranges, dtype=torch.int32) if call.asymmetric and call.azp is None else None,
    )


def quantize(call: QuantizeCall) -> QuantizedRows:
    """The codes of `a`, with scales and zero points of their own or the given ones."""
    check_quantize(call)
    check_memory(call.tensors)
    codes, scale, azp = _outputs(call)
    if scale.numel() == 0:
        return codes, scale, azp
    with current_device(codes):
        arguments, alive = call.fill(codes, scale, azp)
        if codes.is_cuda and call.has_one_range and call.scale is None:
            workspace = codes.new_empty(_C.QUANTIZE_WORKSPACE_BYTES, dtype=torch.uint8)
            arguments.workspace = workspace.data_ptr()
            alive.append(workspace)
        _C.quantize(arguments, **backend(codes))
    return codes, scale, azp


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _quantize(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _without_none(*quantize(QuantizeCall(*arguments)))


def _quantize_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = QuantizeCall(*arguments)
    check_quantize(call)
    return _without_none(*_outputs(call))


def _without_none(codes: Tensor, scale: Tensor, azp: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """As operators return them: no zero points are an empty tensor."""
    return codes, scale, scale.new_empty(0, dtype=torch.int32) if azp is None else azp


register(f"quantize_8bit({schema_of(QuantizeCall)}) -> (Tensor, Tensor, Tensor)", _quantize, _quantize_fake)
