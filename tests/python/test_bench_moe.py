"""The bench of mixtures of experts without its measurements."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bench import limits, schemes
from bench.__main__ import app
from bench.gpu_timing import ROUNDS
from bench.moe import contestants, problem, run
from bench.moe.contestants import GroupedMm, Humming, Ours, Triton, sorted_ids
from bench.moe.problem import SIZES, SKEWS, Block, Size, Skew, parse_scheme, router_ids
from bench.peers.base import MAX_ERROR, Skip, relative_error
from bench.timing import Sample
from typer.testing import CliRunner

import qcutlass
from qcutlass import moe

TINY = SIZES["tiny"]
PLAIN = "w4a16_g128"
SCHEMES = (PLAIN, "w8a16_g64_int", "w4a16_g32_real_bf16", "w8a16_channel", "w4a16_g32_min", "mxfp4", "nvfp4",
           "e4m3_g128", "e4m3", "q4_k", "q6_k")  # fmt: skip


def tiny(scheme: str = PLAIN) -> Block:
    return Block(TINY, parse_scheme(scheme), "cpu")


@pytest.mark.parametrize("skew", SKEWS)
def test_ids_are_those_of_distinct_experts(skew: Skew) -> None:
    ids = router_ids(SIZES["qwen3-30b-a3b"], 2000, skew, torch.Generator().manual_seed(1))
    assert all(len(set(row)) == 8 for row in ids.tolist())
    counts = ids.flatten().bincount(minlength=128)
    assert int(counts.sum()) == 16000
    assert (int(counts.max()) > 4 * int(counts.float().median())) == (skew == "zipf")


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block's weights: those that keep caches cold take gigabytes."""
    monkeypatch.setattr(problem, "copies_for", lambda size: 2)
    monkeypatch.setattr(problem, "MOST_ROUTINGS", 2)


@pytest.mark.parametrize(
    ("scheme", "bits"),  # of a weight with all that belongs to it
    [
        (PLAIN, 4 + 16 / 128),
        ("w8a16_g64_int", 8 + (16 + 8) / 64),
        ("w4a16_g32_real", 4 + (16 + 16) / 32),
        ("w4a16_g32_min", 4 + (32 + 32) / 32),
        ("mxfp4", 4 + 8 / 32),
        ("e4m3_g128", 8 + 32 / 128),
        ("q4_k", 4 + (8 + 8) / 32 + (16 + 16) / 256),
    ],
)
def test_bytes_and_operations_of_a_size(scheme: str, bits: float) -> None:
    """Worked out by hand: 512 x 256 and 256 x 256 weights."""
    size = Size("by hand", 3, 2, 256, 256)
    block = Block(size, parse_scheme(scheme), "cpu")
    assert block.expert_bytes == (512 * 256 + 256 * 256) * bits / 8
    assert size.operations(5) == 2 * 5 * 2 * (512 * 256 + 256 * 256)


def test_the_bound_is_the_larger_one() -> None:
    block, machine = tiny(), limits.MACHINES["NVIDIA H200"]
    read = block.least_seconds(machine, 1, 2.0)
    assert read == 2 * block.expert_bytes / machine.bandwidth
    assert block.least_seconds(machine, 10**9, 4.0) == TINY.operations(10**9) / 790e12


@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_give_what_is_expected_of_them(scheme: str) -> None:
    block = tiny(scheme)
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
    packed = qcutlass.preprocess_weights(codes, bits=block.scheme.bits)
    assert codes.shape == (n, k)
    assert torch.equal(packed, block.copies[0][0].w_packed[3])


def test_schemes_and_skews_are_named() -> None:
    with pytest.raises(ValueError, match="'w8a8': this bench measures weight-only schemes"):
        parse_scheme("w8a8")
    with pytest.raises(ValueError, match="'w4a16_g128_f32': expected activations of 16 bits"):
        parse_scheme("w4a16_g128_f32")
    with pytest.raises(ValueError, match=r"'moe_mxfp4': blocks of experts .* bench moe --scheme mxfp4"):
        schemes.parse("moe_mxfp4")
    assert problem.skews(["zipf", "uniform", "zipf"]) == ["uniform", "zipf"]
    with pytest.raises(ValueError, match="--skew: expected uniform, zipf, got 'flat'"):
        problem.skews(["flat"])


@pytest.mark.parametrize(("option", "value"), [("--scheme", "w9a16_g128"), ("--skew", "flat"), ("--model", "gpt")])
def test_the_command_refuses_unknown_names(option: str, value: str) -> None:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["moe", option, value])
    assert result.exit_code == 2
    assert value in result.output


def test_slots_are_sorted_into_whole_blocks() -> None:
    routing = moe.route(torch.tensor([[1, 0], [1, 3], [1, 0]]), 4)
    slots, experts, total = sorted_ids(routing, 4)
    assert slots.tolist() == [1, 5, 6, 6, 0, 2, 4, 6, 3, 6, 6, 6]
    assert experts.tolist() == [0, 1, 3]
    assert total.tolist() == [12]


def test_a_peer_gets_the_blocks_own_numbers() -> None:
    """Two codes a byte, the even column's in the low half, and the scales of a channel side by side."""
    block, product = tiny(), 0
    codes, scales = Triton._plain(block, product)
    n, k = TINY.products[product]
    assert codes.shape == (TINY.experts, n, k // 2)
    assert scales.shape == (TINY.experts, n, k // 128)
    assert scales.is_contiguous()
    assert codes.nbytes + scales.nbytes == TINY.experts * (n * k // 2 + 2 * n * (k // 128))
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).float() - 8
    weights = (numbers * scales.float().repeat_interleave(128, dim=-1)).to(block.dtype)
    for expert in range(TINY.experts):
        assert torch.equal(weights[expert], block.dense(product, expert))


def test_peers_say_what_they_do_not_take() -> None:
    for scheme in ("w8a16_g128", "w4a16_g128_int", "mxfp4", "w4a16_g128_bf16", "w4a16_g32"):
        with pytest.raises(Skip, match="takes int4 codes without zeros"):
            Triton().prepare(tiny(scheme))
    for scheme, message in (("q4_k", "not minimums"), ("q6_k", "of one level"), ("nvfp4", "no global scales")):
        with pytest.raises(Skip, match=message):
            Humming().prepare(tiny(scheme))


@pytest.mark.parametrize("scheme", [PLAIN, "w8a16_g64_int", "mxfp4"])
def test_dense_grouped_products_give_what_is_expected(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, block = GroupedMm(), tiny(scheme)
    peer.load()
    with pytest.raises(Skip, match="stay in L2"):
        peer.prepare(block)
    monkeypatch.setattr(contestants, "ROTATION_BYTES", 0)
    one = block.routed(9, "uniform")[0]
    multiply = peer.prepare(block)([one])
    assert relative_error(peer.result(multiply, one), block.expected(one, 9)) <= MAX_ERROR


class Launched:
    """In place of a CUDA graph: a launch of each contestant, which takes as many seconds as its place says."""

    def __init__(self, one: contestants.Contestant, outs: Sequence[torch.Tensor]) -> None:
        self.name = one.name
        self.out = one.launch(0, outs[0])

    @classmethod
    def of(cls, one: contestants.Contestant, outs: Sequence[torch.Tensor], least_seconds: float) -> Launched:
        assert least_seconds > 0
        return cls(one, outs)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that computes on the CPU: plans are an H200's, times 10 microseconds, and less from place to place."""

    def plan(product: Any, *operands: Any, **options: Any) -> Any:
        return qcutlass.explain(product, *operands, **options, device="h200").plan

    def measured(graphs: Sequence[Launched], rounds: int) -> list[Sample]:
        assert rounds == ROUNDS
        return [Sample([1e-5 / (1 + 0.02 * place)]) for place in range(len(graphs))]

    monkeypatch.setattr(qcutlass, "plan", plan)
    monkeypatch.setattr(run, "Graph", Launched)
    monkeypatch.setattr(run, "measure", measured)
    monkeypatch.setattr(run, "outputs", lambda m, n, dtype: [torch.empty(m, n, dtype=dtype) for _ in range(4)])
    monkeypatch.setattr(run, "Block", lambda size, scheme: Block(size, scheme, "cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(contestants, "ROTATION_BYTES", 0)


def cells(bench: run.Bench, schemes: Sequence[str], tokens: Sequence[int], skews: Sequence[Skew]) -> list[list[Any]]:
    return list(bench.rows([TINY], [parse_scheme(name) for name in schemes], tokens, skews))


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_tactic_of_both_products_has_a_row(scheme: str) -> None:
    bench = run.Bench([], tactics="")
    ((whole, *others),) = cells(bench, [scheme], [40], ["uniform"])
    assert (whole["scheme"], whole["shape"], whole["m"]) == (scheme, "tiny", 40)
    for product, (n, k) in zip(("gate_up", "down"), TINY.products, strict=True):
        rows = [row for row in others if row["product"] == product]
        assert [row["selected"] for row in rows] == [True, *[False] * (len(rows) - 1)]
        names = [row["tactic"] for row in rows]
        block = tiny(scheme)
        one, ours = block.routed(40, "uniform")[0], Ours()
        a = torch.randn(80, TINY.intermediate).to(block.dtype) if product == "down" else one.x
        arguments = ours._arguments(block, 0, one, int(product == "down"))
        why = qcutlass.explain(qcutlass.gemm_grouped, a, **arguments, device="h200")
        assert names[0] == why.plan.tactic
        assert set(names) == {candidate.plan.tactic for candidate in why.candidates}
        assert rows[0]["to_chosen"] == 1.0
        assert rows[0]["tflops"] == 2 * 80 * n * k / 1e-5 / 1e12
    page = bench.report([whole, *others]).markdown()
    assert "| product | tactic | tactic us | x chosen | products, TFLOP/s |" in page
    assert re.search(r"at most 1\.05 of the best one's time in \d of 2 products", page)


@pytest.mark.usefixtures("h200")
def test_tactics_are_those_that_are_wanted() -> None:
    ((whole, *none),) = cells(run.Bench([]), [PLAIN], [4], ["uniform"])
    assert none == []
    assert whole["tflops"] == TINY.operations(4) / whole["qcutlass_us"] / 1e6
    ((_, *some),) = cells(run.Bench([], "sm90a"), [PLAIN], [4], ["uniform"])
    assert {row["selected"] or "sm90a" in row["tactic"] for row in some} == {True}
    assert any("sm90a" in row["tactic"] for row in some)


@pytest.mark.usefixtures("h200")
def test_cells_are_those_of_every_scheme_number_of_tokens_and_skew() -> None:
    bench = run.Bench([GroupedMm()])
    found = cells(bench, [PLAIN, "mxfp4"], [1, 64], ["uniform", "zipf"])
    assert [(row["scheme"], row["m"], row["skew"]) for (row,) in found] == [
        (scheme, m, skew) for scheme in (PLAIN, "mxfp4") for m in (1, 64) for skew in ("uniform", "zipf")
    ]
    assert all(row["grouped_mm_block_us"] > 0 for (row,) in found)
    assert bench.skipped == {}
    page = bench.report([row for (row,) in found]).markdown()
    assert "w4a16_g128: int4 weights (groups of 128), fp16 activations; mxfp4: e2m1 weights (groups of 32)" in page


@pytest.mark.usefixtures("h200")
def test_there_may_be_many_tokens() -> None:
    found = cells(run.Bench([]), [PLAIN], [2048, 16384], ["zipf"])
    assert [(row["m"], row["touched"]) for (row,) in found] == [(2048, 4), (16384, 4)]


def test_choices_are_judged() -> None:
    row = {"scheme": PLAIN, "shape": "tiny", "skew": "uniform", "m": 4}
    rows = [row | {"product": "down", "tactic": name, "to_chosen": ratio} for name, ratio in (("a", 1.0), ("b", 0.8))]
    assert run.choices([row]) == []
    assert run.choices([row, *rows]) == [
        "the chosen tactic takes at most 1.05 of the best one's time in 0 of 1 products",
        "at worst 1.25 of it: w4a16_g128 tiny uniform 4 down",
    ]


def test_the_triton_kernel_is_one() -> None:
    triton = pytest.importorskip("triton", reason="needs triton, which torch has on Linux with CUDA")
    kernel = importlib.import_module("bench.moe.triton_kernel").multiply
    assert isinstance(kernel, triton.runtime.JITFunction)
    assert kernel.arg_names[:4] == ["a", "codes", "scales", "out"]
