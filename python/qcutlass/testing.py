"""What counts as a correct product: references, error bounds, problem generators and poisoned buffers.

Every tolerance of the project lives in this module. It is plain torch: it knows neither the packed layout nor the
extension, so it can judge both. Two oracles are offered:

* **E, exact** (`exact_problem`): small integers and power-of-two scales make every order of summation exact in fp32,
  so an output must equal the correctly rounded reference.
* **T, real data** (`random_problem`, `reference`, `bound`): each element must lie within an a-priori error bound of
  the float64 reference.

Example:
    >>> import torch
    >>> from qcutlass import testing
    >>> p = testing.random_problem(3, 16, 64, bits=4, group_size=32, dtype=torch.float16, seed=1)
    >>> out = (p.a.float() @ p.weight().T).half()
    >>> testing.error_ratio(out, p.reference()) <= 1
    True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

Zeros: TypeAlias = Literal["none", "int", "real"]

UNIT_ROUNDOFF: Final = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""Half the distance from 1 to the next number: the relative error of rounding to nearest."""

_ROUNDING_SLACK: Final = 1 + 2.0**-7  # the value that is rounded is itself a little off: u * |x'| against u * |x|
_STEP: Final = 2.0**-23  # tensor cores truncate inside a step: a whole unit in the last place of fp32
_TINY: Final = 2.0**-25  # half of fp16's smallest subnormal
_EVALUATION: Final = 2.0**-22  # error of an activation function computed in fp32, relative to its argument
_EXACT_LIMIT: Final = 2**24  # fp32 holds every integer up to here
_EPILOGUE: Final = ("bias", "activation", "act_scale", "perm")  # what Problem, reference and gemm share

# Largest slope of each activation, rounded up: how much an error of the argument can grow.
# SiLU: 1.0999 at 2.40; GELU: 1.1289 at sqrt(2); its tanh form: 1.1290 near there.
SLOPE: Final[dict[str | None, float]] = {None: 1.0, "relu": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}


def activate(x: Tensor, activation: str | None) -> Tensor:
    """Applies None, "relu", "gelu" (erf), "gelu_tanh" or "silu" in the precision of `x`; ValueError for other names."""
    if activation is None:
        return x
    if activation == "relu":
        return torch.relu(x)
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation == "gelu":
        return torch.nn.functional.gelu(x)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    raise ValueError(f"activation must be one of {', '.join(map(repr, SLOPE))}, got {activation!r}")


def dequantized_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, bits: int, dtype: torch.dtype | None = None
) -> Tensor:
    """The weights that codes stand for: RN(RN32(RN32(code - zero) * scale)), RN to `dtype`.

    Args:
        codes: uint8 `[N, K]`.
        scales: floating `[G, N]`, G = ceil(K / group_size), or `[N]`: one a channel.
        zeros: shaped as `scales`, integer or floating; None: 2^(bits - 1).
        group_size: columns that share a scale; the last group may be short.
        bits: 4 or 8.
        dtype: type of the result; None: float32, which holds the products as they are.

    Returns:
        `[N, K]`.
    """
    n, k = codes.shape
    scales = scales.reshape(-1, n).float()
    shift = torch.full_like(scales, 2.0 ** (bits - 1)) if zeros is None else zeros.reshape(-1, n).float()
    weight = torch.empty(n, k, dtype=dtype or torch.float32, device=codes.device)
    for group in range(scales.shape[0]):
        columns = slice(group * group_size, min(k, (group + 1) * group_size))
        difference = codes[:, columns].float() - shift[group, :, None]
        weight[:, columns] = difference * scales[group, :, None]
    return weight


@dataclass(frozen=True)
class Reference:
    """The float64 answer of a product and what its bound needs.

    Attributes:
        sum: float64 `[M, N]`, sum over k of a' * w.
        spread: float64 `[M, N]`, root of the sum over k of (a' * w)^2: the size of errors that do not conspire.
        k: number of terms.
        bias: float64 `[N]` or None.
        activation: name or None.
        dtype: type of the activations, hence of the output.
    """

    sum: Tensor
    spread: Tensor
    k: int
    bias: Tensor | None
    activation: str | None
    dtype: torch.dtype

    @property
    def argument(self) -> Tensor:
        """float64 `[M, N]`: what the activation function is applied to."""
        return self.sum if self.bias is None else self.sum + self.bias

    @property
    def value(self) -> Tensor:
        """float64 `[M, N]`: activation(sum + bias)."""
        return activate(self.argument, self.activation)

    def rows(self, begin: int, end: int) -> Reference:
        """The same for rows [begin, end) alone."""
        part = slice(begin, end)
        return Reference(self.sum[part], self.spread[part], self.k, self.bias, self.activation, self.dtype)


def scaled_activations(a: Tensor, act_scale: Tensor | None = None, perm: Tensor | None = None) -> Tensor:
    """The activations as the product sees them: column k is RN(RN32(a * act_scale))[:, perm[k]], RN to `a`'s type."""
    if act_scale is not None:
        a = (a.float() * act_scale.float()).to(a.dtype)
    return a if perm is None else a[..., perm.long()]


def reference(
    a: Tensor,
    w_hat: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    act_scale: Tensor | None = None,
    perm: Tensor | None = None,
) -> Reference:
    """Multiplies in float64, in blocks of channels, on `a`'s device.

    Args:
        a: floating `[..., K]`; leading dimensions are flattened.
        w_hat: floating `[N, K]`, exactly the weights the product under test uses (`dequantized_weight`).
        bias: floating `[N]`.
        activation: as `qcutlass.gemm`'s.
        act_scale: floating `[K]`, multiplied onto `a` and rounded to its type.
        perm: integer `[K]`, column k of `w_hat` meets column `perm[k]` of the activations.
    """
    x = scaled_activations(a, act_scale, perm).reshape(-1, a.shape[-1]).double()
    (m, k), n = x.shape, w_hat.shape[0]
    total, squares = (torch.empty(m, n, dtype=torch.float64, device=a.device) for _ in range(2))
    x_squared = x.square()
    block = max(16, 2**24 // max(1, k))  # 128 MB of float64 weights
    for begin in range(0, n, block):
        w = w_hat[begin : begin + block].double()
        total[:, begin : begin + block] = x @ w.T
        squares[:, begin : begin + block] = x_squared @ w.square().T
    return Reference(total, squares.sqrt(), k, None if bias is None else bias.double(), activation, a.dtype)


def bound(ref: Reference, *, splits: int = 1) -> Tensor:
    """Oracle T: the largest error of a correct product, element by element.

    Without bias and activation it is u*|ref|*(1 + 2^-7) + 2^-23*(K/8 + 16 + splits)*(|ref| + 4Q) + 2^-25, with u the
    unit roundoff of the output and Q = `ref.spread`. A bias adds its own fp32 rounding; an activation multiplies the
    error of its argument by its largest slope and adds 2^-22 of the argument for its evaluation in fp32.

    Args:
        ref: what `reference` returned.
        splits: number of partial sums that are added at the end (split-K).

    Returns:
        float64 `[M, N]`.
    """
    value, argument = ref.value, ref.argument
    error = _STEP * (ref.k / 8 + 16 + splits) * (ref.sum.abs() + 4 * ref.spread)
    if ref.bias is not None:
        error = error + _STEP / 2 * argument.abs()
    if ref.activation is not None:
        error = SLOPE[ref.activation] * error
    if ref.activation not in (None, "relu"):
        error = error + _EVALUATION * argument.abs()
    return UNIT_ROUNDOFF[ref.dtype] * _ROUNDING_SLACK * value.abs() + error + _TINY


def error_ratios(out: Tensor, ref: Reference, *, splits: int = 1) -> Tensor:
    """Element-wise |out - ref| / bound, float64 `[M, N]`.

    NaN is right where the reference has NaN, infinity where the reference is that infinity or rounds to it; elsewhere
    both count as an infinite error.
    """
    actual, value, limit = out.reshape(ref.sum.shape).double(), ref.value, bound(ref, splits=splits)
    ratio = (actual - value).abs() / limit
    overflows = value.abs() + limit >= torch.finfo(ref.dtype).max * (1 + UNIT_ROUNDOFF[ref.dtype] / 2)
    right = (actual.isnan() & value.isnan()) | (actual == value)
    right |= actual.isinf() & overflows & (actual.sign() == value.sign())
    return ratio.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(right, 0)


def error_ratio(out: Tensor, ref: Reference, *, splits: int = 1) -> float:
    """Largest |out - ref| / bound: at most 1 for a correct product, 0 for an empty one."""
    rows = max(1, 2**22 // max(1, ref.sum.shape[1]))
    out = out.reshape(ref.sum.shape)
    return max(
        (
            float(error_ratios(out[begin : begin + rows], ref.rows(begin, begin + rows), splits=splits).max())
            for begin in range(0, out.shape[0] if out.numel() else 0, rows)
        ),
        default=0.0,
    )


def assert_close(out: Tensor, ref: Reference, *, splits: int = 1, label: object = "") -> float:
    """Asserts oracle T and returns the largest ratio; `label` (say, a `Problem`) opens the message of a failure."""
    assert out.dtype == ref.dtype, f"{label}: output has {out.dtype}, expected {ref.dtype}"
    worst = error_ratio(out, ref, splits=splits)
    if worst > 1:
        ratios = error_ratios(out, ref, splits=splits)
        m, n = divmod(int(ratios.argmax()), ratios.shape[1])
        got, want = out.reshape(ratios.shape)[m, n].item(), ref.value[m, n].item()
        limit = bound(ref, splits=splits)[m, n].item()
        raise AssertionError(
            f"{label}: {int((ratios > 1).sum())} of {ratios.numel()} elements are out of bounds; worst [{m}, {n}] = "
            f"{got!r}, reference {want!r}, error {worst:.4g} times the bound {limit:.4g}"
        )
    return worst


def assert_equal(out: Tensor, expected: Tensor, *, label: object = "") -> None:
    """Asserts equal type, shape and every value (NaN equals NaN; zeros of either sign are equal)."""
    assert out.dtype == expected.dtype, f"{label}: dtype {out.dtype}, expected {expected.dtype}"
    assert out.shape == expected.shape, f"{label}: shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
    wrong = ~(out == expected)
    if out.is_floating_point():
        wrong &= ~(out.isnan() & expected.isnan())
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{label}: {int(wrong.sum())} of {wrong.numel()} elements differ; first {list(index)} = "
            f"{out[index].item()!r}, expected {expected[index].item()!r}"
        )


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

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.a.reshape(-1, self.codes.shape[1]).shape[0], *self.codes.shape

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `qcutlass.gemm`; group_size and bits only where the shapes do not tell them."""
        return {name: getattr(self, name) for name in _EPILOGUE if getattr(self, name) is not None} | self.ambiguous

    @property
    def ambiguous(self) -> dict[str, int]:
        """Those of group_size and bits that the shapes of weights and scales do not tell."""
        k = self.codes.shape[1]
        ragged = min(self.group_size, k) * self.scales.shape[0] != k
        return ({"group_size": self.group_size} if ragged else {}) | ({"bits": self.bits} if k <= 32 else {})

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """`[N, K]` in `dtype` (None: float32), columns in the order of the codes."""
        return dequantized_weight(self.codes, self.scales, self.zeros, self.group_size, self.bits, dtype)

    def reference(self, weight_dtype: torch.dtype | None = None) -> Reference:
        """The float64 answer for weights rounded to `weight_dtype` (None: kept in fp32)."""
        return reference(self.a, self.weight(weight_dtype), **{name: getattr(self, name) for name in _EPILOGUE})

    def __repr__(self) -> str:
        m, n, k = self.shape
        zeros = "none" if self.zeros is None else str(self.zeros.dtype).removeprefix("torch.")
        epilogue = [name for name in ("bias", "act_scale", "perm") if getattr(self, name) is not None]
        return (
            f"M={m} N={n} K={k} w{self.bits} g{self.group_size} a={self.a.dtype} scales={self.scales.dtype} "
            f"zeros={zeros} activation={self.activation} {' '.join(epilogue)} seed={self.seed}"
        )


@dataclass(frozen=True)
class Case:
    """What kind of product to test; `random` and `exact` fill it with data.

    Attributes:
        m, n, k: sizes.
        bits: 4 or 8.
        group_size: columns that share a scale.
        zeros: "none" (symmetric), "int" or "real".
        dtype: of the activations, the bias, `act_scale` and the output.
        scale_dtype: of the scales; None: `dtype`.
        zero_dtype: of the zeros; None: uint8 for zeros="int", the scales' type for zeros="real".
        bias, act_scale, perm: whether there is one.
        activation: name or None.
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

    @property
    def _zero_span(self) -> int:  # int8 holds half of what 8-bit codes need
        return 1 << (min(self.bits, 7) if self.zero_dtype == torch.int8 else self.bits)

    def _problem(self, seed: int, **tensors: Tensor | None) -> Problem:
        """Casts float64 or integer tensors to the case's types."""
        scale_dtype = self.scale_dtype or self.dtype
        zero_dtype = self.zero_dtype or (torch.uint8 if self.zeros == "int" else scale_dtype)
        types = {"codes": torch.uint8, "scales": scale_dtype, "zeros": zero_dtype, "perm": torch.int32}
        cast: dict[str, Any] = {
            name: t if t is None else t.to(types.get(name, self.dtype)) for name, t in tensors.items()
        }
        return Problem(bits=self.bits, group_size=self.group_size, activation=self.activation, seed=seed, **cast)

    def random(self, *, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
        """Data as a layer has it: normal activations with outlier columns, every code, scales within a factor of 4."""
        g = torch.Generator(device).manual_seed(seed)
        n, k, groups, span = self.n, self.k, -(-self.k // self.group_size), 2**self.bits

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=g, device=device)

        def integers(end: int, *shape: int) -> Tensor:
            return torch.randint(0, end, shape, generator=g, device=device, dtype=torch.int32)

        a = torch.randn(self.m, k, generator=g, device=device)
        a[:, integers(k, 1 + k // 256)] *= 16
        whole, real = integers(self._zero_span, groups, n), (0.25 + uniform(groups, n) / 2) * span
        zeros = {"none": None, "int": whole, "real": real}
        return self._problem(
            seed,
            a=a,
            codes=torch.randint(0, span, (n, k), generator=g, device=device, dtype=torch.uint8),
            scales=(2 + 6 * uniform(groups, n)) / (span * math.sqrt(k)),  # outputs of a few units
            zeros=zeros[self.zeros],
            bias=torch.randn(n, generator=g, device=device) if self.bias else None,
            act_scale=0.5 + 1.5 * uniform(k) if self.act_scale else None,
            perm=torch.randperm(k, generator=g, device=device) if self.perm else None,
        )

    def exact(self, *, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Problem, Tensor]:
        """Oracle E: a problem whose sums are exact in fp32 in any order, and the output it must give, `[m, n]`.

        Activations and code - zero are integers (half integers for 4-bit codes with real zeros), scales are powers of
        two, and the sum of |a * w| stays under 2^24 units of the smallest term. Every third row and every second
        channel is non-negative, so that sums grow past what 16 bits hold: a 16-bit accumulator shows.
        ValueError if `activation` is neither None nor "relu": the others are not exact.
        """
        if self.activation not in (None, "relu"):
            raise ValueError(f"activation must be None or 'relu' (the others are not exact), got {self.activation!r}")
        g = torch.Generator(device).manual_seed(seed)
        n, k, groups, span = self.n, self.k, -(-self.k // self.group_size), 2**self.bits
        halves = self.zeros == "real" and self.bits == 4  # 8-bit codes less a half integer would not fit bf16

        def integers(low: int, high: int, *shape: int) -> Tensor:  # both ends included
            return torch.randint(low, high + 1, shape, generator=g, device=device)

        unit = 2.0 ** -(2 + halves + self.act_scale)
        headroom = (_EXACT_LIMIT * unit - 64) / (k * span * (2 if self.act_scale else 1))
        largest = min(128, max(1, int(headroom)))
        a = integers(-largest, largest, self.m, k).double()
        if headroom < 1:  # so many terms that only some can count
            a *= torch.rand(self.m, k, generator=g, device=device) < headroom
        a[::3] = a[::3].abs()

        some = integers(0, self._zero_span - 1, groups, n).double() / (2 if halves else 1)
        zeros = None if self.zeros == "none" else some
        codes = integers(0, span - 1, n, k).to(torch.uint8)
        floor = torch.full((groups, n), span // 2, device=device) if zeros is None else zeros.ceil()
        floor = floor.to(torch.uint8).T.repeat_interleave(min(self.group_size, k), dim=1)[:, :k]
        codes[::2] = codes[::2].maximum(floor[::2])
        scales = torch.exp2(-integers(0, 2, groups, n).double())
        bias = integers(-64, 64, n).double() if self.bias else None
        act_scale = torch.exp2(integers(-1, 1, k).double()) if self.act_scale else None
        perm = torch.randperm(k, generator=g, device=device) if self.perm else None

        def problem(shrink: float) -> Problem:
            shrunk = {"scales": scales * shrink, "bias": None if bias is None else bias * shrink}
            return self._problem(seed, a=a, codes=codes, zeros=zeros, act_scale=act_scale, perm=perm, **shrunk)

        result = problem(1.0)
        total = reference(result.a.abs(), result.weight().abs(), act_scale=result.act_scale, perm=result.perm).sum + 64
        assert bool((total < _EXACT_LIMIT * unit).all()), f"the generator is wrong: {result} is not exact in fp32"
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


class Poisoned:
    """A tensor inside a larger buffer of sentinel NaNs: shows what is not written, and what is written elsewhere.

    Args:
        shape, dtype, device: of the tensor; at most two dimensions, float16, bfloat16 or float32.
        offset: elements by which the tensor's start is moved from an aligned address.
        padding: elements between the end of a row and the start of the next.

    Example:
        >>> import torch
        >>> from qcutlass.testing import Poisoned
        >>> box = Poisoned((2, 3), torch.float16)
        >>> _ = box.tensor.fill_(1)
        >>> box.check()
    """

    BORDER: Final = 1024  # elements on either side

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        offset: int = 0,
        padding: int = 0,
    ) -> None:
        stride = shape[-1] + padding
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        self._sentinel: int = 0x7FED5EED if dtype == torch.float32 else 0x7FED  # NaNs that no arithmetic produces
        size = 2 * self.BORDER + offset + math.prod(shape[:-1]) * stride
        self._bits = torch.full((size,), self._sentinel, dtype=integer, device=device)
        self._view = (shape, (stride, 1)[-len(shape) :], self.BORDER + offset)
        self.tensor: Tensor = self._bits.view(dtype).as_strided(*self._view)

    @classmethod
    def around(cls, content: Tensor, *, offset: int = 0, padding: int = 0) -> Poisoned:
        """The same with a copy of `content` inside: an input whose surroundings must not be used."""
        box = cls(tuple(content.shape), content.dtype, content.device, offset=offset, padding=padding)
        box.tensor.copy_(content)
        return box

    def check(self, label: object = "") -> None:
        """Asserts that every element of the tensor was written and nothing around it."""
        unwritten = self._bits.as_strided(*self._view) == self._sentinel
        assert not bool(unwritten.any()), (
            f"{label}: {int(unwritten.sum())} elements were not written, first {unwritten.nonzero()[0].tolist()}"
        )
        self.check_surroundings(label)

    def check_surroundings(self, label: object = "") -> None:
        """Asserts that nothing outside the tensor was written."""
        touched = self._bits != self._sentinel
        touched.as_strided(*self._view).fill_(False)
        assert not bool(touched.any()), (
            f"{label}: {int(touched.sum())} elements around the tensor were written, the first one "
            f"{int(touched.nonzero()[0]) - self._view[2]} elements from its start"
        )

    def is_untouched(self) -> bool:
        """Whether the whole buffer still holds its sentinel: nothing was written at all."""
        return bool((self._bits == self._sentinel).all())


def poison_free_memory(device: torch.device | str, megabytes: int = 64) -> None:
    """Fills and frees blocks of the CUDA caching allocator, so that scratch memory taken next starts as NaN."""
    blocks = [torch.empty(size, device=device) for size in (128, 4096, 65536, 262144) for _ in range(4)]
    blocks.append(torch.empty(megabytes << 18, device=device))
    for block in blocks:
        block.fill_(math.nan)
