"""Whole GGUF files of 4-bit floats, which are kept, and of types that no product multiplies, which are rounded anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.python.formats.gguf_files import random_blocks, random_rows
from torch import Tensor

from qcutlass import UnsupportedError, WeightOnly, formats, models
from qcutlass.formats.gguf_blocks import DEQUANTIZED, QUANTIZED
from qcutlass.layers import WeightOnlyLinear

pytest.importorskip("transformers", reason="needs transformers")
from tests.python.models import test_gguf_models
from tests.python.models.test_commands import command
from tests.python.models.test_gguf_models import write_gguf
from tests.python.models.test_heads import check, load

from qcutlass.models.gguf import GGUFModel

NAMES = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
ROUNDED = dict(zip(NAMES, DEQUANTIZED, strict=False))
MORE = {**ROUNDED, "attn_q": DEQUANTIZED[7], "ffn_up": DEQUANTIZED[8]}


def blocks_of(random: np.random.Generator, n: int, k: int, kind: str, deviation: float) -> np.ndarray:
    """Blocks of any type, in the place of `random_gguf_weights`, which knows those with float16 scales."""
    if kind in DEQUANTIZED:
        return random_rows(random, n, k, kind, 0.01)
    blocks = random_blocks(random, n, k // QUANTIZED[kind].columns, kind)
    columns, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if kind == "MXFP4":
        blocks.reshape(n, k // columns, size)[:, :, 0] = random.integers(120, 125, (n, k // columns), dtype=np.uint8)
    return blocks


@pytest.fixture
def write(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """write(types): a GGUF file of a Llama with these types of layers, Q8_0 else."""
    monkeypatch.setattr(GGUFModel, "write_files", lambda self, folder: None)  # its tokenizer is none
    monkeypatch.setattr(test_gguf_models, "random_gguf_weights", blocks_of)
    (tmp_path / "gguf").mkdir()

    def file(types: dict[str, str]) -> Path:
        monkeypatch.setitem(test_gguf_models.MIXES, "these", {"token_embd": "Q8_0", **types})
        return write_gguf(tmp_path / "gguf" / "tiny.gguf", "llama", seed, mix="these")

    return file


def numbers(path: Path) -> dict[str, Tensor]:
    """What the gguf package makes of each matrix."""
    found = gguf.GGUFReader(path).tensors
    return {
        tensor.name.removesuffix(".weight"): torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in found
        if len(tensor.shape) == 2
    }


@pytest.mark.parametrize("embeddings", ["Q8_0", "MXFP4"])
def test_floats_of_4_bits_are_kept(embeddings: str, write: Any, seed: int, tmp_path: Path) -> None:
    """MXFP4 and NVFP4, to the bit the numbers of the gguf package; embeddings of such are floats in the folder."""
    types = dict.fromkeys(NAMES, "MXFP4") | {"ffn_up": "NVFP4", "token_embd": embeddings, "output": embeddings}
    path = write(types)
    done = models.convert(path, tmp_path / "new", verify=True)
    assert not done.requantized
    folder, expected = models.ConvertedFolder(tmp_path / "new"), numbers(path)
    words = {name: folder.spec[f"model.layers.0.mlp.{name}_proj"].words for name in ("up", "down")}
    assert words == {"up": "e2m1 g16 e4m3 scales", "down": "e2m1 g32 e8m0 scales"}
    source = GGUFModel(formats.load(path), path)
    for name, stored in source.names.items():
        found = folder[name]
        assert isinstance(found, WeightOnlyLinear)
        if "attn_q" in stored or "attn_k" in stored:
            continue  # whose rows have another order
        assert torch.equal(found.weights(), expected[stored])
    assert ("model.embed_tokens" in folder) == (embeddings == "Q8_0")
    if embeddings != "Q8_0":
        assert torch.equal(folder.tensor("model.embed_tokens.weight"), expected["token_embd"])
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
    check(load(tmp_path / "new"), ids)


@pytest.mark.parametrize("types", [ROUNDED, MORE], ids=["first", "others"])
def test_what_no_product_multiplies_is_rounded_anew(types: dict[str, str], write: Any, tmp_path: Path) -> None:
    path = write(types)
    with pytest.raises(UnsupportedError, match=r"no product multiplies \w+ weights as they are; .*--requantize"):
        models.convert(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    done = models.convert(path, tmp_path / "new", requantize=True, scheme=WeightOnly(8, 32), verify=True)
    assert {lost.stored for lost in done.requantized.values()} == set(types.values())
    assert len(done.requantized) == 2 * len(NAMES)
    assert max(lost.error for lost in done.requantized.values()) < 0.01
    folder, expected = models.ConvertedFolder(tmp_path / "new"), numbers(path)
    found, weight = folder["model.layers.1.mlp.down_proj"].weights(), expected["blk.1.ffn_down"]
    assert float((found - weight).norm() / weight.norm()) < 0.01


def test_commands_say_what_is_rounded(write: Any, tmp_path: Path) -> None:
    path = write(ROUNDED)
    shown = command("inspect", path)
    assert shown.exit_code == 0
    assert all(kind in shown.stdout for kind in ROUNDED.values())
    refused = command("convert", path, tmp_path / "new")
    assert refused.exit_code == 2
    assert "qcutlass convert --requantize" in refused.stderr
    made = command("convert", path, tmp_path / "new", "--requantize", "--bits", 8, "--group-size", 32)
    assert made.exit_code == 0, made.output
    assert "14 layers were quantised anew, WITH LOSS" in made.stdout
    assert all(f"2 of {kind}: " in made.stdout for kind in ROUNDED.values())
