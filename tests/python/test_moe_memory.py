"""Memory that the block of a mixture of experts takes beside its output: what is promised, counted and allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from tests.python.test_moe import arguments, on_both, options
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import qcutlass
from qcutlass import moe
from qcutlass.products import expert_block, grouped
from qcutlass.products.expert_block import ExpertsCall, row_bytes, tokens_at_once
from qcutlass.testing.moe import MoeCase

ROUNDING: Final = 1 << 16  # of torch's allocator on GPUs, 512 bytes a tensor; offsets of experts
CASES: Final = {
    "fused gate": MoeCase(600, 256, 128, 4, 2),
    "gate apart": MoeCase(600, 256, 128, 4, 2, limit=0.5),
    "gate apart, wide": MoeCase(600, 64, 256, 4, 2, limit=0.5),
    "gpt-oss": MoeCase(600, 192, 192, 4, 4, activation="swigluoai", interleaved=True, bias=True),
}


def most_alive(device: str, run: Callable[[], Any]) -> int:
    """Bytes of tensors that were alive together, beside those from before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    alive = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


@on_both
@pytest.mark.parametrize("name", CASES)
def test_a_block_keeps_to_its_memory(name: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts its tokens are computed in; and it needs what is counted."""
    case = CASES[name]
    problem = case.random(device=device, seed=seed)
    given, out = arguments(problem), torch.empty_like(problem.x)
    row = row_bytes(ExpertsCall(*given, case.activation, case.limit, None))

    def run() -> None:
        moe.experts(*given, **options(case), out=out)

    run()
    slack = ROUNDING if device == "cuda" else 4 * (case.experts + 1)
    for parts in (1, 2, 5):
        most = row * case.slots * case.tokens // parts
        monkeypatch.setattr(expert_block, "MOST_BYTES", most)
        found = most_alive(device, run)
        assert found <= most + slack, parts
        copied = 2 * case.hidden * case.slots * case.tokens // parts  # the rows that kernels of wgmma alone have copied
        assert found >= most - copied, parts


@pytest.mark.parametrize("name", CASES)
def test_a_row_takes_what_is_promised(name: str) -> None:
    case = CASES[name]
    given = arguments(case.random())
    call = ExpertsCall(*given, case.activation, case.limit, None)
    h, i = case.hidden, case.intermediate
    elements = i + h if name == "fused gate" else 2 * i + max(i, h)
    assert row_bytes(call) == 12 + 2 * elements
    order = torch.zeros(case.experts, max(h, i), dtype=torch.int32)
    first = call._replace(gate_up=call.gate_up._replace(perm=order[:, :h]))
    assert row_bytes(first) == 12 + max(2 * elements, 2 * (i if name == "fused gate" else 2 * i) + 12 * h + 32)
    down = call._replace(down=call.down._replace(perm=order[:, :i]))
    assert row_bytes(down) == 12 + max(2 * elements, 2 * (i + h) + 12 * i + 32)


def stacked(experts: int, n: int, k: int, interleaved: bool = False) -> moe.ExpertWeights:
    """Weights without numbers: int4 in groups of 64."""
    w_packed = torch.empty(experts, -(-n // 16), -(-k // 64), 32, 16, dtype=torch.uint8, device="meta")
    scales = torch.empty(experts, -(-k // 64), n, dtype=torch.float16, device="meta")
    return moe.ExpertWeights(w_packed, scales, group_size=64, interleaved=interleaved)


def large(experts: int, slots: int, h: int, i: int, limit: float | None = None, turns: bool = False) -> ExpertsCall:
    """A block of so many tokens that they are computed in parts."""
    tokens = 1 << 18
    x, ids = torch.empty(tokens, h, dtype=torch.float16, device="meta"), torch.empty(tokens, slots, device="meta").int()
    weights = stacked(experts, 2 * i, h, turns), stacked(experts, h, i)
    return ExpertsCall(x, *weights, ids, ids.float(), "swigluoai" if turns else "silu", limit, None)


LARGE: Final = {
    "mixtral-8x7b": large(8, 2, 4096, 14336),
    "qwen3-30b-a3b": large(128, 8, 2048, 768),
    "qwen3-30b-a3b, a limit": large(128, 8, 2048, 768, limit=7.0),
    "gpt-oss-20b": large(32, 4, 2880, 2880, turns=True),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_workspaces_of_kernels_are_counted(gpu: str, name: str) -> None:
    """Those of the tokens that are computed at once: what `explain` says of the first product is beside its result."""
    call = LARGE[name]
    tokens = tokens_at_once(call)
    rows, (slots, first) = tokens * call.topk_ids.shape[1], (call.topk_ids.shape[1], call.gate_up)
    fused = expert_block._fused_gate(call)

    def multiplied(a: Tensor, weights: moe.ExpertWeights, **options: Any) -> int:
        offsets = torch.empty(call.experts + 1, dtype=torch.int32, device="meta")
        operands = a, weights.w_packed, weights.scales
        why = qcutlass.explain(qcutlass.gemm_grouped, *operands, group_size=64, offsets=offsets, **options, device=gpu)
        assert ("sm90a" in why.plan.tactic) == (gpu == "h200")
        return why.plan.workspace_bytes

    index = torch.empty(rows, dtype=torch.int32, device="meta")
    inner = call.x.new_empty(rows, call.down.w_packed.shape[2] * 64)
    space = multiplied(call.x[:tokens], first, rows=index, activation=fused)
    result = 2 * rows * (first.scales.shape[-1] // (2 if fused else 1))
    assert (space > 0) == (gpu == "h200"), "the rows in the order of their experts"
    assert space + result + 12 * rows <= 1 << 30
    assert multiplied(inner, call.down, row_scale=index.float()) == 0
    assert tokens < len(call.x) // 2 + 1
    assert (tokens + tokens // 2) * slots * row_bytes(call) > 1 << 30, "fewer parts would do"


@pytest.mark.parametrize("of", ["gate_up", "down"])
def test_columns_in_another_order_keep_to_the_memory(of: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that torch gathers, as it does for GPUs."""
    monkeypatch.setattr(grouped, "IN_ANY_ORDER", ())
    case = CASES["fused gate"]
    x, gate_up, down, ids, weights = arguments(case.random(seed=seed))
    columns = {"gate_up": case.hidden, "down": case.intermediate}[of]
    perm = torch.stack([torch.randperm(columns) for _ in range(case.experts)]).int()
    both = {"gate_up": gate_up, "down": down}
    both[of] = both[of]._replace(perm=perm)
    out, row = torch.empty_like(x), row_bytes(ExpertsCall(x, *both.values(), ids, weights, "silu", None, None))
    for parts in (1, 3):
        most = row * case.slots * case.tokens // parts
        monkeypatch.setattr(expert_block, "MOST_BYTES", most)
        found = most_alive("cpu", lambda: moe.experts(x, *both.values(), ids, weights, out=out))
        assert 0.9 * most < found <= most + 4 * (case.experts + 1), parts
