"""GGUF files of every architecture that is converted, against transformers' own reading of the same file."""

from __future__ import annotations

import struct
import sys
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from bench.gguf_weights import random_gguf_weights

from qcutlass import CheckpointError, UnsupportedError, formats, models
from qcutlass.layers import QuantEmbedding
from qcutlass.models.gguf import GGUFModel, model_values
from qcutlass.models.gguf_families import FAMILIES
from qcutlass.models.transformers import load_model
from qcutlass.testing.models import LLAMA_CPP, NOISE, noise_ratio
from qcutlass.testing.quantizing import relative_norm

pytest.importorskip("transformers", reason="needs transformers")

HIDDEN, HEADS, KV_HEADS, WIDE, VOCABULARY, BLOCKS = 128, 4, 2, 160, 64, 2
LARGE = 256  # columns, where blocks have so many
SIZES = {"qwen3": 128, "gemma2": 128, "gemma3": 128}  # of a head, where it is not HIDDEN // HEADS
GEMMAS = "gemma", "gemma2", "gemma3"
VALUES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attention.sliding_window": 4, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0
    },
    "gemma3": {"attention.sliding_window": 4, "rope.freq_base": 1e6},
    "granite": {"attention.scale": 0.25, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0},
}  # fmt: skip
MIXES: dict[str, dict[str, str]] = {
    "Q8_0": {},
    "Q4_K_M": {
        **dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up", "token_embd"), "Q4_K"),
        **dict.fromkeys(("attn_v", "ffn_down", "output"), "Q6_K"),
    },
    "others": {
        "attn_q": "Q5_K", "attn_k": "Q3_K", "attn_v": "Q5_1", "attn_output": "IQ4_XS", "ffn_gate": "Q2_K",
        "ffn_up": "Q5_0", "ffn_down": "IQ4_NL", "token_embd": "Q6_K", "output": "Q5_K",
    },
}  # fmt: skip
"""Types by the last part of a tensor's name; of the others Q8_0."""


def separate(hidden: int, wide: int, size: int) -> list[tuple[str, int, int]]:
    """Projections that read a block's input, their rows and columns."""
    return [
        ("attn_q", HEADS * size, hidden), ("attn_k", KV_HEADS * size, hidden), ("attn_v", KV_HEADS * size, hidden),
        ("ffn_gate", wide, hidden), ("ffn_up", wide, hidden),
    ]  # fmt: skip


def fused(hidden: int, wide: int, size: int) -> list[tuple[str, int, int]]:
    """The same where they are two."""
    return [("attn_qkv", (HEADS + 2 * KV_HEADS) * size, hidden), ("ffn_up", 2 * wide, hidden)]


def write_gguf(
    path: Path,
    architecture: str,
    seed: int,
    *,
    embeddings: str = "F32",
    tied: bool = False,
    mix: str = "Q8_0",
    types: Mapping[str, str] | None = None,
    biases: Collection[str] = (),
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    absent: Collection[str] = (),
    split: int = 0,
) -> Path:
    """Linear layers in a mix of types, embeddings in a type of GGUF where the mix has none, all else in F32.

    Args:
        types: of some layers, by the last part of their names, in place of the mix's.
        biases: layers that have one, by the last part of their names.
        values: keys behind the architecture's name, more or others; None leaves one out.
        tensors: more of them.
        absent: names of tensors that are left out.
        split: how many tensors a file holds at most; 0: all are in one. The path of the first file is returned.
    """
    random = np.random.default_rng(seed)
    kinds: Mapping[str, str] = {"token_embd": embeddings} | MIXES[mix] | dict(types or {})
    biases = {"qwen2": ("attn_q", "attn_k", "attn_v")}.get(architecture, biases)
    hidden, wide = (LARGE, LARGE) if MIXES[mix] else (HIDDEN, WIDE)
    size = SIZES.get(architecture, hidden // HEADS)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    sizes: dict[str, Any] = {
        "block_count": BLOCKS, "context_length": 256, "embedding_length": hidden, "feed_forward_length": wide,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": size,
        "attention.value_length": size, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
    }  # fmt: skip
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in {**sizes, **VALUES.get(architecture, {}), **(values or {})}.items():
        if value is not None:
            add_value: Any = adders.get(type(value), writer.add_array)
            add_value(f"{architecture}.{key}", value)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(48 + i) for i in range(VOCABULARY - 1)), "ab"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if architecture == "phi3":
        writer.add_pad_token_id(0)  # transformers' own reader takes Phi-3's, which is in no small vocabulary
    if architecture in ("granite", "smollm3"):
        writer.add_rope_dimension_count(size)

    def add(name: str, *shape: int) -> None:
        if name in absent:
            return
        data = random.normal(0, 0.1, shape).astype(np.float32)
        data = data + 1 if name.endswith("norm.weight") and architecture in GEMMAS else data
        label = kinds.get(name.split(".")[-2], "Q8_0")
        kind = gguf.GGMLQuantizationType[label]
        if len(shape) == 1:
            writer.add_tensor(name, data)
        elif MIXES[mix]:
            writer.add_tensor(name, random_gguf_weights(random, *shape, label, 0.1), raw_dtype=kind)  # type: ignore[call-arg]
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)

    add("token_embd.weight", VOCABULARY, hidden)
    add("output_norm.weight", hidden)
    if not tied and architecture not in GEMMAS:
        add("output.weight", VOCABULARY, hidden)
    for i in range(BLOCKS):
        for name, rows, columns in (
            *(fused if architecture == "phi3" else separate)(hidden, wide, size),
            ("attn_output", hidden, HEADS * size), ("ffn_down", hidden, wide),
        ):  # fmt: skip
            add(f"blk.{i}.{name}.weight", rows, columns)
            if name in biases:
                add(f"blk.{i}.{name}.bias", rows)
        for name in () if architecture == "olmo2" else ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}.weight", hidden)
        if architecture in ("qwen3", "gemma3"):
            for name in ("attn_q_norm", "attn_k_norm"):
                add(f"blk.{i}.{name}.weight", size)
        if architecture == "olmo2":
            for name, heads in (("attn_q_norm", HEADS), ("attn_k_norm", KV_HEADS)):
                add(f"blk.{i}.{name}.weight", heads * size)
        if architecture in ("gemma2", "gemma3", "olmo2"):
            for name in ("post_attention_norm", "post_ffw_norm"):
                add(f"blk.{i}.{name}.weight", hidden)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*.gguf")) if split else path


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_names_and_rows_are_those_of_transformers(architecture: str, mix: str, tmp_path: Path, seed: int) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to dequantise GGUF files")
    from transformers import AutoModelForCausalLM

    path = write_gguf(tmp_path / "tiny.gguf", architecture, seed, mix=mix)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    expected = model.state_dict()
    source = GGUFModel(formats.load(path), path)
    found = {name: source.tensor(name) for name in source.rest}
    for name in source.names:
        layer = source.layer(name)
        found[f"{name}.weight"] = layer.dequantize(torch.float32)
        if layer.bias is not None:
            found[f"{name}.bias"] = layer.bias
    if source.config["tie_word_embeddings"]:
        del expected["lm_head.weight"]
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert source.config["architectures"] == [type(model).__name__]
    assert source.config.get("head_dim", LARGE // HEADS if MIXES[mix] else HIDDEN // HEADS) == SIZES.get(
        architecture, (LARGE if MIXES[mix] else HIDDEN) // HEADS
    )
    assert ("model.layers.0.self_attn.q_proj.bias" in found) == (architecture == "qwen2")


@pytest.mark.parametrize("architecture", [*GEMMAS, "phi3", "granite", "smollm3", "olmo2"])
def test_other_families_run(architecture: str, tmp_path: Path, seed: int) -> None:
    """With a packed embedding, whose rows Gemma scales, beside transformers' own layers of dequantised weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = write_gguf(tmp_path / "tiny.gguf", architecture, seed, embeddings="Q8_0")
    source = GGUFModel(formats.load(path), path)
    config: Any = AutoConfig.for_model(**source.config)
    dense: Any = AutoModelForCausalLM.from_config(config).eval()
    weights = {name: source.tensor(name) for name in source.rest}
    weights |= {f"{name}.weight": source.layer(name).dequantize(torch.float32) for name in source.names}
    absent, unexpected = dense.load_state_dict(weights, strict=False)
    assert (absent, unexpected) == (["lm_head.weight"] if architecture in GEMMAS else [], [])
    dense.tie_weights()
    models.convert(path, tmp_path / "converted")
    model, _ = load_model(tmp_path / "converted")
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, QuantEmbedding)
    assert embedding.scale == (HIDDEN**0.5 if architecture in GEMMAS else 1)
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        found, close = model(ids).logits, dense(ids).logits
        assert noise_ratio(found, close, dense.double()(ids).logits) <= NOISE


@pytest.mark.parametrize("architecture", sorted(name for name, has_experts in FAMILIES if not has_experts))
def test_logits_are_those_of_llama_cpp(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which reads the same file, with code of its own for each architecture; eight blocks have all kinds of them."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    monkeypatch.setattr(sys.modules[__name__], "BLOCKS", 8)
    floats = "attn_q", "attn_k", "attn_v", "attn_qkv", "ffn_gate", "ffn_up", "ffn_down", "output"
    path = write_gguf(tmp_path / "tiny.gguf", architecture, 0, types=dict.fromkeys(floats, "F32"))
    models.convert(path, tmp_path / "converted")
    model, _ = load_model(tmp_path / "converted")
    ids = [(7 * i + 3) % (VOCABULARY - 4) + 3 for i in range(14)]
    theirs = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1, flash_attn=False)
    theirs.eval(ids)
    expected = torch.tensor(np.array(theirs.scores[: len(ids)]))
    with torch.inference_mode():
        assert relative_norm(model(torch.tensor([ids])).logits[0], expected) <= LLAMA_CPP


def test_rows_and_multipliers_of_llamas_like(tmp_path: Path) -> None:
    """Granite's and SmolLM3's rows lie as Llama's do, OLMo 2's as transformers has them."""
    found = {}
    for architecture in ("llama", "granite", "smollm3", "olmo2"):
        path = write_gguf(tmp_path / f"{architecture}.gguf", architecture, 0)
        source = GGUFModel(formats.load(path), path)
        found[architecture] = source.layer("model.layers.0.self_attn.q_proj").dequantize(torch.float32)
        if architecture == "granite":
            names = "attention", "embedding", "residual"
            assert [source.config[f"{name}_multiplier"] for name in names] == [0.25, 3.0, 0.5]
            assert source.config["logits_scaling"] == 4.0
    assert torch.equal(found["llama"], found["granite"])
    assert torch.equal(found["llama"], found["smollm3"])
    assert not torch.equal(found["llama"], found["olmo2"])
    path = write_gguf(tmp_path / "absent.gguf", "granite", 0, values={"attention.scale": None})
    with pytest.raises(CheckpointError, match=r"expected the key granite\.attention\.scale; it is absent"):
        GGUFModel(formats.load(path), path)


def test_what_headers_say_of_gemmas(tmp_path: Path) -> None:
    """Also what llama.cpp knows by the number of blocks alone, as of the 27B models: what queries are scaled by."""
    for architecture, blocks, scale in (
        ("gemma2", 42, 128),
        ("gemma2", 46, 32),
        ("gemma3", 34, 128),
        ("gemma3", 62, 32),
    ):
        path = write_gguf(tmp_path / "tiny.gguf", architecture, 0)
        checkpoint = formats.load(path)
        header = {**checkpoint.metadata, f"{architecture}.block_count": blocks}
        tensors = {f"blk.{i}.attn_norm.weight": checkpoint.info("blk.0.attn_norm.weight") for i in range(blocks)}
        values = model_values(path, header, tensors)
        assert (values["query_pre_attn_scalar"], values["sliding_window"]) == (scale, 4)
        config = GGUFModel(checkpoint, path).config
        assert config["query_pre_attn_scalar"] == 128
        capped = architecture == "gemma2"
        assert config["final_logit_softcapping"] == (5.0 if capped else None)
        assert config["attn_logit_softcapping"] == (3.0 if capped else None)
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    path = write_gguf(tmp_path / "scaled.gguf", "gemma3", 0, values=scaled)
    source = GGUFModel(formats.load(path), path)
    assert source.config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    path = write_gguf(tmp_path / "capped.gguf", "llama", 0, values={"final_logit_softcapping": 5.0})
    with pytest.raises(UnsupportedError, match=r"llama\.final_logit_softcapping: expected it absent, or 0, got 5\.0"):
        GGUFModel(formats.load(path), path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_configuration_and_tokenizer_are_those_of_transformers(architecture: str, tmp_path: Path, seed: int) -> None:
    """Which reads the header with a reader of its own, that takes seconds for a real vocabulary."""
    from transformers import AutoConfig, AutoTokenizer

    path = write_gguf(tmp_path / "tiny.gguf", architecture, seed)
    source = GGUFModel(formats.load(path), path)
    expected = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    added = {"architectures", "dtype", "_name_or_path", *({"head_dim"} if architecture == "qwen2" else ())}
    assert {key for key in source.config.keys() | expected if source.config.get(key) != expected.get(key)} == added
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert type(source.tokenizer()) is type(theirs)
    source.write_files(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    names = sorted(file.name for file in (tmp_path / "theirs").iterdir())
    assert sorted(file.name for file in (tmp_path / "ours").iterdir()) == names
    for name in names:
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text(), name


def test_ways_to_split_text_that_transformers_does_not_know(tmp_path: Path, seed: int) -> None:
    """It splits as GPT-2 does then, without a word."""
    path = write_gguf(tmp_path / "tiny.gguf", "llama", seed)
    source = GGUFModel(formats.load(path), path)
    header = source._metadata
    source._metadata = {**header, "tokenizer.ggml.pre": "deepseek-coder"}
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre is 'deepseek-coder', which transformers does not know"):
        source.tokenizer()
    for same in (header, {**header, "tokenizer.ggml.pre": "smollm"}):
        source._metadata = same
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            source.tokenizer()


@pytest.mark.parametrize(
    ("ends", "expected"),
    [({}, 2), ({"eot": 2}, 2), ({"eot": 5}, [2, 5]), ({"eot": 5, "eom": 6}, [2, 5, 6]), ({"eot": "five"}, 2)],
)
def test_ends_of_turns_end_texts(ends: dict[str, Any], expected: object, tmp_path: Path, seed: int) -> None:
    """As in llama.cpp: chat models end a turn by another token than a text."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = write_gguf(tmp_path / "tiny.gguf", "llama", seed)
    checkpoint = formats.load(path)
    checkpoint.metadata.update({f"tokenizer.ggml.{name}_token_id": token for name, token in ends.items()})
    source = GGUFModel(checkpoint, path)
    assert source.config["eos_token_id"] == expected
    config: Any = AutoConfig.for_model(**source.config)
    assert AutoModelForCausalLM.from_config(config).generation_config.eos_token_id == expected


def test_the_header_is_read_by_our_own_reader_alone(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gguf's, in Python, takes seconds for the vocabulary of a real model."""
    path = write_gguf(tmp_path / "tiny.gguf", "llama", seed)
    monkeypatch.setattr(gguf, "GGUFReader", None)
    checkpoint = formats.load(path)
    monkeypatch.setattr("qcutlass.formats.gguf.read_header", lambda path: pytest.fail("it is read twice"))
    GGUFModel(checkpoint, path).write_files(tmp_path / "ours")
    assert (tmp_path / "ours" / "tokenizer.json").is_file()


@pytest.mark.parametrize("key", ["embedding_length", "attention.layer_norm_rms_epsilon"])
def test_a_header_without_a_size(key: str, tmp_path: Path, seed: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", seed, values={key: None})
    with pytest.raises(CheckpointError, match=rf"expected the key llama\.{key}; it is absent"):
        GGUFModel(formats.load(path), path)


def test_other_models_are_refused(tmp_path: Path, seed: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "falcon", seed)
    with pytest.raises(UnsupportedError, match="got a model of 'falcon'"):
        GGUFModel(formats.load(path), path)


@pytest.mark.parametrize("key", ["llama.attention.head_count", "llama.attention.head_count_kv"])
@pytest.mark.parametrize("heads", [0, -1, 3, 2**31 - 1])
def test_heads_that_are_none(key: str, heads: int, tmp_path: Path) -> None:
    from tests.python.formats.readers import gguf_model

    data, path = gguf_model(), tmp_path / "model.gguf"
    at = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
    path.write_bytes(data[:at] + struct.pack("<Ii", 5, heads) + data[at + 8 :])
    with pytest.raises((CheckpointError, UnsupportedError), match=r"model\.gguf"):
        models.convert(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()
