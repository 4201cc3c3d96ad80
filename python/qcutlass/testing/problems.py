"""Weight-only products to test: random ones, and ones whose sums are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from qcutlass.testing.bounds import EXACT_LIMIT, GATES, Reference, dequantized_weight, numbers_of_codes, reference
from qcutlass.testing.fields import check_fields, generator

Zeros: TypeAlias = Literal["none", "int", "real", "minimum"]

_SPANS: Final = {"e2m1": 12, "e4m3": 512}  # of numbers as large as most codes of these types
_MOST_EXACT: Final = {"e2m1": 6, "e4m3": 16}  # of the numbers in exact problems, which are multiples of 1/2
_NAN: Final = 0x7F  # of e4m3, but for the sign

_EPILOGUE: Final = ("bias", "activation", "act_scale", "perm", "residual")  # what Problem, reference and gemm share


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """A weight-only product: activations, a weight matrix in canonical form, and what the epilogue does."""

    a: Tensor
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    bias: Tensor | None = None
    activation: str | None = None
    act_scale: Tensor | None = None
    perm: Tensor | None = None
    seed: int = 0
    minimums: Tensor | None = None
    weight_dtype: str | None = None
    global_scale: Tensor | None = None
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None
    residual: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.a.reshape(-1, self.codes.shape[1]).shape[0], *self.codes.shape

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `qcutlass.gemm`; group_size and bits only where the shapes do not tell them."""
        names = (*_EPILOGUE, "minimums", "weight_dtype", "global_scale", "super_scales", "super_minimums")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None} | self.ambiguous

    @property
    def ambiguous(self) -> dict[str, int]:
        """Those of group_size and bits that the shapes of weights and scales do not tell."""
        k = self.codes.shape[1]
        ragged = min(self.group_size, k) * self.scales.shape[0] != k
        return ({"group_size": self.group_size} if ragged else {}) | ({"bits": self.bits} if k <= 32 else {})

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """`[N, K]` in `dtype` (None: float32), columns in the order of the codes."""
        given = self.codes, self.scales, self.zeros, self.group_size, self.bits
        numbers = self.weight_dtype, self.global_scale, self.super_scales, self.super_minimums
        return dequantized_weight(*given, dtype, self.minimums, *numbers)

    def reference(self, weight_dtype: torch.dtype | None = None, *, scaled_sums: bool | None = None) -> Reference:
        """The float64 answer for weights rounded to `weight_dtype` (None: kept in fp32).

        `scaled_sums`: of codes with minimums, whether sums of codes are scaled, and minimums times sums of activations
        are taken off: what is added up, and rounded, are these two then. None: as GPUs do that keep weights in fp32.
        """
        found = self._reference(weight_dtype)
        if scaled_sums is None:
            scaled_sums = self.a.is_cuda and weight_dtype in (None, torch.float32)
        if self.minimums is None or not scaled_sums:
            return found
        scaled = replace(self, minimums=torch.zeros_like(self.minimums))
        taken_off = replace(self, codes=torch.zeros_like(self.codes))
        terms = (problem._reference(weight_dtype).spread for problem in (scaled, taken_off))
        return replace(found, spread=torch.hypot(*terms))

    def _reference(self, weight_dtype: torch.dtype | None) -> Reference:
        return reference(self.a, self.weight(weight_dtype), **{name: getattr(self, name) for name in _EPILOGUE})

    def __repr__(self) -> str:
        m, n, k = self.shape
        offsets = {"zeros": self.zeros, "minimums": self.minimums, "global": self.global_scale}
        offsets |= {"super": self.super_scales}
        named = [f"{name}={part.dtype}" for name, part in offsets.items() if part is not None]
        epilogue = [name for name in ("bias", "act_scale", "perm", "residual") if getattr(self, name) is not None]
        codes = self.weight_dtype or f"w{self.bits}"
        return (
            f"M={m} N={n} K={k} {codes} g{self.group_size} a={self.a.dtype} scales={self.scales.dtype} "
            f"{' '.join(named) or 'zeros=none'} activation={self.activation} {' '.join(epilogue)} seed={self.seed}"
        )


@dataclass(frozen=True)
class Case:
    """A case of products; `random` and `exact` fill it with data.

    Attributes:
        m, n, k: sizes.
        bits: 4 or 8.
        group_size: columns that share a scale.
        zeros: "none" (symmetric), "int" or "real"; "minimum": minimums instead.
        dtype: of the activations, the bias, `act_scale` and the output.
        scale_dtype: of the scales; None: `dtype`. Those of float8_e4m3fn have a global scale.
        zero_dtype: of the zeros or minimums; None: uint8 for zeros="int", the scales' type otherwise.
        bias, act_scale, perm: whether there is one.
        activation: name or None.
        weight_dtype: of floating codes, "e2m1" or "e4m3", with zeros="none"; None: integers.
        super_groups: groups of a super-block, or all if that is no divisor of their number: scales are int8 and
            minimums uint8 then, with zeros="none" or "minimum". 0: scales have one level.
        residual: whether there is one, of the output's type.
    """

    m: int
    n: int
    k: int
    bits: int = 4
    group_size: int = 128
    zeros: Zeros = "int"
    dtype: torch.dtype = torch.float16
    scale_dtype: torch.dtype | None = None
    zero_dtype: torch.dtype | None = None
    bias: bool = False
    activation: str | None = None
    act_scale: bool = False
    perm: bool = False
    weight_dtype: str | None = None
    super_groups: int = 0
    residual: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def _columns(self) -> int:
        return self.n // 2 if self.activation in GATES else self.n

    @property
    def groups_of_super_block(self) -> int:
        """Where scales have two levels."""
        groups = -(-self.k // self.group_size)
        return groups if groups % self.super_groups else self.super_groups

    @property
    def _zero_span(self) -> int:  # int8 holds half of what 8-bit codes need; minimums of two levels are 4 times these
        return 1 << min(self.bits, 7 if self.zero_dtype == torch.int8 else 6 if self.super_groups else self.bits)

    def _problem(self, seed: int, exact: bool, **tensors: Tensor | None) -> Problem:
        """Casts float64 or integer tensors to the case's types."""
        scale_dtype = self.scale_dtype or self.dtype
        zero_dtype = self.zero_dtype or (torch.uint8 if self.zeros == "int" else scale_dtype)
        types = {"codes": torch.uint8, "scales": scale_dtype, "zeros": zero_dtype, "perm": torch.int32}
        types |= {"minimums": zero_dtype, "global_scale": torch.float32}
        cast: dict[str, Any] = {
            name: t if t is None else t.to(types.get(name, self.dtype)) for name, t in tensors.items()
        }
        if self.super_groups:
            for name, dtype in (("scales", torch.int8), ("minimums", torch.uint8)):
                cast[name], cast[f"super_{name}"] = self._two_levels(tensors.get(name), dtype, exact)
        numbers: dict[str, Any] = {"bits": self.bits, "group_size": self.group_size, "weight_dtype": self.weight_dtype}
        return Problem(**numbers, activation=self.activation, seed=seed, **cast)

    @property
    def _has_global_scale(self) -> bool:
        return self.scale_dtype == torch.float8_e4m3fn

    def _exact_codes(self, codes: Tensor) -> Tensor:
        """Floating codes of multiples of 1/2 in place of others; those of every second channel are not negative."""
        assert self.weight_dtype is not None
        every = torch.arange(2**self.bits, dtype=torch.uint8, device=codes.device)
        numbers = numbers_of_codes(every, self.weight_dtype)
        chosen = every[(2 * numbers == (2 * numbers).round()) & (numbers.abs() <= _MOST_EXACT[self.weight_dtype])]
        found = chosen[codes.long() % len(chosen)]
        found[::2] &= 2 ** (self.bits - 1) - 1
        return found

    def _two_levels(
        self, values: Tensor | None, dtype: torch.dtype, exact: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Numbers `[G, N]` as integers and the float16 numbers of super-blocks.

        Exact: numbers whose multiples of the largest one's 2^-6 (with signs; else 2^-7) they are stay what they are.
        Those of every second channel are negative where integers have signs.
        """
        if values is None:
            return None, None
        most, bits = (127, 6) if dtype == torch.int8 else (255, 7)
        blocks = values.double().view(-1, self.groups_of_super_block, values.shape[1])
        largest = blocks.abs().amax(1).clamp(min=2.0**-14)  # the rest of float16's exponents is for the integers
        # largest < 2^exponent, and at least half of it (a logarithm of a power of two may be rounded down)
        exponent = torch.frexp(largest).exponent
        supers = torch.exp2(exponent.double() - 1 - bits) if exact else largest / most
        if dtype == torch.int8:
            supers[:, ::2] *= -1
        supers = supers.to(torch.float16)
        integers = (blocks / supers.double()[:, None]).round().clamp(-most if dtype == torch.int8 else 0, most)
        return integers.flatten(0, 1).to(dtype), supers

    def random(self, *, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
        """Data as a layer has it: normal activations with outlier columns, every code, scales within a factor of 4.

        With minimums some scales are negative, and some 0, as in K-quants.
        """
        g = generator(device, seed)
        n, k, groups, span = self.n, self.k, -(-self.k // self.group_size), 2**self.bits

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=g, device=device)

        def integers(end: int, *shape: int) -> Tensor:
            return torch.randint(0, end, shape, generator=g, device=device, dtype=torch.int32)

        a = torch.randn(self.m, k, generator=g, device=device)
        a[:, integers(k, 1 + k // 256)] *= 16
        whole, real = integers(self._zero_span, groups, n), (0.25 + uniform(groups, n) / 2) * span
        unit = 1 / (_SPANS.get(self.weight_dtype or "", span) * math.sqrt(k))  # for outputs of a few units
        scales = (2 + 6 * uniform(groups, n)) * (1 if self._has_global_scale else unit)
        zeros = {"none": None, "int": whole, "real": real, "minimum": None}
        minimums = None
        if self.zeros == "minimum":
            minimums = real * scales
            scales = scales * (integers(8, groups, n) - 1).sign()
        codes = torch.randint(0, span, (n, k), generator=g, device=device, dtype=torch.uint8)
        if self.weight_dtype == "e4m3":
            codes[codes & _NAN == _NAN] = 0x31
        return self._problem(
            seed,
            False,
            a=a,
            codes=codes,
            global_scale=torch.full((1,), unit, device=device) if self._has_global_scale else None,
            scales=scales,
            zeros=zeros[self.zeros],
            minimums=minimums,
            bias=torch.randn(n, generator=g, device=device) if self.bias else None,
            act_scale=0.5 + 1.5 * uniform(k) if self.act_scale else None,
            perm=torch.randperm(k, generator=g, device=device) if self.perm else None,
            residual=torch.randn(self.m, self._columns, generator=g, device=device) if self.residual else None,
        )

    def exact(self, *, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Problem, Tensor]:
        """Oracle E: a problem whose sums are exact in fp32 in any order, and the output it must give, `[m, n]`.

        Activations and code - zero are integers (half integers for 4-bit codes with real zeros), scales are powers of
        two, minimums zeros times them, and the sum of |a * w| stays under 2^24 units of the smallest term. Every third
        row and every second channel is non-negative, so that sums grow past what 16 bits hold: a 16-bit accumulator
        shows.
        ValueError if `activation` is neither None nor "relu": the others are not exact.
        """
        if self.activation not in (None, "relu"):
            raise ValueError(f"activation must be None or 'relu' (the others are not exact), got {self.activation!r}")
        g = generator(device, seed)
        n, k, groups, span = self.n, self.k, -(-self.k // self.group_size), 2**self.bits
        halves = self.zeros == "real" and self.bits == 4  # 8-bit codes less a half integer would not fit bf16

        def integers(low: int, high: int, *shape: int) -> Tensor:  # both ends included
            return torch.randint(low, high + 1, shape, generator=g, device=device)

        floats = self.weight_dtype is not None
        whole = torch.full((1,), 0.5, device=device) if self._has_global_scale else None
        unit = 2.0 ** -(2 + (halves or floats) + self.act_scale + self._has_global_scale)
        span = 2 * _MOST_EXACT.get(self.weight_dtype or "", span // 2)
        headroom = (EXACT_LIMIT * unit - 64 - 64 * self.residual) / (k * span * (2 if self.act_scale else 1))
        largest = min(128, max(1, int(headroom)))
        a = integers(-largest, largest, self.m, k).double()
        if headroom < 1:  # so many terms that only some can count
            a *= torch.rand(self.m, k, generator=g, device=device) < headroom
        a[::3] = a[::3].abs()

        some = integers(0, self._zero_span - 1, groups, n).double() / (2 if halves else 1)
        zeros = None if self.zeros == "none" else some
        codes = integers(0, 2**self.bits - 1, n, k).to(torch.uint8)
        floor = torch.full((groups, n), span // 2, device=device) if zeros is None else zeros.ceil()
        floor = floor.to(torch.uint8).T.repeat_interleave(min(self.group_size, k), dim=1)[:, :k]
        codes[::2] = codes[::2].maximum(floor[::2])
        codes = self._exact_codes(codes) if floats else codes
        scales = torch.exp2(-integers(0, 2, groups, n).double())
        bias = integers(-64, 64, n).double() if self.bias else None
        act_scale = torch.exp2(integers(-1, 1, k).double()) if self.act_scale else None
        perm = torch.randperm(k, generator=g, device=device) if self.perm else None
        residual = integers(-64, 64, self.m, n).double() if self.residual else None

        def problem(shrink: float) -> Problem:
            shrunk = {"scales": scales * shrink, "bias": None if bias is None else bias * shrink, "zeros": zeros}
            shrunk["residual"] = None if residual is None else residual * shrink
            if self.zeros == "minimum":
                shrunk |= {"zeros": None, "minimums": some * scales * shrink}
            return self._problem(
                seed, True, a=a, codes=codes, act_scale=act_scale, perm=perm, global_scale=whole, **shrunk
            )

        result = problem(1.0)
        total = reference(result.a.abs(), result.weight().abs(), act_scale=result.act_scale, perm=result.perm).sum + 64
        total += 64 * self.residual
        assert bool((total < EXACT_LIMIT * unit).all()), f"the generator is wrong: {result} is not exact in fp32"
        value = result.reference().value
        peak = float(value.abs().max()) if value.numel() else 0.0
        if self.dtype == torch.float16 and peak > 60000:  # keep clear of overflow; a power of two changes nothing else
            result = problem(2.0 ** -math.ceil(math.log2(peak / 60000)))
            value = result.reference().value
        return result, value.to(self.dtype)


def random_problem(
    m: int, n: int, k: int, *, device: torch.device | str = "cpu", seed: int = 0, **options: Any
) -> Problem:
    """`Case(m, n, k, **options).random(...)`."""
    return Case(m, n, k, **options).random(device=device, seed=seed)


def exact_problem(
    m: int, n: int, k: int, *, device: torch.device | str = "cpu", seed: int = 0, **options: Any
) -> tuple[Problem, Tensor]:
    """`Case(m, n, k, **options).exact(...)`."""
    return Case(m, n, k, **options).exact(device=device, seed=seed)
