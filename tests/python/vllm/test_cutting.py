"""Shares of layers for tensor parallelism: dequantised and joined, those of all ranks are the layer, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass.formats import CanonicalBlockwise, CanonicalFp8, CanonicalInt8, CanonicalLinear, FloatLinear, Layer
from qcutlass.products.packing import GROUP_STEP
from qcutlass.quantized import QuantizedTensor
from qcutlass.vllm.cutting import Share, cut_columns, cut_rows, joined, place


def weight_only(n: int, k: int, group_size: int, *, bits: int = 4, zeros: str = "uint8", order: bool = False) -> Layer:
    groups = -(-k // group_size)
    drawn: Tensor | None = torch.randint(0, 2**bits, (groups, n), dtype=torch.uint8)
    if zeros != "uint8":
        drawn = None if zeros == "none" else torch.rand(groups, n) * 2**bits
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    perm = torch.randperm(k).to(torch.int32) if order else None
    if perm is not None:  # as loaders yield it: sorted by group, in the order of the activations within each
        perm = torch.cat([part.sort().values for part in perm.split(group_size)])
    scales = torch.rand(groups, n).half() + 0.5
    return CanonicalLinear(QuantizedTensor(codes, scales, drawn, bits, group_size), None, perm, torch.rand(k) + 0.5)


def two_levels(n: int, k: int, super_blocks: int, *, symmetric: bool = False) -> Layer:
    """As K-quants have them: of Q4_K, symmetric: of Q6_K."""
    step, bits = (16, 8) if symmetric else (32, 4)
    numbers: dict[str, Tensor] = {}
    for name in ("scales",) if symmetric else ("scales", "minimums"):
        first, kind = (-127, torch.int8) if symmetric else (0, torch.uint8)
        numbers[name] = torch.randint(first, 64, (k // step, n), dtype=kind)
        numbers[f"super_{name}"] = (torch.rand(super_blocks, n) / 64).half()
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    return CanonicalLinear(QuantizedTensor(codes, zeros=None, bits=bits, group_size=step, **numbers))


def effective(share: Share, size: int) -> Tensor:
    """float64 `[N, size]`: what each of the rank's activations is multiplied by, in all."""
    layer = share.layer
    if share.columns is None:
        return layer.effective_weight().double()
    summed = torch.zeros(layer.shape[0], size, dtype=torch.float64)
    return summed.index_add_(1, share.columns, layer.effective_weight().double())


def blocks(type: Any, size: int) -> Layer:
    linear = torch.nn.Linear(256, 24, bias=False)
    made: Any = qcutlass.QuantLinear.from_linear(linear, qcutlass.Blockwise(size, type)).canonical()
    assert isinstance(made, CanonicalBlockwise)
    return made


LAYERS = {
    "groups": lambda: weight_only(24, 256, 32),
    "one group": lambda: weight_only(24, 256, 256),
    "8 bits": lambda: weight_only(24, 256, 64, bits=8),
    "middle": lambda: weight_only(24, 256, 64, zeros="none"),
    "straddling": lambda: weight_only(24, 352, 64),
    "straddling, real zeros": lambda: weight_only(24, 384, 128, zeros="real"),
    "straddling at no multiple of 16": lambda: weight_only(24, 4 * 72, 32),
    "act-order": lambda: weight_only(24, 256, 64, order=True),
    "act-order, one group": lambda: weight_only(24, 256, 256, order=True),
    "act-order, short last group": lambda: weight_only(24, 352, 128, order=True),
    "act-order, middle": lambda: weight_only(24, 256, 64, order=True, zeros="none"),
    "two levels": lambda: two_levels(24, 1024, 4),
    "two levels, cut through super-blocks": lambda: two_levels(24, 256, 1),
    "two levels, cut through groups": lambda: two_levels(24, 320, 1),
    "two levels, symmetric": lambda: two_levels(24, 512, 2, symmetric=True),
    "int8": lambda: CanonicalInt8(
        torch.randint(-127, 128, (24, 256), dtype=torch.int8), torch.rand(24), smooth=torch.rand(256) + 0.5
    ),
    "fp8": lambda: CanonicalFp8(*qcutlass.quantize_weights_fp8(torch.randn(24, 256)), smooth=torch.rand(256) + 0.5),
    "int8 blocks": lambda: blocks("int8", 32),
    "fp8 blocks": lambda: blocks("fp8", 128),
    "floats": lambda: FloatLinear(torch.randn(24, 256)),
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_columns_of_all_ranks_are_the_layer(name: str, world_size: int) -> None:
    layer = LAYERS[name]()
    size = layer.shape[1] // world_size
    shares = [cut_columns(layer, rank * size, size) for rank in range(world_size)]
    parts = torch.cat([effective(share, size) for share in shares], dim=1)
    assert torch.equal(parts, layer.effective_weight().double())


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_all_ranks_are_the_layer(name: str) -> None:
    layer = LAYERS[name]()
    parts = [cut_rows(layer, begin, 12).effective_weight() for begin in (0, 12)]
    assert torch.equal(torch.cat(parts), layer.effective_weight())


@pytest.mark.parametrize("name", LAYERS)
def test_rows_past_the_last_have_no_weight(name: str) -> None:
    layer = LAYERS[name]()
    padded = cut_rows(layer, 16, 16).effective_weight()
    assert torch.equal(padded[:8], layer.effective_weight()[16:])
    assert not padded[8:].any()


@pytest.mark.parametrize("name", LAYERS)
def test_shares_are_packed_and_multiplied(name: str) -> None:
    """The kernels' own limits: groups of multiples of 16 columns, or one."""
    layer, size = LAYERS[name](), LAYERS[name]().shape[1] // 2
    for rank in range(2):
        share = cut_columns(layer, rank * size, size)
        if not isinstance(share.layer, CanonicalLinear):
            continue
        weight = share.layer.weight
        assert weight.group_size >= weight.shape[1] or weight.group_size % GROUP_STEP == 0
        made = qcutlass.QuantLinear.from_quantized(weight, perm=share.layer.perm)
        assert torch.equal(made.weights(), share.layer.dequantize(torch.float32))


def test_groups_without_cuts_keep_their_size() -> None:
    share = cut_columns(weight_only(8, 256, 64), 64, 128)
    assert isinstance(share.layer, CanonicalLinear)
    assert share.layer.weight.group_size == 64
    assert share.columns is None


@pytest.mark.parametrize(("k", "super_blocks", "kept"), [(1024, 4, 2), (256, 1, 1), (352, 1, None)])
def test_levels_stay_but_where_groups_are_cut_through(k: int, super_blocks: int, kept: int | None) -> None:
    layer = two_levels(24, k, super_blocks)
    for share in joined([Share(cut_columns(cut_rows(layer, row, 12), k // 2, k // 2).layer) for row in (0, 12)]):
        assert isinstance(share.layer, CanonicalLinear)
        supers = share.layer.weight.super_scales, share.layer.weight.super_minimums
        assert [part if part is None else len(part) for part in supers] == [kept] * 2
        assert share.layer.weight.scales.dtype == (torch.float32 if kept is None else torch.uint8)


def test_few_columns_are_added_to_groups_of_several_ranks() -> None:
    share = cut_columns(weight_only(8, 1024, 128, order=True), 512, 512)
    assert share.columns is not None
    assert 512 <= len(share.columns) < 512 + 8 * GROUP_STEP
    assert len(share.columns) % GROUP_STEP == 0


@pytest.mark.parametrize("zeros", [torch.rand(4, 8), torch.full((4, 8), 16, dtype=torch.uint8)])
def test_zeros_that_are_no_codes_are_refused_where_columns_are_added(zeros: Tensor) -> None:
    layer = weight_only(8, 256, 64, order=True)
    assert isinstance(layer, CanonicalLinear)
    weight = QuantizedTensor(layer.weight.codes, layer.weight.scales, zeros, 4, 64)
    with pytest.raises(qcutlass.UnsupportedError, match="tensor parallel size"):
        cut_columns(CanonicalLinear(weight, None, layer.perm), 0, 128)


def test_heads_of_keys_repeat_where_there_are_more_ranks() -> None:
    assert [place(rank, 2, 128, 64) for rank in range(2)] == [0, 64]
    assert [place(rank, 4, 128, 64) for rank in range(4)] == [0, 0, 64, 64]
    assert [place(rank, 4, 64, 64) for rank in range(4)] == [0] * 4
    with pytest.raises(ValueError, match="equal parts"):
        place(0, 2, 100, 64)


class TestJoining:
    @pytest.mark.parametrize("name", LAYERS)
    def test_parts_are_one_product(self, name: str) -> None:
        layer = LAYERS[name]()
        parts = [Share(cut_rows(layer, begin, 8)) for begin in (0, 8, 16)]
        (whole,) = joined(parts)
        assert torch.equal(whole.layer.effective_weight(), layer.effective_weight())

    def test_zeros_in_the_middle_are_written_out(self) -> None:
        one, other = weight_only(8, 64, 32, zeros="none"), weight_only(8, 64, 32)
        assert isinstance(one, CanonicalLinear)
        same = CanonicalLinear(one.weight, act_scale=other.tensors["act_scale"])
        (whole,) = joined([Share(same), Share(other)])
        expected = torch.cat([same.effective_weight(), other.effective_weight()])
        assert torch.equal(whole.layer.effective_weight(), expected)

    @pytest.mark.parametrize(
        "other",
        [
            weight_only(8, 64, 32, bits=8),
            weight_only(8, 64, 16),
            weight_only(8, 64, 32, zeros="real"),
            weight_only(8, 64, 32, order=True),
            two_levels(8, 64, 1),
            FloatLinear(torch.randn(8, 64)),
        ],
    )
    def test_different_layers_stay_apart(self, other: Layer) -> None:
        one = weight_only(8, 64, 32)
        assert [share.layer for share in joined([Share(one), Share(other)])] == [one, other]


class TestBlocks:
    def layer(self) -> CanonicalBlockwise:
        codes, scales = torch.randint(-127, 128, (96, 160), dtype=torch.int8), torch.rand(3, 5)
        return CanonicalBlockwise(codes, scales, 32)

    def test_cuts_between_blocks_leave_them(self) -> None:
        layer = self.layer()
        rows, share = cut_rows(layer, 32, 64), cut_columns(layer, 128, 32)
        assert isinstance(rows, CanonicalBlockwise)
        assert isinstance(share.layer, CanonicalBlockwise)
        assert torch.equal(rows.effective_weight(), layer.effective_weight()[32:])
        assert torch.equal(share.layer.effective_weight(), layer.effective_weight()[:, 128:])

    @pytest.mark.parametrize(("begin", "size"), [(0, 48), (16, 32), (64, 64)])
    def test_cuts_of_rows_through_blocks_make_groups(self, begin: int, size: int) -> None:
        layer = self.layer()
        rows = cut_rows(layer, begin, size)
        assert isinstance(rows, CanonicalLinear)
        expected = torch.zeros(size, 160)
        expected[: 96 - begin] = layer.effective_weight()[begin : begin + size]
        assert torch.equal(rows.effective_weight(), expected)

    def test_a_short_last_block_stays(self) -> None:
        whole = self.layer()
        layer = CanonicalBlockwise(whole.codes[:80], whole.scales, 32)
        assert isinstance(cut_rows(layer, 64, 16), CanonicalBlockwise)
        one, other = cut_rows(layer, 64, 16), cut_rows(layer, 0, 32)
        assert len(joined([Share(one), Share(other)])) == 2
        assert len(joined([Share(other), Share(one)])) == 1
