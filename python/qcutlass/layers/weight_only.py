"""Quantised weights, activations as they are."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.algorithms.nearest import quantize
from qcutlass.layers.base import Parts, QuantLinear, copy_of_bias
from qcutlass.products import gemm, preprocess_weights
from qcutlass.products.checks import ceil_div, short
from qcutlass.products.weight_only import GemmCall
from qcutlass.quantized import QuantizedTensor, check_zeros
from qcutlass.schemes import WeightOnly

_PROBE: Final = torch.float16  # activations that are allowed everywhere


class WeightOnlyLinear(QuantLinear, scheme=WeightOnly):
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

    @classmethod
    def _of_linear(
        cls, linear: nn.Linear, scheme: WeightOnly, statistics: ActivationStatistics | None, activation: str | None
    ) -> WeightOnlyLinear:
        """Statistics are not used: nothing is lost of the activations, however large."""
        quantized = (_empty if linear.weight.is_meta else _quantized)(linear.weight, scheme)
        return WeightOnlyLinear(quantized, bias=copy_of_bias(linear), activation=activation)

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


def _quantized(weight: Tensor, scheme: WeightOnly) -> QuantizedTensor:
    return quantize(weight, scheme.bits, scheme.group_size, scheme.symmetric, scale_dtype=scheme.scale_dtype)


def _empty(weight: Tensor, scheme: WeightOnly) -> QuantizedTensor:
    n, k = weight.shape
    step = k if scheme.group_size in (None, -1) else min(scheme.group_size or k, k)
    scales = weight.new_empty((ceil_div(k, step), n), dtype=scheme.scale_dtype)
    zeros = None if scheme.symmetric else torch.empty_like(scales, dtype=torch.uint8)
    return QuantizedTensor(weight.new_empty((n, k), dtype=torch.uint8), scales, zeros, scheme.bits, step)
