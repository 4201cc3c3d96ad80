"""Whole GGUF files of K-quants: converted, loaded, saved, fused, cut, run by the commands; what minimums rule out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, formats, models
from qcutlass.cli import app
from qcutlass.formats.specs import LayerSpec
from qcutlass.layers import (
    Int4Linear,
    QuantEmbedding,
    QuantLinear,
    TiedLinear,
    WeightOnlyLinear,
    shard,
    use_activations,
)

pytest.importorskip("transformers", reason="needs transformers")
from tests.python.models import test_gguf_models
from tests.python.models.test_gguf_models import MIXES, write_gguf
from tests.python.models.test_heads import check, dense, load, logits

from qcutlass.models.evaluation import perplexity
from qcutlass.models.gguf import GGUFModel

EMBEDDINGS = "model.embed_tokens"
NAMES = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd", "output"
ROUNDING = 1e-6
"""Largest difference of the logarithms of these models' perplexities, in float32, from that of their numbers.

Logits are below 2; the last sum, of 256 products, errs by 256 ** 0.5 * 2 ** -24 of that, 2e-6, and those before it by
no more. A token's loss changes by twice as much at most, and the mean of 56 losses, whose errors are independent, by
56 ** -0.5 of that: 5e-7. 200 models had 8e-8 at most; a step of the scales of one group of one layer makes about 1e-5.
"""


@pytest.fixture
def tiny(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """tiny(mix, architecture, tied): a GGUF file of a model and the folder that it is converted to.

    A mix that is none has all tensors in this type.
    """
    monkeypatch.setattr(GGUFModel, "write_files", lambda self, folder: None)  # its tokenizer is none

    def convert(mix: str = "Q4_K_M", architecture: str = "llama", tied: bool = False) -> tuple[Path, Path]:
        if mix not in MIXES:
            monkeypatch.setitem(MIXES, mix, dict.fromkeys(NAMES, mix))
        (tmp_path / "gguf").mkdir(exist_ok=True)
        path = write_gguf(tmp_path / "gguf" / "tiny.gguf", architecture, seed, mix=mix, tied=tied)
        models.convert(path, tmp_path / "new", verify=True, overwrite=True)
        return path, tmp_path / "new"

    return convert


@pytest.fixture
def ids(seed: int) -> Tensor:
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(seed))


WORDS = {
    "Q2_K": "w4 g16 minimums", "Q3_K": "w4 g16 sym", "Q4_K": "w4 g32 minimums", "Q5_0": "w8 g32 sym",
    "Q5_1": "w8 g32 minimums", "Q5_K": "w8 g32 minimums", "Q6_K": "w8 g16 sym", "IQ4_NL": "w8 g32 sym",
    "IQ4_XS": "w8 g32 sym",
}  # fmt: skip
"""What layers of a type are."""
OURS = {"attn": "self_attn", "ffn": "mlp"}


def names(part: str) -> list[str]:
    """Of modules, by the last part of a tensor's name."""
    if part in ("token_embd", "output"):
        return [EMBEDDINGS if part == "token_embd" else "lm_head"]
    block, name = part.split("_")
    own = "o" if name == "output" else name
    return [f"model.layers.{i}.{OURS[block]}.{own}_proj" for i in range(2)]


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q6_K", "others"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_converted_file_computes_what_its_numbers_do(
    architecture: str, mix: str, tiny: Any, ids: Tensor, seed: int
) -> None:
    """Embeddings, logits and perplexity; every layer, embeddings and head have the codes of the mix."""
    path, folder = tiny(mix, architecture)
    converted, checkpoint = models.ConvertedFolder(folder), formats.load(path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for ours, theirs in (("lm_head", "output"), ("model.layers.1.mlp.down_proj", "blk.1.ffn_down")):
        blocks = tensors[f"{theirs}.weight"]
        expected = torch.from_numpy(gguf.quants.dequantize(blocks.data, blocks.tensor_type))
        assert torch.equal(models.weights_of(converted[ours]), expected)
    stored = checkpoint.tensor("token_embd.weight")
    model = load(folder)
    embedding = model.get_input_embeddings()
    assert type(embedding) is QuantEmbedding
    assert torch.equal(embedding(ids), stored[ids])
    held = {name: layer.spec.words for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    held[EMBEDDINGS] = converted.spec[EMBEDDINGS].words
    assert held == {name: WORDS[kind] for part, kind in MIXES[mix].items() for name in names(part)}
    check(model, ids)
    tokens = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(seed))
    found, expected = (perplexity(each, tokens, window=8).perplexity for each in (model, dense(model, torch.float32)))
    assert abs(math.log(found / expected)) <= ROUNDING


def test_tied_heads_share_embeddings_with_minimums(tiny: Any, ids: Tensor) -> None:
    _, folder = tiny(tied=True)
    model = load(folder)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, QuantEmbedding)
    assert isinstance(head, TiedLinear)
    assert embedding.minimums is not None
    check(model, ids)


def test_states_folders_and_fused_models_keep_minimums(tiny: Any, ids: Tensor, tmp_path: Path) -> None:
    _, folder = tiny()
    model = load(folder)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), ids), expected)
    other = load(folder)
    for module in other.modules():
        if isinstance(module, WeightOnlyLinear) and module.minimums is not None:
            module.minimums.zero_()
    assert not torch.equal(logits(other, ids), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), expected)
    assert qcutlass.fuse_projections(model).fused
    assert sum("minimums" in name for name in model.state_dict()) == sum("minimums" in n for n in other.state_dict())
    assert torch.equal(logits(model, ids), expected)  # strip by strip the same products
    model.save_pretrained(tmp_path / "fused")
    assert torch.equal(logits(load(tmp_path / "fused"), ids), expected)


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS"])
def test_folders_are_as_small_as_their_files(mix: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both levels of scales are kept, in half a byte or one, and codes take as many bits as in the file."""
    monkeypatch.setattr(test_gguf_models, "LARGE", 512)  # columns: names and sizes of tensors weigh little then
    path, folder = tiny(mix)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 1.05 * path.stat().st_size


@pytest.mark.parametrize("axis", ["out", "in"])
def test_parts_of_layers_have_their_minimums(axis: Any, tiny: Any, seed: int) -> None:
    _, folder = tiny()
    layer = models.ConvertedFolder(folder)["model.layers.0.mlp.up_proj"]
    assert layer.minimums is not None
    whole, parts = layer.weights(), [shard(layer, rank, 2, axis).weights() for rank in range(2)]
    assert torch.equal(torch.cat(parts, 0 if axis == "out" else 1), whole)
    assert torch.equal(layer.canonical().dequantize(torch.float32), whole)


def test_what_minimums_rule_out(tiny: Any, tmp_path: Path) -> None:
    _, folder = tiny()
    for kind in ("gptq", "compressed-tensors"):
        with pytest.raises(UnsupportedError, match="minimums"):
            models.export_model(folder, tmp_path / kind, kind)
        assert not (tmp_path / kind).exists()


@pytest.mark.parametrize("mix", ["Q3_K", "Q6_K"])
def test_what_scales_of_two_levels_rule_out(mix: str, tiny: Any, tmp_path: Path) -> None:
    """Nothing of them came from floats."""
    _, folder = tiny(mix)
    for kind in ("gptq", "compressed-tensors"):
        with pytest.raises(UnsupportedError, match=r"got two levels of scales .*; quantise the GGUF file anew"):
            models.export_model(folder, tmp_path / kind, kind)
        assert not (tmp_path / kind).exists()


def test_activations_of_8_bits(tiny: Any, ids: Tensor) -> None:
    """Every layer takes them, whatever its blocks; a row's logits are those of the products alone."""
    for mix in ("Q4_K_M", "others"):
        _, folder = tiny(mix)
        model = load(folder)
        expected = logits(model, ids)
        quantized = {name for name, layer in model.named_modules() if isinstance(layer, WeightOnlyLinear)}
        assert set(use_activations(model, "int8")) == quantized
        found = logits(model, ids)
        assert not torch.equal(found, expected)
        of_tokens = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert of_tokens.median() < 0.05  # 0.005 to 0.023 of 240 models; one token of a batch may err by more


@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_scales_of_two_levels_become_one_for_activations_of_8_bits(activations: Any, tiny: Any, tmp_path: Path) -> None:
    """Q3_K has whole zero points, and so is multiplied with such activations; blocks with minimums are not."""
    path, folder = tiny("others")
    models.convert(path, tmp_path / "w4a8", activations=activations, verify=True)
    made, before = models.ConvertedFolder(tmp_path / "w4a8"), models.ConvertedFolder(folder)
    eight = {name for name, layer in made.items() if type(layer) is Int4Linear}
    assert eight == {f"model.layers.{i}.self_attn.k_proj" for i in range(2)}
    for name in eight:
        assert torch.equal(models.weights_of(made[name]), models.weights_of(before[name]))
    if activations == "fp8":
        assert set(use_activations(load(folder), "fp8")) == eight


def test_zeros_and_minimums_exclude_each_other() -> None:
    values = {"kind": "weight_only", "bits": 4, "group_size": 32, "scales": "float32", "minimums": "float32"}
    assert LayerSpec.from_dict(values, "layer").words == "w4 g32 minimums"
    for offset in ({"zeros": "uint8"}, {"minima": "float16"}):
        with pytest.raises(CheckpointError, match="layer: expected zeros or minimums, got both"):
            LayerSpec.from_dict(values | offset, "layer")
    codes, ones = torch.zeros(16, 32, dtype=torch.uint8), torch.ones(1, 16)
    with pytest.raises(ValueError, match="minimums: expected zeros or minimums, got both"):
        qcutlass.QuantizedTensor(codes, ones, ones, 4, 32, minimums=ones)


def command(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [str(word) for word in arguments])


def test_the_commands_run_files_of_k_quants(tmp_path: Path, seed: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", seed, mix="Q4_K_M")
    folder, text = tmp_path / "packed", tmp_path / "text.txt"
    text.write_text("ab" * 40)
    for words, shown in (
        (("convert", path, folder), "gguf: 16 layers"),
        (("inspect", folder), "w4 g32 minimums"),
        (("generate", folder, "--prompt", "ab", "--max-new-tokens", 2), ""),
        (("eval", folder, "--text", text, "--window", 8), "perplexity"),
    ):
        result = command(*words)
        assert result.exit_code == 0, result.output
        assert shown in result.stdout, result.stdout
