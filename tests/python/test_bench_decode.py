"""The bench of whole models on the CPU beside llama.cpp."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs transformers")

from bench import decode, llama, schemes
from bench.__main__ import app

import qcutlass

SCHEME = schemes.parse_weight_only("w4a16_g64_int")


def test_contestants_take_turns_and_are_compared(seed: int) -> None:
    model = llama.quantized_model(llama.SIZES["tiny"], SCHEME, torch.device("cpu"), torch.float32)
    fused = llama.quantized_model(llama.SIZES["tiny"], SCHEME, torch.device("cpu"), torch.float32)
    assert len(qcutlass.fuse_block(fused).fused) == 2
    calls: list[int] = []

    def peer(prompt: Sequence[int], count: int, threads: int) -> decode.Times:
        calls.append(threads)
        return decode.Times(0.5, 2.0, [-1] * count)

    ids = torch.randint(0, 96, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    found = [decode.ours("plain", model), decode.ours("fused", fused), decode.Contestant(decode.PEER, peer)]
    rows = decode.run(found, [1, 2], ids, 5, rounds=2)
    assert calls == [1, 1, 1, 2, 2, 2]
    assert [(row["contestant"], row["threads"]) for row in rows] == [
        (name, threads) for threads in (1, 2) for name in ("plain", "fused", decode.PEER)
    ]
    for row in rows:
        assert row["same"] == (0 if row["contestant"] == decode.PEER else 5)
        for phase, count, seconds in (("prompt", 9, 0.5), ("decode", 4, 2.0)):
            assert abs(row[f"{phase}_ratio"] * (count / seconds) / row[f"{phase}_tokens"] - 1) < 1e-9
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([ids])
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    assert list(found[0].run(ids, 5, 1).tokens) == wanted[0, 9:].tolist()


@pytest.mark.slow
def test_the_command_goes_on_without_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    options = ["--prompt", "8", "--tokens", "3", "--rounds", "1", "--threads", "1", "--dtype", "f32"]
    result: Any = CliRunner().invoke(app, ["decode", *options, "--json", str(tmp_path / "rows.json")])
    assert result.exit_code == 0, result.output
    assert "pip install llama-cpp-python" in result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {"float32", "float32, not fused"} <= {row["contestant"] for row in rows}
