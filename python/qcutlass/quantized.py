"""The canonical form of quantised weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantised weight matrix in canonical form.

    `w[n, k] = (codes[n, k] - zeros[g, n]) * scales[g, n]` with g = k // group_size.

    Attributes:
        codes: uint8 `[N, K]`, values in `[0, 2**bits)`.
        scales: float16, bfloat16 or float32 `[G, N]`, G = ceil(K / group_size).
        zeros: `[G, N]`, integer (exact zero points, in `[0, 2**bits]`) or floating (real-valued zeros); None:
            2**(bits - 1) everywhere.
        bits: 4 or 8.
        group_size: columns that share a scale; K: one scale a channel. The last group may be shorter.

    Raises:
        ValueError: integer zeros lie outside `[0, 2**bits]`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        check_zeros(self.zeros, self.bits)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.codes.shape
        return n, k

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a weight, its share of scales and zeros included."""
        stored = [tensor for tensor in (self.scales, self.zeros) if tensor is not None]
        extra = 8 * sum(tensor.numel() * tensor.element_size() for tensor in stored)
        return self.bits + extra / max(1, self.codes.numel())

    def rows(self, index: Tensor | slice) -> QuantizedTensor:
        """The matrix with its rows in another order, or some of them."""
        zeros = None if self.zeros is None else self.zeros[:, index]
        return replace(self, codes=self.codes[index], scales=self.scales[:, index], zeros=zeros)

    def columns(self, part: slice) -> QuantizedTensor:
        """Some columns, of whole groups, or of the only one."""
        size, step = part.stop - part.start, self.group_size
        groups = slice(None) if step >= self.shape[1] else slice(part.start // step, part.stop // step)
        zeros = None if self.zeros is None else self.zeros[groups]
        return QuantizedTensor(self.codes[:, part], self.scales[groups], zeros, self.bits, min(step, size))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights `[N, K]`, computed in fp32 and rounded once to `dtype` (None: the type of the scales)."""
        k = self.codes.shape[1]
        step = max(1, min(self.group_size, k))
        weight = self.codes.to(torch.float32)
        for group, begin in enumerate(range(0, k, step)):
            columns = weight[:, begin : begin + step]
            zero = 2.0 ** (self.bits - 1) if self.zeros is None else self.zeros[group].float()[:, None]
            columns.sub_(zero).mul_(self.scales[group].float()[:, None])
        return weight.to(dtype or self.scales.dtype)


def check_zeros(zeros: Tensor | None, bits: int) -> None:
    """Raises ValueError if integer zeros lie outside [0, 2**bits], for which products give wrong numbers.

    It waits for the device of `zeros`, so products do not call it: it stands where data enters.
    """
    if zeros is None or zeros.is_floating_point() or zeros.is_meta or not zeros.numel():
        return
    if zeros.dtype == torch.uint8 and bits == 8:
        return  # holds no others
    if bool(((zeros < 0) | (zeros > 2**bits)).any()):
        got = f"{int(zeros.min())} to {int(zeros.max())}"
        raise ValueError(f"zeros: expected integers in [0, {2**bits}] for {bits}-bit weights, got {got}")
