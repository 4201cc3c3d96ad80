"""The block of a mixture of experts, `torch.ops.qcutlass.moe_experts`: routing, two grouped products, gate and sum."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.products.checks import (
    ceil_div,
    check_dense,
    check_flag,
    check_inference,
    check_memory,
    check_operand,
    check_out,
    check_tensor,
    shape_of,
    tensors_of,
)
from qcutlass.products.epilogue import GATE_STEP
from qcutlass.products.functions import gemm_grouped
from qcutlass.products.grouped import GATHER_BYTES, GATHER_ROW_BYTES, GroupedCall
from qcutlass.products.kind import schema_of
from qcutlass.products.library import is_eager, register
from qcutlass.products.memory import check_out_memory
from qcutlass.products.moe_operators import (
    IDS,
    ROUTER_WEIGHTS,
    check_gate,
    check_routing,
    check_rows,
    gate_rows,
    route,
    sum_slots_into,
)
from qcutlass.products.packing import PackedWeights, WeightShape

MOST_BYTES: Final = 1023 << 20
"""Of memory for the tokens that are computed at once: hundreds of rows an expert, which cost more arithmetic than bytes
of weights, so that reading these once more for the next tokens costs little. Of 1 GiB a MiB is left for offsets of
experts and for what allocators round up."""
_ROUTING_BYTES: Final = 4 + 4 + 4
"""Of a row in a routing: its token, its place in the order of slots, its weight."""


class ExpertWeights(NamedTuple):
    """The quantised weights `[E, N, K]` of one linear layer of all experts.

    Attributes:
        w_packed: uint8 `[E, ceil(N/16), ceil(K/kt), 32, 16]`: `preprocess_weights` of codes `[E, N, K]`.
        scales: `[E, G, N]`, or `[E, N]`: one a channel.
        zeros, minimums: shaped as `scales`, or None; types and meaning are those of `gemm`.
        super_scales, super_minimums: `[E, B, N]`, beside integer scales and minimums as for `gemm`, or None.
        bias: floating `[E, N]`, or None.
        group_size, bits: needed only where `gemm` needs them.
        interleaved: of gate and up: their channels take turns, as in gpt-oss; if not, all of gate comes first.
        weight_dtype: of codes that are floating numbers, as for `gemm`.
        global_scale: float32 `[E]` or `[E, 1]`, beside scales of float8_e4m3fn, or None.
        perm: int32 `[E, K]`, as for `gemm_grouped` (act-order), or None.

    Example:
        >>> import torch, qcutlass
        >>> each = [qcutlass.quantize(torch.randn(64, 256), bits=4, group_size=64) for _ in range(3)]
        >>> w_packed = qcutlass.preprocess_weights(torch.stack([q.codes for q in each]), bits=4)
        >>> weights = qcutlass.moe.ExpertWeights(w_packed, torch.stack([q.scales for q in each]))
        >>> weights.scales.shape
        torch.Size([3, 4, 64])
    """

    w_packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bias: Tensor | None = None
    group_size: int | None = None
    bits: int | None = None
    interleaved: bool = False
    weight_dtype: str | None = None
    global_scale: Tensor | None = None
    minimums: Tensor | None = None
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None
    perm: Tensor | None = None


def weights_of(name: str, given: object) -> ExpertWeights:
    """The argument called `name`, which may be a tuple of the parts; TypeError if it is none."""
    fields = ExpertWeights._fields
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= len(fields):
        count = f" of {len(given)}" if isinstance(given, (tuple, list)) else ""
        raise TypeError(
            f"{name}: expected qcutlass.moe.ExpertWeights, with w_packed and scales at least, got "
            f"{type(given).__name__}{count}; make it of the packed weights and scales of all experts"
        )
    return ExpertWeights(*given)


class ExpertsCall(NamedTuple):
    """The arguments of one block, in the order of the operator's schema; `qcutlass.moe.experts` describes them."""

    x: Tensor
    gate_up: ExpertWeights
    down: ExpertWeights
    topk_ids: Tensor
    topk_weights: Tensor
    activation: str
    limit: float | None
    alpha: float | None
    batch_invariant: bool = False

    @staticmethod
    def of(*arguments: Any) -> ExpertsCall:
        """From the operator's arguments."""
        count = len(ExpertWeights._fields)
        x, gate_up, down, others = (
            arguments[0],
            arguments[1:][:count],
            arguments[1 + count :][:count],
            arguments[1 + 2 * count :],
        )
        return ExpertsCall(x, ExpertWeights(*gate_up), ExpertWeights(*down), *others)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of the operator."""
        x, gate_up, down, *others = self
        return x, *gate_up, *down, *others

    @property
    def experts(self) -> int:
        return self.gate_up.w_packed.shape[0]

    def check(self, out: Tensor | None) -> None:
        """Checks every argument but what needs memory addresses."""
        check_rows("x", self.x)
        for name, weights in (("gate_up", self.gate_up), ("down", self.down)):
            check_flag(f"{name}: interleaved", weights.interleaved)
        check_gate(self.activation, self.limit, self.alpha, self.gate_up.interleaved)
        if self.down.interleaved:
            raise ValueError(
                "down: interleaved: expected False, as channels of gate and up alone take turns, got True; leave it out"
            )
        tokens, hidden = self.x.shape
        check_operand("topk_ids", self.topk_ids, IDS, self.x.device, "x")
        both = _check_product("gate_up", self.x, self.gate_up)
        if both.n % 2:
            raise ValueError(f"gate_up: expected N = 2 I channels, of gate and up, got N = {both.n}")
        down = _check_product("down", self.x.new_empty((0, both.n // 2)), self.down)
        found = self.down.w_packed.shape[0]
        if found != self.experts:
            raise ValueError(f"down: expected E = {self.experts} experts as gate_up has, got {found}")
        if down.n != hidden:
            raise ValueError(f"down: expected N = H = {hidden} channels, as x has columns, got N = {down.n}")
        check_tensor("topk_weights", self.topk_weights, ROUTER_WEIGHTS)
        check_routing(self.topk_ids, self.experts, self.topk_weights)
        if self.topk_ids.shape[0] != tokens:
            raise ValueError(f"topk_ids: expected shape [T, k] with T = {tokens}, got {shape_of(self.topk_ids)}")
        if out is not None:
            check_out("x", self.x, out, hidden, self.x.dtype)


def _check_product(name: str, a: Tensor, weights: ExpertWeights) -> WeightShape:
    """The sizes of the weights called `name`, for activations like `a`; raises unless they fit."""
    if not isinstance(weights.w_packed, Tensor) or weights.w_packed.dim() == 0:
        raise TypeError(f"{name}: expected packed weights of experts, got {type(weights.w_packed).__name__}")
    offsets = a.new_empty(weights.w_packed.shape[0] + 1, dtype=torch.int32)
    try:
        return _grouped(a, weights, offsets).check(None)
    except (TypeError, ValueError, UnsupportedError) as error:
        raise type(error)(f"{name}: {error}") from None


def _grouped(a: Tensor, weights: ExpertWeights, offsets: Tensor) -> GroupedCall:
    return GroupedCall(
        a=a, offsets=offsets, bias=weights.bias, perm=weights.perm, **PackedWeights.of(weights)._asdict()
    )


def _multiply(
    a: Tensor,
    weights: ExpertWeights,
    offsets: Tensor,
    batch_invariant: bool,
    rows: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    parts = PackedWeights.of(weights)._asdict() | {"bias": weights.bias, "perm": weights.perm}
    return gemm_grouped(
        a,
        offsets=offsets,
        rows=rows,
        row_scale=row_scale,
        activation=activation,
        batch_invariant=batch_invariant,
        **parts,
    )


def _fused_gate(call: ExpertsCall) -> str | None:
    """The activation with which the first product computes the gate, too; None: it leaves gate and up."""
    gate_up = call.gate_up
    if gate_up.interleaved or gate_up.scales.shape[-1] % (2 * GATE_STEP):
        return None
    return check_gate(call.activation, call.limit, call.alpha, gate_up.interleaved).fused


def row_bytes(call: ExpertsCall) -> int:
    """What a routed row takes of memory at most, in the step that takes the most.

    Rows of `x` may be copied before the first product: kernels of `wgmma` read those of an expert one after the other.
    Copies of operands whose rows are no multiples of 16 bytes are not counted.
    """
    hidden, inner, size = call.x.shape[1], call.gate_up.scales.shape[-1] // 2, call.x.element_size()
    first = inner if _fused_gate(call) else 2 * inner
    copied = size * hidden if call.gate_up.perm is None else GATHER_ROW_BYTES + GATHER_BYTES * hidden
    ordered = 0 if call.down.perm is None else GATHER_ROW_BYTES + GATHER_BYTES * inner
    steps = {
        "gate_up": copied + size * first,
        "gate": size * (first + inner) if first > inner else 0,
        "down": size * (inner + hidden) + ordered,
    }
    return _ROUTING_BYTES + max(steps.values())


def tokens_at_once(call: ExpertsCall) -> int:
    """Equal shares of the tokens whose intermediate results fit into `MOST_BYTES`, or one."""
    most = max(1, MOST_BYTES // (row_bytes(call) * call.topk_ids.shape[1]))
    return ceil_div(call.x.shape[0], ceil_div(call.x.shape[0], most)) if call.x.shape[0] else 1


def _run(call: ExpertsCall, out: Tensor) -> None:
    """The block of checked arguments in `out`, which has unit stride along H."""
    step = tokens_at_once(call)
    gate_up, down, fused = call.gate_up, call.down, _fused_gate(call)
    for begin in range(0, call.x.shape[0], step):
        part = slice(begin, begin + step)
        rows, offsets, order, row_scale = route(call.topk_ids[part], call.experts, call.topk_weights[part])
        gated = _multiply(call.x[part], gate_up, offsets, call.batch_invariant, rows=rows, activation=fused)
        if fused is None:
            gated = gate_rows(gated, call.activation, call.limit, call.alpha, gate_up.interleaved, offsets)
        y = _multiply(gated, down, offsets, call.batch_invariant, row_scale=row_scale)
        del gated
        sum_slots_into(y, order, out[part])
        del y  # before the next tokens' results


def compute(call: ExpertsCall, out: Tensor | None) -> Tensor:
    """Runs a block at once, or through torch's dispatcher where something traces."""
    if torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0:
        check_inference(**tensors_of(call), out=out)
    if out is None:
        if is_eager(*call.arguments):
            return _experts(*call.arguments)
        check_dense(tensors_of(call))
        result: Tensor = torch.ops.qcutlass.moe_experts(*call.arguments)
        return result
    if is_eager(*call.arguments, out):
        _experts_out(*call.arguments, out=out)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
    else:
        check_dense(tensors_of(call))
        torch.ops.qcutlass.moe_experts_out(*call.arguments, out=out)
    return out


def _experts(*arguments: Any) -> Tensor:
    call = ExpertsCall.of(*arguments)
    call.check(None)
    check_memory(tensors_of(call))
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    _run(call, out)
    return out


def _experts_fake(*arguments: Any) -> Tensor:
    call = ExpertsCall.of(*arguments)
    call.check(None)
    return call.x.new_empty(call.x.shape)


def _experts_out(*arguments: Any, out: Tensor) -> None:
    call = ExpertsCall.of(*arguments)
    call.check(out)
    check_memory(tensors_of(call) | {"out": out})
    check_out_memory(out, call)
    target = out if out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    _run(call, target)
    if target is not out:
        out.copy_(target)


def _experts_out_fake(*arguments: Any, out: Tensor) -> None:
    ExpertsCall.of(*arguments).check(out)


_SCHEMA: Final = schema_of(ExpertsCall)
register(f"moe_experts({_SCHEMA}) -> Tensor", _experts, _experts_fake)
register(f"moe_experts_out({_SCHEMA}, *, Tensor(a!) out) -> ()", _experts_out, _experts_out_fake)
