"""Benches of quantisers and of products behind them, without their measurements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import gpu, gpu_report, quantizers, schemes
from bench.gpu_timing import Contestant
from bench.layer_blockwise import BlockwiseLayer
from bench.peers.base import MAX_ERROR, relative_error
from bench.timing import Sample
from torch import Tensor

import qcutlass
from qcutlass import blockwise

M, N, K = 20, 160, 256
NAMES = ("blockwise", "blockwise_fp8", "blockwise_fp8_bf16")


def layer_of(name: str) -> BlockwiseLayer:
    """A layer on the CPU."""
    scheme = schemes.parse(name)
    assert isinstance(scheme, schemes.Blockwise)
    return BlockwiseLayer(scheme, (N, K), M, device="cpu")


def test_all_quantisers_of_rows_are_measured(seed: int) -> None:
    a = torch.randn(M, K, generator=torch.Generator().manual_seed(seed))
    found = {name: quantize(a) for name, quantize in quantizers.quantizers(K, "cpu").items()}
    for name, expected in (("act_quant", blockwise.act_quant(a)), ("fp8_act_quant", blockwise.fp8_act_quant(a))):
        for got, part in zip(found[name], expected, strict=True):
            assert torch.equal(got.float(), part.float())
    assert {codes.dtype for codes, *_ in found.values()} == {torch.int8, torch.float8_e4m3fn}
    assert set(quantizers.GOAL_OF) <= {*found, "int8_gelu"}


def test_codes_of_swiglu_are_checked(seed: int) -> None:
    gate_up = torch.randn(M, 2 * K, generator=torch.Generator().manual_seed(seed))
    codes, scales = blockwise.fp8_silu_mul_quant(gate_up)
    quantizers.check_silu_mul(codes, scales, gate_up)
    for wrong in (scales * 1.2, scales * torch.nan):
        with pytest.raises(AssertionError, match="fp8_silu_mul_quant: codes are farther"):
            quantizers.check_silu_mul(codes, wrong, gate_up)


@pytest.mark.parametrize("name", NAMES)
def test_products_behind_their_quantisers(name: str) -> None:
    layer = layer_of(name)
    contestant = layer.with_quantizer(M)
    assert contestant is not None
    assert contestant.copies == len(layer.packed)
    out = torch.empty(M, N, dtype=layer.dtype)
    assert contestant.launch(contestant.copies - 1, out) is out
    assert relative_error(out, layer.expected(M)) < MAX_ERROR


def test_products_that_others_quantise_for_have_none() -> None:
    assert layer_of("blockwise_quant").with_quantizer(M) is None
    scheme = schemes.parse("w4a16_g128")
    assert gpu.layer_of(scheme, (N, K), M, "cpu").with_quantizer(M) is None


class _Graph:
    """Launches that are made when they are asked for."""

    def __init__(self, contestant: Contestant, outs: list[Tensor]) -> None:
        self.contestant, self._outs = contestant, outs

    @classmethod
    def of(cls, contestant: Contestant, outs: list[Tensor], least_seconds: float) -> _Graph:
        return cls(contestant, outs)

    def run(self) -> list[Tensor]:
        return [self.contestant.launch(0, out) for out in self._outs]


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of the bench on the CPU, in which each contestant takes one microsecond more than the one before."""
    monkeypatch.setattr(qcutlass, "plan", lambda *_, **__: SimpleNamespace(tactic="stream", split_k=1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(gpu, "layer_of", lambda scheme, shape, rows: BlockwiseLayer(scheme, shape, rows, "cpu"))
    monkeypatch.setattr(gpu, "Graph", _Graph)
    monkeypatch.setattr(gpu, "outputs", lambda m, n, dtype: [torch.empty(m, n, dtype=dtype) for _ in range(2)])
    monkeypatch.setattr(gpu, "measure", lambda graphs, rounds: [Sample([1e-6 * i]) for i in range(1, len(graphs) + 1)])


@pytest.mark.usefixtures("no_gpu_needed")
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_time_of_both(name: str) -> None:
    (((row,)),) = gpu.Bench([], gpu.Options()).rows([schemes.parse(name)], [(N, K)], [M])
    assert (round(row["qcutlass_us"], 6), round(row["with_quantizer_us"], 6)) == (1, 2)
    assert round(row["with_quantizer_ratio"], 6) == 2
    assert row["with_quantizer_spread"] == 0
    text = gpu_report.report({"GPU": "none"}, [row]).markdown()
    assert "with quantiser / product" in text
    assert "best_peer" not in row


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_wrong_result_of_both_stops_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(layer: BlockwiseLayer, m: int) -> Contestant:
        return Contestant("with quantiser", lambda index, out: out.fill_(1), 1)

    monkeypatch.setattr(BlockwiseLayer, "with_quantizer", wrong)
    with pytest.raises(AssertionError, match="wrong result: relative error"):
        list(gpu.Bench([], gpu.Options()).rows([schemes.parse("blockwise_fp8")], [(N, K)], [M]))


K_QUANTS = {"q2_k": (4, 16, "minimum", 16), "q3_k": (4, 16, "none", 16), "q4_k": (4, 32, "minimum", 8),
            "q5_k": (8, 32, "minimum", 8), "q6_k": (8, 16, "none", 16), "iq4_xs": (8, 32, "none", 8),
            "iq4_nl": (8, 32, "none", 0)}  # fmt: skip


@pytest.mark.parametrize("name", K_QUANTS)
def test_blocks_of_gguf_are_schemes(name: str) -> None:
    """Held as layers of such files hold them."""
    scheme: Any = schemes.parse(f"{name}_bf16")
    assert (scheme.bits, scheme.group_size, scheme.zeros, scheme.super_groups) == K_QUANTS[name]
    assert scheme.dtype == torch.bfloat16
    problem = scheme.case(3, 32, 512, torch.float16).random(seed=1)
    assert (problem.minimums is not None) == (scheme.zeros == "minimum")
    assert (problem.super_scales is not None) == (scheme.super_groups > 0)
    assert name in schemes.PATTERNS
