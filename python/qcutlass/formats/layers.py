"""What loaders yield: linear layers in canonical form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from qcutlass.quantized import QuantizedTensor


@dataclass(frozen=True, eq=False)
class CanonicalLinear:
    """A linear layer with low-bit weights: `y = (x * act_scale)[..., perm] @ weight.T + bias`.

    The members are arguments of `qcutlass.gemm`, once `weight.codes` are packed.

    Attributes:
        weight: codes `[N, K]`, scales and zeros `[G, N]`.
        bias: float16, bfloat16 or float32 `[N]`, or None.
        perm: int32 `[K]`, or None: column k of the codes meets activation column `perm[k]` (act-order).
        act_scale: floating `[K]`, or None: multiplies the activations, in their own column order.
    """

    weight: QuantizedTensor
    bias: Tensor | None = None
    perm: Tensor | None = None
    act_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights `[N, K]` with columns in the order of the activations, without `act_scale`.

        Computed in fp32 and rounded once to `dtype` (None: the type of the scales).
        """
        weight = self.weight.dequantize(dtype)
        if self.perm is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.perm.long()] = weight
        return ordered


@dataclass(frozen=True, eq=False)
class Int8Linear:
    """A linear layer with int8 weights for int8 activations (W8A8).

    Attributes:
        codes: int8 `[N, K]`; `w[n, k] = codes[n, k] * scales[n]`.
        scales: float32 `[N]`.
        input_scale: float32 `[1]`, of all activations; None: each token's is computed when it comes.
        bias: float16, bfloat16 or float32 `[N]`, or None.
        smooth: float32 `[K]`, or None: the activations are divided by it first.
    """

    codes: Tensor
    scales: Tensor
    input_scale: Tensor | None = None
    bias: Tensor | None = None
    smooth: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.codes.shape
        return n, k

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights `[N, K]`, computed in fp32 and rounded once to `dtype`."""
        return (self.codes.float() * self.scales[:, None]).to(dtype)


@dataclass(frozen=True, eq=False)
class FloatLinear:
    """A linear layer that is not quantised.

    Attributes:
        weight: float16, bfloat16 or float32 `[N, K]`.
        bias: such a type, `[N]`, or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.weight.shape
        return n, k

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights `[N, K]` in `dtype` (None: their own)."""
        return self.weight.to(dtype or self.weight.dtype)


Layer: TypeAlias = CanonicalLinear | Int8Linear | FloatLinear
