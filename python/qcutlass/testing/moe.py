"""Mixtures of experts: problems, exact routing and sums, the float64 answer of a block and how far a correct one may be
from it.

The bound of a block goes through its steps. A product's errors are oracle T's (`bounds`); what its operand is off by
reaches its sums as sum |w| |error|, the worst case. An activation multiplies the error of its argument by its largest
slope, and a product of two errs as both do. The last step adds up what the slots err by, and roundings of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass.testing.bounds import SLOPE, UNDERFLOW, UNIT_ROUNDOFF, activate, bound, dequantized_weight, reference
from qcutlass.testing.decoder import Answer
from qcutlass.testing.fields import check_fields, generator
from qcutlass.testing.problems import Case, Zeros

_ROUNDING: Final = UNIT_ROUNDOFF[torch.float32]
_EVALUATION: Final = 2.0**-21  # of a gate in fp32, relative to gate * up: see `decoder.gate_answer`

# An operand that is off makes a product's own errors, of at most 2^-8 of its terms and its sum, larger by that share.
_SECOND_ORDER: Final = 1 + 2.0**-7

_GATES: Final = {"silu": ("silu", 1.0, math.inf, 0.0), "gelu_tanh": ("gelu_tanh", 1.0, math.inf, 0.0),
                 "swigluoai": ("silu", 1.702, 7.0, 1.0)}  # fmt: skip
"""The function of a gated activation, its alpha, its limit, and what is added to up."""


@dataclass(frozen=True, eq=False, repr=False)
class ExpertCodes:
    """The weights of experts in canonical form: codes `[E, N, K]`, scales and zeros `[E, G, N]`, bias `[E, N]`.

    The others as in `Problem`, with the experts' dimension before theirs.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    bits: int
    group_size: int
    weight_dtype: str | None = None
    global_scale: Tensor | None = None
    minimums: Tensor | None = None

    def weight(self, expert: int) -> Tensor:
        """float32 `[N, K]`."""
        zeros, minimums, whole = (
            part if part is None else part[expert] for part in (self.zeros, self.minimums, self.global_scale)
        )
        given = self.codes[expert], self.scales[expert], zeros, self.group_size, self.bits
        return dequantized_weight(*given, None, minimums, self.weight_dtype, whole)

    @property
    def ambiguous(self) -> dict[str, int]:
        """Those of group_size and bits that the shapes of weights and scales do not tell."""
        k = self.codes.shape[2]
        ragged = min(self.group_size, k) * self.scales.shape[1] != k
        return ({"group_size": self.group_size} if ragged else {}) | ({"bits": self.bits} if k <= 32 else {})


@dataclass(frozen=True, eq=False)
class MoeProblem:
    """A block to compute: its case, activations `[T, H]`, both weights, ids and weights `[T, k]`."""

    case: MoeCase
    x: Tensor
    gate_up: ExpertCodes
    down: ExpertCodes
    topk_ids: Tensor
    topk_weights: Tensor
    seed: int = 0

    def __repr__(self) -> str:
        return f"{self.case} seed={self.seed}"

    def tokens(self, index: Tensor | slice) -> MoeProblem:
        """The same for some tokens alone."""
        ids, weights = self.topk_ids[index], self.topk_weights[index]
        return replace(self, x=self.x[index], topk_ids=ids, topk_weights=weights)


@dataclass(frozen=True)
class MoeCase:
    """A case of blocks; `random` fills it with data.

    Attributes:
        tokens, hidden, intermediate, experts, slots: T, H, I, E and k.
        bits, group_size, zeros, dtype, bias, weight_dtype, scale_dtype: as for `Case`, of both products.
        activation, interleaved, limit: as for `qcutlass.moe.experts`.
        invalid: share of the slots whose ids are outside [0, E).
        used: experts that get tokens; None: all may.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    slots: int
    bits: int = 4
    group_size: int = 32
    zeros: Zeros = "none"
    dtype: torch.dtype = torch.float16
    bias: bool = False
    activation: str = "silu"
    interleaved: bool = False
    limit: float | None = None
    invalid: float = 0.0
    used: tuple[int, ...] | None = None
    id_dtype: torch.dtype = field(default=torch.int64, repr=False)
    weight_dtype: str | None = None
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def random(self, *, device: torch.device | str = "cpu", seed: int = 0) -> MoeProblem:
        """Normal activations, weights as `Case.random` makes them, ids without repetition where experts suffice."""
        g = generator(device, seed)
        used = torch.tensor(self.used or range(self.experts), device=device)
        scores = torch.rand(self.tokens, len(used), generator=g, device=device)
        if len(used) >= self.slots:
            ids = used[scores.topk(self.slots, dim=-1).indices] if self.tokens else used.new_empty(0, self.slots)
        else:
            ids = used[torch.randint(0, len(used), (self.tokens, self.slots), generator=g, device=device)]
        out = torch.rand(self.tokens, self.slots, generator=g, device=device) < self.invalid
        strange = torch.tensor([-1, self.experts, -7, 2**31 - 1], device=device)
        some = strange[torch.randint(0, len(strange), ids.shape, generator=g, device=device)]
        weights = torch.rand(self.tokens, self.slots, generator=g, device=device).exp().softmax(-1)
        return MoeProblem(
            self,
            x=torch.randn(self.tokens, self.hidden, generator=g, device=device).to(self.dtype),
            gate_up=self._codes(2 * self.intermediate, self.hidden, device, seed + 1),
            down=self._codes(self.hidden, self.intermediate, device, seed + 2),
            topk_ids=torch.where(out, some, ids).to(self.id_dtype),
            topk_weights=weights,
            seed=seed,
        )

    def _codes(self, n: int, k: int, device: torch.device | str, seed: int) -> ExpertCodes:
        given = 1, n, k, self.bits, self.group_size, self.zeros, self.dtype, self.scale_dtype
        case = Case(*given, bias=self.bias, weight_dtype=self.weight_dtype)
        each = [case.random(device=device, seed=seed * 1009 + expert) for expert in range(self.experts)]

        def stacked(name: str) -> Any:
            tensors = [getattr(one, name) for one in each]
            return None if tensors[0] is None else torch.stack(tensors)

        parts = {name: stacked(name) for name in ("codes", "scales", "zeros", "bias", "global_scale", "minimums")}
        return ExpertCodes(**parts, bits=self.bits, group_size=self.group_size, weight_dtype=self.weight_dtype)


def routing_answer(topk_ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, offsets and order of a routing, int32 on the CPU, one slot at a time.

    Example:
        >>> import torch
        >>> from qcutlass.testing.moe import routing_answer
        >>> [found.tolist() for found in routing_answer(torch.tensor([[1, 0], [0, -1]]), 2)]
        [[0, 1, 0, 0], [0, 2, 3], [[2, 0], [1, -1]]]
    """
    slots = topk_ids.shape[1]
    ids = topk_ids.flatten().tolist()
    places: list[list[int]] = [[] for _ in range(experts)]
    for place, expert in enumerate(ids):
        if 0 <= expert < experts:
            places[expert].append(place)
    rows, order, offsets = [0] * len(ids), [-1] * len(ids), [0]
    for each in places:
        for row, place in enumerate(each, offsets[-1]):
            rows[row], order[place] = place // slots, row
        offsets.append(offsets[-1] + len(each))
    found = [torch.tensor(values, dtype=torch.int32) for values in (rows, offsets, order)]
    return found[0], found[1], found[2].view(topk_ids.shape)


def sum_answer(y: Tensor, order: Tensor) -> Tensor:
    """The sum over slots as it must be, bit for bit: fp32 additions in the slots' order, one rounding."""
    total = torch.zeros(order.shape[0], y.shape[1], device=y.device)
    for slot in range(order.shape[1]):
        rows = order[:, slot].long()
        total += torch.where((rows >= 0)[:, None], y[rows.clamp(min=0)].float(), 0)
    return total.to(y.dtype)


def gated_answer(
    activation: str, both: Answer, interleaved: bool = False, limit: float | None = None, alpha: float | None = None
) -> Answer:
    """The gated activation of `[R, 2 I]` in float64, and the largest error in fp32 given those of its operands."""

    def parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
        return (tensor[:, ::2], tensor[:, 1::2]) if interleaved else tensor.double().chunk(2, dim=-1)  # type: ignore[return-value]

    function, default_alpha, default_limit, offset = _GATES[activation]
    scale, most = alpha or default_alpha, limit or default_limit
    (gate, up), (gate_error, up_error) = parts(both[0].double()), parts(both[1])
    gate, up = gate.clamp(max=most), up.clamp(-most, most) + offset
    value = activate(gate * scale, function) / scale
    error = SLOPE[function] * gate_error * (up.abs() + up_error) + value.abs() * up_error
    return value * up, error + _EVALUATION * (gate * up).abs()


def _rounded(answer: Answer, dtype: torch.dtype) -> Answer:
    value, error = answer
    return value, error + UNIT_ROUNDOFF[dtype] * (value.abs() + error) + UNDERFLOW[dtype]


def _product(x: Answer, experts: ExpertCodes, expert: int, dtype: torch.dtype, rounds_weights: bool) -> Answer:
    """One expert's product, its result rounded to `dtype`."""
    value, off = x
    weight = experts.weight(expert)
    bias = None if experts.bias is None else experts.bias[expert]
    found = replace(reference(value, weight, bias=bias), dtype=dtype)
    error = bound(found) + _SECOND_ORDER * (off @ weight.double().abs().T)
    if rounds_weights:
        error = error + UNIT_ROUNDOFF[dtype] * _SECOND_ORDER * ((value.abs() + off) @ weight.double().abs().T)
    return found.value, error


def experts_answer(problem: MoeProblem, *, rounds_weights: bool = False) -> Answer:
    """The block's float64 answer `[T, H]`, and its largest error before it is rounded to the output's type.

    Args:
        problem: of any device.
        rounds_weights: whether products may round weights to the activations' type first.

    Example:
        >>> from qcutlass.testing.moe import MoeCase, experts_answer
        >>> value, error = experts_answer(MoeCase(3, 64, 32, experts=4, slots=2).random())
        >>> value.shape == error.shape == (3, 64)
        True
    """
    case, dtype, x = problem.case, problem.x.dtype, problem.x.double()
    value = torch.zeros(x.shape[0], problem.down.codes.shape[1], dtype=torch.float64, device=x.device)
    error, magnitude = torch.zeros_like(value), torch.zeros_like(value)
    for expert in range(case.experts):
        token, slot = (problem.topk_ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        rows = x[token]
        both = _product((rows, torch.zeros_like(rows)), problem.gate_up, expert, dtype, rounds_weights)
        gated = _rounded(gated_answer(case.activation, both, case.interleaved, case.limit), dtype)
        y, off = _product(gated, problem.down, expert, dtype, rounds_weights)
        scale = problem.topk_weights[token, slot].double()[:, None]
        y, off = scale * y, scale.abs() * (off + _ROUNDING * y.abs()) + UNDERFLOW[torch.float32]
        value.index_add_(0, token, y)
        error.index_add_(0, token, off)
        magnitude.index_add_(0, token, y.abs() + off)
    return value, error + case.slots * _ROUNDING * magnitude
