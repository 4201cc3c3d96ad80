"""Quantised weights, activations as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from qcutlass.layers.base import Parts, QuantLinear, Scheme, copy_of_bias, short
from qcutlass.products import gemm, preprocess_weights
from qcutlass.products.checks import FLOATING, ceil_div, check_flag, check_integer
from qcutlass.products.packing import PACKINGS
from qcutlass.products.weight_only import GemmCall
from qcutlass.quantization import QuantizedTensor, check_zeros, quantize
from qcutlass.smoothquant import ActivationStatistics

_PROBE: Final = torch.float16  # activations that are allowed everywhere


@dataclass(frozen=True)
class WeightOnly(Scheme):
    """Codes of 4 or 8 bits with a scale, and a zero point, for each group of columns.

    Attributes:
        bits: 4 or 8.
        group_size: columns that share a scale; None or -1: one scale a channel.
        symmetric: whether the zero point is fixed at 2**(bits - 1).
        scale_dtype: float16, bfloat16 or float32; None: the type of the weights.

    Example:
        >>> import qcutlass
        >>> qcutlass.WeightOnly(bits=8, group_size=None)
        WeightOnly(bits=8, group_size=None, symmetric=False, scale_dtype=None)
    """

    bits: int = 4
    group_size: int | None = 128
    symmetric: bool = False
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, PACKINGS)
        if self.group_size not in (None, -1):
            check_integer("group_size", self.group_size, minimum=1)
        check_flag("symmetric", self.symmetric)
        if self.scale_dtype not in (None, *FLOATING):
            raise TypeError(f"scale_dtype: expected float16, bfloat16, float32 or None, got {self.scale_dtype}")

    def layer(
        self, linear: nn.Linear, statistics: ActivationStatistics | None, activation: str | None
    ) -> WeightOnlyLinear:
        """Statistics are not used: nothing is lost of the activations, however large."""
        quantized = self._empty(linear.weight) if linear.weight.is_meta else self._quantized(linear.weight)
        return WeightOnlyLinear(quantized, bias=copy_of_bias(linear), activation=activation)

    def _quantized(self, weight: Tensor) -> QuantizedTensor:
        return quantize(weight, self.bits, self.group_size, self.symmetric, scale_dtype=self.scale_dtype)

    def _empty(self, weight: Tensor) -> QuantizedTensor:
        n, k = weight.shape
        step = k if self.group_size in (None, -1) else min(self.group_size or k, k)
        scales = weight.new_empty((ceil_div(k, step), n), dtype=self.scale_dtype)
        zeros = None if self.symmetric else torch.empty_like(scales, dtype=torch.uint8)
        return QuantizedTensor(weight.new_empty((n, k), dtype=torch.uint8), scales, zeros, self.bits, step)


class WeightOnlyLinear(QuantLinear):
    """A linear layer on `qcutlass.gemm`. `QuantLinear` says what all quantised layers do.

    Buffers: `w_packed`, `scales`, `zeros`, `bias`, `act_scale`, `perm`, as `gemm` takes them; all but the first two may
    be None.

    Args:
        quantized: codes, scales and zeros of an `[N, K]` matrix.
        bias, activation, act_scale, perm: as for `gemm`.

    Raises:
        TypeError, ValueError: as for `gemm`; also where `perm` holds values outside [0, K) or whole zeros lie outside
            [0, 2**bits], on any device.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers import WeightOnlyLinear
        >>> layer = WeightOnlyLinear(qcutlass.quantize(torch.randn(48, 256), bits=4), activation="silu")
        >>> layer(torch.randn(3, 256)).shape
        torch.Size([3, 48])
    """

    OPTIONAL: ClassVar = ("zeros", "bias", "act_scale", "perm")

    w_packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    act_scale: Tensor | None
    perm: Tensor | None

    def __init__(
        self,
        quantized: QuantizedTensor,
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
        act_scale: Tensor | None = None,
        perm: Tensor | None = None,
    ) -> None:
        if not isinstance(quantized, QuantizedTensor):
            raise TypeError(f"quantized: expected a qcutlass.QuantizedTensor, got {type(quantized).__name__}")
        n, k = quantized.shape
        parts = {
            "w_packed": preprocess_weights(quantized.codes, quantized.bits),
            "scales": quantized.scales,
            "zeros": quantized.zeros,
            "bias": bias,
            "act_scale": act_scale,
            "perm": perm,
        }
        super().__init__(k, n, quantized.bits, min(quantized.group_size, k), activation, parts)

    @staticmethod
    def of_parts(
        in_features: int, out_features: int, bits: int, group_size: int, activation: str | None, parts: Parts
    ) -> WeightOnlyLinear:
        """A layer of weights that are packed already: `parts` holds every buffer by its name but `layout`."""
        layer = WeightOnlyLinear.__new__(WeightOnlyLinear)
        QuantLinear.__init__(layer, in_features, out_features, bits, group_size, activation, parts)
        return layer

    def _check(self, parts: Parts) -> None:
        w_packed, perm = parts["w_packed"], parts["perm"]
        if not isinstance(w_packed, Tensor):
            raise TypeError("w_packed: expected a torch.Tensor, got None")
        a = torch.empty((1, self.in_features), dtype=_PROBE, device=w_packed.device)
        operands: dict[str, Any] = {**parts}
        call = GemmCall(a, activation=self.activation, bits=self.bits, group_size=self.group_size, **operands)
        shape = call.check(None)
        if shape.n != self.out_features:
            raise ValueError(f"scales: expected N = {self.out_features} channels, got {shape.n}")
        check_zeros(parts["zeros"], self.bits)
        if perm is not None and not perm.is_meta and not bool(((perm >= 0) & (perm < self.in_features)).all()):
            raise ValueError(f"perm: expected values in [0, {self.in_features}), got others")

    def forward(self, a: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`, of the same type."""
        self._check_input(a)
        return gemm(
            a,
            self.w_packed,
            self.scales,
            self.zeros,
            bias=self.bias,
            activation=self.activation,
            act_scale=self.act_scale,
            perm=self.perm,
            group_size=self.group_size,
            bits=self.bits,
        )

    def _description(self) -> list[str]:
        zeros = None if self.zeros is None else short(self.zeros.dtype)
        described = [f"bits={self.bits}", f"group_size={self.group_size}", f"zeros={zeros}"]
        return described + [f"{name}=True" for name in ("act_scale", "perm") if self._buffers[name] is not None]
