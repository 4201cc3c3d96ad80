"""Products of 16-bit activations by packed codes of 4 or 8 bits: `qcutlass.gemm`."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass._C import Operand
from qcutlass.errors import UnsupportedError
from qcutlass.products.checks import (
    FLOATING,
    check_activations,
    check_operand,
    check_options,
    check_out,
    check_vector,
    names_of,
)
from qcutlass.products.epilogue import check_epilogue
from qcutlass.products.extension import DTYPES
from qcutlass.products.kind import Description, Kind
from qcutlass.products.packing import PackedWeights, WeightShape, check_weights, weight_arguments

PERM: Final = (torch.int32,)
ACTIVATIONS_ON: Final = {"cpu": FLOATING, "meta": FLOATING, "cuda": (torch.float16, torch.bfloat16)}
_GROUP_STEP: Final = 16  # of the kernels for CUDA, and of those for int8 activations


def has_whole_steps(group_size: int, k: int) -> bool:
    """Whether groups are whole steps of the packed layout, or one a channel."""
    return group_size >= k or group_size % _GROUP_STEP == 0


def check_quantized_activations(
    activations: object, device: torch.device, allowed: tuple[str, ...] = ("int8",)
) -> None:
    """Raises unless activations on `device` can be quantised so; None: they are not quantised."""
    if activations is None:
        return
    names = f"{', '.join(map(repr, allowed))} or None"
    if not isinstance(activations, str):
        raise TypeError(f"activations: expected {names}, got {type(activations).__name__}")
    if activations not in allowed:
        raise ValueError(f"activations: expected {names}, got {activations!r}")
    if device.type == "cuda" and activations == "int8":
        raise UnsupportedError(
            "activations: 'int8' is for CPU tensors; on CUDA leave it out, or quantise the weights to int8, too, and "
            "use gemm_w8a8"
        )


def check_groups(shape: WeightShape, device: torch.device) -> None:
    """Raises unless `device` multiplies by weights with groups of this size."""
    if device.type == "cuda" and not has_whole_steps(shape.group_size, shape.k):
        raise UnsupportedError(
            f"group_size: on CUDA groups are multiples of {_GROUP_STEP} columns, or one a channel; "
            f"got {shape.group_size}. Quantise with another group size, or use CPU tensors"
        )


def describe_codes(shape: WeightShape) -> str:
    """The type of the weights in words, for `explain`."""
    return f"{shape.weight_dtype or f'{shape.bits}-bit'} weights"


def describe_scales(shape: WeightShape, weights: PackedWeights) -> list[str]:
    """Groups, scales and what else belongs to codes in words, for `explain`."""
    found = [
        "per channel" if shape.group_size >= shape.k else f"groups of {shape.group_size}",
        f"{names_of([weights.scales.dtype])} scales",
    ]
    offsets = {"zeros": weights.zeros, "minimums": weights.minimums}
    named = [f"{names_of([part.dtype])} {name}" for name, part in offsets.items() if part is not None]
    found += named or (["symmetric"] if shape.weight_dtype is None else [])
    optional = {"global_scale": weights.global_scale, "super-blocks": weights.super_scales}
    return found + [name for name, part in optional.items() if part is not None]


class GemmCall(NamedTuple):
    """The arguments of one product, in the order of the operator's schema; `qcutlass.gemm` describes them."""

    a: Annotated[Tensor, Operand.A]
    w_packed: Annotated[Tensor, Operand.WEIGHTS]
    scales: Annotated[Tensor, Operand.SCALES]
    zeros: Annotated[Tensor | None, Operand.ZEROS] = None
    bias: Annotated[Tensor | None, Operand.BIAS] = None
    activation: str | None = None
    act_scale: Annotated[Tensor | None, Operand.ACT_SCALE] = None
    perm: Annotated[Tensor | None, Operand.PERM] = None
    group_size: int | None = None
    bits: int | None = None
    tactic: str | None = None
    split_k: int = 0
    activations: str | None = None
    weight_dtype: str | None = None
    global_scale: Annotated[Tensor | None, Operand.GLOBAL_SCALE] = None
    minimums: Annotated[Tensor | None, Operand.MINIMUMS] = None
    batch_invariant: bool = False
    super_scales: Annotated[Tensor | None, Operand.SUPER_SCALES] = None
    super_minimums: Annotated[Tensor | None, Operand.SUPER_MINIMUMS] = None
    residual: Annotated[Tensor | None, Operand.RESIDUAL] = None

    @property
    def out_dtype(self) -> torch.dtype:
        return self.a.dtype

    def check(self, out: Tensor | None) -> WeightShape:
        """Checks every argument but what needs memory addresses."""
        a, bias, act_scale, perm = self.a, self.bias, self.act_scale, self.perm
        device = check_activations("a", a, ACTIVATIONS_ON)
        shape = check_weights(PackedWeights.of(self), a.shape[-1], device, "a")
        n, k = shape.n, shape.k
        if bias is not None:
            check_operand("bias", bias, FLOATING, device, "a")
            check_vector("bias", bias, n, "N")
        if act_scale is not None:
            check_operand("act_scale", act_scale, FLOATING, device, "a")
            check_vector("act_scale", act_scale, k, "K")
        if perm is not None:
            check_operand("perm", perm, PERM, device, "a")
            check_vector("perm", perm, k, "K")
        check_options(self.activation, self.tactic, self.split_k, self.batch_invariant, takes_gates=True)
        columns = check_epilogue(self, n, "a")
        if out is not None:
            check_out("a", a, out, columns, a.dtype)
        check_quantized_activations(self.activations, device)
        check_groups(shape, device)
        if self.weight_dtype is not None and self.activations is not None:
            raise UnsupportedError(
                f"activations: {self.activations!r} is for integer codes, got weight_dtype={self.weight_dtype!r}; "
                "leave it out"
            )
        irregular = not has_whole_steps(shape.group_size, k)
        if irregular and self.activations is not None:
            raise UnsupportedError(
                f"group_size: for activations={self.activations!r} groups are multiples of {_GROUP_STEP} columns, or "
                f"one a channel; got {shape.group_size}. Leave activations out"
            )
        return shape

    def prepared(self, shape: WeightShape) -> GemmCall:
        return self

    def fill(self, arguments: _C.GemmArguments, shape: WeightShape) -> list[Tensor]:
        arguments.int8_activations = self.activations is not None
        arguments.weights, operands = weight_arguments(shape, PackedWeights.of(self))
        if self.act_scale is not None:
            act_scale = self.act_scale.contiguous()
            arguments.act_scale, arguments.act_scale_type = act_scale.data_ptr(), DTYPES[act_scale.dtype]
            operands.append(act_scale)
        if self.perm is not None:
            perm = self.perm.contiguous()
            arguments.perm = perm.data_ptr()
            operands.append(perm)
        return operands

    def describe(self, shape: WeightShape) -> Description:
        parts = describe_scales(shape, PackedWeights.of(self))
        optional = {"bias": self.bias, "act_scale": self.act_scale, "perm": self.perm}
        parts += [name for name, operand in optional.items() if operand is not None]
        if self.activations is not None:
            parts.append(f"activations quantised to {self.activations}")
        return Description(describe_codes(shape), parts)


WEIGHT_ONLY: Final = Kind("gemm", GemmCall, activations=FLOATING, dequantises=True)
