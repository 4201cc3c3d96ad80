"""GGUF files that llama.cpp's own quantiser writes, against the gguf package's dequantisation."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from qcutlass import formats, models

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: pip install llama-cpp-python")
import llama_cpp
from tests.python.models import test_gguf_models
from tests.python.models.test_gguf_models import write_gguf
from tests.python.models.test_heads import check, load

MIXES = {
    "Q2_K": ("Q2_K", "Q3_K"), "Q3_K_M": ("Q3_K", "Q4_K"), "Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q6_K": ("Q6_K",), "Q5_0": ("Q5_0",), "Q5_1": ("Q5_1",), "IQ4_NL": ("IQ4_NL",), "IQ4_XS": ("IQ4_XS",),
}  # fmt: skip
"""Types that each one has, beside others of which it picks for some tensors."""
CASES = [("llama", mix) for mix in MIXES] + [(other, mix) for other in ("qwen2", "qwen3") for mix in ("Q4_K_M", "Q6_K")]
"""Of the other architectures the most common mixes: blocks are the same in all."""
LAYERS = (
    "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output",
)  # fmt: skip


@pytest.fixture(scope="module")
def floats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of float32 weights, of as many columns as K-quants take."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"HIDDEN": 256, "WIDE": 512}.items():
            patch.setattr(test_gguf_models, name, size)
        return write_gguf(folder / "floats.gguf", request.param, 0, types=dict.fromkeys(LAYERS, "F32"))


def quantized(source: Path, out: Path, mix: str) -> Path:
    """What llama.cpp makes of a file."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{mix}"), 1
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(options))
    assert failed == 0
    return out


def dequantized(tensor: gguf.ReaderTensor) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).float()


@pytest.mark.parametrize(("floats", "mix"), CASES, indirect=["floats"])
def test_what_llama_cpp_quantises(mix: str, floats: Path, tmp_path: Path) -> None:
    """Every matrix is the gguf package's; the model computes what these numbers do."""
    path = quantized(floats, tmp_path / f"{mix}.gguf", mix)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    matrices = {name.removesuffix(".weight"): tensor for name, tensor in stored.items() if len(tensor.shape) == 2}
    assert {tensor.tensor_type.name for tensor in matrices.values()}.issuperset(MIXES[mix])
    checkpoint = formats.load(path)
    assert set(checkpoint) == matrices.keys() - {"token_embd"}
    for name, tensor in matrices.items():
        layer = checkpoint.matrix(name) if name == "token_embd" else checkpoint[name]
        assert torch.equal(layer.dequantize(torch.float32), dequantized(tensor)), name
    models.convert(path, tmp_path / "converted", verify=True)  # which compares each layer with the file's
    folder = models.ConvertedFolder(tmp_path / "converted")
    assert len(folder) == len(matrices)
    same = {"model.layers.0.mlp.down_proj": "blk.0.ffn_down", "model.layers.1.mlp.up_proj": "blk.1.ffn_up"}
    for name, theirs in same.items():  # of which no rows move
        assert torch.equal(models.weights_of(folder[name]), dequantized(matrices[theirs])), name
    check(load(tmp_path / "converted"), torch.arange(24).view(2, 12))
