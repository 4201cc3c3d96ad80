"""The bench of whole models on the CPU beside llama.cpp."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs transformers")

from bench import decode, k_quants, llama, schemes
from bench.__main__ import app
from tests.python.models.test_gguf_models import write_gguf
from tests.python.models.test_heads import load

import qcutlass
from qcutlass import models
from qcutlass.models.gguf import GGUFModel

SCHEME = schemes.parse_weight_only("w4a16_g64_int")


def test_contestants_take_turns_and_are_compared(seed: int) -> None:
    model = llama.quantized_model(llama.SIZES["tiny"], SCHEME, torch.device("cpu"), torch.float32)
    fused = llama.quantized_model(llama.SIZES["tiny"], SCHEME, torch.device("cpu"), torch.float32)
    assert len(qcutlass.fuse_block(fused).fused) == 2
    calls: list[int] = []

    def peer(prompt: Sequence[int], count: int, threads: int) -> decode.Times:
        calls.append(threads)
        return decode.Times(0.5, 1.0 + threads, [-1] * count)

    ids = torch.randint(0, 96, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    found = [decode.ours("plain", model), decode.ours("fused", fused), decode.Contestant(decode.PEER, peer)]
    rows = decode.run(found, [1, 2], ids, 5, rounds=2)
    assert sorted(calls) == [1, 1, 1, 2, 2, 2]
    assert [(row["contestant"], row["threads"]) for row in rows] == [
        (name, threads) for threads in (1, 2) for name in ("plain", "fused", decode.PEER)
    ]
    for row in rows:
        assert row["same"] == (0 if row["contestant"] == decode.PEER else 5)
        assert ("slower" in row) == (row["threads"] == 2)
        if row["contestant"] == decode.PEER and row["threads"] == 2:
            assert row["slower"] == 2
        for phase, count, seconds in (("prompt", 9, 0.5), ("decode", 4, 1.0 + row["threads"])):
            assert abs(row[f"{phase}_ratio"] * (count / seconds) / row[f"{phase}_tokens"] - 1) < 1e-9
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([ids])
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    assert list(found[0].run(ids, 5, 1).tokens) == wanted[0, 9:].tolist()


def test_neighbours_compute_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def remembered(command: list[str]) -> subprocess.Popen[bytes]:
        begun.append(start(command))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", remembered)
    with decode.neighbours(2):
        assert [process.poll() for process in begun] == [None, None]
    assert all(process.poll() is not None for process in begun)


@pytest.mark.slow
def test_the_command_goes_on_without_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    options = ["--prompt", "8", "--tokens", "3", "--rounds", "1", "--threads", "1", "--dtype", "f32"]
    result: Any = CliRunner().invoke(app, ["decode", *options, "--json", str(tmp_path / "rows.json")])
    assert result.exit_code == 0, result.output
    assert "pip install llama-cpp-python" in result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {"float32", "float32, not fused"} <= {row["contestant"] for row in rows}


def test_a_file_of_k_quants_has_the_tokenizer_of_another(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And converts into a folder as large, each linear layer in a type of llama.cpp's mix."""
    monkeypatch.setattr(GGUFModel, "write_files", lambda self, folder: None)  # the tokenizer of the source is none
    source = write_gguf(tmp_path / "source.gguf", "llama", seed)
    path = k_quants.write(tmp_path / "random.gguf", source, blocks=8, seed=seed)
    ours, theirs = (
        {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items() if key.startswith("tokenizer.")}
        for file in (path, source)
    )
    assert ours == theirs
    folder = decode.converted(path, tmp_path)
    layers = models.ConvertedFolder(folder)
    words = {name: layers[name].spec.words for name in layers.names}
    assert set(words.values()) == {"w4 g32 minimums", "w8 g16 sym"}
    assert {name for name, found in words.items() if found == "w8 g16 sym"} == {
        "model.embed_tokens",
        *(f"model.layers.{i}.{name}" for i in (0, 3, 6, 7) for name in ("self_attn.v_proj", "mlp.down_proj")),
    }
    assert len(words) == 8 * 7 + 1
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= 1.05 * path.stat().st_size
    model = load(folder)
    qcutlass.fuse_block(model)
    assert len(decode.ours("ours", model).run(range(16), 4, 1).tokens) == 4
