"""SmolLM2-135M, from its GGUF file to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench import quality
from tests.python.models.folders import SmolCut

from qcutlass import models
from qcutlass.layers import WeightOnlyLinear
from qcutlass.models.evaluation import perplexity
from qcutlass.testing.models import NOISE, PERPLEXITY, noise_ratio

TOKENS = 4096


def in_transformers_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q and k, one at a time: llama.cpp interleaves the halves of each head."""
    size = len(weight) // heads
    moved = torch.empty_like(weight)
    for head in range(heads):
        for row in range(size // 2):
            moved[head * size + row] = weight[head * size + 2 * row]
            moved[head * size + size // 2 + row] = weight[head * size + 2 * row + 1]
    return moved


@pytest.mark.parametrize(
    ("ours", "theirs", "heads"), [("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3), ("v_proj", "attn_v", 0)]
)
def test_rows_of_q_and_k_are_put_in_order(ours: str, theirs: str, heads: int, smol: SmolCut) -> None:
    found = smol.source.layer(f"model.layers.3.self_attn.{ours}").dequantize(torch.float32)
    stored = smol.source.checkpoint[f"blk.3.{theirs}"].dequantize(torch.float32)
    assert torch.equal(found, in_transformers_order(stored, heads) if heads else stored)
    assert torch.equal(found, stored) == (heads == 0)


@pytest.mark.slow
def test_the_imported_model_is_the_dequantised_one(smol_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to dequantise GGUF files")
    from pydoc_data.topics import topics

    from transformers import AutoModelForCausalLM

    from qcutlass.models.transformers import load_model

    done = models.convert(smol_file, tmp_path / "smol", verify=True)
    assert (done.layers, done.verified) == (210, 210)
    dense: Any = AutoModelForCausalLM.from_pretrained(
        smol_file.parent, gguf_file=smol_file.name, dtype=torch.float32
    ).eval()
    model, tokenizer = load_model(tmp_path / "smol")
    assert sum(isinstance(module, WeightOnlyLinear) for module in model.modules()) == 210
    assert torch.equal(model.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight

    ids = tokenizer("\n".join(topics.values())[: 10 * TOKENS], return_tensors="pt")["input_ids"][0, :TOKENS]
    assert len(ids) == TOKENS
    found, expected = perplexity(model, ids).perplexity, perplexity(dense, ids).perplexity
    assert abs(found / expected - 1) < PERPLEXITY
    assert 10 < expected < 20

    with torch.inference_mode():
        out, same = model(ids[None, :64]).logits, dense(ids[None, :64]).logits
        exact = dense.double()(ids[None, :64]).logits
    assert noise_ratio(out, same, exact) <= NOISE


@pytest.mark.slow
def test_rows_of_the_quality_table(smol_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to dequantise GGUF files")
    settings = quality.Settings(samples=1, seqlen=64, tokens=256, window=128)
    names = ["float", "imported", "w8a8", "blockwise"]
    wanted = [entry for entry in quality.entries() if entry.name in names]
    exact, imported, *int8 = quality.run(settings, wanted, [], tmp_path)
    assert exact["divergence"] == 0
    assert imported["divergence"] < 1e-6
    assert len(int8) == 2
    assert all(0 < row["divergence"] < 0.05 for row in int8)
    assert abs(imported["perplexity"] / exact["perplexity"] - 1) < PERPLEXITY
    assert 5 < imported["bits_per_weight"] < 7
    assert all(8 < row["bits_per_weight"] < 8.2 for row in int8)
    assert list(tmp_path.iterdir()) == []
