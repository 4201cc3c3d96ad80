"""The bench of host time: every layer in turn, each call by itself, and its table."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import pytest
import torch
import typer
from bench import host
from typer.testing import CliRunner

CPU = torch.device("cpu")


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(host.main)
    return made


def test_times_are_those_of_each_call() -> None:
    counts = [0, 0]

    def wait(index: int, seconds: float) -> torch.Tensor:
        counts[index] += 1
        time.sleep(seconds)
        return torch.empty(0)

    short, long = host.host_seconds([functools.partial(wait, 0, 0.0), functools.partial(wait, 1, 0.004)], CPU, 25)
    assert long >= 0.004 > short
    assert counts == [40, 40]  # three rounds of ten, and one that warms up


def test_layers_beside_a_linear(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    result = CliRunner().invoke(
        app(), ["--device", "cpu", "--size", "128", "--m", "2", "--calls", "3", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["layer"] for row in rows] == list(host.SCHEMES)
    assert all(row["host_us"] > 0 and row["ratio"] == row["host_us"] / row["linear_us"] for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_a_gpu_that_is_not_there() -> None:
    result = CliRunner().invoke(app(), [], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "torch sees no CUDA device" in result.output
