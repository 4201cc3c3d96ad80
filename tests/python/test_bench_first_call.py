"""The bench of first calls: layers that no product has read, and graphs that nothing was launched before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import first_call, host, timing
from bench.__main__ import app
from torch import nn
from typer.testing import CliRunner


def devices() -> list[Any]:
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", devices())
def test_first_calls_beside_second_ones(device: str, tmp_path: Path) -> None:
    files = "--json", str(tmp_path / "first.json"), "--markdown", str(tmp_path / "first.md")
    result = CliRunner().invoke(app, ["first-call", "--device", device, "--size", "256", "--m", "2", *files])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "first.json").read_text())["rows"]
    assert [(row["layer"], row["m"]) for row in rows] == [(name, 2) for name in host.SCHEMES]
    assert all(row["first_us"] > 0 and row["ratio"] == row["first_us"] / row["second_us"] for row in rows)
    assert all(("graph_ratio" in row) == (device == "cuda") for row in rows)
    assert "graph of first calls" in (tmp_path / "first.md").read_text() or device == "cpu"


class Counted(nn.Module):
    """A layer that counts its calls, as do its copies, which are in `made`."""

    weight: torch.Tensor

    def __init__(self, made: list[Counted]) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(4, 4))
        self.made, self.calls = made, 0

    def __deepcopy__(self, memo: Any) -> Counted:
        self.made.append(Counted(self.made))
        return self.made[-1]

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return a @ self.weight


def test_every_layer_is_called_twice() -> None:
    made: list[Counted] = []
    found = first_call.eager(Counted(made), torch.ones(1, 4))
    assert sorted(layer.calls for layer in made) == [1] + [2] * first_call.EAGER
    assert found["ratio"] == found["first_us"] / found["second_us"]


class Captured:
    """Stands for a graph of three launches; `seen` are the contestants of all, and results grow by `drift`."""

    seen: list[Any]
    drift = 0.0

    def __init__(self, results: list[torch.Tensor]) -> None:
        self.results = results

    @classmethod
    def of(cls, contestant: Any, outs: Any, least_seconds: float, warm: bool) -> Captured:
        assert not warm
        cls.seen.append(contestant)
        return cls([contestant.launch(index, outs[0]) + cls.drift * len(cls.seen) for index in range(3)])

    def run(self) -> list[torch.Tensor]:
        return self.results


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> type[Captured]:
    monkeypatch.setattr(Captured, "seen", [], raising=False)
    monkeypatch.setattr(first_call, "Graph", Captured)
    monkeypatch.setattr(first_call, "outputs", lambda m, n, dtype: [torch.empty(m, n, dtype=dtype)])
    monkeypatch.setattr(first_call, "measure", lambda both: [timing.Sample([3e-6, 3e-6]), timing.Sample([2e-6, 2e-6])])
    monkeypatch.setattr(first_call, "copies_for", lambda size: 3)
    return Captured


def test_graphs_are_captured_with_the_first_calls(captured: type[Captured]) -> None:
    found = first_call.graphs(Counted([]), torch.ones(1, 4))
    assert round(found["first_graph_us"]) == 3
    assert round(found["graph_ratio"], 9) == 1.5
    assert captured.seen[0] is captured.seen[1], "with the same layers"


def test_graphs_that_differ_are_not_timed(captured: type[Captured], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "drift", 1.0)
    with pytest.raises(AssertionError, match="different numbers"):
        first_call.graphs(Counted([]), torch.ones(1, 4))
