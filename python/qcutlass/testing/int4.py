"""Products of 8-bit activations by 4-bit weights to test: random ones, exact ones, and their oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from qcutlass.testing.bounds import ALIGNMENT, EXACT_LIMIT, GATES, UNIT_ROUNDOFF, Reference, finished_by, reference
from qcutlass.testing.fields import check_fields, generator

if TYPE_CHECKING:
    from typing_extensions import Self

_ROUNDING: Final = UNIT_ROUNDOFF[torch.float32]
_STEP: Final = 16
"""Columns of which a group of weights holds a whole number, or is the only one, where sums are integers."""
_TILE: Final = 64
_MOST_COLUMNS: Final = 512
_SPAN: Final = 16
_MOST_EXACT: Final = {torch.int8: 127, torch.float8_e4m3fn: 4}
"""Integers up to here are activations of the type; of fp8 those of whose products 128 sum to 2^13 at most."""


@dataclass(frozen=True)
class Int4Reference(Reference):
    """The float64 answer of `qcutlass.gemm_w4a8`.

    Oracle T. Where sums are of integers, those over a run of columns are exact: |sum a * (code - zero)| is at most
    512 * 128 * 16 = 2^20, as is what each of its two parts can be. A run is scaled (one rounding) and added to at most
    R others; the sum of all is scaled by the row's scale. So

        |x' - x| <= 2^-24 * (R + 2) * sum over runs of |t|.

    Elsewhere weights are those of a weight-only product in fp32, whose bound it is, and one more rounding by the row's
    scale.

    The asynchronous MMAs of sm_90 add fp8 products of a run with some 14 bits, as in `EightBitReference`: beside the
    above 2^-12 * (3 * sum|t| + 40Q), Q the root of the sum of squares of all terms.

    Attributes:
        magnitude: float64 `[M, N]`, sum of |t| over runs; None: sums are not of integers.
        runs: R.
        aligned: float64 `[M, N]`, sum of |t| over the runs of such MMAs; None: there are none.
    """

    magnitude: Tensor | None = None
    runs: int = 0
    aligned: Tensor | None = None

    def rows(self, begin: int, end: int) -> Self:
        rows = slice(begin, end)
        magnitude = None if self.magnitude is None else self.magnitude[rows]
        aligned = None if self.aligned is None else self.aligned[rows]
        return replace(super().rows(begin, end), magnitude=magnitude, aligned=aligned)

    def sum_error(self, splits: int) -> Tensor:
        if self.magnitude is not None:
            return _ROUNDING * (self.runs + splits + 1) * self.magnitude
        error = super().sum_error(splits) + _ROUNDING * self.sum.abs()
        return error if self.aligned is None else error + ALIGNMENT * (3 * self.aligned + 40 * self.spread)


def columns_of_a_run(group_size: int, k: int) -> int:
    """Columns whose products are added up as integers: the largest power of two that divides groups and whole tiles."""
    run = _MOST_COLUMNS
    while -(-k // _TILE) * _TILE % run or (group_size < k and group_size % run):
        run //= 2
    return run


@dataclass(frozen=True, eq=False, repr=False)
class Int4Problem:
    """A product of 8-bit activations `a` `[M, K]` by 4-bit `codes` `[N, K]` with `scales` and `zeros` of groups."""

    a: Tensor
    codes: Tensor
    a_scale: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    out_dtype: torch.dtype
    bias: Tensor | None = None
    activation: str | None = None
    seed: int = 0
    residual: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return len(self.rows()), *self.codes.shape

    def rows(self) -> Tensor:
        """Activations, float64 `[M, K]`."""
        return self.a.double().reshape(-1, self.codes.shape[1])

    def differences(self) -> Tensor:
        """float64 `[N, K]`: codes less zeros."""
        if self.zeros is None:
            return self.codes.double() - _SPAN // 2
        return self.codes.double() - self._each(self.zeros)

    def weight(self) -> Tensor:
        """float64 `[N, K]`."""
        return self.differences() * self._each(self.scales)

    def _each(self, groups: Tensor) -> Tensor:
        n, k = self.codes.shape
        return groups.reshape(-1, n).double().T.repeat_interleave(min(self.group_size, k), dim=1)[:, :k]

    def row_scale(self) -> Tensor:
        """float64 `[M, 1]`."""
        return self.a_scale.double().reshape(-1, 1).expand(self.shape[0], 1)

    def sums(self) -> Tensor:
        """float64 `[M, N]`, before the row's scale."""
        return self.rows() @ self.weight().T

    def reference(self, *, promoted: int | None = None, aligned: bool = True) -> Int4Reference:
        """The float64 answer.

        `promoted`: columns after which a GPU's sums leave its MMAs; `aligned`: whether these are the asynchronous ones.
        """
        k = self.shape[2]
        found = reference(self.rows(), self.weight(), bias=self.bias, activation=self.activation)
        row_scale = self.row_scale()
        whole = self.group_size >= k or self.group_size % _STEP == 0
        magnitude, of_aligned, runs = None, None, 0
        if (whole and self.a.dtype == torch.int8) or promoted is not None:
            run = promoted or columns_of_a_run(self.group_size, k)
            a, w, runs = self.rows(), self.weight(), -(-k // run)
            parts = ((a[:, at : at + run] @ w[:, at : at + run].T).abs() for at in range(0, k, run))
            magnitude = sum(parts, torch.zeros_like(found.sum)) * row_scale.abs()
        if self.a.dtype != torch.int8:
            magnitude, of_aligned = None, magnitude if aligned else None
        total, spread = found.sum * row_scale, found.spread * row_scale.abs()
        options = found.bias, self.activation, self.out_dtype
        return finished_by(Int4Reference(total, spread, k, *options, magnitude, runs, of_aligned), self.residual)

    def __repr__(self) -> str:
        m, n, k = self.shape
        zeros = "none" if self.zeros is None else self.zeros.dtype
        return (
            f"M={m} N={n} K={k} g{self.group_size} a={self.a.dtype} scales={self.scales.dtype} zeros={zeros} "
            f"out={self.out_dtype} activation={self.activation} bias={self.bias is not None} "
            f"residual={self.residual is not None} seed={self.seed}"
        )


@dataclass(frozen=True)
class Int4Case:
    """A case of products; `random` and `exact` fill it with data.

    Attributes:
        m, n, k: sizes.
        dtype: of the activations, int8 or float8_e4m3fn.
        out_dtype: float16, bfloat16 or float32.
        group_size: columns that share a scale.
        zeros: "none" (symmetric) or "int".
        scale_dtype, zero_dtype: of the scales, of the zeros.
        a_scale: "one" for all rows, or one for "each".
        bias: whether there is one, float32.
        activation: name or None.
        residual: whether there is one, of the output's type; not in exact problems.

    Example:
        >>> from qcutlass import testing
        >>> testing.Int4Case(2, 16, 64).random().a.shape
        torch.Size([2, 64])
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.int8
    out_dtype: torch.dtype = torch.float16
    group_size: int = 128
    zeros: Literal["none", "int"] = "int"
    scale_dtype: torch.dtype = torch.float16
    zero_dtype: torch.dtype = torch.uint8
    a_scale: Literal["one", "each"] = "each"
    bias: bool = False
    activation: str | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def _problem(self, seed: int, **tensors: Any) -> Int4Problem:
        zeros = tensors.pop("zeros") if self.zeros == "int" else None
        residual = tensors.pop("residual", None)
        return Int4Problem(
            tensors["a"].to(self.dtype),
            tensors["codes"].to(torch.uint8),
            tensors["a_scale"].float(),
            tensors["scales"].to(self.scale_dtype),
            None if zeros is None else zeros.to(self.zero_dtype),
            self.group_size,
            self.out_dtype,
            tensors["bias"].float() if self.bias else None,
            self.activation,
            seed,
            None if residual is None else residual.to(self.out_dtype),
        )

    @property
    def _groups(self) -> int:
        return -(-self.k // self.group_size)

    @property
    def _row_scales(self) -> int:
        return 1 if self.a_scale == "one" else self.m

    def random(self, *, device: torch.device | str = "cpu", seed: int = 0) -> Int4Problem:
        """Normal activations as quantisers make them, every code, scales within a factor of 4."""
        g = generator(device, seed)
        a = torch.randn(self.m, self.k, generator=g, device=device)
        largest = 127 if self.dtype == torch.int8 else 448
        if a.numel():
            a = a * (largest / a.abs().max().clamp(min=1))
        a = a.round() if self.dtype == torch.int8 else a
        if a.numel() and self.dtype == torch.int8:
            a.view(-1)[0] = -128
        shape = self._groups, self.n

        def uniform(low: float, high: float, *size: int) -> Tensor:
            return torch.rand(size, generator=g, device=device) * (high - low) + low

        columns = self.n // 2 if self.activation in GATES else self.n
        return self._problem(
            seed,
            a=a,
            codes=torch.randint(0, _SPAN, (self.n, self.k), generator=g, device=device),
            a_scale=uniform(0.5, 2, self._row_scales) / largest,
            scales=uniform(0.5, 2, *shape) / (4 * math.sqrt(max(1, self.k))),
            zeros=torch.randint(0, _SPAN, shape, generator=g, device=device),
            bias=uniform(-1, 1, self.n),
            residual=uniform(-2, 2, self.m, columns) if self.residual else None,
        )

    def exact(self, *, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Int4Problem, Tensor]:
        """A product whose sums are exact in fp32 in any order, and its output.

        Activations are integers, scales powers of two, and the sum of |a * w| stays under 2^24 units of the smallest
        term. Every third row and every second channel is not negative, so that sums grow past what 16 bits hold.
        ValueError if `activation` is neither None nor "relu": the others are not exact.
        """
        if self.activation not in (None, "relu"):
            raise ValueError(f"activation must be None or 'relu' (the others are not exact), got {self.activation!r}")
        g = generator(device, seed)
        unit = 0.25
        headroom = (EXACT_LIMIT * unit - 64) / (max(1, self.k) * _SPAN)
        largest = min(_MOST_EXACT[self.dtype], max(1, int(headroom)))

        def integers(low: int, high: int, *shape: int) -> Tensor:  # both ends included
            return torch.randint(low, high + 1, shape, generator=g, device=device)

        a = integers(-largest, largest, self.m, self.k).double()
        if headroom < 1:  # so many terms that only some can count
            a *= torch.rand(self.m, self.k, generator=g, device=device) < headroom
        a[::3] = a[::3].abs()
        zeros = integers(0, _SPAN - 1, self._groups, self.n)
        floor = zeros if self.zeros == "int" else torch.full_like(zeros, _SPAN // 2)
        codes = integers(0, _SPAN - 1, self.n, self.k)
        floor = floor.T.repeat_interleave(min(self.group_size, self.k), dim=1)[:, : self.k]
        codes[::2] = codes[::2].maximum(floor[::2])
        scales = torch.exp2(-integers(0, 2, self._groups, self.n).double())
        a_scale = torch.exp2(integers(-1, 1, self._row_scales).double())
        bias = integers(-8, 8, self.n).double()
        parts = {"a": a, "codes": codes, "scales": scales, "zeros": zeros}
        result = self._problem(seed, **parts, a_scale=a_scale, bias=bias)
        value = result.reference().value
        peak = float(value.abs().max()) if value.numel() else 0.0
        if self.out_dtype == torch.float16 and peak > 60000:  # a power of two changes nothing else
            shrink = 2.0 ** -math.ceil(math.log2(peak / 60000))
            result = self._problem(seed, **parts, a_scale=a_scale * shrink, bias=bias * shrink)
            value = result.reference().value
        return result, value.to(self.out_dtype)
