"""The float64 answer of a product, and how far a correct one may be from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

UNIT_ROUNDOFF: Final = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""Half the distance from 1 to the next number: the relative error of rounding to nearest."""
UNDERFLOW: Final = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}
"""The error of rounding results near 0: half of fp16's smallest subnormal; the others' subnormals may become 0."""

_ROUNDING_SLACK: Final = 1 + 2.0**-7  # the value that is rounded is itself a little off: u * |x'| against u * |x|
_STEP: Final = 2.0**-23  # tensor cores truncate inside a step: a whole unit in the last place of fp32
EXACT_LIMIT: Final = 2**24
"""fp32 holds every integer up to here."""
ALIGNMENT: Final = 2.0**-12
"""What the asynchronous MMAs of sm_90 lose of sums of fp8 products: see `EightBitReference`."""
_EVALUATION: Final = 2.0**-22  # error of an activation function computed in fp32, relative to its argument

# Largest slope of each activation, rounded up: how much an error of the argument can grow.
# SiLU: 1.0999 at 2.40; GELU: 1.1289 at sqrt(2); its tanh form: 1.1290 near there.
SLOPE: Final[dict[str | None, float]] = {None: 1.0, "relu": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}


GATES: Final = {"silu_mul": "silu", "gelu_tanh_mul": "gelu_tanh"}
"""The activations of gated MLPs: of channels in turns of 16, the first ones' activation multiplies the others."""
_TURN: Final = 16


def gate_and_up(x: Tensor) -> tuple[Tensor, Tensor]:
    """Both halves `[M, N / 2]` of channels `[M, N]` in turns of 16."""
    m, n = x.shape
    gate, up = x.view(m, n // (2 * _TURN), 2, _TURN).unbind(2)
    return gate.reshape(m, n // 2), up.reshape(m, n // 2)


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


_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1, by the three bits below the sign."""


def numbers_of_codes(codes: Tensor, weight_dtype: str) -> Tensor:
    """The floating numbers that codes of "e2m1" or "e4m3" are, float32."""
    if weight_dtype == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    magnitudes = torch.tensor(_MAGNITUDES, device=codes.device)[(codes & 7).long()]
    return torch.where(codes < 8, magnitudes, -magnitudes)


def combined_levels(integers: Tensor, supers: Tensor | None) -> Tensor:
    """float32 `[G, N]` of both levels."""
    if supers is None:
        return integers.float()
    block = torch.arange(len(integers), device=integers.device) * len(supers) // len(integers)
    return (integers.double() * supers.double()[block]).float()


def dequantized_weight(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    bits: int,
    dtype: torch.dtype | None = None,
    minimums: Tensor | None = None,
    weight_dtype: str | None = None,
    global_scale: Tensor | None = None,
    super_scales: Tensor | None = None,
    super_minimums: Tensor | None = None,
) -> Tensor:
    """The weights that codes stand for: RN(RN32(RN32(code - zero) * scale)), RN to `dtype`.

    With minimums RN(RN32(code * scale - minimum)): the product has 32 digits, fp64 holds it; its difference to the
    minimum would be rounded there only where they are 2^20 times apart. Floating codes have no zero, and the scale
    RN32(scale * global_scale).

    Args:
        codes: uint8 `[N, K]`.
        scales: floating `[G, N]`, G = ceil(K / group_size), or `[N]`: one a channel.
        zeros: shaped as `scales`, integer or floating; None: 2^(bits - 1).
        group_size: columns that share a scale; the last group may be short.
        bits: 4 or 8.
        dtype: type of the result; None: float32, which holds the products as they are.
        minimums: shaped as `scales`, floating; or None.
        weight_dtype: of floating codes, "e2m1" or "e4m3"; None: integers.
        global_scale: float32 `[1]`, or None.
        super_scales, super_minimums: float16 `[B, N]`: numbers that the integers of G / B neighbouring groups are
            times, which fp32 holds exactly; None: scales and minimums are numbers.

    Returns:
        `[N, K]`.
    """
    n, k = codes.shape
    scales = combined_levels(scales.reshape(-1, n), super_scales)
    if minimums is not None:
        minimums = combined_levels(minimums.reshape(-1, n), super_minimums)
        scale, minimum = (
            part.reshape(-1, n).double().T.repeat_interleave(min(group_size, k), dim=1)[:, :k]
            for part in (scales, minimums)
        )
        return (codes.double() * scale - minimum).float().to(dtype or torch.float32)
    scales = scales if global_scale is None else scales * global_scale
    numbers = codes if weight_dtype is None else numbers_of_codes(codes, weight_dtype)
    middle = 2.0 ** (bits - 1) if weight_dtype is None else 0.0
    shift = torch.full_like(scales, middle) if zeros is None else zeros.reshape(-1, n).float()
    weight = torch.empty(n, k, dtype=dtype or torch.float32, device=codes.device)
    for group in range(scales.shape[0]):
        columns = slice(group * group_size, min(k, (group + 1) * group_size))
        difference = numbers[:, columns].float() - shift[group, :, None]
        weight[:, columns] = difference * scales[group, :, None]
    return weight


@dataclass(frozen=True)
class Reference:
    """The float64 answer of a product and what its bound needs.

    Attributes:
        sum: float64 `[M, N]`, sum over k of a' * w.
        spread: float64 `[M, N]`, root of the sum over k of (a' * w)^2: the size of errors that do not conspire. Where
            w = code * scale - minimum, and sums of codes are scaled, of (a' * code * scale)^2 + (a' * minimum)^2.
        k: number of terms.
        bias: float64 `[N]` or None.
        activation: name or None.
        dtype: type of the activations, hence of the output.
        residual: float64 `[M, columns of the output]` or None.
        rounds_between: the product is rounded to `dtype` before its gate, and what is added to a residual before that,
            as on GPUs.
    """

    sum: Tensor
    spread: Tensor
    k: int
    bias: Tensor | None
    activation: str | None
    dtype: torch.dtype
    residual: Tensor | None = field(default=None, kw_only=True)
    rounds_between: bool = field(default=False, kw_only=True)

    @property
    def argument(self) -> Tensor:
        """float64 `[M, N]`: what the activation function is applied to."""
        return self.sum if self.bias is None else self.sum + self.bias

    @property
    def value(self) -> Tensor:
        """`activation(sum + bias) + residual` in float64, `[M, N]`; with a gate `[M, N / 2]`."""
        value = self.finished
        return value if self.residual is None else value + self.residual

    @property
    def finished(self) -> Tensor:
        """The same without the residual."""
        if self.activation not in GATES:
            return activate(self.argument, self.activation)
        gate, up = gate_and_up(self.argument)
        return activate(gate, GATES[self.activation]) * up

    @property
    def bare(self) -> Reference:
        """The product without gate and residual."""
        activation = None if self.activation in GATES else self.activation
        return replace(self, activation=activation, residual=None, rounds_between=False)

    def rows(self, begin: int, end: int) -> Self:
        """The same for rows [begin, end) alone."""
        residual = None if self.residual is None else self.residual[begin:end]
        return replace(self, sum=self.sum[begin:end], spread=self.spread[begin:end], residual=residual)

    def sum_error(self, splits: int) -> Tensor:
        """float64 `[M, N]`: how far from `sum` the fp32 number may be that bias and activation get."""
        return _STEP * (self.k / 8 + 16 + splits) * (self.sum.abs() + 4 * self.spread)

    @property
    def underflow(self) -> float:
        """Error of results near 0, where it is not relative."""
        return UNDERFLOW[self.dtype]


_Reference = TypeVar("_Reference", bound=Reference)


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
    residual: Tensor | None = None,
    rounds_between: bool | None = None,
) -> Reference:
    """Multiplies in float64, in blocks of channels, on `a`'s device.

    Args:
        a: floating `[..., K]`; leading dimensions are flattened.
        w_hat: floating `[N, K]`, exactly the weights the product under test uses (`dequantized_weight`).
        bias: floating `[N]`.
        activation: as `qcutlass.gemm`'s.
        act_scale: floating `[K]`, multiplied onto `a` and rounded to its type.
        perm: integer `[K]`, column k of `w_hat` meets column `perm[k]` of the activations.
        residual: floating, of the output's shape.
        rounds_between: as `Reference` has it; None: as the device of `a` computes gates and residuals.
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
    bias = None if bias is None else bias.double()
    found = Reference(total, squares.sqrt(), k, bias, activation, a.dtype)
    return finished_by(found, residual, rounds_between)


def finished_by(ref: _Reference, residual: Tensor | None, rounds_between: bool | None = None) -> _Reference:
    """With a residual; `rounds_between`: None: as the device computes gates and residuals."""
    if rounds_between is None:
        rounds_between = ref.sum.is_cuda and (residual is not None or ref.activation in GATES)
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1]).double()
    return replace(ref, residual=residual, rounds_between=rounds_between)


def bound(ref: Reference, *, splits: int = 1) -> Tensor:
    """Oracle T: the largest error of a correct product, element by element.

    Without bias and activation it is u*|ref|*(1 + 2^-7) + 2^-23*(K/8 + 16 + splits)*(|ref| + 4Q) + e, with u the unit
    roundoff of the output, Q = `ref.spread` and e = `ref.underflow` (`EightBitReference` has another middle term):

    * The first term is the rounding of the output.
    * The second is the error of the fp32 sum: 2^-23 of a partial sum, which tensor cores may lose by truncating, for
      each of K/8 + 16 + splits additions. These are one for every eight products, one for each slice of a block (up to
      16) and one for each split. |ref| + 4Q stands for the size of partial sums of terms that do not conspire. So it
      is a bound for random data, not for the worst case.
    * The last is the rounding of outputs near 0: 2^-25 in fp16, 2^-126 in bf16 and fp32.

    A bias adds its own fp32 rounding. An activation multiplies the error of its argument by its largest slope and adds
    2^-22 of the argument for its evaluation in fp32. A gate multiplies the error of either factor by the other factor,
    and adds the product of both errors and the rounding of its own product. A residual adds the rounding of its sum. If
    the product is rounded before gate and residual, as on GPUs, the errors are those of the rounded product, and the
    result of a gate is rounded again before a residual.

    Args:
        ref: what `reference` returned.
        splits: number of partial sums that are added at the end (split-K).

    Returns:
        float64, of the output's shape.
    """
    return rounding_error(ref.value, ref.dtype) + evaluation_error(ref, splits=splits) + ref.underflow


def rounding_error(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The part of the bound that is the last rounding, to the type of the output."""
    return UNIT_ROUNDOFF[dtype] * _ROUNDING_SLACK * value.abs()


def evaluation_error(ref: Reference, *, splits: int = 1) -> Tensor:
    """The part of the bound that comes before it: how far from `ref.value` the fp32 result may be."""
    if ref.rounds_between:
        error = bound(ref.bare, splits=splits)
    else:
        error = ref.sum_error(splits)
        if ref.bias is not None:
            error = error + _STEP / 2 * ref.argument.abs()
    if ref.activation in GATES:
        error = _gate_error(ref, error)
        if ref.rounds_between and ref.residual is not None:
            error = error + rounding_error(ref.finished.abs() + error, ref.dtype) + ref.underflow
    elif not ref.rounds_between:
        error = _activation_error(ref.argument, ref.activation, error)
    return error if ref.residual is None else error + _STEP / 2 * (ref.value.abs() + error)


def _activation_error(argument: Tensor, activation: str | None, error: Tensor) -> Tensor:
    """How far an activation may be from its value if its argument has this error."""
    if activation is not None:
        error = SLOPE[activation] * error
    return error if activation in (None, "relu") else error + _EVALUATION * argument.abs()


def _gate_error(ref: Reference, error: Tensor) -> Tensor:
    """That of s * up, s = activation(gate), from the `error` of both arguments: |up| e_s + |s| e_up + e_s e_up, and the
    rounding of the product."""
    assert ref.activation is not None
    (gate, up), (gate_error, up_error) = gate_and_up(ref.argument), gate_and_up(error)
    name = GATES[ref.activation]
    factor, factor_error = activate(gate, name), _activation_error(gate, name, gate_error)
    found = up.abs() * factor_error + factor.abs() * up_error + factor_error * up_error
    return found + _STEP / 2 * (ref.finished.abs() + found)


def error_ratios(out: Tensor, ref: Reference, *, splits: int = 1) -> Tensor:
    """Element-wise |out - ref| / bound, float64, of the output's shape.

    NaN is right where the reference has NaN, infinity where the reference is that infinity or rounds to it; elsewhere
    both count as an infinite error.
    """
    value, limit = ref.value, bound(ref, splits=splits)
    actual = out.reshape(value.shape).double()
    ratio = (actual - value).abs() / limit
    overflows = value.abs() + limit >= torch.finfo(ref.dtype).max * (1 + UNIT_ROUNDOFF[ref.dtype] / 2)
    right = (actual.isnan() & value.isnan()) | (actual == value)
    right |= actual.isinf() & overflows & (actual.sign() == value.sign())
    return ratio.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(right, 0)


def error_ratio(out: Tensor, ref: Reference, *, splits: int = 1) -> float:
    """Largest |out - ref| / bound: at most 1 for a correct product, 0 for an empty one."""
    rows = max(1, 2**22 // max(1, ref.sum.shape[1]))
    out = out.reshape(ref.sum.shape[0], -1) if out.numel() else out
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
