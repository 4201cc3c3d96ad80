"""Products of 8-bit activations by weights of 8 bits to test, and their oracles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from qcutlass.testing.bounds import ALIGNMENT, EXACT_LIMIT, GATES, UNIT_ROUNDOFF, Reference, finished_by
from qcutlass.testing.fields import check_fields, generator

Scope: TypeAlias = Literal["none", "one", "each"]
"""Whether there is none of a parameter, one, or one for each row or channel."""

_ROUNDING: Final = UNIT_ROUNDOFF[torch.float32]
_INT8: Final = torch.int8


@dataclass(frozen=True)
class EightBitReference(Reference):
    """The float64 answer of an 8-by-8-bit product: `sum` and `spread` are those of the scaled terms.

    Oracle T for int8. The integer sum is exact, so what bias and activation get is
    `x' = RN(RN(RN(sum) * a_scale) * w_scale)`, three roundings in fp32: |x' - x| <= 3 * 2^-24 * |x|. (The sum of the
    second-order terms, below 2^-46 |x|, is paid for by the slack of the last rounding.) With a bias, RN(x' + b) adds
    2^-24 * |x + b|; the output's own rounding adds u * |ref|. So, without activation,

        |out - ref| <= u*|ref|*(1 + 2^-7) + 3*2^-24*|x| + (2^-24*|x + b| if there is a bias) + tiny,

    tiny being half of fp16's smallest subnormal, or the smallest normal number of bfloat16 and float32, below which an
    intermediate result may be flushed. `bound` multiplies by the slope of an activation as it does elsewhere.

    Oracle T for fp8. Products of two fp8 numbers are exact in fp32 (at most 4 + 4 bits), their sum has the error of any
    fp32 sum, 2^-23 * (K/8 + 16 + splits) * (|x| + 4Q) when scaled, and the scales add two roundings: 2 * 2^-24 * |x|.
    The asynchronous MMAs of sm_90 align what they add in a step and keep some 14 bits of it. Of random numbers, of
    either sign or of one, that is up to 2^-12 * (3|x| + 40Q) if sums are promoted to fp32 every 128 k: at most 0.65 of
    it was measured, K from 32 to 16384, and 0.76 in a model of such sums. Terms of very different size may lose more,
    each up to 2^-13 of the largest.

    Attributes:
        accumulates: whether sums are rounded (fp8), not exact (int8).
        aligned: whether asynchronous MMAs add the fp8 products.
    """

    accumulates: bool = False
    aligned: bool = False

    def sum_error(self, splits: int) -> Tensor:
        if not self.accumulates:
            return 3 * _ROUNDING * self.sum.abs()
        error = super().sum_error(splits) + 2 * _ROUNDING * self.sum.abs()
        return error + ALIGNMENT * (3 * self.sum.abs() + 40 * self.spread) if self.aligned else error


@dataclass(frozen=True, eq=False, repr=False)
class EightBitProblem:
    """An 8-by-8-bit product: operands as `qcutlass.gemm_w8a8` and `gemm_fp8` take them, weights as codes `[N, K]`."""

    a: Tensor
    w: Tensor
    a_scale: Tensor | None
    w_scale: Tensor | None
    bias: Tensor | None = None
    azp: Tensor | None = None
    activation: str | None = None
    out_dtype: torch.dtype = torch.float16
    seed: int = 0
    residual: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.a.reshape(-1, self.w.shape[1]).shape[0], *self.w.shape

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `gemm_w8a8` or `gemm_fp8`."""
        names = ["bias", "activation", "out_dtype", "residual", *(["azp"] if self.w.dtype == _INT8 else [])]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def sums(self) -> Tensor:
        """`[M, N]`, sum over k of (a - azp) * w: int64 of int8 codes, float64 of fp8."""
        a, w = self.a.reshape(-1, self.w.shape[1]), self.w
        total = a.double() @ w.double().T  # of integers: below 2^53, hence exact
        if w.dtype != _INT8:
            return total
        if self.azp is None:
            return total.long()
        return total.long() - self.azp.long().reshape(-1, 1) * w.sum(1, dtype=torch.int64)

    def integer_sums(self) -> Tensor:
        """int32 `[M, N]`: what int32 outputs must be, bit for bit."""
        wrapped = self.sums() & 0xFFFFFFFF
        return torch.where(wrapped >= 2**31, wrapped - 2**32, wrapped).to(torch.int32)

    def reference(self, *, aligned: bool = False) -> EightBitReference:
        """The float64 answer, and what its bound needs; `aligned`: see `EightBitReference`."""
        assert self.a_scale is not None
        assert self.w_scale is not None
        scale = self.a_scale.double().reshape(-1, 1) * self.w_scale.double().reshape(1, -1)
        total = self.sums().double() * scale
        squares = self.a.reshape(-1, self.w.shape[1]).double().square() @ self.w.double().square().T
        bias = None if self.bias is None else self.bias.double()
        accumulates = self.w.dtype != _INT8
        found = EightBitReference(
            total,
            squares.sqrt() * scale.abs(),
            self.w.shape[1],
            bias,
            self.activation,
            self.out_dtype,
            accumulates,
            aligned,
        )
        return finished_by(found, self.residual)

    def __repr__(self) -> str:
        m, n, k = self.shape
        names = "a_scale", "w_scale", "bias", "azp", "residual"
        given = [(name, getattr(self, name)) for name in names]
        parts = [f"{name}={list(value.shape)}" for name, value in given if value is not None]
        return (
            f"M={m} N={n} K={k} a={self.a.dtype} {' '.join(parts)} activation={self.activation} "
            f"out={self.out_dtype} seed={self.seed}"
        )


@dataclass(frozen=True)
class EightBitCase:
    """A case of 8-by-8-bit products; `random` and `exact` fill it with data.

    Attributes:
        m, n, k: sizes.
        dtype: of the activations: int8, float8_e4m3fn or float8_e5m2. Weights are int8 or float8_e4m3fn.
        out_dtype: float16, bfloat16, float32, or int32 for the sums of int8 products.
        a_scale, w_scale: "one" or "each"; there are none with int32 outputs.
        azp: "none", "one" or "each" zero point.
        bias: whether there is one.
        bias_dtype: its type.
        activation: name or None.
        residual: whether there is one, of the output's type; not in exact problems.
        growing: whether random fp8 numbers have sums that grow with K, not with its root.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype = _INT8
    out_dtype: torch.dtype = torch.float16
    a_scale: Scope = "each"
    w_scale: Scope = "each"
    azp: Scope = "none"
    bias: bool = False
    bias_dtype: torch.dtype = torch.float32
    activation: str | None = None
    residual: bool = False
    growing: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    def _problem(self, seed: int, a: Tensor, w: Tensor, **tensors: Tensor | None) -> EightBitProblem:
        """Casts to the case's types, and leaves out what the case has not."""
        if self.out_dtype == torch.int32:
            tensors |= {"a_scale": None, "w_scale": None, "bias": None}
        if not self.bias:
            tensors["bias"] = None
        types = {"a_scale": torch.float32, "w_scale": torch.float32, "bias": self.bias_dtype, "azp": torch.int32}
        types["residual"] = self.out_dtype
        cast: dict[str, Any] = {name: t if t is None else t.to(types[name]) for name, t in tensors.items()}
        weight_dtype = _INT8 if self.dtype == _INT8 else torch.float8_e4m3fn
        return EightBitProblem(
            a.to(self.dtype),
            w.to(weight_dtype),
            **cast,
            activation=self.activation,
            out_dtype=self.out_dtype,
            seed=seed,
        )

    def random(self, *, device: torch.device | str = "cpu", seed: int = 0) -> EightBitProblem:
        """Data as a layer has it: every int8 code (or normal fp8 numbers), scales within a factor of 4.

        Of fp8 numbers every third row and every second channel is non-negative where sums are `growing` with K: those
        that accumulate for longer than they may are out of their bound.
        """
        g = generator(device, seed)

        def numbers(rows: int) -> Tensor:
            if self.dtype == _INT8:
                return torch.randint(-128, 128, (rows, self.k), generator=g, device=device, dtype=torch.int32)
            return torch.randn(rows, self.k, generator=g, device=device) * 32

        def uniform(count: int) -> Tensor:
            return 0.5 + 1.5 * torch.rand(count, generator=g, device=device)

        a, w = numbers(self.m), numbers(self.n)
        if self.dtype != _INT8 and self.growing:
            a[::3], w[::2] = a[::3].abs(), w[::2].abs()
        size = 128 * 32 if self.dtype == _INT8 else 32 * 32
        rows = self.m if self.azp == "each" else 1
        azp = torch.randint(-128, 128, (rows,), generator=g, device=device) if self.azp != "none" else None
        return self._problem(
            seed,
            a,
            w,
            a_scale=uniform(self.m if self.a_scale == "each" else 1) / 64,
            w_scale=uniform(self.n if self.w_scale == "each" else 1) * 64 / (size * math.sqrt(self.k)),
            bias=torch.randn(self.n, generator=g, device=device),
            azp=azp,
            residual=self._residual(g, device),
        )

    def _residual(self, g: torch.Generator, device: torch.device | str) -> Tensor | None:
        columns = self.n // 2 if self.activation in GATES else self.n
        return torch.randn(self.m, columns, generator=g, device=device) if self.residual else None

    def exact(self, *, device: torch.device | str = "cpu", seed: int = 0) -> tuple[EightBitProblem, Tensor]:
        """Oracle E: a problem whose sums are exact in fp32 in any order, and the output it must give, `[m, n]`.

        Numbers are integers, scales powers of two, and sums stay under 2^24; those of 128 fp8 products up to 2^13,
        which asynchronous MMAs add exactly. Every third row and every second channel is non-negative, so that sums grow
        past what 16 bits hold. ValueError if `activation` is neither None nor
        "relu": the others are not exact.
        """
        if self.activation not in (None, "relu"):
            raise ValueError(f"activation must be None or 'relu' (the others are not exact), got {self.activation!r}")
        g = generator(device, seed)

        def integers(low: int, high: int, *shape: int) -> Tensor:  # both ends included
            return torch.randint(low, high + 1, shape, generator=g, device=device)

        w_largest = 127 if self.dtype == _INT8 else 8  # e5m2 and e4m3 hold every integer up to here
        headroom = (EXACT_LIMIT - 2**10) / (self.k * w_largest * (2 if self.azp != "none" else 1))
        a_largest = min(w_largest, max(1, int(headroom)))
        a, w = integers(-a_largest, a_largest, self.m, self.k), integers(-w_largest, w_largest, self.n, self.k)
        if headroom < 1:  # so many terms that only some can count
            a *= torch.rand(self.m, self.k, generator=g, device=device) < headroom
        a[::3], w[::2] = a[::3].abs(), w[::2].abs()
        rows = self.m if self.azp == "each" else 1
        zero_point = a_largest if headroom >= 1 else 0
        result = self._problem(
            seed,
            a,
            w,
            a_scale=torch.exp2(-integers(4, 6, self.m if self.a_scale == "each" else 1).double()),
            w_scale=torch.exp2(-integers(4, 6, self.n if self.w_scale == "each" else 1).double()),
            bias=integers(-64, 64, self.n).double() * 2.0**-6,
            azp=None if self.azp == "none" else integers(-zero_point, zero_point, rows),
        )
        largest = float(result.sums().abs().max()) if self.m and self.n else 0.0
        assert largest + 64 * 2**6 < EXACT_LIMIT, f"the generator is wrong: {result} is not exact in fp32"
        if self.out_dtype == torch.int32:
            return result, result.integer_sums()
        return result, result.reference().value.to(self.out_dtype)
