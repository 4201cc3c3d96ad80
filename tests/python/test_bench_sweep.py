"""The sweep over layers of models and random ones: which layers, going on with a run, means, worst cells, heat map."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench import gpu_report, shapes, sweep, sweep_figure
from bench.__main__ import app
from bench.gpu import Bench
from bench.schemes import Scheme, parse
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


def test_means_are_geometric_and_by_range_of_m() -> None:
    rows = [
        _row("64x64", 1, 1.0, cublas=4.0, humming=2.0),
        _row("64x64", 64, 1.0, cublas=1.0),
        _row("64x64", 512, 2.0, cublas=1.0),
    ]
    text = sweep.report({}, rows, 5).markdown()
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    heads, first, second, third, everything = lines[:5]
    assert heads == ["| M", "cells", "best peer", "cuBLAS", "humming |"]
    assert first[1:4] == ["2", f"{math.sqrt(2):.2f} (worst 1.00)", "2.00 (worst 1.00)"]
    assert second[1:4] == ["1", "0.50 (worst 0.50)", "0.50 (worst 0.50)"]
    assert third[1:3] == ["0", ""]
    assert everything[1:3] == ["3", "1.00 (worst 0.50)"]
    assert "3 of 5 cells" in text


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
