"""The bench of 8-bit activations without its measurements: schemes, layers, peers, reports. One run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import gpu_report, gpu_timing, limits, peers, plots, schemes
from bench.__main__ import app
from bench.layer import Layer, WeightOnlyLayer
from bench.layer_w8a8 import EightBitLayer
from bench.peers import base, cutlass
from tests.python.bench_rows import GPU, compared, row, write
from tests.python.eight_bit import needs_instructions
from torch import Tensor
from typer.testing import CliRunner

import qcutlass

M, N, K = 20, 64, 128
NAMES = ("w8a8", "w8a8_f16", "w8a8_azp", "fp8", "fp8_e5m2")


def layer_of(name: str, n: int = N, k: int = K) -> Layer:
    """A layer on the CPU, where most adapters run too."""
    scheme = schemes.parse(name)
    make: Callable[..., Layer] = EightBitLayer if isinstance(scheme, schemes.EightBit) else WeightOnlyLayer
    return make(scheme, (n, k), M, device="cpu")


def eight_bit(name: str) -> EightBitLayer:
    layer = layer_of(name)
    assert isinstance(layer, EightBitLayer)
    return layer


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on a GPU, though the products run on the CPU."""
    plan = SimpleNamespace(tactic="stream", split_k=2)
    monkeypatch.setattr(qcutlass, "plan", lambda *operands, **options: plan)


@pytest.mark.parametrize(
    ("name", "a_dtype", "azp", "dtype", "operands"),
    [
        ("w8a8", torch.int8, False, torch.bfloat16, "int8"),
        ("w8a8_bf16", torch.int8, False, torch.bfloat16, "int8"),
        ("w8a8_f16", torch.int8, False, torch.float16, "int8"),
        ("w8a8_azp", torch.int8, True, torch.bfloat16, "int8"),
        ("w8a8_azp_f16", torch.int8, True, torch.float16, "int8"),
        ("fp8", torch.float8_e4m3fn, False, torch.bfloat16, "fp8"),
        ("fp8_f16", torch.float8_e4m3fn, False, torch.float16, "fp8"),
        ("fp8_e5m2", torch.float8_e5m2, False, torch.bfloat16, "fp8"),
        ("fp8_e5m2_f16", torch.float8_e5m2, False, torch.float16, "fp8"),
    ],
)
def test_schemes_by_name(name: str, a_dtype: torch.dtype, azp: bool, dtype: torch.dtype, operands: str) -> None:
    scheme = schemes.parse(name)
    assert scheme == schemes.EightBit(name, a_dtype, azp, dtype)
    assert scheme.operands == operands


@pytest.mark.parametrize("name", ["w8a8_", "w4a8", "w8a8_f32", "w8a8_f16_azp", "fp8_azp", "fp8_e4m3", "FP8", "w8a16"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"scheme '{name}': expected w<4\|8>a16.*w8a8\[_azp\].*fp8\[_e5m2\]"):
        schemes.parse(name)


def test_the_bench_of_models_is_weight_only() -> None:
    assert schemes.parse_weight_only("w4a16_g64").operands == "16-bit"
    result = CliRunner().invoke(app, ["model", "--scheme", "w8a8", "--device", "cpu"])
    assert result.exit_code == 2
    assert "weight-only" in " ".join(result.output.split())


def test_limits_are_those_of_the_operands() -> None:
    machine = limits.machine(GPU)
    assert machine is not None
    operations = 10**12
    seconds = {kind: machine.seconds(0, operations, kind) for kind in machine.rates}
    assert seconds["int8"] == seconds["fp8"] == operations / 1979e12 + machine.launch
    assert seconds["16-bit"] == operations / 989e12 + machine.launch
    assert machine.seconds(10**9, 1, "int8") == machine.seconds(10**9, 1, "fp8") == 1e9 / 4.56e12 + machine.launch


@pytest.mark.parametrize(("name", "more"), [("w8a8", 0), ("w8a8_f16", 0), ("w8a8_azp", 4), ("fp8", 0)])
def test_moved_bytes_count_every_operand_once(name: str, more: int) -> None:
    weights, rows = N * K + (4 + 2 + more) * N, K + 4 + more + 2 * N  # codes, scale, bias, and sums or zero points
    layer = layer_of(name)
    assert layer.moved_bytes(3) == weights + 3 * rows
    assert layer.operations(3) == 2 * 3 * N * K


@pytest.mark.usefixtures("no_gpu_needed")
def test_forced_tactics_reach_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    layer = layer_of("w8a8_azp")
    names = layer.tactics(4)
    wanted = names[1]
    monkeypatch.setattr(qcutlass, "tactics", lambda *operands, **options: names)  # which knows the real product alone
    monkeypatch.setattr(qcutlass, "gemm_w8a8", lambda *operands, **options: calls.append(options))
    for contestant in layer.forced(4, wanted, [1, 2]):
        contestant.launch(0, torch.empty(4, N))
    assert [(call["tactic"], call["split_k"]) for call in calls] == [(wanted, 1), (wanted, 2)]
    layer.plan(4).launch(0, torch.empty(4, N))
    assert "tactic" not in calls[-1]


@pytest.mark.parametrize("name", NAMES)
def test_peers_compute_the_layer(name: str) -> None:
    layer = eight_bit(name)
    expected = layer.expected(M)
    for peer in peers.select(["cublas", "int_mm" if layer.scheme.operands == "int8" else "scaled_mm"]):
        (contestant,) = peer.prepare(layer)(M)
        out = contestant.launch(contestant.copies - 1, torch.empty(M, N, dtype=layer.dtype))
        assert base.relative_error(contestant.completed(out), expected) < base.MAX_ERROR, peer.key
        if peer.key == "int_mm":
            assert out.dtype == torch.int32
            assert base.relative_error(out, expected) > base.MAX_ERROR
        else:
            assert out.dtype == layer.dtype


def sums_of_14_bits(a: Tensor, w: Tensor) -> Tensor:
    """As fast accumulation has them: of 32 products and the sum so far, bits below 14 of the largest are cut off."""
    total = torch.zeros(len(a), len(w), dtype=torch.float64)
    for begin in range(0, a.shape[1], 32):
        products = a[:, None, begin : begin + 32].double() * w[None, :, begin : begin + 32].double()
        largest = torch.maximum(total.abs(), products.abs().amax(-1)).clamp(min=2.0**-20)
        step = torch.exp2(largest.log2().floor() - 13)
        total = ((products / step[..., None]).trunc().sum(-1) + (total / step).trunc()) * step
    return total


def test_fast_accumulation_is_right_on_the_data_of_the_bench() -> None:
    scheme = schemes.parse("fp8")
    assert isinstance(scheme, schemes.EightBit)
    case = scheme.case(16, 48, 14336)
    assert not case.growing

    def error(case: Any) -> float:
        problem = case.random(seed=1)
        exact = problem.a.double() @ problem.w.double().T
        return base.relative_error(sums_of_14_bits(problem.a, problem.w), exact)

    assert error(case) < base.MAX_ERROR < error(replace(case, growing=True))


def test_stock_cutlass_gets_its_operands_in_order() -> None:
    class FakeLibrary:
        """The product of cutlass_int8.cu, with operands in its order."""

        names = ("64x64x64_s3", "128x128x64_s4")

        def run(self, tile: int, operands: list[Tensor]) -> None:
            a, weight, a_scale, w_scale, bias, out = operands
            sums = a.float() @ weight.float().T
            out.copy_(sums * a_scale[:, None] * w_scale + bias.float() + tile)

    layer, peer = eight_bit("w8a8"), cutlass.CutlassInt8()
    peer._library = FakeLibrary()  # type: ignore[assignment]
    first, second = peer.prepare(layer)(M)
    out = first.launch(first.copies - 1, torch.empty(M, N, dtype=layer.dtype))
    assert [first.name, second.name] == ["cutlass_int8 64x64x64_s3", "cutlass_int8 128x128x64_s4"]
    assert base.relative_error(out, layer.expected(M)) < base.MAX_ERROR
    other = second.launch(0, torch.empty(M, N, dtype=layer.dtype))
    assert base.relative_error(other, layer.expected(M) + 1) < base.MAX_ERROR


@pytest.mark.parametrize(
    ("key", "name", "why"),
    [
        *((key, "w8a8", "16-bit activations by quantised weights alone") for key in ("cutlass", "int4pack")),
        *((key, "w8a16_channel", "8-bit .* alone") for key in ("cutlass_int8", "int_mm", "scaled_mm")),
        ("int_mm", "fp8", "int8 alone"),
        ("scaled_mm", "w8a8", "fp8 alone"),
        ("cutlass_int8", "fp8_e5m2", "int8 without zero points"),
        ("cutlass_int8", "w8a8_azp", "int8 without zero points"),
        ("cutlass_int8", "w8a8_f16", "bf16 outputs, N a multiple of 8, K of 16"),
        ("humming", "w8a8_azp", "no zero points"),
    ],
)
def test_peers_say_what_they_do_not_take(key: str, name: str, why: str) -> None:
    (peer,) = peers.select([key])
    with pytest.raises(base.Skip, match=why):
        peer.prepare(layer_of(name))


@pytest.mark.parametrize(
    ("key", "name", "n", "k"),
    [
        ("int_mm", "w8a8", 60, 128),
        ("int_mm", "w8a8", 64, 124),
        ("scaled_mm", "fp8", 72, 128),
        ("scaled_mm", "fp8", 64, 72),
        ("cutlass_int8", "w8a8", 60, 128),
        ("cutlass_int8", "w8a8", 64, 120),
    ],
)
def test_peers_refuse_shapes(key: str, name: str, n: int, k: int) -> None:
    (peer,) = peers.select([key])
    with pytest.raises(base.Skip, match="multiple"):
        peer.prepare(layer_of(name, n, k))


def test_int_mm_takes_more_than_16_rows() -> None:
    (peer,) = peers.select(["int_mm"])
    product = peer.prepare(layer_of("w8a8"))
    assert len(product(17)) == 1
    with pytest.raises(base.Skip, match="M < 17"):
        product(16)


def test_results_of_every_type_are_poisoned() -> None:
    results = [torch.zeros(2, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.int32)]
    graph: Any = SimpleNamespace(replay=lambda: None)
    contestant = gpu_timing.Contestant("ours", lambda index, out: out, 1)
    floating, integer = gpu_timing.Graph(graph, 2, results, contestant).run()
    assert bool(floating.isnan().all())
    assert bool((integer == -(2**31)).all())


@pytest.fixture
def whole_run(tmp_path: Path) -> Path:
    """Int8 and fp8 beside their peers, one of which takes more than 16 rows only."""
    rows = []
    for m in (1, 16, 64, 4096):
        some = {"int_mm": 1.2} if m > 16 else {}
        int8, fp8 = (row("8192x8192", m, "stream", 0.0, scheme=scheme) for scheme in ("w8a8", "fp8"))
        rows.append(compared(int8, 0.8, cublas=2.0, cutlass_int8=1.5, **some))
        rows.append(compared(fp8, 0.9, cublas=1.9, scaled_mm=0.5))
    return write(tmp_path / "whole.json", rows)


def test_reports_compare_with_the_peers_of_each_scheme(whole_run: Path) -> None:
    report = gpu_report.merge([whole_run])
    text = report.markdown()
    assert "| 1 | **19.2** / 28.7 cutlass_int8 (1.50x) / 80% |" in text
    assert "/ 80% |" in next(
        line for line in text.splitlines() if line.startswith("| 64 | ") and "int_mm (1.20x)" in line
    )
    assert text.count("scaled_mm (0.50x) / 90% |") == 4
    headings = [column.heading for column in report.used_columns()]
    for heading in (
        "torch._int_mm (no scales) us",
        "CUTLASS int8 / qcutlass",
        "_int_mm / qcutlass",
        "_scaled_mm / qcutlass",
    ):
        assert heading in headings
    assert "CUTLASS / qcutlass" not in headings
    ratios = {key: round(value, 6) for key, value in report.rows[2].items() if key.endswith("_ratio")}
    assert ratios == {"cublas_ratio": 2.0, "cutlass_int8_ratio": 1.5, "int_mm_ratio": 1.2}


def test_figures_show_the_peers_and_rates_of_each_scheme(whole_run: Path, tmp_path: Path) -> None:
    report = gpu_report.merge([whole_run])
    names = [path.name for path in plots.draw(report, tmp_path / "figures")]
    assert names == [f"{scheme}_{what}.png" for scheme in ("w8a8", "fp8") for what in ("8192x8192", "roofline")]
    int8, fp8 = ([row for row in report.rows if row["scheme"] == scheme] for scheme in ("w8a8", "fp8"))
    assert list(plots._contestants(int8)) == ["qcutlass", "cublas", "cutlass_int8", "int_mm"]
    assert list(plots._contestants(fp8)) == ["qcutlass", "cublas", "scaled_mm"]

    def words(rows: list[dict[str, Any]], scheme: str) -> str:
        (axes,) = plots._roofline(rows, scheme, GPU).axes
        legend = axes.get_legend()
        assert legend is not None
        return " ".join([axes.get_ylabel(), *(text.get_text() for text in legend.get_texts())])

    assert words(int8, "w8a8").startswith("TOP/s 8192x8192 4.56 TB/s, 1979 TOP/s (data sheet) 4.56 TB/s, 1288")
    rates = "635 TFLOP/s (mma.sync; wgmma does more) 4.56 TB/s, 1470 TFLOP/s (cuBLAS at best)"
    assert words(fp8, "fp8").endswith(rates)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "key"), [("w8a8", "int_mm"), ("w8a8_azp", "int_mm"), ("fp8", "scaled_mm")])
def test_a_run_on_a_gpu(name: str, key: str) -> None:
    from bench import gpu

    needs_instructions(torch.float8_e4m3fn if name == "fp8" else torch.int8)
    bench = gpu.Bench(peers.select(["cublas", key]), gpu.Options(tactics="stream", eager=True))
    cells = list(bench.rows([schemes.parse(name)], [(512, 256)], [1, 33]))
    for selected, *forced in cells:
        assert selected["selected"]
        assert forced
        assert 0 <= selected["error"] <= 1
        assert selected["cublas_ratio"] > 0
        assert selected["eager_us"] > 0
    assert cells[1][0][f"{key}_error"] < base.MAX_ERROR
    assert bench.skipped == ({"int_mm": [f"{name}: M < 17: refused by torch"]} if key == "int_mm" else {})
