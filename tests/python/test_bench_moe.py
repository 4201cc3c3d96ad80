"""The bench of mixtures of experts without its measurements."""

from __future__ import annotations

import pytest
import torch
from bench import limits
from bench.moe.contestants import Ours, sorted_ids
from bench.moe.problem import SIZES, SKEWS, Block, Skew, router_ids
from bench.peers.base import MAX_ERROR, relative_error

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
