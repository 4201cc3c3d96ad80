"""The bench of mixtures of experts without its measurements."""

from __future__ import annotations

import importlib

import pytest
import torch
from bench import limits
from bench.moe import contestants, problem
from bench.moe.contestants import GroupedMm, Ours, Triton, sorted_ids
from bench.moe.problem import DTYPE, GROUP, SIZES, SKEWS, Block, Skew, router_ids
from bench.peers.base import MAX_ERROR, Skip, relative_error

import qcutlass
from qcutlass import moe

TINY = SIZES["tiny"]


@pytest.mark.parametrize("skew", SKEWS)
def test_ids_are_those_of_distinct_experts(skew: Skew) -> None:
    ids = router_ids(SIZES["qwen3-30b-a3b"], 2000, skew, torch.Generator().manual_seed(1))
    assert all(len(set(row)) == 8 for row in ids.tolist())
    counts = ids.flatten().bincount(minlength=128)
    assert int(counts.sum()) == 16000
    assert (int(counts.max()) > 4 * int(counts.float().median())) == (skew == "zipf")


def test_bytes_and_operations_of_a_size() -> None:
    """Worked out by hand: 1536 x 2048 and 2048 x 768 codes of half a byte, a scale of 2 bytes for 128 of them."""
    size = SIZES["qwen3-30b-a3b"]
    assert size.expert_bytes == (1536 * 2048 + 2048 * 768) // 2 + 2 * (1536 * 16 + 2048 * 6)
    assert size.operations(3) == 2 * 3 * 8 * (1536 * 2048 + 2048 * 768)


def test_the_bound_is_the_larger_one() -> None:
    block, machine = Block(TINY, "cpu"), limits.MACHINES["NVIDIA H200"]
    read = block.least_seconds(machine, 1, 2.0)
    assert read == 2 * TINY.expert_bytes / machine.bandwidth
    assert block.least_seconds(machine, 10**9, 4.0) == TINY.operations(10**9) / 790e12


def test_blocks_give_what_is_expected_of_them() -> None:
    block = Block(TINY, "cpu")
    one = block.routed(9, "uniform")[0]
    expected = block.expected(one, 9)
    whole = moe.experts(one.x, *block.copies[0], one.ids, one.weights)
    assert relative_error(whole, expected) <= MAX_ERROR
    ours = Ours()
    multiply = ours.prepare(block)([one])
    assert relative_error(ours.result(multiply, one), expected) <= MAX_ERROR
    out = torch.empty_like(one.x)
    ours.block(multiply, {id(one): ours.order(one)})(1, one, out)
    assert torch.equal(out, whole)
    n, k = TINY.products[0]
    codes = block.codes(0, 3)
    packed = qcutlass.preprocess_weights(codes, bits=4)
    assert codes.shape == (n, k)
    assert torch.equal(packed, block.copies[0][0].w_packed[3])


def test_slots_are_sorted_into_whole_blocks() -> None:
    routing = moe.route(torch.tensor([[1, 0], [1, 3], [1, 0]]), 4)
    slots, experts, total = sorted_ids(routing, 4)
    assert slots.tolist() == [1, 5, 6, 6, 0, 2, 4, 6, 3, 6, 6, 6]
    assert experts.tolist() == [0, 1, 3]
    assert total.tolist() == [12]


@pytest.fixture
def one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block's weights: those that keep caches cold take gigabytes."""
    monkeypatch.setattr(problem, "copies_for", lambda size: 1)
    monkeypatch.setattr(problem, "MOST_ROUTINGS", 1)


@pytest.mark.usefixtures("one_copy")
def test_a_peer_gets_the_blocks_own_numbers() -> None:
    """Two codes a byte, the even column's in the low half, and the scales of a channel side by side."""
    block, product = Block(TINY, "cpu"), 0
    codes, scales = Triton._plain(block, product)
    n, k = TINY.products[product]
    assert codes.shape == (TINY.experts, n, k // 2)
    assert scales.shape == (TINY.experts, n, k // GROUP)
    assert scales.is_contiguous()
    assert codes.nbytes + scales.nbytes == TINY.experts * (n * k // 2 + 2 * n * (k // GROUP))
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).float() - 8
    weights = (numbers * scales.float().repeat_interleave(GROUP, dim=-1)).to(DTYPE)
    for expert in range(TINY.experts):
        assert torch.equal(weights[expert], block.dense(product, expert))


@pytest.mark.usefixtures("one_copy")
def test_dense_grouped_products_give_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, block = GroupedMm(), Block(TINY, "cpu")
    peer.load()
    with pytest.raises(Skip, match="stay in L2"):
        peer.prepare(block)
    monkeypatch.setattr(contestants, "ROTATION_BYTES", 0)
    one = block.routed(9, "uniform")[0]
    multiply = peer.prepare(block)([one])
    assert relative_error(peer.result(multiply, one), block.expected(one, 9)) <= MAX_ERROR


def test_the_triton_kernel_is_one() -> None:
    triton = pytest.importorskip("triton", reason="needs triton, which torch has on Linux with CUDA")
    kernel = importlib.import_module("bench.moe.triton_kernel").multiply
    assert isinstance(kernel, triton.runtime.JITFunction)
    assert kernel.arg_names[:4] == ["a", "codes", "scales", "out"]
