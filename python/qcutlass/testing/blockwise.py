"""Blockwise products to test, int8 and fp8, their oracles, and that of outputs quantised in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from qcutlass.testing.bounds import (
    ALIGNMENT,
    EXACT_LIMIT,
    GATES,
    UNIT_ROUNDOFF,
    Reference,
    activate,
    bound,
    finished_by,
)
from qcutlass.testing.fields import check_fields, generator

if TYPE_CHECKING:
    from typing_extensions import Self

_ROUNDING: Final = UNIT_ROUNDOFF[torch.float32]
_LEAST_SCALE: Final = 2.0**-126
_UNDERFLOW: Final = 2.0**-125  # of errors: no more than what sums of zeros may have
_LARGEST: Final = 127
_INT8: Final = torch.int8
_GELU: Final = 2.0**-20
"""Error of `int8_gelu`'s GELU relative to its argument: 2^-21.4 of the polynomial whose exponential a GPU takes, and
2^-21 of rounding it, the exponential and a sum."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class BlockwiseReference(Reference):
    """The float64 answer of a blockwise product.

    Oracle T. The sum of a block is an integer of at most 2^21 and exact. Its scale a_s * b_s is rounded, and the
    product with it; of the G terms of the outer sum, in fp32 and in any order, each takes part in at most G - 1
    additions. Split-K may cut a block in two: G + splits - 1 terms. So every term t has at most G + splits roundings,

        |x' - x| <= (G + splits) * 2^-24 * sum|t|,

    beside what `bound` adds for the bias, the activation and the output. (Second-order terms are paid for by the slack
    of the last rounding.)

    The sum s of an fp8 block is that of exact products, and has the error of any fp32 sum of its c columns, with
    q the root of the sum of their squares: 2^-23 * (c/8 + 16) * (|s| + 4q), which its scale multiplies. `inner` is what
    all blocks have of it; it adds to the above. Where asynchronous MMAs add the products, some 14 bits are kept, as in
    `EightBitReference`: 2^-12 * (3 * sum|t| + 40Q) more, Q the root of the sum of squares of all blocks' scaled terms.

    Attributes:
        magnitude: float64 `[M, N]`, sum|t|.
        blocks: G.
        inner: float64 `[M, N]`, or None for int8.
    """

    magnitude: Tensor
    blocks: int
    inner: Tensor | None = None

    def rows(self, begin: int, end: int) -> Self:
        rows = slice(begin, end)
        inner = None if self.inner is None else self.inner[rows]
        return replace(super().rows(begin, end), magnitude=self.magnitude[rows], inner=inner)

    def sum_error(self, splits: int) -> Tensor:
        error = (self.blocks + splits) * _ROUNDING * self.magnitude
        return error if self.inner is None else error + self.inner


@dataclass(frozen=True, eq=False, repr=False)
class BlockwiseProblem:
    """A blockwise product: operands as `int8_addmm` and `fp8_gemm` take them, weights as codes `[N, K]`.

    `b_s` may be that of gate and up.
    """

    a: Tensor
    a_s: Tensor
    b: Tensor
    b_s: Tensor
    bias: Tensor | None = None
    activation: str | None = None
    out_dtype: torch.dtype = torch.float16
    block_size: int = 128
    seed: int = 0
    residual: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.a.shape[:-1].numel(), *self.b.shape

    def terms(self) -> Iterator[Tensor]:
        """float64 `[M, N]` for each block of columns in turn: its exact sum, scaled."""
        for a, b, scale in self._blocks():
            yield (a @ b.T) * scale

    def channel_scales(self) -> Tensor:
        """Those of each channel, `[N, blocks]`."""
        n = self.b.shape[0]
        if self.b_s.dim() == 2:
            return self.b_s.repeat_interleave(self.block_size, 0)[:n]
        halves = self.b_s.repeat_interleave(self.block_size, 1)[:, : n // 2]
        turns = halves.reshape(2, -1, 16, halves.shape[-1]).transpose(0, 1)
        return turns.flatten(0, 2)

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each block of columns in turn float64 activations `[M, c]`, weights `[N, c]` and scales `[M, N]`."""
        k = self.b.shape[1]
        a, a_s = self.a.reshape(-1, k).double(), self.a_s.reshape(-1, self.b_s.shape[-1]).double()
        b, b_s = self.b.double(), self.channel_scales().double()
        for block, start in enumerate(range(0, k, self.block_size)):
            columns = slice(start, start + self.block_size)
            yield a[:, columns], b[:, columns], a_s[:, block, None] * b_s[:, block]

    def reference(self, out_dtype: torch.dtype | None = None, *, aligned: bool = False) -> BlockwiseReference:
        """The float64 answer, and what its bound needs; `out_dtype`: instead of the problem's; `aligned`: asynchronous
        MMAs add fp8 products."""
        m, n, k = self.shape
        zeros = (torch.zeros(m, n, dtype=torch.float64, device=self.a.device) for _ in range(4))
        total, magnitude, inner, squares = zeros
        for a, b, scale in self._blocks():
            term = (a @ b.T) * scale
            total += term
            magnitude += term.abs()
            if self.b.dtype != _INT8:
                spread = (a.square() @ b.square().T).sqrt() * scale.abs()
                inner += 2 * _ROUNDING * (a.shape[1] / 8 + 16) * (term.abs() + 4 * spread)
                squares += spread.square()
        if aligned:
            inner += ALIGNMENT * (3 * magnitude + 40 * squares.sqrt())
        bias = None if self.bias is None else self.bias.double()
        dtype = self.out_dtype if out_dtype is None else out_dtype
        blocks, rounded = ceil_div(k, self.block_size), None if self.b.dtype == _INT8 else inner
        found = BlockwiseReference(total, total, k, bias, self.activation, dtype, magnitude, blocks, rounded)
        return finished_by(found, self.residual)

    def __repr__(self) -> str:
        m, n, k = self.shape
        bias = None if self.bias is None else self.bias.dtype
        return (
            f"M={m} N={n} K={k} {self.b.dtype} blocks of {self.block_size} bias={bias} activation={self.activation} "
            f"out={self.out_dtype} residual={self.residual is not None} apart={self.b_s.dim() == 3} seed={self.seed}"
        )


@dataclass(frozen=True)
class BlockwiseCase:
    """A case of blockwise products; `random` and `exact` fill it with data.

    Attributes:
        m, n, k: sizes.
        block_size: 32, 64 or 128.
        out_dtype: float16, bfloat16 or float32; with a quantised output float32.
        bias: whether there is one.
        bias_dtype: its type.
        activation: name or None.
        dtype: of activations and weights: int8 or float8_e4m3fn.
        residual: whether there is one, of the output's type; not in exact problems.
        apart: whether gate and up, in turns of 16 channels, have scales of their own; `n` is a multiple of 32 then.
    """

    m: int
    n: int
    k: int
    block_size: int = 128
    out_dtype: torch.dtype = torch.float16
    bias: bool = False
    bias_dtype: torch.dtype = torch.float32
    activation: str | None = None
    dtype: torch.dtype = _INT8
    residual: bool = False
    apart: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def _problem(
        self,
        seed: int,
        a: Tensor,
        b: Tensor,
        a_s: Tensor,
        b_s: Tensor,
        bias: Tensor,
        residual: Tensor | None = None,
    ) -> BlockwiseProblem:
        return BlockwiseProblem(
            a.to(self.dtype),
            a_s.float(),
            b.to(self.dtype),
            b_s.float(),
            bias.to(self.bias_dtype) if self.bias else None,
            self.activation,
            self.out_dtype,
            self.block_size,
            seed,
            None if residual is None else residual.to(self.out_dtype),
        )

    @property
    def _scale_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        blocks = ceil_div(self.k, self.block_size)
        of_rows = self.m, blocks
        if self.apart:
            return of_rows, (2, ceil_div(self.n // 2, self.block_size), blocks)
        return of_rows, (ceil_div(self.n, self.block_size), blocks)

    def random(self, *, device: torch.device | str = "cpu", seed: int = 0) -> BlockwiseProblem:
        """Every int8 code, or normal fp8 numbers; scales within a factor of 16, outputs about 1 in size.

        Of fp8 numbers every third row and every second channel is non-negative, so that sums of blocks grow.
        """
        g = generator(device, seed)
        if self.dtype == _INT8:
            a, b = (torch.randint(-128, 128, (rows, self.k), generator=g, device=device) for rows in (self.m, self.n))
        else:
            a, b = (torch.randn(rows, self.k, generator=g, device=device) * 32 for rows in (self.m, self.n))
            a[::3], b[::2] = a[::3].abs(), b[::2].abs()
        a_s, b_s = (torch.exp2(4 * torch.rand(shape, generator=g, device=device)) for shape in self._scale_shapes)
        size = (74 if self.dtype == _INT8 else 32) ** 2 * 36 * math.sqrt(self.k)  # of codes, of products of scales
        bias = torch.randn(self.n, generator=g, device=device)
        columns = self.n // 2 if self.activation in GATES else self.n
        residual = torch.randn(self.m, columns, generator=g, device=device) if self.residual else None
        return self._problem(seed, a, b, a_s / 64, b_s * 64 / size, bias, residual)

    def exact(self, *, device: torch.device | str = "cpu", seed: int = 0) -> tuple[BlockwiseProblem, Tensor]:
        """Oracle E: a problem whose sums are exact in fp32 in any order, and the output it must give, `[m, n]`.

        Scales are powers of two, and sums of magnitudes stay under 2^24 units of the smallest; fp8 numbers are integers
        up to 8, of whose products a block of 128 sums to 2^13 at most. Every third row and second channel is
        non-negative, so that sums grow past what 16 bits hold. ValueError if `activation` is neither None nor "relu":
        the others are not exact.
        """
        if self.activation not in (None, "relu"):
            raise ValueError(f"activation must be None or 'relu' (the others are not exact), got {self.activation!r}")
        g = generator(device, seed)

        def integers(low: int, high: int, *shape: int) -> Tensor:  # both ends included
            return torch.randint(low, high + 1, shape, generator=g, device=device)

        headroom = (EXACT_LIMIT - 2**11) / (16 * self.k)  # scales of both sides are within a factor of 4
        largest_code = 127 if self.dtype == _INT8 else 8
        a_largest = min(largest_code, max(1, int(math.sqrt(headroom))))
        b_largest = min(largest_code, max(1, int(headroom / a_largest)))
        a, b = integers(-a_largest, a_largest, self.m, self.k), integers(-b_largest, b_largest, self.n, self.k)
        if headroom < 1:  # so many terms that only some can count
            a *= torch.rand(self.m, self.k, generator=g, device=device) < headroom
        a[::3], b[::2] = a[::3].abs(), b[::2].abs()
        a_s, b_s = (torch.exp2(-integers(4, 6, *shape).double()) for shape in self._scale_shapes)
        result = self._problem(seed, a, b, a_s, b_s, integers(-64, 64, self.n).double() * 2.0**-6)
        reference = result.reference()
        largest = float(reference.magnitude.max()) if self.m and self.n else 0.0
        assert (largest + 1) * 2**12 < EXACT_LIMIT, f"the generator is wrong: {result} is not exact in fp32"
        return result, reference.value.to(self.out_dtype)


def _by_blocks(values: Tensor, size: int) -> Tensor:
    """`[M, N]` as `[M, blocks, size]`, zeros after the last column."""
    m, n = values.shape
    return torch.nn.functional.pad(values, (0, -n % size)).view(m, -1, size)


def quantized_error_ratio(codes: Tensor, scales: Tensor, value: Tensor, error: Tensor, size: int) -> float:
    """The error of quantised outputs over the error allowed; at most 1 for correct ones.

    The numbers y that were quantised are within `error` of `value`. The largest magnitude of a block is then within the
    largest error of it, and scale = max|y| / 127 has one rounding more. A code q is y / scale, with up to three
    roundings (of the reciprocal, of a factor, of the product), rounded to nearest:

        |q * scale - value| <= scale / 2 + error + 4 * 2^-24 * 127 * scale.

    That leaves one code, and two only where the exact quotient is within its error of their middle.

    Args:
        codes: int8 `[..., N]`.
        scales: float32 `[..., ceil(N / size)]`, of codes that are all within +-127.
        value, error: float64 `[M, N]`.
        size: channels of a block.

    Returns:
        The largest ratio, infinity where a scale is not finite or a block of zeros has another scale than 1.
    """
    if codes.numel() == 0:
        return 0.0
    exact, errors = _by_blocks(value, size), _by_blocks(error, size)
    q, s = _by_blocks(codes.reshape(value.shape).double(), size), scales.reshape(exact.shape[:2]).double()
    extent, extent_error = exact.abs().amax(-1), errors.amax(-1)
    expected = (extent / _LARGEST).clamp(min=_LEAST_SCALE)
    of_scale = (s - expected).abs() / (extent_error / _LARGEST + 2 * _ROUNDING * s.abs() + _LEAST_SCALE)
    zeros = (extent <= extent_error) & (s == 1) & (q == 0).all(-1)
    of_nothing = (extent == 0) & (extent_error <= _UNDERFLOW)
    of_scale = of_scale.masked_fill(zeros, 0).masked_fill(of_nothing & (s != 1), math.inf)
    allowed = s[..., None] / 2 + errors + 4 * _ROUNDING * _LARGEST * s[..., None].abs()
    of_codes = ((q * s[..., None] - exact).abs() / allowed).amax(-1).masked_fill(zeros, 0)
    of_codes = of_codes.masked_fill(q.abs().amax(-1) > _LARGEST, math.inf)
    return float(torch.maximum(of_scale, of_codes).nan_to_num(nan=math.inf).max())


def assert_quantized(
    codes: Tensor, scales: Tensor, ref: Reference, size: int, *, splits: int = 1, label: object = ""
) -> float:
    """Asserts that an output quantised in blocks of `size` channels is right, and returns the largest ratio.

    Args:
        codes, scales: the output.
        ref: of a product with `dtype` float32.
        splits: as for `bound`.
        label: opens the message of a failure.
    """
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32), f"{label}: {codes.dtype}, {scales.dtype}"
    worst = quantized_error_ratio(codes, scales, ref.value, bound(ref, splits=splits), size)
    assert worst <= 1, f"{label}: a quantised output is {worst:.4g} times what is allowed from the reference"
    return worst


def assert_gelu(codes: Tensor, scales: Tensor, x: Tensor, x_s: Tensor, size: int, *, label: object = "") -> float:
    """Asserts that `int8_gelu(x, x_s, size)` is right, and returns the largest ratio.

    v = x * s is rounded once, which GELU multiplies by up to 1.13, and GELU itself is within 2^-20 |v|.
    """
    k = x.shape[-1]
    v = x.reshape(-1, k).double() * x_s.reshape(-1, x_s.shape[-1]).double().repeat_interleave(size, 1)[:, :k]
    error = (_GELU + 1.13 * _ROUNDING) * v.abs()
    worst = quantized_error_ratio(codes, scales, activate(v, "gelu"), error, size)
    assert worst <= 1, f"{label}: GELU's output is {worst:.4g} times what is allowed from the reference"
    return worst


def options_of(problem: BlockwiseProblem) -> dict[str, Any]:
    """Keyword arguments of `int8_addmm` or `fp8_gemm` for a problem."""
    names = ["bias", "activation", "out_dtype", "block_size", *([] if problem.residual is None else ["residual"])]
    return {name: getattr(problem, name) for name in names}
