"""The steps of a mixture of experts around its two grouped products, `torch.ops.qcutlass.moe_*`."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.errors import UnsupportedError
from qcutlass.products.checks import (
    ACTIVATION_OF_GATE,
    FLOATING,
    check_device,
    check_flag,
    check_inference,
    check_integer,
    check_memory,
    check_number,
    check_operand,
    check_tensor,
    names_of,
    shape_of,
)
from qcutlass.products.extension import DTYPES, backend, current_device
from qcutlass.products.library import register

IDS: Final = (torch.int32, torch.int64)
_INT32: Final = (torch.int32,)
ROUTER_WEIGHTS: Final = (torch.float32,)
_MOST_ROWS: Final = 2**30  # kernels count in 31 bits, and round the parts of warps up
_TYPES_ON: Final = {"cpu": FLOATING, "meta": FLOATING, "cuda": (torch.float16, torch.bfloat16)}


class Gate(NamedTuple):
    """A gated activation: `gate * sigmoid(z) * (up + up_offset)`.

    Attributes:
        function: SILU, z = alpha * gate; or GELU_TANH, with z of its own.
        alpha: its default.
        limit: what gate is at most, and up at most in magnitude, by default.
        up_offset: added to up.
    """

    function: _C.Activation
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0

    @property
    def fused(self) -> str | None:
        """The activation of a product that computes it, too."""
        return next((name for name, function in ACTIVATION_OF_GATE.items() if self == Gate(function)), None)


GATES: Final = {
    "silu": Gate(_C.Activation.SILU),
    "gelu_tanh": Gate(_C.Activation.GELU_TANH),
    "swigluoai": Gate(_C.Activation.SILU, alpha=1.702, limit=7.0, up_offset=1.0),
}

Routed: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Rows, offsets, order, and the scales of rows, which are empty where there are no weights."""


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check_inference(**tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0:
        check_inference(**tensors)


def check_rows(name: str, x: Tensor) -> None:
    """Raises unless `x` is a matrix of a type that products take where it is."""
    check_tensor(name, x, FLOATING)
    check_device(name, x)
    if x.dtype not in _TYPES_ON[x.device.type]:
        allowed = names_of(_TYPES_ON[x.device.type])
        raise TypeError(f"{name}: expected a tensor of {allowed} on {x.device.type}, got {names_of([x.dtype])}")
    if x.dim() != 2:
        raise ValueError(f"{name}: expected a matrix, got shape {shape_of(x)}")


def check_routing(topk_ids: Tensor, num_experts: int, topk_weights: Tensor | None) -> None:
    """Checks the arguments of `route`."""
    check_tensor("topk_ids", topk_ids, IDS)
    check_device("topk_ids", topk_ids)
    if topk_ids.dim() != 2 or topk_ids.shape[1] == 0:
        raise ValueError(f"topk_ids: expected shape [T, k] with k at least 1, got {shape_of(topk_ids)}")
    check_integer("num_experts", num_experts, minimum=1)
    if topk_ids.is_cuda and num_experts > _C.MOST_EXPERTS:
        raise UnsupportedError(f"num_experts: on CUDA expected at most {_C.MOST_EXPERTS}, got {num_experts}")
    if num_experts > _MOST_ROWS:
        raise ValueError(f"num_experts: expected at most 2^30, got {num_experts}")
    if topk_weights is not None:
        check_operand("topk_weights", topk_weights, ROUTER_WEIGHTS, topk_ids.device, "topk_ids")
        if topk_weights.shape != topk_ids.shape:
            expected = shape_of(topk_ids)
            raise ValueError(f"topk_weights: expected the shape of topk_ids, {expected}, got {shape_of(topk_weights)}")


def route(topk_ids: Tensor, num_experts: int, topk_weights: Tensor | None = None) -> Routed:
    """Where each slot's row goes; `qcutlass.moe.route` describes it."""
    rows, offsets, order, row_scale = routed = _route_fake(topk_ids, num_experts, topk_weights)
    check_memory({"topk_ids": topk_ids, "topk_weights": topk_weights})
    tokens, slots = topk_ids.shape
    if tokens * slots > _MOST_ROWS:
        raise ValueError(f"topk_ids: expected at most 2^30 elements, got shape {shape_of(topk_ids)}")
    topk_ids = topk_ids.contiguous()
    weights = None if topk_weights is None else topk_weights.contiguous()
    with current_device(rows):
        _C.moe_route(
            tokens,
            slots,
            num_experts,
            topk_ids.element_size(),
            topk_ids.data_ptr(),
            _address(weights),
            rows.data_ptr(),
            offsets.data_ptr(),
            order.data_ptr(),
            row_scale.data_ptr(),
            **backend(rows),
        )
    return routed


def _route_fake(topk_ids: Tensor, num_experts: int, topk_weights: Tensor | None = None) -> Routed:
    check_routing(topk_ids, num_experts, topk_weights)
    _check_inference(topk_weights=topk_weights)
    count = topk_ids.shape[0] * topk_ids.shape[1]
    return (
        topk_ids.new_empty(count, dtype=torch.int32),
        topk_ids.new_empty(num_experts + 1, dtype=torch.int32),
        topk_ids.new_empty(topk_ids.shape, dtype=torch.int32),
        topk_ids.new_empty(0 if topk_weights is None else count, dtype=torch.float32),
    )


def check_gate(activation: object, limit: float | None, alpha: float | None, interleaved: object) -> Gate:
    """The gate of an activation, with this limit and alpha; raises unless they fit."""
    if not isinstance(activation, str) or activation not in GATES:
        raise ValueError(f"activation: expected one of {', '.join(map(repr, GATES))}, got {activation!r}")
    check_flag("interleaved", interleaved)
    gate = GATES[activation]
    if limit is not None:
        check_number("limit", limit)
        if not limit > 0:
            raise ValueError(f"limit: expected a positive number, got {limit}")
        gate = gate._replace(limit=float(limit))
    if alpha is not None:
        check_number("alpha", alpha)
        if gate.function != _C.Activation.SILU:
            raise ValueError(f"alpha: {activation!r} has none; leave it out")
        if not math.isfinite(alpha):
            raise ValueError(f"alpha: expected a finite number, got {alpha}")
        gate = gate._replace(alpha=float(alpha))
    return gate


def _check_gate_rows(x: Tensor, offsets: Tensor | None) -> None:
    check_rows("x", x)
    if x.shape[1] % 2 or x.shape[1] == 0:
        raise ValueError(f"x: expected shape [R, 2 I], gate and up of I channels each, got {shape_of(x)}")
    if offsets is not None:
        check_operand("offsets", offsets, _INT32, x.device, "x")
        if offsets.dim() != 1 or offsets.shape[0] == 0:
            raise ValueError(f"offsets: expected shape [E + 1], got {shape_of(offsets)}")


def gate_rows(
    x: Tensor,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    interleaved: bool = False,
    offsets: Tensor | None = None,
) -> Tensor:
    """The gated activation of rows `[R, 2 I]`, `[R, I]`: `GATES` says what it is.

    Args:
        x: I channels of gate, then I of up; with `interleaved` they take turns.
        activation, limit, alpha: as for `qcutlass.moe.experts`.
        offsets: of a routing; rows past its last one are left as they come from memory.
    """
    out = _gate_fake(x, activation, limit, alpha, interleaved, offsets)
    gate = check_gate(activation, limit, alpha, interleaved)
    check_memory({"x": x, "offsets": offsets})
    if out.numel():
        rows = x if x.stride(1) == 1 else x.contiguous()
        live = None if offsets is None else offsets[-1:]
        with current_device(out):
            _C.moe_gate(
                out.shape[0],
                out.shape[1],
                _address(live),
                DTYPES[out.dtype],
                rows.data_ptr(),
                rows.stride(0),
                interleaved,
                gate.function,
                gate.alpha,
                gate.limit,
                gate.up_offset,
                out.data_ptr(),
                **backend(out),
            )
    return out


def _gate_fake(
    x: Tensor,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    interleaved: bool = False,
    offsets: Tensor | None = None,
) -> Tensor:
    _check_gate_rows(x, offsets)
    check_gate(activation, limit, alpha, interleaved)
    _check_inference(x=x)
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _check_sum(y: Tensor, order: Tensor) -> None:
    check_rows("y", y)
    check_operand("order", order, _INT32, y.device, "y")
    if order.dim() != 2 or order.shape[1] == 0:
        raise ValueError(f"order: expected shape [T, k] with k at least 1, got {shape_of(order)}")
    if y.shape[1] == 0:
        raise ValueError(f"y: expected shape [R, N] with N at least 1, got {shape_of(y)}")


def sum_slots(y: Tensor, order: Tensor) -> Tensor:
    """`out[t]` = the sum of `y[order[t, j]]` over slots j, in their order, in fp32; entries of -1 add nothing.

    Args:
        y: `[R, N]`.
        order: int32 `[T, k]`, of a routing: rows of `y`, which is not checked, or -1.

    Returns:
        `[T, N]`, of the type of `y`.
    """
    out = _sum_fake(y, order)
    sum_slots_into(y, order, out)
    return out


def sum_slots_into(y: Tensor, order: Tensor, out: Tensor) -> None:
    """The same in `out`, which has unit stride along N."""
    check_memory({"y": y, "order": order})
    if not out.numel():
        return
    y = y if y.stride(1) == 1 else y.contiguous()
    order = order.contiguous()
    with current_device(out):
        _C.moe_sum(
            order.shape[0],
            order.shape[1],
            out.shape[1],
            DTYPES[y.dtype],
            y.data_ptr(),
            y.stride(0),
            order.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            **backend(out),
        )


def _sum_fake(y: Tensor, order: Tensor) -> Tensor:
    _check_sum(y, order)
    _check_inference(y=y)
    return y.new_empty((order.shape[0], y.shape[1]))


register(
    "moe_route(Tensor topk_ids, SymInt num_experts, Tensor? topk_weights=None) -> (Tensor, Tensor, Tensor, Tensor)",
    route,
    _route_fake,
)
register(
    'moe_gate(Tensor x, str activation="silu", float? limit=None, float? alpha=None, bool interleaved=False, '
    "Tensor? offsets=None) -> Tensor",
    gate_rows,
    _gate_fake,
)
register("moe_sum(Tensor y, Tensor order) -> Tensor", sum_slots, _sum_fake)
