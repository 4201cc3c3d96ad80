"""What a newcomer meets: help, options, ways out of errors, progress."""

from __future__ import annotations

import inspect
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file
from tests.python.models.folders import random_model
from typer.testing import CliRunner

import qcutlass
from qcutlass import models
from qcutlass.cli import app, quickstart, terminal
from qcutlass.formats import CanonicalLinear, gptq

FLOATS = {f"model.layers.{block}.up_proj.weight": torch.randn(32, 64) for block in range(11)}


def command(*arguments: object, **options: Any) -> Any:
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner(env=environment).invoke(app, [str(argument) for argument in arguments], **options)


@pytest.fixture
def floats(tmp_path: Path) -> Path:
    folder = tmp_path / "floats"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file(FLOATS, folder / "model.safetensors")
    return folder


def gguf_file(path: Path, *kinds: str) -> Path:
    """A layer of each kind of blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    for block, name in enumerate(kinds):
        kind = gguf.GGMLQuantizationType[name]
        size, count = gguf.GGML_QUANT_SIZES[kind]
        data = np.zeros((48, 256 // size * count), dtype=np.uint8)
        writer.add_tensor(f"blk.{block}.ffn_up.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("columns", ["0", "20"])
def test_tables_keep_their_columns_on_narrow_terminals(columns: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path / "folder", layers=1, seed=0)
    environment = {"COLUMNS": columns, "NO_COLOR": "1", "TERM": "dumb"}
    shown = CliRunner(env=environment).invoke(app, ["inspect", str(folder)]).stdout
    assert all(part in shown for part in ("model", "up_pr", "N x K"))


def test_the_version() -> None:
    result = command("--version")
    assert (result.exit_code, result.stdout) == (0, f"qcutlass {qcutlass.__version__}\n")


def test_help_is_in_order_and_under_headings() -> None:
    shown = command("--help").stdout
    assert "Run quantised language models in torch" in shown
    assert "--install-completion" in shown
    names = ["quickstart", "inspect", "convert", "quantize", "eval", "generate", "export", "tune", "info"]
    places = [re.search(rf"^\W*{name} ", shown, re.MULTILINE) for name in names]
    assert [place.start() for place in places if place] == sorted(place.start() for place in places if place)
    assert all(places)
    for heading, first in (("Try it", "quickstart"), ("Models", "inspect"), ("This machine", "tune")):
        assert shown.index(heading) < shown.index(f" {first} ")


CALLBACKS: dict[str, Any] = {info.name or info.callback.__name__: info.callback for info in app.registered_commands}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", CALLBACKS)
def test_help_is_written_in_sentences(name: str) -> None:
    assert "<bool>" not in command(name, "--help").stdout
    parameters = inspect.signature(CALLBACKS[name], eval_str=True).parameters.values()
    texts = [described.help for each in parameters for described in get_args(each.annotation)[1:]]
    assert texts
    assert [text for text in texts if not re.fullmatch(r"[A-Z0-9].*\.", text)] == []


def test_usage_errors_are_in_our_words() -> None:
    result = command("quickstart", "--bits", "3")
    assert result.exit_code == 2
    assert "'3' is not one of '4', '8'" in result.stderr
    assert "Value error" not in result.stderr
    assert "Missing argument 'FOLDER'" in command("inspect").stderr


@pytest.mark.parametrize("words", [("eval", "--text", "README.md"), ("generate", "--prompt", "x"), ("quickstart",)])
def test_devices(words: tuple[str, ...], floats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers")

    def told(device: str) -> str:
        name, *options = words
        result = command(name, floats, *options, "--device", device)
        assert result.exit_code == 2, result.output
        return str(result.stderr)

    assert "--device gpu: expected cpu, cuda, or cuda:N for GPU number N" in told("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cuda:0: torch sees no CUDA device; use --device cpu" in told("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "--device cuda:2: torch sees 2 CUDA devices; the last one is cuda:1" in told("cuda:2")
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert terminal.chosen_device("cuda:1") == torch.device("cuda", 1)
    assert current == [1]
    assert terminal.chosen_device(None) == torch.device("cuda")


def test_quickstart_times_passes_in_the_order_of_layers(floats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, int]] = []
    product = quickstart.gemm
    numbers: dict[int, int] = {}

    def recorded(a: torch.Tensor, w_packed: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
        called.append((len(a), numbers.setdefault(w_packed.data_ptr(), len(numbers))))
        return product(a, w_packed, *rest, **keywords)

    monkeypatch.setattr(quickstart, "gemm", recorded)
    result = command("quickstart", floats / "model.safetensors", "--device", "cpu", "--all")
    assert result.exit_code == 0, result.output
    checks = [(rows, layer) for layer in range(len(FLOATS)) for rows in (1, 16)]
    one_pass = {rows: [(rows, layer) for layer in range(len(FLOATS))] for rows in (1, 16)}
    assert called == checks + 6 * one_pass[1] + 6 * one_pass[16]
    shown = [line.split()[0] for line in result.stdout.splitlines() if "up_proj" in line and "bound" not in line]
    assert shown == [f"model.layers.{block}.up_proj" for block in range(11)]  # not 0, 1, 10, 2
    assert "ratio" not in result.stdout
    for rows in ("1 row through", "16 rows through"):
        line = next(line for line in result.stdout.splitlines() if line.startswith(rows))
        assert re.fullmatch(rf"{rows} all 11 layers in turn: [\d.]+ ms, with dense fp32 weights [\d.]+ ms", line)
    few = command("quickstart", floats / "model.safetensors", "--device", "cpu", "--tokens", 3).stdout
    assert "3 rows through all 11 layers" in few
    assert "16 rows" not in few


def test_quickstart_keeps_as_many_dense_weights_as_fit(floats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "_MOST_DENSE_BYTES", 3 * 32 * 64 * 4 + 100)
    result = command("quickstart", floats / "model.safetensors", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "1 row through the first 3 of 11 layers in turn" in result.stdout
    assert "passed: 11 of 11" in result.stdout


@pytest.mark.parametrize(("slow", "warned"), [(1.4, False), (1.6, True)])
def test_quickstart_warns_where_times_differ(
    slow: float, warned: bool, floats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([9.0, 9.0, slow, 1.0, *8 * [1.0], *12 * [1.0]])  # two in a round, the first of which is dropped
    monkeypatch.setattr(quickstart, "_wall_time", lambda call: next(times))
    result = command("quickstart", floats / "model.safetensors", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert ("warning: the times of repeated passes differ by 60 %" in result.stdout) == warned
    assert "1000.00 ms, with dense fp32 weights 1000.00 ms" in result.stdout  # the fastest


def test_float_models_are_rounded_where_it_is_asked_for(floats: Path, tmp_path: Path) -> None:
    refused = command("convert", floats, tmp_path / "new")
    assert refused.exit_code == 2
    assert "are floats; qcutlass quantize --calibration TEXT loses least, convert --bits 4" in refused.stderr
    assert not (tmp_path / "new").exists()
    done = command("convert", floats, tmp_path / "new", "--bits", 4, "--group-size", 32)
    assert done.exit_code == 0, done.output
    assert done.stderr == "note: rounded to the nearest int4 in groups of 32; qcutlass quantize loses less\n"
    assert done.stdout.startswith("floats: 11 layers")
    other = command("convert", floats, tmp_path / "odd", "--bits", 8, "--group-size", 20)
    assert "note: groups of 20 run on the CPU alone; GPU kernels take multiples of 16, or -1" in other.stderr
    channel = command("convert", floats, tmp_path / "channel", "--bits", 8, "--group-size", -1)
    assert channel.stderr == "note: rounded to the nearest int8 in a scale a channel; qcutlass quantize loses less\n"
    wide = command("convert", floats, tmp_path / "wide", "--bits", 8, "--group-size", 1000000)
    assert wide.stderr == channel.stderr


def test_groups_that_no_gpu_takes_are_said_at_once(floats: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    for size, said in ((20, True), (32, False), (-1, False)):
        result = command("quantize", floats, tmp_path / "new", "--method", "rtn", "--group-size", size)
        assert result.exit_code == 2  # the model has no sizes
        assert ("note: groups of 20 run on the CPU alone" in result.stderr) == said


def test_options_for_floats_are_refused_for_quantised_weights(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 1, seed=seed)
    result = command("convert", source, tmp_path / "new", "--bits", 4)
    assert result.exit_code == 2
    assert "--bits: the weights of" in result.stderr
    assert "are quantised already, and stay what they are; leave it out" in result.stderr


def test_names_of_the_hub(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    for words in (("inspect",), ("convert", "new"), ("quantize", "new", "--method", "rtn"), ("quickstart",)):
        name, *rest = words
        result = command(name, "owner/Some-Model", *rest)
        assert result.exit_code == 2
        assert "hf download owner/Some-Model --local-dir Some-Model" in result.stderr, words
    revision = tmp_path / "hub/models--owner--Some-Model/snapshots/0123456789012345678901234567890123456789"
    revision.parent.mkdir(parents=True)
    floats.rename(revision)
    references = revision.parents[1] / "refs"
    references.mkdir()
    (references / "main").write_text(revision.name)
    result = command("inspect", "owner/Some-Model")
    assert result.exit_code == 0, result.output
    assert f"owner/Some-Model: taken from {revision}" in result.stderr
    assert "model.layers.*.up_proj" in result.stdout
    for place in ("absent", "absent/model.gguf", "/absent/model", "./absent/model/deep"):
        assert "hf download" not in command("inspect", place).stderr  # no name of the hub


def test_inspect_says_what_is_not_read(tmp_path: Path) -> None:
    none = command("inspect", gguf_file(tmp_path / "k.gguf", "Q8_1", "Q8_1", "Q8_K"))
    assert none.exit_code == 2
    assert none.stdout == ""
    assert "not read: 2 layers, blk.0.ffn_up and others: Q8_1 blocks are not read, only" in none.stderr
    assert "not read: 1 layer, blk.2.ffn_up: Q8_K blocks are not read" in none.stderr
    assert none.stderr.splitlines()[-1].endswith("none of its linear layers can be read")
    assert "qcutlass quantize" in none.stderr
    some = command("inspect", gguf_file(tmp_path / "some.gguf", "Q4_0", "Q8_1"))
    assert some.exit_code == 0
    assert "blk.*.ffn_up" in some.stdout
    assert "not read: 1 layer, blk.1.ffn_up: Q8_1" in some.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "config.json"])
def test_pointers_of_git_lfs(name: str, floats: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 4096\n"
    if name.endswith(".gguf"):
        (floats / "model.safetensors").unlink()
    (floats / name).write_text(pointer)
    result = command("inspect", floats)
    assert result.exit_code == 2
    assert f"{name}: a git-lfs pointer, not the file itself; run git lfs pull" in result.stderr


@pytest.mark.parametrize("label", ["quip", "quanto"])
def test_other_quantisers_are_refused_with_advice(label: str, floats: Path) -> None:
    (floats / "config.json").write_text(f'{{"quantization_config": {{"quant_method": "{label}"}}}}')
    result = command("inspect", floats)
    assert result.exit_code == 2
    assert f"quant_method '{label}' is not read, only gptq, awq, compressed-tensors, " in result.stderr
    assert result.stderr.rstrip().endswith("quantise the model's float original instead: qcutlass quantize")


def test_packed_weights_of_another_type_are_refused_with_advice(tmp_path: Path) -> None:
    tensors = {
        "up.weight_packed": torch.zeros(32, 32, dtype=torch.int16),
        "up.weight_scale": torch.ones(32, 4).to(torch.float8_e4m3fn),
        "up.weight_global_scale": torch.ones(1),
    }
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    with pytest.raises(qcutlass.UnsupportedError, match=r"expected words of integers or bytes.*qcutlass quantize"):
        dict(qcutlass.formats.load(tensors, config=config))


def test_windows_that_are_longer_than_the_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three")
    result = command("eval", tmp_path, "--text", tmp_path / "text.txt", "--tokens", 64)
    assert result.exit_code == 2
    assert "--tokens 64: expected at least one window of 512; pass --window 64 as well" in result.stderr


def test_places_are_checked_before_a_text_is_tokenised(
    floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.setattr("qcutlass.models.sources.load_tokenizer", lambda *_: pytest.fail("a tokenizer was loaded"))
    (tmp_path / "text.txt").write_text("one two three")
    (tmp_path / "there").mkdir()
    for out, message in (("there", "exists; pass overwrite=True (--overwrite)"), ("new", "no causal model")):
        if out == "new":
            (floats / "config.json").write_text('{"model_type": "no-such-model"}')
        result = command("quantize", floats, tmp_path / out, "--calibration", tmp_path / "text.txt")
        assert result.exit_code == 2
        assert message in result.stderr


def test_zero_points_that_a_format_does_not_hold() -> None:
    weight = qcutlass.quantize(torch.randn(32, 64), 4, 32, symmetric=False)
    assert weight.zeros is not None
    layer = CanonicalLinear(replace(weight, zeros=weight.zeros.to(torch.float32) + 0.5))
    with pytest.raises(qcutlass.UnsupportedError, match="quantise the model anew: qcutlass quantize makes whole ones"):
        gptq.store(layer, 2)


def test_progress_shows_phases() -> None:
    stream = io.StringIO()
    with terminal.steps(Console(file=stream, force_terminal=True, width=120), "reading headers") as report:
        for done in range(1, 4):
            report(f"writing {done}", done, 3)
        report("writing the tokenizer", 0, 0)
        report("verifying 2", 1, 3)
    shown = stream.getvalue()
    assert "verifying 2" in shown
    assert "1/3" in shown


def test_the_clock_does_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last step of a phase it goes on, and each phase has its own."""
    bars: list[Progress] = []

    class Noted(Progress):
        def __init__(self, *columns: Any, **options: Any) -> None:
            super().__init__(*columns, **options)
            bars.append(self)

    monkeypatch.setattr(terminal, "Progress", Noted)
    with terminal.steps(Console(file=io.StringIO(), force_terminal=True), "reading headers") as report:
        task = bars[0].tasks[0]
        begin = task.start_time
        report("writing 1", 1, 2)
        second = task.start_time
        assert None is not begin != second
        report("writing 2", 2, 2)
        assert task.start_time == second
        assert not task.finished
        report("verifying 1", 0, 2)
        assert task.start_time != second


def test_nothing_moves_where_no_terminal_is() -> None:
    stream = io.StringIO()
    with terminal.steps(Console(file=stream), "reading headers") as report:
        report("writing", 1, 2)
    assert stream.getvalue() == ""


def test_a_conversion_names_its_phases(floats: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    models.convert(floats, tmp_path / "new", verify=True, progress=lambda *call: calls.append(call))
    names = [f"model.layers.{block}.up_proj" for block in range(11)]
    assert [what for what, _, _ in calls] == [
        *(f"writing {name}" for name in names),
        "writing embeddings and norms",
        "writing the tokenizer",
        "writing the index",
        *(f"verifying {name}" for name in names),
        "putting files in place",
    ]
    assert [(done, total) for what, done, total in calls if what.startswith("verifying")] == [
        (done, 11) for done in range(11)
    ]


def test_piped_results_have_no_blank_lines(floats: Path, tmp_path: Path) -> None:
    result = command("convert", floats, tmp_path / "new", "--bits", 4)
    assert all(line.strip() for line in result.output.splitlines()), result.output


def test_numbers_have_no_colours() -> None:
    stream = io.StringIO()
    shown = terminal.console()
    shown.file, shown._force_terminal = stream, True
    shown.print("qcutlass 0.1.0: 17 layers")
    assert "\x1b" not in stream.getvalue()
