"""Statistics of a linear layer's input, and the error of outputs that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcutlass.products.checks import (
    FLOATING,
    as_device_here,
    check_channels,
    check_finite,
    check_integer,
    check_matrix,
    check_operand,
    check_strided,
    check_tensor,
    check_values,
    shape_of,
)


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

    def __post_init__(self) -> None:
        check_integer("count", self.count, minimum=0)
        check_integer("rows_a_call", self.rows_a_call, minimum=0)

    @staticmethod
    def empty(k: int, device: torch.device | str = "cpu", rows_a_call: int = 0) -> InputStatistics:
        """Of no tokens of K numbers; TypeError or ValueError for arguments that are none such."""
        where = as_device_here("device", device)
        check_integer("k", k, minimum=1)
        check_integer("rows_a_call", rows_a_call, minimum=0)
        zeros = torch.zeros(k, dtype=torch.float32, device=where)
        square = torch.zeros((k, k), dtype=torch.float32, device=where)
        return InputStatistics(square, zeros, zeros.clone(), zeros.new_zeros((0, k)), 0, rows_a_call)

    def add(self, a: Tensor) -> None:
        """Takes in activations `[..., K]`.

        Raises:
            TypeError, ValueError: not floating, or not of K numbers; nothing has been taken in then.
        """
        check_tensor("a", a, FLOATING)
        check_values("a", a)
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
            kept = (
                torch.linspace(0, len(rows) - 1, min(self.rows_a_call, len(rows)), dtype=torch.float32).round().long()
            )
            self.rows = torch.cat([self.rows, rows[kept.to(rows.device)]])

    def divided(self, factors: Tensor) -> InputStatistics:
        """Of the same tokens, each divided by `factors`, floating `[K]`, all positive."""
        check_channels("factors", factors, len(self.mean_abs))
        if not bool((factors > 0).all()):
            raise ValueError(f"factors: expected positive numbers, got {float(factors.min()):g}")
        s = factors.to(self.mean_abs)
        return replace(
            self,
            second_moment=self.second_moment / s / s[:, None],
            mean_abs=self.mean_abs / s,
            absmax=self.absmax / s,
            rows=self.rows / s,
        )


def check_weight(name: str, weight: Tensor) -> None:
    """Raises TypeError or ValueError unless this is a floating matrix `[N, K]` with K of at least 1."""
    check_matrix(name, weight, FLOATING)
    if weight.shape[1] < 1:
        raise ValueError(f"{name}: K must be at least 1, got shape {shape_of(weight)}")


def check_layer(weight: Tensor, second_moment: Tensor, name: str = "weight") -> None:
    """Raises TypeError or ValueError unless these are a layer's finite weights `[N, K]` and the moment `[K, K]`."""
    check_weight(name, weight)
    check_moment(second_moment, weight, name)
    check_finite(name, weight)
    check_values("second_moment", second_moment)
    if not bool(second_moment.isfinite().all()):
        raise ValueError("second_moment: expected finite values, got NaN or infinity; were activations finite?")
    least = float(second_moment.detach().diagonal().min())
    if least < 0:
        raise ValueError(f"second_moment: expected a mean of x xT, whose diagonal is not negative, got {least:g} there")


def check_moment(second_moment: Tensor, weight: Tensor, name: str) -> None:
    """Raises TypeError or ValueError unless the moment has the shape and the device for these weights."""
    check_operand("second_moment", second_moment, (torch.float32,), weight.device, name)
    k = weight.shape[1]
    if second_moment.shape != (k, k):
        raise ValueError(
            f"second_moment: expected shape [K, K] = {[k, k]} for {name} {shape_of(weight)}, got "
            f"{shape_of(second_moment)}"
        )


def check_inputs(weights: Sequence[Tensor], statistics: InputStatistics) -> None:
    """Raises TypeError or ValueError unless these are finite weights `[N_i, K]` and statistics of their input."""
    if not isinstance(statistics, InputStatistics):
        raise TypeError(f"statistics: expected an InputStatistics, got {type(statistics).__name__}")
    if not isinstance(weights, list | tuple):
        raise TypeError(f"weights: expected a list of matrices, got {type(weights).__name__}")
    if not weights:
        raise ValueError("weights: expected a matrix or several, got none")
    for index, weight in enumerate(weights):
        check_layer(weight, statistics.second_moment, f"weights[{index}]")
    for name in ("mean_abs", "absmax"):
        value: Tensor = getattr(statistics, name)
        check_channels(f"statistics.{name}", value, len(statistics.second_moment))
        if bool((value < 0).any()):
            raise ValueError(f"statistics.{name}: expected magnitudes, got a negative one")
    rows, k = statistics.rows, len(statistics.second_moment)
    check_operand("statistics.rows", rows, (torch.float32,), statistics.second_moment.device, "second_moment")
    if rows.dim() != 2 or rows.shape[1] != k:
        raise ValueError(f"statistics.rows: expected shape [R, K], K = {k}, got {shape_of(rows)}")
    check_finite("statistics.rows", rows)


def output_error(weight: Tensor, other: Tensor, second_moment: Tensor) -> float:
    """The squared error of the outputs with `other`, not `weight`: summed over channels, mean over tokens.

    With D = other - weight and H = `second_moment` this is trace(D H DT), the loss that GPTQ and AWQ minimise.

    Args:
        weight, other: floating `[N, K]`.
        second_moment: float32 `[K, K]`, of `InputStatistics`.

    Raises:
        TypeError, ValueError: types, shapes or devices disagree.

    Example:
        >>> import torch
        >>> from qcutlass.algorithms import output_error
        >>> output_error(torch.zeros(2, 3), torch.ones(2, 3), torch.eye(3))
        6.0
    """
    check_weight("weight", weight)
    check_operand("other", other, FLOATING, weight.device, "weight")
    check_strided("other", other)
    if other.shape != weight.shape:
        raise ValueError(f"other: expected the shape of weight, {shape_of(weight)}, got {shape_of(other)}")
    check_moment(second_moment, weight, "weight")
    difference = other.float() - weight.float()
    return float(((difference @ second_moment) * difference).double().sum())
