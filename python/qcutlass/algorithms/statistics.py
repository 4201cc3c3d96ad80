"""What calibration keeps of a linear layer's input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcutlass._validation import FLOATING, check_integer, check_matrix, check_tensor, shape_of
from qcutlass.smoothquant.factors import check_channels


@dataclass
class InputStatistics:
    """Running means over the tokens that a linear layer has seen, in fp32.

    Means, not sums: they stay of the size of one token's numbers, however many tokens come.

    Attributes:
        second_moment: float32 `[K, K]`: the mean of x xT over tokens x; half of GPTQ's Hessian, up to a factor.
        mean_abs: float32 `[K]`: the mean of |x|.
        absmax: float32 `[K]`: the largest |x|.
        count: number of tokens.
        rows: float32 `[R, K]`: some of the tokens, evenly spaced in each call.
        rows_a_call: how many tokens of each call are kept.

    Example:
        >>> import torch
        >>> from qcutlass.algorithms import InputStatistics
        >>> statistics = InputStatistics.empty(8)
        >>> for _ in range(4):
        ...     statistics.add(torch.randn(2, 16, 8))
        >>> statistics.count, statistics.second_moment.shape
        (128, torch.Size([8, 8]))
    """

    second_moment: Tensor
    mean_abs: Tensor
    absmax: Tensor
    rows: Tensor
    count: int = 0
    rows_a_call: int = 0

    @staticmethod
    def empty(k: int, device: torch.device | str = "cpu", rows_a_call: int = 0) -> InputStatistics:
        """Of no tokens of K numbers."""
        check_integer("k", k, minimum=1)
        check_integer("rows_a_call", rows_a_call, minimum=0)
        zeros = torch.zeros(k, dtype=torch.float32, device=device)
        square = torch.zeros((k, k), dtype=torch.float32, device=device)
        return InputStatistics(square, zeros, zeros.clone(), zeros.new_zeros((0, k)), 0, rows_a_call)

    def add(self, a: Tensor) -> None:
        """Takes in activations `[..., K]`.

        Raises:
            TypeError, ValueError: not floating, or not of K numbers; nothing has been taken in then.
        """
        check_tensor("a", a, FLOATING)
        k = len(self.mean_abs)
        if a.dim() == 0 or a.shape[-1] != k:
            raise ValueError(f"a: expected shape [..., {k}], got {shape_of(a)}")
        rows = a.detach().reshape(-1, k).to(self.mean_abs)
        if not len(rows):
            return
        total = self.count + len(rows)
        old = self.count / total
        self.second_moment.addmm_(rows.T, rows, beta=old, alpha=1 / total)
        magnitudes = rows.abs()
        self.mean_abs.mul_(old).add_(magnitudes.sum(dim=0), alpha=1 / total)
        torch.maximum(self.absmax, magnitudes.amax(dim=0), out=self.absmax)
        self.count = total
        if self.rows_a_call:
            kept = torch.linspace(0, len(rows) - 1, min(self.rows_a_call, len(rows))).round().long()
            self.rows = torch.cat([self.rows, rows[kept.to(rows.device)]])

    def divided(self, factors: Tensor) -> InputStatistics:
        """Of the same tokens, each divided by `factors`, floating `[K]`."""
        check_channels("factors", factors, len(self.mean_abs))
        s = factors.to(self.mean_abs)
        return replace(
            self,
            second_moment=self.second_moment / s / s[:, None],
            mean_abs=self.mean_abs / s,
            absmax=self.absmax / s,
            rows=self.rows / s,
        )


def check_layer(weight: Tensor, second_moment: Tensor) -> None:
    """Raises TypeError or ValueError unless these are a layer's weights `[N, K]` and the finite moment `[K, K]`."""
    check_matrix("weight", weight, FLOATING)
    check_matrix("second_moment", second_moment, (torch.float32,))
    k = weight.shape[1]
    if second_moment.shape != (k, k):
        raise ValueError(f"second_moment: expected shape [K, K] = {[k, k]}, got {shape_of(second_moment)}")
    for name, value in (("weight", weight), ("second_moment", second_moment)):
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name}: expected finite values, got NaN or infinity")


def output_error(weight: Tensor, other: Tensor, second_moment: Tensor) -> float:
    """How far the outputs with `other` are from those with `weight`: squared, summed over channels, mean over tokens.

    With D = other - weight and H = `second_moment` this is trace(D H DT), the loss that GPTQ and AWQ minimise.

    Args:
        weight, other: floating `[N, K]`.
        second_moment: float32 `[K, K]`, of `InputStatistics`.

    Example:
        >>> import torch
        >>> from qcutlass.algorithms import output_error
        >>> output_error(torch.zeros(2, 3), torch.ones(2, 3), torch.eye(3))
        6.0
    """
    difference = other.float() - weight.float()
    return float(((difference @ second_moment) * difference).double().sum())
