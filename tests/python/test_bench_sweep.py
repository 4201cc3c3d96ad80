"""The sweep over layers of models and random ones: which layers, going on with a run, means, worst cells, heat map."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from bench import gpu_report, gpu_timing, peers, shapes, sweep, sweep_figure
from bench.__main__ import app
from bench.gpu import Bench, layer_of
from bench.gpu_timing import Contestant
from bench.layer import Layer
from bench.peers.base import Peer, Product
from bench.schemes import Scheme, parse
from bench.shapes import Shape
from tests.python.bench_rows import write
from typer.testing import CliRunner

_ROW = {"scheme": "w4a16_g128", "selected": True, "tactic": "w4a16_f16_stream"}


def _row(shape: str, m: int, ours: float, **peers: float) -> dict[str, Any]:
    times = {f"{key}_us": value for key, value in peers.items()}
    row = {**_ROW, "shape": shape, "m": m, "qcutlass_us": ours, **times}
    return row | gpu_report.comparison(row, list(peers))


class _Bench(Bench):
    """Rows without a GPU: it remembers which cells it was asked for."""

    def __init__(self) -> None:
        self.cells: list[tuple[str, int]] = []

    def rows(
        self, schemes: Sequence[Scheme], shapes: Sequence[tuple[int, int]], ms: Sequence[int]
    ) -> Iterator[list[dict[str, Any]]]:
        for n, k in shapes:
            for m in ms:
                self.cells.append((f"{n}x{k}", m))
                yield [_row(f"{n}x{k}", m, 2.0, cublas=3.0)]


def test_layers_are_those_of_models_and_their_shards() -> None:
    found = sweep.model_layers()
    for model in (*shapes.MODELS.values(), *shapes.SEPARATE.values()):
        for n, k in model:
            assert (n, k) in found
            assert (n // 2, k) in found
            assert (n, k // 2) in found
    assert (28672 // 8, 4096) in found
    assert (4096, 14336 // 8) in found
    assert len(found) == len(set(found))


def test_a_sweep_is_of_these_rows_shards_layers_and_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few, some = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64), (96, 128, 192, 256, 384, 512)
    assert list(sweep.MS) == [*few, *some, 1024, 2048, 4096]
    assert [sum(least <= m <= most for m in sweep.MS) for least, most in sweep.RANGES] == [11, 6, 3]
    assert sweep.SHARDS == (1, 2, 4, 8)
    assert len(sweep.layers()) == 260
    asked: list[list[str]] = []
    select = peers.select
    monkeypatch.setattr(peers, "select", lambda names: [asked.append(names), select(names)][1])
    result = CliRunner().invoke(app, ["sweep", "--seconds", "0", "--json", str(tmp_path / "none.json")])
    assert asked == [["cublas", "humming"]]
    assert "0 of 5200 cells of the sweep." in result.stdout


def test_a_sweep_of_random_layers_alone(tmp_path: Path) -> None:
    found = sweep.layers(models=False)
    assert sorted(found) == sorted(sweep.random_layers())
    assert set(found) < set(sweep.layers())
    asked = ["sweep", "--seconds", "0", "--no-models", "--m", "1", "--m", "64", "--json", str(tmp_path / "none.json")]
    assert "0 of 200 cells of the sweep." in CliRunner().invoke(app, asked).stdout


@pytest.mark.parametrize(
    "command", [["sweep", "--json", "rows.json"], ["gpu"], ["gpu", "--tactics", "all", "--split-k", "2"]]
)
def test_what_is_near_is_asked_of_tactics_with_any_split(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    result = CliRunner().invoke(app, [*command, "--within", "1.3"])
    assert result.exit_code == 2
    assert "--within: expected --tactics" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "of"),
    [("sweep", ""), ("choices", "--no-models --m 1 --m 4 --m 16 --m 64 --m 256 --m 1024")],
)
def test_the_committed_pages_follow_from_their_rows(name: str, of: str, repository: Path, tmp_path: Path) -> None:
    results, page = repository / "bench" / "results", tmp_path / f"{name}.md"
    command = ["sweep", *of.split(), "--seconds", "0", "--json", str(results / f"{name}.json.gz")]
    result = CliRunner().invoke(app, [*command, "--markdown", str(page)])
    assert result.exit_code == 0, result.output
    assert page.read_text() == (results / f"{name}.md").read_text()


def test_random_layers_follow_from_the_seed() -> None:
    found = sweep.random_layers(100, seed=3)
    assert found == sweep.random_layers(100, seed=3) != sweep.random_layers(100, seed=4)
    assert len(set(found)) == 100
    assert all(512 <= side <= 32768 and side % 64 == 0 for shape in found for side in shape)
    assert all(n * k <= 1 << 28 for n, k in found)
    assert sorted(sweep.layers(100, seed=3)) == sorted({*found, *sweep.model_layers()})


def test_a_sweep_goes_on_where_it_stopped() -> None:
    bench = _Bench()
    done = [_row("64x64", 1, 1.0, cublas=1.0)]
    cells = list(sweep.run(bench, [parse("w4a16_g128")], [(64, 64), (128, 64)], [1, 2], done, 100))
    assert bench.cells == [("64x64", 2), ("128x64", 1), ("128x64", 2)]
    assert len(cells) == 3
    assert list(sweep.run(bench, [parse("w4a16_g128")], [(256, 64)], [1], [], 0)) == []


def test_unfinished_layers_are_those_with_cells_that_are_not_done() -> None:
    done = [_row("64x64", 1, 1.0), _row("64x64", 2, 1.0), _row("128x64", 2, 1.0)]
    shapes_ = [(64, 64), (128, 64), (256, 64)]
    assert sweep.unfinished([parse("w4a16_g128")], shapes_, [1, 2], done) == [(128, 64), (256, 64)]


class _Compiler(Peer):
    """Notes what it is asked to multiply; fails with two rows, and to be prepared for layers of 64 channels."""

    key = "cublas"
    asked: ClassVar[list[tuple[str, int]]] = []

    def load(self) -> str:
        return "1"

    def prepare(self, layer: Layer) -> Product:
        if layer.n == 64:
            raise RuntimeError("no such layer")

        def contestants(m: int) -> list[Contestant]:
            self.asked.append((layer.shape, m))
            if m == 2:
                raise RuntimeError("no such M")
            return [Contestant("", lambda index, out: out, 1)]

        return contestants


def test_peers_compile_for_every_layer_and_m(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "select", lambda names: [_Compiler()])
    monkeypatch.setattr(sweep, "layer_of", lambda *arguments: layer_of(*arguments, "cpu"))
    monkeypatch.setattr(gpu_timing, "outputs", lambda m, n, dtype: [None])
    monkeypatch.setattr(gpu_timing, "ROTATION_BYTES", 1)
    for shape in ((64, 128), (128, 128)):
        sweep._compile_for((["cublas"], parse("w4a16_g128"), shape, [1, 2, 3]))
    assert _Compiler.asked == [("128x128", 1), ("128x128", 2), ("128x128", 3)]


def test_layers_are_compiled_for_in_their_order_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Shape] = []

    class Pool:
        """Of this process, and one layer at a time."""

        def imap_unordered(self, compile_for: Any, work: Sequence[Any]) -> Iterator[None]:
            for _, _, shape, _ in work:
                compiled.append(shape)
                yield

    monkeypatch.setattr(
        sweep, "get_context", lambda method: SimpleNamespace(Pool=lambda processes: contextlib.nullcontext(Pool()))
    )
    layers = sweep.random_layers(5)
    sweep.compile_kernels(["cublas"], [parse("w4a16_g128")], layers, [1], 1)
    assert compiled == layers
    sweep.compile_kernels(["cublas"], [parse("w4a16_g128")], layers, [1], 1, seconds=0)
    assert compiled == [*layers, layers[0]]


def test_gpus_share_a_sweep() -> None:
    parts = [sweep.layers(20, seed=3, part=(number, 3)) for number in range(3)]
    assert sorted(layer for part in parts for layer in part) == sorted(sweep.layers(20, seed=3))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="expected I N with 0 <= I < N, got"):
            sweep.layers(part=part)


def test_parts_are_reported_together(tmp_path: Path) -> None:
    first, second, none = (tmp_path / f"{name}.json" for name in "abc")
    write(first, [_row("64x64", 1, 2.0, cublas=3.0)], commit="1234567")
    write(second, [_row("128x64", 1, 2.0, cublas=3.0)], commit="89abcde")
    found = sweep.read_all([first, second, none])
    assert found["facts"]["commit"] == "1234567 | 89abcde"
    assert [row["shape"] for row in found["rows"]] == ["64x64", "128x64"]
    again = tmp_path / "again.json"
    write(again, [_row("64x64", 1, 1.0, cublas=3.0)])
    assert [row["qcutlass_us"] for row in sweep.read_all([first, again])["rows"]] == [1.0]
    assert sweep.read_all([none]) == {"facts": {}, "rows": []}
    result = CliRunner().invoke(app, ["sweep", "--seconds", "0", "--json", str(first), "--json", str(second)])
    assert result.exit_code == 0
    assert "2 of " in result.stdout


def test_rows_may_be_compressed(tmp_path: Path) -> None:
    path, fresh = tmp_path / "sweep.json.gz", gpu_report.report({"GPU": "NVIDIA H200"}, [_row("64x64", 2, 1.0)])
    fresh.write(path, None)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert sweep.read(path) == {"title": gpu_report.TITLE, "facts": fresh.facts, "rows": fresh.rows}
    whole = path.read_bytes()
    for damaged in (whole[:20], whole[:15] + b"\xff" * 30 + whole[45:], b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"sweep\.json\.gz: expected JSON"):
            sweep.read(path)


def test_every_second_random_layer_judges_what_is_fitted_to_others() -> None:
    names = [f"{n}x{k}" for n, k in sweep.random_layers(100, seed=3)]
    kept = sweep.held_out(100, seed=3)
    assert kept == set(names[1::2])
    assert len(kept) == 50
    assert sweep.held_out(60, seed=3) == kept & set(names[:60])  # whatever the number of layers


def test_a_sweep_goes_on_on_one_gpu_and_keeps_what_its_parts_say(tmp_path: Path) -> None:
    path, rows = tmp_path / "sweep.json", [_row("64x64", 1, 2.0, cublas=3.0)]
    assert sweep.read(path, "NVIDIA H200") == {"facts": {}, "rows": []}
    write(path, rows, commit="1234567", skipped={"humming": ["no such layer"]})
    before = sweep.read(path, "NVIDIA H200")
    with pytest.raises(ValueError, match=r"sweep\.json was measured on NVIDIA H200, this is NVIDIA L4"):
        sweep.read(path, "NVIDIA L4")
    fresh = gpu_report.report({"GPU": "NVIDIA H200", "commit": "89abcde"}, [_row("64x64", 2, 1.0)])
    report = sweep.continued(before, fresh)
    skipped = {"humming": ["no such layer"]}
    assert report.facts == {"GPU": "NVIDIA H200", "commit": "1234567 | 89abcde", "skipped": skipped}
    assert report.rows == [*rows, *fresh.rows]
    assert sweep.continued({"facts": {}, "rows": []}, fresh) == fresh


def _table(text: str, words: str) -> list[list[str]]:
    """The cells of the table under a heading that ends so."""
    _, _, behind = text.partition(f"{words}\n\n")
    lines = behind.partition("\n\n")[0].strip().splitlines()
    return [line.strip("| ").split(" | ") for line in [lines[0], *lines[2:]]]


def test_means_are_geometric_and_by_range_of_m() -> None:
    rows = [
        _row("64x64", 1, 1.0, cublas=4.0, humming=2.0),
        _row("64x64", 64, 1.0, cublas=1.0),
        _row("64x64", 512, 2.0, cublas=1.0),
    ]
    text = sweep.report({}, rows, 5).markdown()
    assert "3 of 5 cells" in text
    heads, few, some, many, everything = _table(
        text, "all layers: geometric mean of a peer's time over that of qcutlass"
    )
    assert heads == ["M", "cells", "best peer", "best peer, where all ran", "cuBLAS", "humming"]
    best, where_all_ran = f"{math.sqrt(2):.3f} (worst 1.00)", "2.000 (worst 2.00, 1 of 2)"
    assert few == ["1 to 64", "2", best, where_all_ran, "2.000 (worst 1.00)", where_all_ran]
    assert some[:5] == ["65 to 512", "1", "0.500 (worst 0.50)", "", "0.500 (worst 0.50)"]
    assert many[:2] == ["from 513", "0"]
    assert everything[1:4] == ["3", "1.000 (worst 0.50)", "2.000 (worst 2.00, 1 of 3)"]
    assert "geometric mean" in sweep.report({}, [{**_ROW, "shape": "64x64", "m": 1, "qcutlass_us": 1.0}], 1).markdown()


def test_slow_cells_are_counted_and_held_out_layers_stand_alone() -> None:
    rows = [
        _row("1024x1024", 1, 1.0, cublas=0.96),
        _row("1024x1024", 2, 1.0, cublas=0.94, humming=0.8),
        _row("1024x960", 1, 1.0, cublas=0.94, humming=2.0),
        _row("1024x960", 2, 1.0, cublas=0.84),
        _row("2048x4096", 1, 1.0, cublas=0.5),
        _row("2048x4096", 2, 1.0, humming=0.5),
        {**_row("2048x4096", 1, 1.0, cublas=0.1), "selected": False},
    ]
    text = sweep.report({}, rows, 6, {"2048x4096", "1x1"}).markdown()
    words, held = "cells by cuBLAS's time over that of qcutlass", "the held-out half of the random layers"
    assert _table(text, words) == [
        ["layers", "N and K from 1024: below 0.95", "all: below 0.85"],
        ["all layers", "2 of 3", "2 of 5"],
        [held, "1 of 1", "1 of 1"],
    ]
    _, few, *_ = _table(text, f"{held}: geometric mean of a peer's time over that of qcutlass")
    assert few[1:3] == ["2", "0.500 (worst 0.50)"]
    assert held not in sweep.report({}, rows, 6).markdown()
    alone = [_row("1024x1024", 1, 1.0, humming=2.0)]
    assert words not in sweep.report({}, alone, 1).markdown()


def test_worst_cells_come_first() -> None:
    rows = [_row(f"{64 * i}x64", 1, 1.0, cublas=float(i)) for i in range(30, 0, -1)]
    text = sweep.report({}, rows, 30).markdown()
    table = [line for line in text.splitlines() if line.startswith("| ") and "w4a16_f16_stream" in line]
    assert [line.split(" | ")[0] for line in table] == [f"| {64 * i}x64" for i in range(1, 21)]


def test_report_of_a_file_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [_row(f"{64 * i}x64", m, 1.0, cublas=i / m) for i in (1, 2) for m in (1, 16)]
    path, page = tmp_path / "sweep.json", tmp_path / "sweep.md"
    path.write_text(json.dumps({"title": gpu_report.TITLE, "facts": {"GPU": "NVIDIA H200"}, "rows": rows}))
    command = ["sweep", "--json", str(path), "--seconds", "0", "--markdown", str(page), "--plots", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "geometric mean" in result.output
    assert "geometric mean" in page.read_text()
    assert (tmp_path / "w4a16_g128_sweep.png").stat().st_size > 1000
    assert json.loads(path.read_text())["rows"] == rows


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["sweep", "--json", str(path), "--seconds", "0"])
    assert result.exit_code == 2
    assert "bench gpu --json" in result.output


def test_heat_map_leaves_out_what_no_peer_ran(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert sweep_figure.draw([{**_ROW, "shape": "64x64", "m": 1, "qcutlass_us": 1.0}], tmp_path) == []
