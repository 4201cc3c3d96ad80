"""The bench of serving, without an engine: its rows and report, what it asks of whom, and its soak with a stand-in."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

pytest.importorskip("transformers", reason="needs transformers")

from bench import serving, serving_checkpoint, serving_soak
from safetensors.torch import load_file
from typer.testing import CliRunner

from qcutlass.vllm.stored import layer_of

TINY = serving_checkpoint.MODELS["tiny"]
TIMES = {1: [0.5, 0.375, 0.25, 0.3], 5: [1.4, 1.25, 1.3]}
"""Seconds for so many tokens; the best are whole binary fractions, of which figures are exact."""


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(serving.main)
    return made


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_figures_are_of_the_best_rounds() -> None:
    left = {tokens: iter(times) for tokens, times in TIMES.items()}
    row = serving.figures(8, 5, 3, 3.0, lambda tokens: next(left[tokens]))
    assert row == {
        "batch": 8, "tokens_per_s": 32.0, "first_token_ms": 250.0, "cold_first_token_ms": 500.0,
        "decode_ms": 250.0, "start_s": 3.0,
    }  # fmt: skip
    assert all(next(times, None) is None for times in left.values())


def test_memory_is_that_of_the_fullest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "device", lambda: "cuda")
    found = SimpleNamespace(returncode=0, stdout="1024\n2560\n")
    monkeypatch.setattr(serving.subprocess, "run", lambda *_, **__: found)
    assert serving.memory_gib() == 2.5
    found.returncode = 9
    assert serving.memory_gib() is None
    monkeypatch.setattr(serving, "device", lambda: "cpu")
    assert serving.memory_gib() is None


def test_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"contestant": name, "batch": batch, "tokens_per_s": 100.0 * batch, "decode_ms": 2.0}
        for name in ("qcutlass", "marlin")
        for batch in (1, 8)
    ]
    rows[-1]["tokens_per_s"] = 3000.0  # far ahead of the first, and in the figure all the same
    limits: list[float] = []
    monkeypatch.setattr(serving.plots, "_save", lambda figure, path: limits.append(figure.axes[0].get_ylim()[1]))
    serving.plots.draw_serving(rows, "two contestants", tmp_path / "found" / "serving.png")
    assert limits[0] > 3000 / 800
    monkeypatch.undo()
    serving.plots.draw_serving(rows, "two contestants", tmp_path / "found" / "serving.png")
    assert (tmp_path / "found" / "serving.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("on_a_cpu")
def test_report_of_contestants_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def run_apart(name: str, folder: Path, request: dict[str, Any]) -> list[dict[str, Any]]:
        config = json.loads((folder / "config.json").read_text())
        assert ("quantization_config" in config) == any(folder.glob("*.safetensors")) == (name == "qcutlass")
        asked.append((name, request))
        left = {tokens: itertools.cycle(times) for tokens, times in TIMES.items()}
        return [
            serving.figures(batch, 5, request["rounds"], 3.0, lambda tokens: next(left[tokens]))
            for batch in request["batches"]
        ]

    monkeypatch.setattr(serving, "run_apart", run_apart)
    monkeypatch.setenv("QCUTLASS_COMMIT", "1234567")
    files = [tmp_path / "found" / name for name in ("serving.json", "serving.md")]
    options = ["--model", "tiny", "--batch", "1", "--batch", "8", "--prompt", "7", "--output", "5", "--rounds", "7"]
    more = ["--options", '{"dtype": "bfloat16"}', "--json", str(files[0]), "--markdown", str(files[1])]
    drawn: list[Any] = []
    monkeypatch.setattr(serving.plots, "draw_serving", lambda *arguments: drawn.append(arguments))
    more += ["--plot", "serving.png"]
    result = CliRunner().invoke(app(), options + more, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    common = {"dtype": "bfloat16", "enforce_eager": True, "skip_tokenizer_init": True}
    each = {"batches": [1, 8], "prompt": 7, "output": 5, "rounds": 7}
    assert asked == [
        ("qcutlass", {**each, "options": {**common, "quantization": "qcutlass"}}),
        ("dense", {**each, "options": {**common, "load_format": "dummy"}}),
    ]
    content = json.loads(files[0].read_text())
    assert [(row["contestant"], row["batch"], row["tokens_per_s"]) for row in content["rows"]] == [
        ("qcutlass", 1, 4.0), ("qcutlass", 8, 32.0), ("dense", 1, 4.0), ("dense", 8, 32.0),
    ]  # fmt: skip
    assert {"processor", "torch", "vllm", "date", "commit"} <= set(content["facts"])
    assert content["facts"]["options"] == common
    assert content["facts"]["failed"] == []
    assert "the best of 7 rounds" in content["facts"]["method"]
    assert {str(path) for _, _, path in drawn} == {"serving.png"}, "after each contestant"
    assert len(drawn) == 2
    assert "| dense | 8 | 32.0 | 250.0 | 500.0 | 250.00 | 3.0 |" in files[1].read_text().splitlines()


@pytest.mark.usefixtures("on_a_cpu")
def test_a_contestant_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the others found is written, also what was found before the last one runs."""
    path = tmp_path / "serving.json"
    written: list[bool] = []

    def run_apart(name: str, folder: Path, request: dict[str, Any]) -> list[dict[str, Any]]:
        written.append(path.exists())
        if name == "qcutlass":
            raise typer.Exit(3)
        return [serving.figures(1, 5, 1, 3.0, lambda tokens: float(tokens))]

    monkeypatch.setattr(serving, "run_apart", run_apart)
    result = CliRunner().invoke(app(), ["--model", "tiny", "--output", "5", "--json", str(path)])
    assert result.exit_code == 1
    content = json.loads(path.read_text())
    assert [(row["contestant"], row["tokens_per_s"]) for row in content["rows"]] == [("dense", 1.0)]
    assert content["facts"]["failed"] == ["qcutlass (exit status 3)"]
    assert "failed: qcutlass (exit status 3)" in result.output
    assert written == [False, True]


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--contestant", "machete"], "expected qcutlass, dense on this machine, got machete"),
        (["--model", "9b"], "expected tiny or 8b, got 9b"),
    ],
)
def test_wrong_arguments(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app(), arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert told in result.output


def test_contestants_that_are_not_installed_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "device", lambda: "cuda")
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: object())
    assert serving._wanted([]) == ["qcutlass", "machete", "marlin", "humming", "dense"]
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: None if name == "humming" else object())
    assert serving._wanted([]) == ["qcutlass", "machete", "marlin", "dense"]
    with pytest.raises(typer.BadParameter, match="expected qcutlass, machete, marlin, dense on this machine, got humm"):
        serving._wanted(["humming"])


def test_checkpoint_has_layers_that_are_read(tmp_path: Path) -> None:
    serving_checkpoint.write_gptq(tmp_path, TINY, "cpu")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    prefix = "model.layers.1.mlp.down_proj."
    tensors = {name: load_file(tmp_path / index[name])[name] for name in index if name.startswith(prefix)}
    layer = layer_of(
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, config, prefix, torch.device("cpu")
    )
    assert layer.shape == (TINY.hidden, TINY.intermediate)


class Engine:
    """Serves a token a step of each request, the sums of the prompt; what `faults` names goes wrong once."""

    def __init__(self, faults: frozenset[str] = frozenset()) -> None:
        self.faults = set(faults)
        self.running: dict[str, tuple[list[int], int, list[int]]] = {}
        self.aborted = 0
        self.served = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], tokens: int) -> None:
        self.running[name] = (prompt["prompt_token_ids"], tokens, [])

    def abort_request(self, names: list[str]) -> None:
        self.aborted += len(names)
        for name in names:
            if not self._fails("keeps what is aborted"):
                self.running.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        outputs = []
        for name, (prompt, wanted, found) in list(self.running.items()):
            found.append(sum(prompt) + len(found))
            is_over = len(found) == wanted
            if is_over:
                del self.running[name]
                self.served += 1
            after_warm_up = self.served > serving_soak.PROMPTS
            if is_over and after_warm_up and self._fails("other tokens"):
                found[0] += 1
            if is_over and after_warm_up and self._fails("a token less"):
                found.pop()
            output = SimpleNamespace(token_ids=found, finish_reason="length" if is_over else None)
            if is_over and after_warm_up and self._fails("loses a request"):
                continue
            outputs.append(SimpleNamespace(request_id=name, finished=is_over, outputs=[output]))
        return outputs

    def _fails(self, fault: str) -> bool:
        has = fault in self.faults
        self.faults.discard(fault)
        return has


def soaked(*faults: str) -> tuple[serving_soak.Tally, Engine]:
    engine = Engine(frozenset(faults))
    return serving_soak.Soak(engine, lambda tokens: tokens, vocabulary=TINY.vocabulary).run(0.2), engine


def test_soak_counts_what_became_of_requests() -> None:
    tally, engine = soaked()
    assert (tally.errors, tally.others) == ([], 0)
    assert tally.done == engine.served - serving_soak.PROMPTS > 0
    assert tally.aborted == engine.aborted > 0
    assert len(tally.memory) == 3
    assert min(tally.memory) > 10
    line = serving_soak.Tally(5, 2, 1, ["lost"], [10.0, 11.0, 12.5]).line(180)
    assert line == (
        "soak of 180 s: 5 requests done, 2 aborted, 1 with other tokens than alone, 1 errors, "
        "memory 10.0 -> 11.0 -> 12.5 MB (begin, half, end)"
    )


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("a token less", "tokens, got"),
        ("loses a request", "the engine knows nothing of it"),
        ("keeps what is aborted", "runs on behind its abort"),
    ],
)
def test_soak_finds_faults(fault: str, told: str) -> None:
    tally, _ = soaked(fault)
    assert any(told in error for error in tally.errors)


def test_soak_tells_tokens_that_are_not_those_of_the_prompt_alone() -> None:
    tally, _ = soaked("other tokens")
    assert (tally.others, tally.errors) == (1, [])
