"""The steps of a mixture of experts around its products: routing and sums bit for bit, gates within their bound."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.python.modules import randn
from torch import Tensor

import qcutlass
from qcutlass import moe, testing
from qcutlass.products.moe_operators import GATES, gate_rows, sum_slots
from qcutlass.testing.decoder import Answer, answer_ratio
from qcutlass.testing.moe import gated_answer, routing_answer, sum_answer

CPU_AND_CUDA = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_both = pytest.mark.parametrize("device", CPU_AND_CUDA)


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    return (torch.float16, torch.bfloat16, *((torch.float32,) if device == "cpu" else ()))


def exact(x: Tensor) -> Answer:
    """Numbers that are known without an error."""
    return x, torch.zeros_like(x, dtype=torch.float64)


def some_ids(tokens: int, slots: int, experts: int, seed: int, invalid: float = 0.0, skew: float = 1.0) -> Tensor:
    """int64 ids; `skew` above 1 prefers the first experts, some ids are outside [0, E)."""
    g = torch.Generator().manual_seed(seed)
    ids = (torch.rand(tokens, slots, generator=g) ** skew * experts).long()
    strange = torch.tensor([-1, experts, -(2**31), 2**31 - 1])[torch.randint(0, 4, ids.shape, generator=g)]
    return torch.where(torch.rand(ids.shape, generator=g) < invalid, strange, ids)


def cancelling(order: Tensor, columns: int, seed: int) -> Tensor:
    """float32 rows of which a token's first and last but one cancel: the order in which small ones meet them shows."""
    tokens, slots = order.shape
    y = randn(tokens, slots, columns, seed=seed) * 2**-6
    if slots > 2:
        y[:, 0] *= 2**18
        y[:, slots - 2] = -y[:, 0]
    rows = torch.zeros(tokens * slots, columns)
    routed = order >= 0
    rows[order[routed].long()] = y[routed]
    return rows


def assert_routing(ids: Tensor, experts: int, device: str, seed: int) -> None:
    weights = randn(*ids.shape, seed=seed)
    rows, offsets, order = routing_answer(ids, experts)
    scale = torch.zeros(ids.numel())
    routed = order >= 0
    scale[order[routed].long()] = weights[routed]
    for dtype in (torch.int32, torch.int64):
        found = moe.route(ids.to(device, dtype), experts, weights.to(device))
        testing.assert_equal(found.rows.cpu(), rows)
        testing.assert_equal(found.offsets.cpu(), offsets)
        testing.assert_equal(found.order.cpu(), order)
        assert found.row_scale is not None
        testing.assert_equal(found.row_scale.cpu(), scale)
    bare = moe.route(ids.to(device), experts)
    assert bare.row_scale is None
    testing.assert_equal(bare.order.cpu(), order)


@on_both
@pytest.mark.parametrize("invalid", [0.0, 0.3, 1.0], ids=["all valid", "some invalid", "none valid"])
@pytest.mark.parametrize("skew", [1.0, 6.0], ids=["uniform", "skewed"])
@pytest.mark.parametrize(
    ("tokens", "slots", "experts"), [(1, 1, 1), (1, 8, 128), (5, 2, 8), (33, 3, 7), (100, 8, 60), (64, 8, 128)]
)
def test_routing_is_exact(
    tokens: int, slots: int, experts: int, skew: float, invalid: float, device: str, seed: int
) -> None:
    assert_routing(some_ids(tokens, slots, experts, seed, invalid, skew), experts, device, seed)


@on_both
@pytest.mark.parametrize(
    ("tokens", "slots", "experts"),
    [(512, 8, 128), (513, 8, 128), (1025, 4, 2), (4096, 8, 256), (16384, 8, 512), (2000, 3, 2048), (7, 11, 2047)],
)
def test_routing_of_many_is_exact(tokens: int, slots: int, experts: int, device: str, seed: int) -> None:
    """One block, and a cluster of them; as many experts as there are counters."""
    assert_routing(some_ids(tokens, slots, experts, seed, 0.05, 3.0), experts, device, seed)


@on_both
def test_routing_to_one_expert_alone(device: str, seed: int) -> None:
    ids = torch.full((3000, 2), 5)
    assert_routing(ids, 8, device, seed)
    found = moe.route(ids.to(device), 8)
    assert found.offsets.tolist() == [0] * 6 + [6000] * 3


@on_both
def test_there_may_be_no_tokens(device: str) -> None:
    found = moe.route(torch.empty(0, 2, dtype=torch.int64, device=device), 3, torch.empty(0, 2, device=device))
    assert found.offsets.tolist() == [0, 0, 0, 0]
    assert found.rows.shape == (0,)
    assert found.order.shape == (0, 2)
    for dtype in dtypes(device):
        assert gate_rows(torch.empty(0, 8, dtype=dtype, device=device)).shape == (0, 4)
        assert sum_slots(torch.empty(0, 8, dtype=dtype, device=device), found.order).shape == (0, 8)


def test_more_slots_than_kernels_count_are_refused() -> None:
    ids = torch.zeros(1, 1, dtype=torch.int32).expand(2**27 + 1, 8)
    with pytest.raises(ValueError, match=re.escape("at most 2^30 elements")):
        moe.route(ids, 4)


@on_both
def test_routing_reads_views(device: str, seed: int) -> None:
    ids, weights = some_ids(40, 8, 16, seed).to(device), randn(40, 8, seed=seed).to(device)
    whole = moe.route(ids[:, ::2].contiguous(), 16, weights[:, 1::2].contiguous())
    for view, expected in zip(moe.route(ids[:, ::2], 16, weights[:, 1::2]), whole, strict=True):
        assert view is not None
        testing.assert_equal(view, expected)


@on_both
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "turns"])
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("shape", [(1, 768), (3, 35), (70, 1111), (2, 8), (300, 1), (5, 14336)])
def test_gates_are_within_their_bound(
    shape: tuple[int, int], activation: str, interleaved: bool, device: str, seed: int
) -> None:
    rows, columns = shape
    for dtype in dtypes(device):
        x = (6 * randn(rows, 2 * columns, seed=seed)).to(device, dtype)
        out = gate_rows(x, activation, interleaved=interleaved)
        assert (out.dtype, out.shape) == (dtype, (rows, columns))
        assert answer_ratio(out, gated_answer(activation, exact(x), interleaved)) <= 1
        bounded = gate_rows(x, activation, 2.5, None if activation == "gelu_tanh" else 0.75, interleaved)
        alpha = None if activation == "gelu_tanh" else 0.75
        assert answer_ratio(bounded, gated_answer(activation, exact(x), interleaved, 2.5, alpha)) <= 1


@on_both
def test_gates_read_rows_at_any_stride(device: str, seed: int) -> None:
    for dtype in dtypes(device):
        wide = randn(9, 200, seed=seed).to(device, dtype)
        for view in (wide[:, :64], wide[:, 3:67], wide[::2, :70], wide[:, ::2]):
            testing.assert_equal(gate_rows(view), gate_rows(view.contiguous()))
            turns = gate_rows(view, interleaved=True)
            testing.assert_equal(turns, gate_rows(view.contiguous(), interleaved=True))


@on_both
def test_gates_leave_rows_of_nobody_out(device: str, seed: int) -> None:
    """Not even NaN in them matters; the routing's last offset says how many rows there are."""
    for dtype in dtypes(device):
        x = randn(50, 64, seed=seed).to(device, dtype)
        x[31:] = math.nan
        offsets = torch.tensor([0, 30, 31], dtype=torch.int32, device=device)
        testing.assert_equal(gate_rows(x, offsets=offsets)[:31], gate_rows(x)[:31])


@on_both
@pytest.mark.parametrize("activation", GATES)
def test_gates_far_from_zero(activation: str, device: str) -> None:
    """Where exp() overflows; NaN and infinities come through."""
    far = torch.tensor([-6e4, -1e4, -104.0, -89.0, -87.0, -0.0, 0.0, 87.0, 89.0, 104.0, 1e4, 6e4])
    for dtype in dtypes(device):
        x = torch.stack([far, torch.ones_like(far)], dim=1).to(device, dtype).flatten()[None]
        out = gate_rows(x, activation, interleaved=True)
        assert answer_ratio(out, gated_answer(activation, exact(x), interleaved=True)) <= 1
        special = torch.tensor([[math.nan, 1.0, 1.0, math.nan]], dtype=dtype, device=device)
        assert bool(gate_rows(special, activation, interleaved=True).isnan().all())
    assert float(gate_rows(torch.tensor([[math.inf, 1.0]]), "swigluoai")) == float(
        gate_rows(torch.tensor([[7.0, 1.0]]), "swigluoai")
    )


@on_both
@pytest.mark.parametrize(
    ("tokens", "slots", "columns"), [(1, 1, 8), (5, 2, 33), (40, 8, 2048), (17, 11, 70), (300, 3, 1)]
)
def test_sums_are_exact(tokens: int, slots: int, columns: int, device: str, seed: int) -> None:
    """Bit for bit the sum in the slots' order, in fp32 and rounded once: with another order some element differs."""
    routed = moe.route(some_ids(tokens, slots, 9, seed, 0.2), 9).order
    order = routed.to(device)
    for dtype in dtypes(device):
        y = cancelling(routed, columns, seed).to(device, dtype)
        testing.assert_equal(sum_slots(y, order), sum_answer(y, order))
        wide = torch.cat([y, y], dim=1)[:, columns:]
        testing.assert_equal(sum_slots(wide, order), sum_answer(y, order))


def test_another_order_of_sums_shows(seed: int) -> None:
    """What the exact comparison is worth."""
    order = torch.arange(60 * 8, dtype=torch.int32).view(60, 8)
    y = cancelling(order, 256, seed)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        right, reverse = sum_answer(y.to(dtype), order), sum_answer(y.to(dtype), order.flip(1))
        assert bool((right != reverse).any()), dtype
        rounded = sum((y.to(dtype)[order[:, slot].long()] for slot in range(8)), torch.zeros(60, 256, dtype=dtype))
        assert dtype == torch.float32 or bool((right != rounded).any()), dtype


def test_steps_do_not_depend_on_the_number_of_threads(seed: int) -> None:
    x, order = randn(300, 2048, seed=seed), moe.route(some_ids(100, 3, 9, seed), 9).order
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append((gate_rows(x), sum_slots(x, order)))
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        testing.assert_equal(one, three)


def calls(seed: int) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator."""
    x, ids = randn(12, 64, seed=seed), some_ids(4, 3, 5, seed, 0.2)
    return {
        "moe_route": (ids, 5, randn(4, 3, seed=seed)),
        "moe_gate": (x, "swigluoai", 3.0, 1.5, True),
        "moe_sum": (x, moe.route(ids, 5).order),
    }


@pytest.mark.parametrize("name", calls(0))
def test_steps_are_torch_operators(name: str, seed: int) -> None:
    torch.library.opcheck(getattr(torch.ops.qcutlass, name).default, calls(seed)[name])


@on_both
def test_routing_compiles_without_a_break(device: str, seed: int) -> None:
    def routed(ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        found = moe.route(ids, 16, weights)
        assert found.row_scale is not None
        return found.rows, found.offsets, found.order, found.row_scale

    compiled = torch.compile(routed, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 7, 12):
        ids, weights = some_ids(tokens, 2, 16, seed).to(device), randn(tokens, 2, seed=seed).to(device)
        for out, expected in zip(compiled(ids, weights), routed(ids, weights), strict=True):
            testing.assert_equal(out, expected)


IDS, X = torch.zeros(2, 3, dtype=torch.int64), torch.ones(6, 8)
ORDER = torch.zeros(2, 3, dtype=torch.int32)
WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "ids' type": (lambda: moe.route(IDS.float(), 4), TypeError, "topk_ids: expected a tensor of int32, int64"),
    "ids' shape": (lambda: moe.route(IDS[0], 4), ValueError, r"topk_ids: expected shape \[T, k\]"),
    "no slots": (lambda: moe.route(IDS[:, :0], 4), ValueError, "topk_ids: .* k at least 1"),
    "experts": (lambda: moe.route(IDS, 0), ValueError, "num_experts: expected at least 1, got 0"),
    "weights": (lambda: moe.route(IDS, 4, torch.ones(2, 2)), ValueError, "topk_weights: expected the shape of"),
    "weights' type": (lambda: moe.route(IDS, 4, torch.ones(2, 3).half()), TypeError, "topk_weights: .* float32"),
    "activation": (lambda: gate_rows(X, "relu"), ValueError, "activation: expected one of 'silu', 'gelu_tanh'"),
    "limit": (lambda: gate_rows(X, limit=0.0), ValueError, "limit: expected a positive number, got 0"),
    "alpha": (lambda: gate_rows(X, "gelu_tanh", alpha=1.0), ValueError, "alpha: 'gelu_tanh' has none"),
    "infinite alpha": (lambda: gate_rows(X, alpha=math.inf), ValueError, "alpha: expected a finite number"),
    "odd": (lambda: gate_rows(X[:, :7]), ValueError, r"x: expected shape \[R, 2 I\]"),
    "gate's type": (lambda: gate_rows(X.double()), TypeError, "x: expected a tensor of float16"),
    "gate's shape": (lambda: gate_rows(X[0]), ValueError, "x: expected a matrix"),
    "offsets": (lambda: gate_rows(X, offsets=IDS), TypeError, "offsets: expected a tensor of int32"),
    "order": (lambda: sum_slots(X, IDS), TypeError, "order: expected a tensor of int32"),
    "order's shape": (lambda: sum_slots(X, ORDER[0]), ValueError, r"order: expected shape \[T, k\]"),
    "devices": (lambda: sum_slots(X, ORDER.to("meta")), ValueError, "order is on meta, y is on cpu"),
    "gradients": (
        lambda: moe.route(IDS, 4, torch.ones(2, 3, requires_grad=True)), RuntimeError, "topk_weights requires grad"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
def test_more_experts_than_counters_are_refused() -> None:
    with pytest.raises(qcutlass.UnsupportedError, match="num_experts: on CUDA expected at most"):
        moe.route(IDS.cuda(), 5000)


@pytest.mark.gpu
def test_steps_follow_each_other_in_a_graph(seed: int) -> None:
    """Each starts early, after the one before it in the stream; replays read what is in memory then.

    Turns differ: what memory holds from the last two is wrong."""
    tokens, slots, experts, columns, rounds = 600, 8, 128, 2048, 6
    ids = torch.empty(3, tokens, slots, dtype=torch.int64, device="cuda")
    x = torch.empty(3, tokens * slots, 2 * columns, dtype=torch.float16, device="cuda")

    def steps(turn: int) -> Tensor:
        routing = moe.route(ids[turn], experts)
        return sum_slots(gate_rows(x[turn], offsets=routing.offsets), routing.order)

    def fill(number: int) -> None:
        for turn in range(3):
            ids[turn].copy_(some_ids(tokens, slots, experts, seed + 3 * number + turn, 0.1))
            x[turn].copy_(randn(*x[turn].shape, seed=seed + 3 * number + turn))

    fill(0)
    steps(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [steps(turn % 3) for turn in range(rounds)]
    for number in range(3):
        fill(number)
        graph.replay()
        for turn in range(3):
            order = routing_answer(ids[turn].cpu(), experts)[2].cuda()
            for out in outs[turn::3]:
                testing.assert_equal(out, sum_answer(gate_rows(x[turn]), order))
