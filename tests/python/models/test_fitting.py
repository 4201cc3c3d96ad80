"""What of a checkpoint fits its model: codes without scales, tensors that are never loaded, layers without a place."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.formats.stored import Tensors, as_compressed, as_gptq, named
from tests.python.models.folders import COMPRESSED, GPTQ, RandomCut, requantized, write_model, write_tokenizer
from tests.python.models.mixtures import VOCABULARY, MixtureCut, model_of
from tests.python.models.test_mixtures import load, logits
from torch import nn

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, WeightOnly, formats, models
from qcutlass.layers import QuantEmbedding, QuantLinear, TiedLinear
from qcutlass.testing.models import NOISE, noise_ratio
from qcutlass.testing.quantizing import relative_norm

pytest.importorskip("transformers", reason="needs transformers")

SCHEME = WeightOnly(4, 32)
MTP = "model.layers.2"
"""The block behind the last one of the models of `mixtures`."""


def load_model(folder: Path) -> Any:
    from qcutlass.models.transformers import load_model

    return load_model(folder)[0]


def with_tensors(source: Path, folder: Path, tensors: Tensors, **values: Any) -> Path:
    """A folder with some tensors added or replaced, and values of its configuration."""
    config = {**json.loads((source / "config.json").read_text()), **values}
    quantization = config.pop("quantization_config", None)
    write_model(folder, {**load_file(source / "model.safetensors"), **tensors}, config, quantization)
    write_tokenizer(folder, VOCABULARY)
    return folder


def saved(kind: str, folder: Path, **options: Any) -> tuple[Path, Any]:
    """A float folder of a small model, and the model."""
    model = model_of(kind, **options)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    return folder, model


def refused(source: Path, destination: Path, match: str, **options: Any) -> None:
    """Nothing is written."""
    with pytest.raises(UnsupportedError, match=match):
        models.convert(source, destination, **options)
    assert not destination.exists()


@pytest.mark.filterwarnings("ignore:.*the tensors are those of")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32])
def test_codes_are_no_weights(dtype: torch.dtype, random_cut: RandomCut, tmp_path: Path) -> None:
    """As numbers, without their scales, they were wrong ones. Float8 makes a layer, which is refused as damaged."""
    name = "model.embed_tokens.weight"
    codes = torch.ones(random_cut.rest[name].shape).to(dtype)
    folder = with_tensors(random_cut.gptq().folder, tmp_path / "old", {name: codes})
    told = "expected weight_scale" if dtype.is_floating_point else "expected floats beside the layers of gptq, got "
    for read in (lambda: models.convert(folder, tmp_path / "new"), lambda: load_model(folder)):
        with pytest.raises((CheckpointError, UnsupportedError), match=rf"{name}: {told}"):
            read()
    refused(folder, tmp_path / "new", rf"{name}: .* leave out format= \(--from\) if it was given", format="gptq")


@pytest.mark.filterwarnings("ignore:.*the tensors are those of")
@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "fp8"}}])
def test_codes_of_all_experts_in_one_tensor(config: dict[str, Any], tmp_path: Path) -> None:
    """Beside floats alone."""
    source, model = saved("qwen3_moe", tmp_path / "source")
    block = "model.layers.0.mlp.experts"
    tensors = {name: tensor for name, tensor in load_file(source / "model.safetensors").items() if block not in name}
    codes = model.get_submodule(block).gate_up_proj.detach().to(torch.float8_e4m3fn)
    save_file({**tensors, f"{block}.gate_up_proj": codes}, source / "model.safetensors")
    folder = with_tensors(source, tmp_path / "old", {}, **config)
    with pytest.raises(UnsupportedError, match=rf"{block}\.gate_up_proj: expected floats"):
        load_model(folder)


def test_masks_and_positions_of_old_files_are_no_codes(random_cut: RandomCut, tmp_path: Path) -> None:
    others = {
        "model.layers.0.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "model.position_ids": torch.arange(8)[None],
    }
    folder = with_tensors(random_cut.gptq().folder, tmp_path / "old", others)
    models.convert(folder, tmp_path / "new", verify=True)
    assert torch.equal(logits(load_model(folder)), logits(load_model(random_cut.gptq().folder)))


@pytest.mark.parametrize("form", ["gptq", "fp8", "floats"])
@pytest.mark.parametrize("told", ["by the class", "by the configuration"])
def test_blocks_that_predict_further_tokens(form: str, told: str, tmp_path: Path) -> None:
    """DeepSeek-V3 is published with one, of which transformers loads nothing."""
    cut = getattr(MixtureCut(tmp_path, "deepseek_v3"), form)().folder
    stored = load_file(cut / "model.safetensors")
    block = MTP if told == "by the configuration" else "model.layers.61"
    more = {name.replace("model.layers.1", block): x.clone() for name, x in stored.items() if ".layers.1." in name}
    more[f"{block}.eh_proj.weight"] = torch.randn(64, 128)
    values = {"num_nextn_predict_layers": 1} if told == "by the configuration" else {}
    folder = with_tensors(cut, tmp_path / "with", more, **values)
    options = {"scheme": SCHEME} if form == "floats" else {}
    with pytest.warns(UserWarning, match=r"layers and tensors are left out, which DeepseekV3ForCausalLM never loads"):
        models.convert(folder, tmp_path / "new", verify=True, **options)
    models.convert(cut, tmp_path / "without", **options)
    assert not any(block in name for name in models.ConvertedFolder(tmp_path / "new").tensors)
    expected = logits(load(tmp_path / "without"))
    assert torch.equal(logits(load(tmp_path / "new")), expected)
    if form != "floats":
        assert torch.equal(logits(load(folder, direct=True)), expected)


def test_blocks_that_a_model_has_are_loaded() -> None:
    """Though the patterns of its class, which are meant for models of other sizes, name them."""
    from qcutlass.models.fitting import left_out

    names = [f"model.layers.61.{name}" for name in ("mlp.experts.3.up_proj.weight", "self_attn.o_proj")]
    with torch.device("meta"):
        assert left_out(names, model_of("deepseek_v3", num_hidden_layers=61)) == names
        assert left_out(names, model_of("deepseek_v3", num_hidden_layers=62)) == []


@pytest.mark.parametrize(
    ("kind", "options"), [("falcon", {}), ("gpt_bigcode", {"n_embd": 64, "n_head": 2, "n_layer": 2})]
)
def test_models_with_linears_of_their_own(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A type that is derived from Linear and computes what it does; weights that only initialisation reads."""
    source, model = saved(kind, tmp_path / "old", **options)
    models.convert(source, tmp_path / "new", scheme=SCHEME, verify=True)
    loaded = load(tmp_path / "new")
    packed = {name: each for name, each in loaded.named_modules() if isinstance(each, QuantLinear)}
    assert len(packed) == 2 * 4
    for name, layer in packed.items():
        model.get_submodule(name).weight.data = layer.weights()
    dense = logits(model)
    assert noise_ratio(logits(loaded), dense, logits(model.double())) <= NOISE


def test_models_that_read_weights_themselves(tmp_path: Path) -> None:
    source, _ = saved("mamba", tmp_path / "old", state_size=8, time_step_rank=32)
    refused(
        source, tmp_path / "new", r"mixer\.\w+_proj: MambaForCausalLM reads the weight of this layer", scheme=SCHEME
    )
    rwkv, _ = saved("rwkv", tmp_path / "rwkv", attention_hidden_size=128)  # in inference alone
    refused(rwkv, tmp_path / "new", r"rwkv\.blocks\..*: RwkvForCausalLM reads the weight of this", scheme=SCHEME)
    models.convert(source, tmp_path / "new", scheme=SCHEME, skip=["lm_head", "dt_proj", "out_proj", "x_proj"])
    assert isinstance(load(tmp_path / "new").backbone.layers[0].mixer.in_proj, QuantLinear)


def test_what_the_model_could_not_load_is_not_quantised(tmp_path: Path) -> None:
    """Nothing is written: neither the folder nor that of the work."""
    mamba, _ = saved("mamba", tmp_path / "mamba", state_size=8, time_step_rank=32)
    biogpt, _ = saved("biogpt", tmp_path / "biogpt", tie_word_embeddings=True)
    method = models.Method("rtn", SCHEME)
    with pytest.raises(UnsupportedError, match=r"mixer\.\w+_proj: MambaForCausalLM reads the weight of this layer"):
        models.quantize_model(mamba, tmp_path / "new", method)
    with pytest.raises(UnsupportedError, match=r"biogpt\.embed_tokens: .*BioGptScaledWordEmbedding; .*--lm-head"):
        models.quantize_model(biogpt, tmp_path / "new", method, lm_head=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["biogpt", "mamba"]
    models.quantize_model(mamba, tmp_path / "new", method, skip=["dt_proj", "out_proj", "x_proj"])
    assert isinstance(load(tmp_path / "new").backbone.layers[0].mixer.in_proj, QuantLinear)


def test_encoders_with_decoders(tmp_path: Path) -> None:
    """Embeddings stay floats, whatever their names; T5 asks for the type of a weight."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=VOCABULARY, d_model=64, d_ff=128, num_layers=1, num_heads=4, d_kv=16)
    model = T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "old")
    new = tmp_path / "new"
    match = r"DenseReluDense\.wo: T5ForConditionalGeneration reads the weight of this layer itself"
    refused(tmp_path / "old", new, match, scheme=SCHEME)
    models.convert(tmp_path / "old", new, scheme=SCHEME, skip=["lm_head", "wo"])
    loaded = T5ForConditionalGeneration.from_pretrained(new, dtype=torch.float32)
    assert torch.equal(loaded.shared.weight, model.shared.weight)
    assert not any(isinstance(each, QuantEmbedding) for each in loaded.modules())
    for name, layer in loaded.named_modules():
        if isinstance(layer, QuantLinear):
            model.get_submodule(name).weight.data = layer.weights()
    ids = torch.arange(16)[None]
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    with torch.inference_mode():
        found, dense = loaded(**inputs).logits, model(**inputs).logits
        exact = model.double()(**inputs).logits
    assert noise_ratio(found, dense, exact) <= NOISE


def test_linears_of_falcon_are_quantised(tmp_path: Path) -> None:
    source, model = saved("falcon", tmp_path / "old")
    ids, distances = torch.randint(0, VOCABULARY, (2, 16)), []
    for name, bits in (("rtn", 4), ("awq", 8)):
        method = models.Method(name, WeightOnly(bits, 32))
        models.quantize_model(source, tmp_path / name, method, calibration=None if name == "rtn" else ids)
        loaded = load(tmp_path / name)
        assert sum(isinstance(each, QuantLinear) for each in loaded.modules()) == 2 * 4
        distances.append(relative_norm(logits(loaded), logits(model)))
    assert distances[1] < distances[0] < 1


def test_embeddings_that_scale_rows(tmp_path: Path) -> None:
    """Gemma's do, and the head that shares their weights does not; those of other types stay floats."""
    source, model = saved("gemma2", tmp_path / "old", head_dim=32)
    models.convert(source, tmp_path / "floats", scheme=SCHEME)
    assert type(load(tmp_path / "floats").lm_head) is nn.Linear
    models.convert(source, tmp_path / "new", scheme=SCHEME, lm_head=8)
    loaded = load(tmp_path / "new")
    embedding = loaded.get_input_embeddings()
    assert isinstance(embedding, QuantEmbedding)
    assert embedding.scale == loaded.config.hidden_size**0.5
    assert "scale=" in repr(embedding)
    for name, layer in loaded.named_modules():
        if isinstance(layer, QuantLinear):
            model.get_submodule(name).weight.data = layer.weights()
    model.tie_weights()
    with torch.inference_mode():
        ids = torch.arange(16)[None]
        dense, exact = model(ids).logits, copy.deepcopy(model).double()(ids).logits
        assert noise_ratio(loaded(ids).logits, dense, exact) <= NOISE
        for dtype in (torch.float16, torch.bfloat16):
            rounded = copy.deepcopy(model.get_input_embeddings()).to(dtype)
            assert torch.equal(embedding.to(dtype)(ids), rounded(ids))
    other, _ = saved("biogpt", tmp_path / "biogpt", tie_word_embeddings=True)
    match = r"biogpt\.embed_tokens: BioGptForCausalLM has no such .*, but a BioGptScaledWordEmbedding; .*--lm-head"
    refused(other, tmp_path / "refused", match, scheme=SCHEME, lm_head=8)


def test_names_that_transformers_gives_no_layer(tmp_path: Path, random_cut: RandomCut) -> None:
    """As those that models with vision have in files; nothing is known of classes that transformers lacks."""
    stored = load_file(random_cut.gptq().folder / "model.safetensors")
    config = {**random_cut.config, "architectures": ["LlamaForCausalLM"]}
    tensors = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    folder = write_model(tmp_path / "old", tensors, config, GPTQ)
    refused(
        folder, tmp_path / "new", r"language_model\.model\.layers\.0\..*: LlamaForCausalLM has no such torch\.nn\.Lin"
    )
    for name in ("Unheard", "AutoTokenizer"):
        folder = write_model(tmp_path / name, tensors, {**config, "architectures": [name]}, GPTQ)
        with pytest.warns(
            UserWarning, match=f"transformers makes no {name} .*: that it can load the layers is not che"
        ):
            models.convert(folder, tmp_path / f"new{name}")
    folder = write_model(tmp_path / "large", stored, {**config, "num_hidden_layers": 10**9}, GPTQ)
    with pytest.warns(UserWarning, match="1000000000 blocks of"):
        models.convert(folder, tmp_path / "newlarge")


IMAGES = {"image_size": 32, "patch_size": 8}
"""The configuration of a small model of pictures, with the sizes of `BLOCKS`."""
BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_base_models_whose_layers_have_other_names_in_files(kind: str, tmp_path: Path) -> None:
    """Their layers were taken for heads of a whole model, and folders written that none could load."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**BLOCKS, **IMAGES, mlp_ratio=2)
    cls = getattr(transformers, f"{kind}Model")
    torch.manual_seed(0)
    cls(config).save_pretrained(tmp_path / "old")
    match = rf"^\S+\.attention\.q_proj: {kind}Model has this layer, the files have none of this name; .*replace_linear"
    refused(tmp_path / "old", tmp_path / "new", match, scheme=SCHEME)
    refused(tmp_path / "old", tmp_path / "new", match, scheme=SCHEME, skip=["*.attention.*"])  # as floats, too
    with pytest.raises(UnsupportedError, match="transformers makes no causal model of it"):
        models.quantize_model(tmp_path / "old", tmp_path / "new", models.Method("rtn", SCHEME))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    packed, pixels = cls.from_pretrained(tmp_path / "old").eval(), torch.randn(1, 3, 32, 32)  # as it says
    assert qcutlass.replace_linear(packed, SCHEME)
    packed.save_pretrained(tmp_path / "new")
    with torch.inference_mode():
        assert torch.equal(cls.from_pretrained(tmp_path / "new")(pixels)[0], packed(pixels)[0])


def test_base_models_that_files_name_without_their_prefix(tmp_path: Path) -> None:
    """transformers finds nothing in the files that it does not expect."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    torch.manual_seed(0)
    model = DINOv3ViTModel(DINOv3ViTConfig(**BLOCKS, **IMAGES)).eval()
    model.save_pretrained(tmp_path / "old")
    models.convert(tmp_path / "old", tmp_path / "new", scheme=SCHEME, verify=True)
    loaded, report = DINOv3ViTModel.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    assert len(qcutlass.replace_linear(model, SCHEME)) == sum(
        isinstance(each, QuantLinear) for each in loaded.modules()
    )
    pixels = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(loaded(pixels)[0], model(pixels)[0])


SEEING = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    },
}  # fmt: skip
"""The configuration of a model with vision, without its text_config."""


def test_names_that_transformers_changes_in_models_of_several_parts(tmp_path: Path, random_cut: RandomCut) -> None:
    """Other readers may take the folder."""
    stored = load_file(random_cut.gptq().folder / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    for blocks, match in ((None, "has no such .*: transformers may not load the folder"), (10**9, "10{9} blocks of")):
        text = {**random_cut.config, "model_type": "llama"} | ({} if blocks is None else {"num_hidden_layers": blocks})
        folder = write_model(tmp_path / f"old{blocks}", tensors, {**SEEING, "text_config": text}, GPTQ)
        with pytest.warns(UserWarning, match=match):
            models.convert(folder, tmp_path / f"new{blocks}", verify=True)


@pytest.mark.filterwarnings("error")
def test_attention_that_a_configuration_asks_for(tmp_path: Path, random_cut: RandomCut) -> None:
    """It is no code of others to check names by, and the names are checked."""
    stored = load_file(random_cut.gptq().folder / "model.safetensors")
    config = {**random_cut.config, "architectures": ["LlamaForCausalLM"], "_attn_implementation": "flash_attention_2"}
    tensors = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no such"):
        models.convert(write_model(tmp_path / "old", tensors, config, GPTQ), tmp_path / "new")


def test_no_attention_that_a_configuration_asks_for_is_run(tmp_path: Path) -> None:
    """It may be code of others, or of a package that is absent; in a part of the model it is refused."""
    saved("llama", tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = json.loads(path.read_text())
    for index, attention in enumerate(("flash_attention_2", "somebody/kernels")):
        path.write_text(json.dumps({**config, "_attn_implementation": attention}))
        assert (
            models.quantize_model(tmp_path / "source", tmp_path / str(index), models.Method("rtn", SCHEME)).layers
            == 2 * 7
        )
    path.write_text(json.dumps({**config, "text_config": {"attn_implementation": "somebody/kernels"}}))
    with pytest.warns(UserWarning, match="is not checked"), pytest.raises(UnsupportedError) as caught:
        models.quantize_model(tmp_path / "source", tmp_path / "new", models.Method("rtn", SCHEME))
    assert str(caught.value).startswith("config.json: an implementation 'somebody/kernels', which may be code from els")
    assert not (tmp_path / "new.work").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_packed_embeddings_of_other_formats(tied: bool, random_cut: RandomCut, tmp_path: Path) -> None:
    """In a folder as it is, and converted."""
    name = "model.embed_tokens"
    weight = random_cut.rest[f"{name}.weight"]
    embedding = as_compressed(requantized(weight.float(), 7, act_order=False))
    tensors = load_file(random_cut.compressed().folder / "model.safetensors")
    del tensors[f"{name}.weight"]
    tensors |= named(embedding, name) | ({} if tied else {"lm_head.weight": weight.flip(0).contiguous()})
    folder = write_model(tmp_path / "old", tensors, {**random_cut.config, "tie_word_embeddings": tied}, COMPRESSED)
    write_tokenizer(folder, RandomCut.VOCABULARY)
    models.convert(folder, tmp_path / "new", verify=True)
    direct, converted = load_model(folder), load_model(tmp_path / "new")
    for model in (direct, converted):
        assert isinstance(model.model.embed_tokens, QuantEmbedding)
        assert type(model.lm_head) is (TiedLinear if tied else nn.Linear)
        with pytest.raises(UnsupportedError, match="resize_token_embeddings") if tied else warnings.catch_warnings():
            model.resize_token_embeddings(7 if tied else None)
    assert torch.equal(logits(direct), logits(converted))
    direct.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(converted))
    ids = torch.tensor([[1, 2, 3]])
    expected = formats.load(folder)[name].dequantize(torch.float32)[ids]
    assert torch.equal(direct.model.embed_tokens(ids), expected)


def test_a_packed_head_that_the_configuration_ties(random_cut: RandomCut, tmp_path: Path) -> None:
    head = requantized(random_cut.rest["model.embed_tokens.weight"].float().flip(0), 3, act_order=False)
    folder = with_tensors(random_cut.gptq().folder, tmp_path / "old", named(as_gptq(head), "lm_head"))
    models.convert(folder, tmp_path / "new", verify=True)
    direct, converted = load_model(folder), load_model(tmp_path / "new")
    assert isinstance(direct.lm_head, QuantLinear)
    assert torch.equal(direct.lm_head.weights(), head.weight)
    assert torch.equal(logits(direct), logits(converted))
