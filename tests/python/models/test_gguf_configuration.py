"""What the header and the tensors of a GGUF file say of its model: frequencies, biases, sizes; what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from qcutlass import CheckpointError, UnsupportedError, formats, models
from qcutlass.models.gguf import GGUFModel

pytest.importorskip("transformers", reason="needs transformers")
from tests.python.models import test_gguf_models
from tests.python.models.test_gguf_models import BLOCKS, HEADS, HIDDEN, KV_HEADS, WIDE, write_gguf
from tests.python.models.test_heads import load

PAIRS: Final = HIDDEN // HEADS // 2
"""Frequencies of a head."""
PLAIN: Final = 10000.0 ** -(torch.arange(PAIRS).double() / PAIRS)


def yarn(factor: float, context: int, fast: float = 32, slow: float = 1) -> Tensor:
    """Frequencies that turn more often than `fast` in a context stay; those less often than `slow` are divided."""
    ends = (PAIRS * math.log(context / (turns * 2 * math.pi)) / math.log(10000) for turns in (fast, slow))
    first, last = max(math.floor(next(ends)), 0), min(math.ceil(next(ends)), 2 * PAIRS - 1)
    divided = ((torch.arange(PAIRS).double() - first) / (last - first)).clamp(0, 1)
    return PLAIN / factor * divided + PLAIN * (1 - divided)


def llama3(factor: float, context: int, high: float = 4) -> np.ndarray:
    """The divisors of Llama 3.1's scaling, as llama.cpp computes and stores them."""
    found = []
    for frequency in PLAIN.float():
        length = float(2 * math.pi / frequency)
        share = (context / length - 1) / (high - 1)
        between = 1 / ((1 - share) / factor + share)
        found.append(1.0 if length < context / high else factor if length > context else between)
    return np.array(found, dtype=np.float32)


YARN: Final = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
SCALED: Final[dict[str, tuple[dict[str, Any], Tensor, float]]] = {  # keys of rope, frequencies, factor of cos and sin
    "nothing": ({}, PLAIN, 1),
    "linear": ({"scaling.type": "linear", "scaling.factor": 4.0}, PLAIN / 4, 1),
    "no type": ({"scaling.factor": 4.0}, PLAIN / 4, 1),
    "older key": ({"scale_linear": 4.0}, PLAIN / 4, 1),
    "none": ({"scaling.type": "none", "scaling.factor": 4.0, "scaling.finetuned": True}, PLAIN, 1),
    "factor 0": ({"scaling.type": "linear", "scaling.factor": 0.0}, PLAIN, 1),
    "yarn": ({f"scaling.{key}": value for key, value in YARN.items()}, yarn(4, 64), 1 + 0.1 * math.log(4)),
    "yarn, no context": ({"scaling.type": "yarn", "scaling.factor": 8.0}, yarn(8, 256), 1 + 0.1 * math.log(8)),
    "yarn, all keys": (
        {f"scaling.{key}": value for key, value in YARN.items()}
        | {"scaling.attn_factor": 1.5, "scaling.yarn_beta_fast": 4.0, "scaling.yarn_beta_slow": 0.5}
        | {"scaling.yarn_ext_factor": 1.0, "scaling.yarn_log_multiplier": 0.0},
        yarn(4, 64, 4, 0.5), 1.5 * (1 + 0.1 * math.log(4)),
    ),
}  # fmt: skip


def rope_of(path: Path) -> tuple[Tensor, float]:
    """The frequencies, and the factor of sines and cosines, of the model in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = GGUFModel(formats.load(path), path)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config))
    return model.model.rotary_emb.inv_freq.double(), model.model.rotary_emb.attention_scaling


def furthest(found: Tensor, expected: Tensor) -> float:
    return float((found / expected - 1).abs().max())


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_frequencies_are_those_of_the_header(architecture: str, name: str, tmp_path: Path, seed: int) -> None:
    keys, expected, attention = SCALED[name]
    values = {f"rope.{key}": value for key, value in keys.items()}
    found, factor = rope_of(write_gguf(tmp_path / "tiny.gguf", architecture, seed, values=values))
    assert furthest(found, expected) < 1e-6
    assert abs(factor / attention - 1) < 1e-6


@pytest.mark.parametrize("numbers", [(8.0, 8192), (32.0, 8192), (4.0, 64), (2.0, 40, 8.0)])
def test_divisors_of_frequencies_are_those_of_llama_3(numbers: Any, tmp_path: Path, seed: int) -> None:
    divisors = llama3(*numbers)
    path = write_gguf(tmp_path / "tiny.gguf", "llama", seed, tensors={"rope_freqs.weight": divisors})
    found, factor = rope_of(path)
    assert furthest(found, PLAIN / torch.from_numpy(divisors)) < 1e-4  # divisors of float32, near their factor
    assert factor == 1
    said = GGUFModel(formats.load(path), path).config["rope_parameters"]
    assert said["rope_type"] == "llama3"
    assert (said["factor"], said["original_max_position_embeddings"]) == numbers[:2]


def test_keys_that_change_nothing(tmp_path: Path, seed: int) -> None:
    values = {"attention.scale": 32**-0.5, "attention.causal": True, "logit_scale": 1.0, "residual_scale": 0.0}
    assert rope_of(write_gguf(tmp_path / "tiny.gguf", "llama", seed, values=values))[1] == 1


def test_divisors_that_divide_nothing(tmp_path: Path, seed: int) -> None:
    ones = {"rope_freqs.weight": np.ones(PAIRS, dtype=np.float32)}
    assert furthest(rope_of(write_gguf(tmp_path / "tiny.gguf", "llama", seed, tensors=ones))[0], PLAIN) < 1e-6


def divisors(values: Any) -> dict[str, Any]:
    return {"tensors": {"rope_freqs.weight": np.asarray(values, dtype=np.float32)}}


def rope(**values: Any) -> dict[str, Any]:
    return {"values": {f"rope.scaling.{key}": value for key, value in values.items()}}


ROW: Final = np.ones(WIDE, dtype=np.float32)
UNREAD: Final[dict[str, tuple[str, dict[str, Any], str]]] = {  # architecture, options of `write_gguf`, message
    "longrope": ("llama", rope(type="longrope"), "rope.scaling.type: expected linear, yarn or none, got 'longrope'"),
    "linear attention": ("llama", rope(factor=2.0, attn_factor=1.5), "attn_factor: expected 1 where the type is l"),
    "log": ("llama", rope(**YARN, yarn_log_multiplier=0.1), "yarn_log_multiplier: expected it absent, or 0, got 0.1"),
    "unknown": ("llama", rope(beta=1.0), "llama.rope.scaling.beta: expected no such key, got 1.0"),
    "below 0": ("llama", rope(factor=-2.0), "llama.rope.scaling.factor: expected a number above 0, got -2.0"),
    "some columns": ("qwen2", {"values": {"rope.dimension_count": 16}}, "expected 32, all columns of a head, got 16"),
    "divisors": ("llama", divisors(np.linspace(1, 8, PAIRS)), "rope_freqs.weight: expected the divisors of Llama 3"),
    "4 divisors": ("llama", divisors([1, 1, 1, 1]), r"a divisor for each of 16 frequencies, got \[4\]"),
    "0 divisor": ("llama", divisors([0] * PAIRS), "rope_freqs.weight: expected numbers above 0"),
    "both": (
        "llama", divisors(llama3(8, 64)) | rope(factor=2.0), "rope_freqs.weight beside llama.rope.scaling",
    ),
    "divisors of another": ("qwen2", divisors([1] * PAIRS), "'rope_freqs' has no place"),
    "heads differ": (
        "llama", {"values": {"attention.head_count_kv": [2, 4]}}, "head_count_kv: expected one number for .* got 2, 4",
    ),
    "a bias without a place": (
        "qwen3", {"tensors": {"blk.0.ffn_up.bias": ROW}, "types": {"ffn_up": "F16"}},
        "'blk.0.ffn_up.bias' has no place in a qwen3 model",
    ),
    "a norm without a place": ("llama", {"tensors": {"blk.0.attn_q_norm.weight": ROW}}, "attn_q_norm.weight' has n"),
    "a block too many": ("llama", {"values": {"block_count": 1}}, "expected tensors of 1 blocks, .* got those of 2;"),
    "a block too few": ("llama", {"values": {"block_count": 3}}, "expected tensors of 3 blocks, .* got those of 2;"),
    "attention of both sides": (
        "qwen3", {"values": {"attention.causal": False}}, "attention.causal: expected it absent, or True, got False",
    ),
    "attention's scale": ("llama", {"values": {"attention.scale": 0.05}}, "attention.scale: expected it absent, or 0,"),
    "capped logits": ("llama", {"values": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping: expected it a"),
    "no tensor": ("llama", {"absent": ["blk.1.attn_v.weight"]}, "a tensor for model.layers.1.self_attn.v_proj.weight;"),
    "no norm": ("llama", {"absent": ["output_norm.weight"]}, "expected a tensor for model.norm.weight; it is absent"),
    "another shape": (
        "llama", {"values": {"attention.head_count_kv": HEADS}},
        rf"blk.0.attn_k.weight: expected \[{HIDDEN}, {HIDDEN}\] by the header's sizes, got \[{HIDDEN // 2}, {HIDDEN}\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_refused_before_anything_is_written(name: str, tmp_path: Path, seed: int) -> None:
    architecture, options, message = UNREAD[name]
    path = write_gguf(tmp_path / "tiny.gguf", architecture, seed, **options)
    with pytest.raises((CheckpointError, UnsupportedError), match=message) as caught:
        models.convert(path, tmp_path / "new")
    assert str(path) in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def converted(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """converted(architecture, ...): the model of a file that `write_gguf` writes, loaded from its converted folder."""
    monkeypatch.setattr(GGUFModel, "write_files", lambda self, folder: None)  # its tokenizer is none

    def convert(architecture: str, **options: Any) -> Any:
        path = write_gguf(tmp_path / "tiny.gguf", architecture, seed, **options)
        models.convert(path, tmp_path / "new", verify=True, overwrite=True)
        return load(tmp_path / "new")

    return convert


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_biases_of_llama_are_kept(kind: str, converted: Callable[..., Any], tmp_path: Path) -> None:
    """Of floats and blocks; a layer without one among those that have gets zeros, as transformers has it."""
    names = ("attn_q", "attn_k", "attn_v", "ffn_down")
    model = converted("llama", biases=names, types=dict.fromkeys((*names, "attn_output", "ffn_up"), kind))
    stored = formats.load(tmp_path / "tiny.gguf")
    assert model.config.attention_bias
    assert model.config.mlp_bias
    for i, block in enumerate(model.model.layers):
        for layer, name in ((block.self_attn.v_proj, "attn_v"), (block.mlp.down_proj, "ffn_down")):
            assert torch.equal(layer.bias, stored[f"blk.{i}.{name}"].bias)
        bias = stored[f"blk.{i}.attn_k"].bias
        assert bias is not None
        assert torch.equal(block.self_attn.k_proj.bias, bias.view(KV_HEADS, -1, 2).transpose(1, 2).flatten())
        for layer in (block.self_attn.o_proj, block.mlp.up_proj):
            assert not layer.bias.any()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_heads_of_keys(architecture: str, converted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that says the same of each block is read; where there is no number, there are as many as of queries."""
    key = "attention.head_count_kv"
    assert converted(architecture, values={key: [KV_HEADS] * BLOCKS}).config.num_key_value_heads == KV_HEADS
    monkeypatch.setattr(test_gguf_models, "KV_HEADS", HEADS)
    assert converted(architecture, values={key: None}).config.num_key_value_heads == HEADS
