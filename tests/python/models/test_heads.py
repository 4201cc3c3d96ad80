"""Packed embeddings and output heads of whole models: what is stored, loaded, tied, saved, exported and refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import llama, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, WeightOnly, formats, models
from qcutlass.cli import app
from qcutlass.layers import Int4Linear, QuantEmbedding, QuantLinear, TiedLinear, WeightOnlyLinear
from qcutlass.testing.models import NOISE, noise_ratio

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("gguf", reason="needs gguf")
from tests.python.models.folders import RandomCut
from tests.python.models.quantizations import VOCABULARY, calibration, make
from tests.python.models.test_gguf_models import write_gguf

from qcutlass.models.gguf import GGUFModel

EMBEDDINGS = "model.embed_tokens"
BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids).logits  # type: ignore[no-any-return]


def dense(model: Any, dtype: torch.dtype) -> Any:
    """The model with all packed weights as numbers."""
    numbers = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, QuantEmbedding):
            numbers.set_submodule(name, nn.Embedding.from_pretrained(module.weights()))
        elif isinstance(module, QuantLinear | TiedLinear):
            weight = module.embedding.weights() if isinstance(module, TiedLinear) else module.weights()
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight = nn.Parameter(weight)
            if module.bias is not None:
                linear.bias = nn.Parameter(module.bias.float())
            numbers.set_submodule(name, linear)
    return numbers.to(dtype)


def check(model: Any, ids: Tensor) -> None:
    exact, same = (logits(dense(model, dtype), ids) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(logits(model, ids), same, exact) <= NOISE


@pytest.fixture
def tiny(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """tiny(embeddings, tied): a GGUF file of a model and the folder that it is converted to."""
    monkeypatch.setattr(GGUFModel, "write_files", lambda self, folder: None)  # its tokenizer is none

    def convert(embeddings: str = "Q8_0", tied: bool = True, **options: Any) -> tuple[Path, Path]:
        (tmp_path / "gguf").mkdir(exist_ok=True)
        path = write_gguf(tmp_path / "gguf" / "tiny.gguf", "llama", seed, embeddings=embeddings, tied=tied)
        models.convert(path, tmp_path / "new", verify=True, overwrite=True, **options)
        return path, tmp_path / "new"

    return convert


@pytest.fixture
def ids(seed: int) -> Tensor:
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", BITS)
def test_embeddings_in_blocks_stay_packed_and_tied_heads_share_them(
    kind: str, tied: bool, tiny: Any, ids: Tensor
) -> None:
    path, folder = tiny(kind, tied)
    converted = models.ConvertedFolder(folder)
    assert converted.spec[EMBEDDINGS].bits == BITS[kind]
    stored = formats.load(path).tensor("token_embd.weight")
    assert torch.equal(models.weights_of(converted[EMBEDDINGS]), stored)
    assert ("lm_head" in converted) != tied
    assert "lm_head" not in converted.spec.modules_to_not_convert

    model = load(folder)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert torch.equal(embedding(ids), stored[ids])
    assert type(head) is (TiedLinear if tied else WeightOnlyLinear)
    assert not tied or head.embedding is embedding
    check(model, ids)
    model.tie_weights()
    assert model.get_output_embeddings() is head
    assert len(model.state_dict()) == len({tensor.data_ptr() for tensor in model.state_dict().values()})
    half = load(folder, torch.float16)
    assert half.get_input_embeddings()(ids).dtype == torch.float16
    assert (logits(half, ids).argmax(-1) == logits(model, ids).argmax(-1)).float().mean() > 0.8


@pytest.mark.parametrize("kind", BITS)
def test_a_folder_is_hardly_larger_than_its_file(kind: str, tiny: Any) -> None:
    path, folder = tiny(kind)
    weights = sum(group.size for group in models.inspect(folder).groups)
    tensors = [stored for name, stored in formats.load(path)._source.tensors.items() if len(stored.shape) == 2]
    bits = {"F32": 32, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5}
    layouts = 40 * len(tensors)  # five numbers a layer, which small ones notice
    expected = sum(bits[info.dtype] / 8 * info.shape[0] * info.shape[1] for info in tensors)
    assert weights - layouts == expected


def test_the_bench_compares_with_the_same_numbers(tiny: Any, ids: Tensor) -> None:
    model = load(tiny()[1])
    twin = llama.dense(model, torch.float32)
    assert twin.lm_head.weight.data_ptr() == twin.model.embed_tokens.weight.data_ptr()
    assert torch.equal(logits(twin, ids), logits(dense(model, torch.float32), ids))
    assert 0 < tokens.check(model, 3, torch.float32) <= 1


def test_saved_models_and_base_models(tiny: Any, ids: Tensor, tmp_path: Path) -> None:
    from transformers import AutoModel

    _, folder = tiny("Q4_1")
    model = load(folder)
    model.save_pretrained(tmp_path / "saved")
    saved, stored = (load_file(place / "model.safetensors") for place in (tmp_path / "saved", folder))
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], stored[name]) for name in stored)
    assert torch.equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))
    base = AutoModel.from_pretrained(folder, dtype=torch.float32)
    assert type(base.embed_tokens) is QuantEmbedding
    with torch.inference_mode():
        assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    qcutlass.fuse_projections(model)
    model.save_pretrained(tmp_path / "fused")
    assert torch.equal(logits(load(tmp_path / "fused"), ids), logits(load(folder), ids))


def test_a_copied_model_generates_the_same(tiny: Any, ids: Tensor) -> None:
    model = load(tiny()[1])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2}
    other = copy.deepcopy(model)
    assert other.lm_head.embedding is other.model.embed_tokens
    assert torch.equal(other.generate(ids, **options), model.generate(ids, **options))


def test_the_number_of_packed_embeddings_is_fixed(tiny: Any) -> None:
    model = load(tiny()[1])
    assert model.resize_token_embeddings(64) is model.get_input_embeddings()
    with pytest.raises(UnsupportedError, match=r"resize_token_embeddings: the 64 embeddings are packed.*resize the mo"):
        model.resize_token_embeddings(72)


def test_folders_of_before_are_loaded(tiny: Any, ids: Tensor) -> None:
    """Embeddings in float32, and zeros where minima would do."""
    _, folder = tiny("Q4_1")
    converted, tensors = models.ConvertedFolder(folder), load_file(folder / "model.safetensors")
    layer = converted[EMBEDDINGS]
    expected = logits(dense(load(folder), torch.float64), ids)
    old = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{EMBEDDINGS}.")}
    config = json.loads((folder / "config.json").read_text())
    described = config["quantization_config"]
    assert described["version"] == 2
    del described["exceptions"][EMBEDDINGS]
    described["modules_to_not_convert"] = ["lm_head", EMBEDDINGS]
    name = "model.layers.0.mlp.up_proj"
    (folder / "config.json").write_text(json.dumps(config))
    save_file(old | {f"{EMBEDDINGS}.weight": models.weights_of(layer)}, folder / "model.safetensors")
    model = load(folder)
    assert type(model.model.embed_tokens) is nn.Embedding
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(dense(model, torch.float64), ids), expected)
    check(model, ids)
    assert type(model.get_submodule(name)) is WeightOnlyLinear


def test_float_embeddings_of_16_bits_keep_them(tiny: Any) -> None:
    folder = models.ConvertedFolder(tiny("F16")[1])
    assert EMBEDDINGS not in folder
    assert folder.tensor(f"{EMBEDDINGS}.weight").dtype == torch.float16


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_of_4_bits_are_looked_up_whatever_activations_are(
    tied: bool, tmp_path: Path, seed: int, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They became layers that quantise their input, which no embedding has, in a folder that did not load."""
    monkeypatch.setattr(GGUFModel, "write_files", lambda self, folder: None)
    path = write_gguf(tmp_path / "tiny.gguf", "llama", seed, embeddings="Q4_0", tied=tied, types={"ffn_up": "Q4_0"})
    models.convert(path, tmp_path / "new", activations="fp8", verify=True)
    folder = models.ConvertedFolder(tmp_path / "new")
    assert {name for name, layer in folder.items() if type(layer) is Int4Linear} == {
        f"model.layers.{i}.mlp.up_proj" for i in range(2)
    }
    assert logits(load(tmp_path / "new"), ids).isfinite().all()


def test_activations_that_no_layer_quantises_are_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="activations: expected layers of 4-bit codes with integer zeros"):
        tiny("Q4_0", activations="int8")  # all but the embeddings have 8 bits
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("to", models.EXPORTS)
def test_export_writes_heads_that_do_not_fit_in_16_bits(to: str, tiny: Any, tmp_path: Path) -> None:
    _, folder = tiny("Q8_0", tied=True, lm_head=4)
    packed = models.ConvertedFolder(folder)
    assert models.export_model(folder, tmp_path / "out", to) == len(packed) - 1
    checkpoint = formats.load(tmp_path / "out")
    assert EMBEDDINGS not in checkpoint
    assert torch.equal(checkpoint.tensor(f"{EMBEDDINGS}.weight"), models.weights_of(packed[EMBEDDINGS]).half())
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert described["lm_head"] is False if to == "gptq" else described["ignore"] == ["lm_head"]
    name = "model.layers.1.mlp.up_proj"
    assert torch.equal(checkpoint[name].dequantize(torch.float32), models.weights_of(packed[name]))


@pytest.mark.parametrize("to", models.EXPORTS)
def test_export_keeps_a_head_of_the_layers_scheme(to: str, tiny: Any, tmp_path: Path) -> None:
    _, folder = tiny("Q8_0", tied=False)  # all of it is Q8_0
    models.export_model(folder, tmp_path / "out", to)
    checkpoint = formats.load(tmp_path / "out")
    expected = models.weights_of(models.ConvertedFolder(folder)["lm_head"])
    assert torch.equal(checkpoint["lm_head"].dequantize(torch.float32), expected)


SCHEMES = {8: WeightOnly(8, 128, symmetric=True), 4: WeightOnly(4, 32, symmetric=True)}


def quantized(weight: Tensor, bits: int) -> Tensor:
    scheme = SCHEMES[bits]
    return qcutlass.quantize(
        weight, bits, scheme.group_size, scheme.symmetric, scale_dtype=torch.float16
    ).dequantize(torch.float32)  # fmt: skip


@pytest.mark.parametrize("method", ["convert", "rtn", "gptq"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("opt", True), ("gpt_neox", False)])
def test_heads_of_float_models(kind: str, tied: bool, bits: int, method: str, tmp_path: Path, seed: int) -> None:
    source = make(kind, seed, tie_word_embeddings=tied)
    source.save_pretrained(tmp_path / "source")
    if method == "convert":
        models.convert(tmp_path / "source", tmp_path / "new", lm_head=bits, verify=True)
    else:
        tokens = calibration(seed) if method == "gptq" else None
        models.quantize_model(tmp_path / "source", tmp_path / "new", method, calibration=tokens, lm_head=bits)
    model = load(tmp_path / "new")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    before = source.get_output_embeddings().weight.detach()
    every = torch.arange(VOCABULARY)
    if tied:
        assert head.embedding is embedding
        assert torch.equal(embedding(every), quantized(before, bits))
    else:
        assert type(embedding) is nn.Embedding
        assert torch.equal(embedding.weight, source.get_input_embeddings().weight)
        assert torch.equal(head.weights(), quantized(before, bits))
    check(model, torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed)))


@torch.inference_mode()
def test_models_of_other_tasks_leave_a_packed_head(tmp_path: Path, ids: Tensor, seed: int) -> None:
    """As transformers leaves one of floats: a classifier's hidden states are those of the base model."""
    import transformers
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "floats")
    models.convert(tmp_path / "floats", tmp_path / "new", scheme=WeightOnly(4, 32), lm_head=8)
    expected = AutoModel.from_pretrained(tmp_path / "new")(ids).last_hidden_state
    for kind in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        model = kind.from_pretrained(tmp_path / "new")
        assert isinstance(model.model.layers[0].self_attn.q_proj, WeightOnlyLinear)
        assert torch.equal(model.model(ids).last_hidden_state, expected)


def test_a_head_of_a_file_is_quantised_anew(tiny: Any) -> None:
    path, folder = tiny("Q8_0", True, lm_head=4)
    before = formats.load(path).tensor("token_embd.weight")
    assert torch.equal(models.weights_of(models.ConvertedFolder(folder)[EMBEDDINGS]), quantized(before, 4))
    path, folder = tiny("Q4_0", False, lm_head=8)
    converted = models.ConvertedFolder(folder)
    assert (converted.spec["lm_head"].group_size, converted.spec[EMBEDDINGS].bits) == (-1, 4)  # K = 128, one group


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_embeddings_of_a_file_stay_packed_when_its_layers_are_quantised(
    method: str, tiny: Any, tmp_path: Path, ids: Tensor
) -> None:
    path, folder = tiny("Q8_0", True)
    tokens = ids if method == "gptq" else None
    models.quantize_model(path, tmp_path / "quantised", method, calibration=tokens)
    before, after = models.ConvertedFolder(folder), models.ConvertedFolder(tmp_path / "quantised")
    assert before.keys() == after.keys()
    assert torch.equal(models.weights_of(after[EMBEDDINGS]), models.weights_of(before[EMBEDDINGS]))
    assert after.spec["model.layers.0.mlp.up_proj"].bits == 4
    check(load(tmp_path / "quantised"), ids)


def test_a_float_head_of_a_quantised_checkpoint(random_cut: RandomCut, tmp_path: Path) -> None:
    models.convert(random_cut.gptq().folder, tmp_path / "new", lm_head=8, verify=True)
    converted = models.ConvertedFolder(tmp_path / "new")
    (name,) = set(converted) - set(random_cut.names)
    stored = random_cut.rest[f"{name}.weight"]
    assert torch.equal(models.weights_of(converted[name]), quantized(stored, 8))


def test_a_head_that_is_in_the_files_is_no_longer_tied(tmp_path: Path, seed: int) -> None:
    source = make("llama", seed, tie_word_embeddings=True)
    source.save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors["lm_head.weight"] = tensors[f"{EMBEDDINGS}.weight"].clone()
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    models.convert(tmp_path / "source", tmp_path / "new", lm_head=8, verify=True)
    model = load(tmp_path / "new")
    assert type(model.lm_head) is WeightOnlyLinear
    assert torch.equal(model.model.embed_tokens.weight, source.model.embed_tokens.weight)
    assert model.config.tie_word_embeddings is False
    check(model, torch.arange(12)[None])


@pytest.mark.parametrize(("lm_head", "error"), [(3, ValueError), (True, TypeError), ("8", TypeError)])
def test_bits_of_heads_are_checked_before_anything_is_opened(lm_head: Any, error: type, tmp_path: Path) -> None:
    for call in (models.convert, models.quantize_model):
        with pytest.raises(error, match="lm_head: expected"):
            call(tmp_path / "absent", tmp_path / "new", lm_head=lm_head)  # type: ignore[operator]


def test_a_model_without_a_known_head(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"up.weight": torch.ones(32, 64)}, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="lm_head: the model has neither a head named lm_head or embed_out"):
        models.convert(tmp_path / "source", tmp_path / "new", lm_head=8)
    assert not (tmp_path / "new").exists()


def test_the_option_of_the_commands(tmp_path: Path, seed: int) -> None:
    make("llama", seed, tie_word_embeddings=True).save_pretrained(tmp_path / "source")
    for command in (["convert", "--bits", "4"], ["quantize", "--method", "rtn"]):
        folder = tmp_path / command[0]
        arguments = [*command, str(tmp_path / "source"), str(folder), "--lm-head", "8"]
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
        assert models.ConvertedFolder(folder).spec[EMBEDDINGS].bits == 8
        assert CliRunner().invoke(app, [*arguments[:-1], "5"]).exit_code == 2


def test_descriptions_with_both_zeros_and_minima_are_refused(tiny: Any) -> None:
    _, folder = tiny("Q4_1")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["exceptions"][EMBEDDINGS] |= {"zeros": "float32", "minima": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="expected zeros or minima, which they follow from, got both"):
        models.ConvertedFolder(folder)
