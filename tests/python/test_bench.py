"""The bench without its measurements: peers that are absent, reports of several runs, figures. One run on a GPU."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from bench import cpu, cpu_int8, cpu_timing, gpu_report, gpu_timing, peers, plots, schemes, timing
from bench.__main__ import app
from bench.layer import WeightOnlyLayer
from bench.peers import base
from tests.python.bench_rows import compared, row, write
from typer.testing import CliRunner

from qcutlass import _C, testing

MS = (1, 16, 64, 512, 4096)


@pytest.fixture
def whole_run(tmp_path: Path) -> Path:
    """Two shapes with three peers, one of which takes few rows only."""
    rows = []
    for shape in ("4096x4096", "8192x8192"):
        for m in MS:
            few = row(shape, m, "stream", 0.0)
            theirs = {"cublas": 2.2, "humming": 1.5} | ({"int4pack": 1 + 0.8 * m / few["limit_us"]} if m < 64 else {})
            rows.append(compared(few, 0.8, **theirs))
    return write(tmp_path / "whole.json", rows, skipped={"gemlite": ["not installed"]})


def test_threads_of_the_cpu_are_compared() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        times = cpu.scaling((64, 128))
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)
    assert list(times) == [1, 2, 4]
    facts = cpu.report([], 0.1, {1: timing.Sample([3e-4, 2e-4]), 2: timing.Sample([1.25e-4, 9e-4])}).facts
    assert facts["threads, M = 1, 2048x2048"] == "1: 200 us (1.00 times as fast); 2: 125 us (1.60 times as fast)"


def test_comparison_names_the_best_peer() -> None:
    measured = {"qcutlass_us": 4.0, "cublas_us": 13.0, "humming_us": 8.0}
    assert gpu_report.comparison(measured, ["cublas", "humming"]) == {
        "best_peer": "humming",
        "best_peer_us": 8.0,
        "ratio": 2.0,
        "cublas_ratio": 3.25,
    }
    assert gpu_report.comparison(measured, []) == {}


def test_choices_compare_with_the_best_tactic_of_the_same_cell() -> None:
    rows = [
        row("4096x4096", 1, "a", 10.0),
        row("4096x4096", 1, "b", 9.8, selected=False),
        row("4096x4096", 16, "a", 10.0),
        row("4096x4096", 16, "b", 8.0, selected=False),
        row("4096x4096", 16, "c", 9.0, selected=False),
        row("4096x4096", 64, "a", 10.0),  # nothing beside it: says nothing about the choice
        row("8192x8192", 1, "b", 30.0),
        row("8192x8192", 1, "a", 40.0, selected=False),
    ]
    found = gpu_report.choices(rows)
    assert [(choice.cell[1:], choice.best) for choice in found] == [
        (("4096x4096", 1), "b"),
        (("4096x4096", 16), "b"),
        (("8192x8192", 1), "b"),
    ]
    assert [choice.excess for choice in found] == [10 / 9.8 - 1, 0.25, 0]
    head, *far = gpu_report.choice_summary(found)
    assert gpu_report.mean_loss(found) == (10 / 9.8 - 1 + 0.25 + 0) / 3
    assert head == (
        "The chosen tactic is within 5% of the best measured one in 2 of 3 cells; in the mean it takes 9.0% longer."
    )
    assert far == ["Farther: w4a16_g128 4096x4096 M=16: +25.0%, chosen a, best b"]
    assert gpu_report.choice_summary(found[:1])[1].startswith("Worst: w4a16_g128 4096x4096 M=1: +2.0%")
    assert gpu_report.choice_summary([]) == []
    assert gpu_report.mean_loss([]) is None


def test_merge_takes_whole_cells_from_the_last_file(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.json",
        [
            row("4096x4096", 16, "a", 10.0),
            row("4096x4096", 16, "b", 11.0, selected=False),
            row("8192x8192", 1, "a", 20.0),
        ],
        torch="2.11",
        skipped={"gemlite": ["not installed"]},
    )
    second = write(
        tmp_path / "b.json",
        [row("4096x4096", 16, "c", 9.0), row("4096x4096", 1, "c", 8.0)],
        torch="2.12",
        skipped={"gemlite": ["not installed", "M > 64"], "int4pack": ["no"]},
    )
    report = gpu_report.merge([first, second])
    assert [(r["shape"], r["m"], r["tactic"]) for r in report.rows] == [
        ("4096x4096", 1, "c"),
        ("4096x4096", 16, "c"),
        ("8192x8192", 1, "a"),
    ]
    assert report.facts["torch"] == "2.11 | 2.12"
    assert report.facts["skipped"] == {"gemlite": ["not installed", "M > 64"], "int4pack": ["no"]}
    assert gpu_report.merge([first, first]).facts == gpu_report.merge([first]).facts


def test_merge_refuses_other_gpus_and_other_files(tmp_path: Path) -> None:
    ours = write(tmp_path / "ours.json", [row("64x64", 1, "a", 1.0)])
    other = write(tmp_path / "other.json", [row("64x64", 1, "a", 1.0)], GPU="NVIDIA L4")
    with pytest.raises(ValueError, match=r"NVIDIA L4.*NVIDIA H200"):
        gpu_report.merge([ours, other])
    for name, text in (("cpu.json", json.dumps({"title": "CPU backend", "rows": []})), ("text.json", "M = 1")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{name}.*bench gpu --json"):
            gpu_report.merge([path])


def test_markdown_says_what_was_skipped_and_shows_every_row(whole_run: Path) -> None:
    text = gpu_report.merge([whole_run]).markdown()
    assert "skipped: gemlite (not installed)" in text
    assert "| 1 | **3.1** / 4.1 int4pack (1.33x) / 80% | **10.0** / 11.0 int4pack (1.10x) / 80% |" in text
    assert "| 512 | **22.5** / 33.7 humming (1.50x) / 80% |" in text
    assert sum(line.startswith("| w4a16_g128 |") for line in text.splitlines()) == 2 * len(MS)


def test_markdown_tells_a_few_of_many_reasons(tmp_path: Path) -> None:
    reasons = [f"{n}x512: too small" for n in range(30)]
    path = write(tmp_path / "a.json", [row("8192x8192", 1, "stream", 1.0)], skipped={"gemlite": reasons})
    assert f"skipped: gemlite ({'; '.join(reasons[:8])}; and 22 more)" in gpu_report.merge([path]).markdown()


def test_report_command_writes_and_draws(whole_run: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    out = tmp_path / "new" / "folder" / "merged.json"
    arguments = ["report", str(whole_run), "--json", str(out), "--markdown", str(tmp_path / "a.md"), "--plots"]
    result = CliRunner().invoke(app, [*arguments, str(figures)])
    assert result.exit_code == 0, result.output
    assert gpu_report.merge([out]).rows == gpu_report.merge([whole_run]).rows
    assert (tmp_path / "a.md").read_text() == gpu_report.merge([whole_run]).markdown()
    names = {"w4a16_g128_4096x4096.png", "w4a16_g128_8192x8192.png", "w4a16_g128_roofline.png"}
    assert {path.name for path in figures.iterdir()} == names

    missing = CliRunner().invoke(app, ["report", str(tmp_path / "a.md")])
    assert missing.exit_code == 2
    assert "bench gpu --json" in " ".join(missing.output.split())


def test_figures_are_small_and_not_empty(whole_run: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    files = plots.draw(gpu_report.merge([whole_run]), tmp_path / "figures")
    assert len(files) == 3
    for path in files:
        assert path.stat().st_size < 150_000, path
        height, width, _ = imread(path).shape
        assert 300 < height < width < 1200
        dark = imread(path)[..., :3].min(axis=2) < 0.6
        assert 0.01 < dark.mean() < 0.5, path


def test_figures_are_titled_in_words(whole_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures: dict[str, Any] = {}
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.setdefault(path.stem, figure) and path)
    plots.draw(gpu_report.merge([whole_run]), tmp_path)
    words = "int4 weights (groups of 128), fp16 activations"
    figure = figures["w4a16_g128_8192x8192"]
    assert figure.get_suptitle() == f"{words}, N = K = 8192; NVIDIA H200"
    assert [axes.get_title() for axes in figure.axes] == [
        "microseconds a call (lower is better)",
        "times as fast as cuBLAS (higher is better)",
        "share of the limit, % (higher is better)",
    ]
    assert figures["w4a16_g128_roofline"].get_suptitle() == f"{words}; NVIDIA H200"


def test_times_in_situ_are_dashed_lines_of_the_same_colours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whole_run: Path
) -> None:
    figures: dict[str, Any] = {}
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.setdefault(path.stem, figure) and path)
    rows = []
    for m, ours in ((1, 10.0), (16, 12.0)):
        few = row("8192x8192", m, "stream", ours)
        rows.append(few | {"cublas_us": 40.0, "humming_us": 20.0, "in_situ_us": ours + 2, "cublas_in_situ_us": 42.0})
    plots.draw(gpu_report.merge([write(tmp_path / "in_situ.json", rows)]), tmp_path)
    figure = figures["w4a16_g128_8192x8192"]
    times, ratios, shares = ([line for line in axes.lines if len(line.get_xdata())] for axes in figure.axes)
    solid, dashed = ([line for line in times if line.get_linestyle() == style] for style in ("-", "--"))
    assert [list(line.get_ydata()) for line in solid] == [[10, 12], [40, 40], [20, 20]]
    assert [list(line.get_ydata()) for line in dashed] == [[12, 14], [42, 42]]  # humming was not timed so
    assert [line.get_color() for line in dashed] == [line.get_color() for line in solid[:2]]
    assert [list(line.get_ydata()) for line in ratios] == [[4, 40 / 12], [1, 1], [2, 2], [3.5, 3], [1, 1]]
    assert sum(line.get_linestyle() == "--" for line in shares) == 2
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["qcutlass", "cuBLAS 16-bit", "humming", *labels[3:]]
    assert sum(label.startswith("dashed: in situ") for label in labels) == 1
    figures.clear()
    plots.draw(gpu_report.merge([whole_run]), tmp_path)
    assert not any(line.get_linestyle() == "--" for line in figures["w4a16_g128_8192x8192"].axes[0].lines)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w8a16_channel_int_bf16", "int8 weights (a scale a channel, integer zeros), bf16 activations"),
        ("e4m3_g128", "e4m3 weights (groups of 128), fp16 activations"),
        ("w8a8_azp", "int8 activations with zero points by int8 weights, bf16 output"),
        ("fp8_e5m2", "fp8 e5m2 activations by fp8 e5m2 weights, bf16 output"),
        ("blockwise_quant", "int8 activations by int8 weights, a scale for each block of 128, int8 in blocks output"),
    ],
)
def test_schemes_in_words(name: str, words: str) -> None:
    assert schemes.parse(name).words == words
    assert schemes.shape_words("28672x4096") == "N = 28672, K = 4096"


def test_numbers_of_rows_do_not_touch() -> None:
    """Numbers of M have room, powers of two first; M + 1 beside M says what it is."""
    (axes,) = plots._figure(4, 4, 1)[1]
    plots._powers(axes, [32, 48, 64, 96, 128, 129, 192, 256, 300, 512])
    numbered = [int(label.get_text()) for label in axes.get_xticklabels() if label.get_text()]
    assert numbered == [32, 64, 128, 256, 512]
    assert [(text.get_text(), text.xy[0]) for text in axes.texts] == [("one row more", 129)]  # type: ignore[attr-defined]


def test_figures_need_rows_of_selected_tactics_but_no_known_gpu(tmp_path: Path) -> None:
    forced = write(tmp_path / "forced.json", [row("64x64", 1, "a", 1.0, selected=False)])
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.draw(gpu_report.merge([forced]), tmp_path / "figures")
    rows = [row("64x64", m, "a", 1.0, limit_us=None, limit_share=None) for m in (1, 2)]
    unknown = write(tmp_path / "unknown.json", rows, GPU="NVIDIA L4")
    assert [path.name for path in plots.draw(gpu_report.merge([unknown]), tmp_path / "figures")] == [
        "w4a16_g128_64x64.png",
        "w4a16_g128_roofline.png",
    ]


def test_every_peer_says_why_it_is_skipped_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    everyone = peers.select([])
    assert [peer.key for peer in everyone] == [peer.key for peer in peers.CLASSES] == list(gpu_report.LABELS)
    for peer in everyone:
        with pytest.raises(base.Skip, match="no CUDA device"):
            peer.load()


def test_absent_libraries_are_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("QCUTLASS_BENCH_CUTLASS", raising=False)
    find_spec = importlib.util.find_spec
    absent = ("humming", "gemlite")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))
    reasons = {"humming": "pip install humming-kernels", "gemlite": "pip install gemlite"} | dict.fromkeys(
        ("cutlass", "cutlass_int8"), "not built"
    )
    for peer in peers.select(list(reasons)):
        with pytest.raises(base.Skip, match=reasons[peer.key]):
            peer.load()
    for path in (tmp_path / "absent.so", tmp_path):
        for peer in peers.select(["cutlass", "cutlass_int8"], cutlass_library=path):
            with pytest.raises(base.Skip, match="OSError"):
                peer.load()
    for peer in peers.select(["cutlass", "cutlass_int8"], cutlass_library=Path(_C.__file__)):  # a library of others
        with pytest.raises(base.Skip, match=r"AttributeError.*qcutlass_bench"):
            peer.load()
    (tmp_path / "broken_peer.py").write_text("raise RuntimeError('no kernel for this GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(base.Skip, match="import broken_peer fails: RuntimeError: no kernel for this GPU"):
        base.import_library("broken_peer", "broken-peer")


def test_peers_by_name() -> None:
    assert [peer.key for peer in peers.select(["humming", "cublas"])] == ["cublas", "humming"]
    with pytest.raises(
        ValueError, match=r"peer 'marlin': expected one of cublas, cutlass, cutlass_int8, int_mm, .*gemlite"
    ):
        peers.select(["marlin"])
    with pytest.raises(ValueError, match=r"autotune mode 'slow': expected one of default, fast, max"):
        peers.select([], gemlite_autotune="slow")


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (testing.Case(1, 64, 256, bits=8), "takes 4 bits"),
        (testing.Case(1, 64, 256, group_size=16), "takes 4 bits in whole groups of 32, 64, 128, 256"),
        (testing.Case(1, 60, 256), "N % 8 = 0 and K % 128 = 0"),
        (testing.Case(1, 64, 192, group_size=64), "N % 8 = 0 and K % 128 = 0"),
    ],
    ids=["bits", "groups", "n", "k"],
)
def test_int4pack_refuses_what_it_does_not_take(case: testing.Case, why: str) -> None:
    (peer,) = peers.select(["int4pack"])
    layer = mock.Mock(spec=WeightOnlyLayer, case=case, problem=None)
    with pytest.raises(base.Skip, match=why):
        peer.prepare(layer)


def test_relative_error_tells_a_wrong_result() -> None:
    expected = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert base.relative_error(expected.half(), expected) == 0
    assert base.relative_error(torch.tensor([[3.0, 4.5]]), expected) == 0.1
    assert base.relative_error(-expected, expected) == 2
    assert math.isnan(base.relative_error(torch.full((1, 2), math.nan), expected))


def test_interleave_runs_everyone_once_a_round_in_changing_order() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = timing.interleave([lambda name=name: measure(name) for name in "abcd"], [8, 8, 8, 2])
    assert [len(sample.times) for sample in samples] == [8, 8, 8, 2]
    rounds = [order[i : i + 4] for i in range(0, 12, 4)] + [order[i : i + 3] for i in range(12, 30, 3)]
    assert [sorted(names) for names in rounds] == [list("abcd")] * 3 + [list("abc")] * 6
    assert len({tuple(names) for names in rounds}) > 3
    counted = sorted(time for sample in samples for time in sample.times)
    assert counted == [float(i) for i in range(5, 31)]  # the first round was to warm up
    (alone,) = timing.interleave([lambda: 2.0], 4, warmup=0)
    assert alone.times == [2.0] * 4


def test_measure_pauses_and_spares_those_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(gpu_timing.time, "sleep", pauses.append)
    times = [2.0**-17, 2.0**-16, 2.0**-15, 2.0**-10]  # seconds
    graphs: Any = [SimpleNamespace(seconds=lambda time=time: time, launches=100) for time in times]
    samples = gpu_timing.measure(graphs)
    assert [len(sample.times) for sample in samples] == [gpu_timing.ROUNDS] * 2 + [gpu_timing.FAR_ROUNDS] * 2
    assert [sample.median for sample in samples] == times
    assert sorted(set(pauses)) == [500 * times[0], 500 * times[1], 500 * times[2], 0.02]  # 5 replays, at most 20 ms


class _Failing(peers.Peer):
    """Takes part in nothing: `problem` is what it does instead."""

    label = "failing"

    def __init__(self, key: str, problem: str) -> None:
        self.key = key  # type: ignore[misc]
        self._problem = problem

    def load(self) -> str:
        return "1.0"

    def prepare(self, layer: Any) -> base.Product:
        if self._problem == "raises":
            raise RuntimeError("no such layer")

        def contestants(m: int) -> list[gpu_timing.Contestant]:
            if self._problem == "skips":
                raise base.Skip(f"M = {m}")
            return [gpu_timing.Contestant(self.key, lambda index, out: out.zero_(), 1)]

        return contestants


@pytest.mark.gpu
def test_a_run_on_a_gpu_survives_its_peers() -> None:
    from bench import gpu, schemes

    failing = [_Failing("cutlass", "raises"), _Failing("int4pack", "skips"), _Failing("gemlite", "wrong")]
    options = gpu.Options(tactics="", eager=True, in_situ=True, batch_invariant=True)
    bench = gpu.Bench([*peers.select(["cublas"]), *failing], options)
    cells = list(bench.rows([schemes.parse("w4a16_g64_int")], [(256, 512)], [1, 16]))
    assert [(cell[0]["shape"], cell[0]["m"]) for cell in cells] == [("256x512", 1), ("256x512", 16)]
    for selected, *forced in cells:
        assert selected["selected"]
        assert forced
        assert not any(row["selected"] for row in forced)
        assert [row["to_chosen"] > 0 for row in forced if row["tactic"].endswith(" batch-invariant")] == [True]
        assert selected["best_peer"] == "cublas"
        assert selected["ratio"] == selected["cublas_us"] / selected["qcutlass_us"] > 0
        assert 0 <= selected["error"] <= 1
        assert selected["cublas_error"] < base.MAX_ERROR
        assert selected["eager_us"] > 0
        assert min(selected["in_situ_us"], selected["cublas_in_situ_us"]) > 0
    assert bench.skipped["cutlass"] == ["w4a16_g64_int 256x512: RuntimeError: no such layer"]
    assert bench.skipped["int4pack"] == ["w4a16_g64_int: M = 1", "w4a16_g64_int: M = 16"]
    assert bench.skipped["gemlite"] == ["w4a16_g64_int: wrong result: relative error 1"]
    report = bench.report([row for cell in cells for row in cell])
    assert len(report.summary) >= 1
    assert report.facts["skipped"] == bench.skipped


@pytest.mark.parametrize("activations", [None, "int8"])
def test_rows_of_the_cpu_bench(activations: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product that is timed is judged by the reference of its kind."""
    monkeypatch.setattr(cpu, "extra_memory", lambda scheme, shape, ms, dtype: dict.fromkeys(ms, 1.0))
    monkeypatch.setattr(cpu_timing, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(cpu_timing, "_ROUNDS_SECONDS", 0.0)
    scheme = schemes.parse_weight_only("w4a16_g32_int")
    rows = list(cpu.run([scheme], [(64, 96)], [1, 3], torch.float32, activations))
    assert [(row["m"], row["activations"]) for row in rows] == [(1, activations), (3, activations)]
    assert all(0 < row["error"] <= 1 and row["gbytes"] > 0 for row in rows)


def test_rows_of_the_cpu_bench_of_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_timing, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(cpu_timing, "_ROUNDS_SECONDS", 0.0)
    kinds = [schemes.parse(name) for name in ("w8a8", "w8a8_azp")]
    rows = list(cpu_int8.run([kind for kind in kinds if isinstance(kind, schemes.EightBit)], [(64, 96)], [1, 20]))
    assert [(row["scheme"], row["m"]) for row in rows] == [(name, m) for name in ("w8a8", "w8a8_azp") for m in (1, 20)]
    assert all(row["error"] <= 1 and row["torch_ms"] > 0 for row in rows)
    fp8 = schemes.parse("fp8")
    assert isinstance(fp8, schemes.EightBit)
    with pytest.raises(ValueError, match="torch has a product of int8 alone"):
        list(cpu_int8.run([fp8], [(64, 96)], [1]))
