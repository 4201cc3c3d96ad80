"""Mixtures of experts in GGUF files that the gguf package writes, against the dequantised model in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
from bench.gguf_weights import random_gguf_weights
from tests.python.models.mixtures import EXPERTS, VOCABULARY, model_of
from tests.python.models.test_commands import command
from tests.python.models.test_mixtures import check_structure, load, logits
from torch import Tensor

from qcutlass import CheckpointError, UnsupportedError, formats, models
from qcutlass.models.gguf import GGUFModel, model_values
from qcutlass.testing.models import NOISE, noise_ratio, rounded_logits

pytest.importorskip("transformers", reason="needs transformers")

WIDE: Final = 256  # columns, as long blocks have
ARCHITECTURES: Final = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
MIXES: Final[dict[str, dict[str, str]]] = {
    "Q4_0": {"": "Q4_0"},
    "Q8_0": {"": "Q8_0"},
    "Q4_K_M": {"": "Q4_K", "ffn_down": "Q6_K", "attn_v": "Q6_K"},
    "Q2_K": {"": "Q2_K", "ffn_down": "Q3_K"},
    "Q5_1": {"": "Q5_1", "ffn_down": "Q4_1"},
    "Q4_K, Q4_1": {"": "Q4_K", "ffn_up": "Q4_1", "ffn_down": "Q6_K"},
    "Q4_K, Q4_0": {"": "Q4_K", "ffn_up": "Q4_0", "ffn_down": "Q6_K"},
}
"""Types by what a tensor's name begins with; those of the others under ""."""
UNLIKE: Final = "Q4_K, Q4_0"
"""The mix whose gate and up are no one product: minimums beside the middle as zero point."""
PLACES: Final = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


class Written:
    """A file, and the model in transformers with the weights that the file stands for.

    Args:
        path: of the file.
        kind: of the model, in the words of transformers.
        mix: one of `MIXES`.
        single: whether each expert has tensors of its own, as in older files.
    """

    def __init__(self, path: Path, kind: str, mix: str, seed: int, *, single: bool = False) -> None:
        sizes = {"hidden_size": WIDE, "intermediate_size": WIDE, "shared_expert_intermediate_size": WIDE}
        options: dict[str, Any] = {**sizes, "moe_intermediate_size": WIDE, "head_dim": 64, "num_attention_heads": 4}
        if kind == "qwen3_moe":
            options["norm_topk_prob"] = True
        self.path, self._mix, self._single = path, MIXES[mix], single
        self.model = model_of(kind, seed % 2**31, **options)
        self._random = np.random.default_rng(seed)
        self._writer = gguf.GGUFWriter(path, ARCHITECTURES[kind])
        self._is_llama = kind == "mixtral"
        self._add_values(kind)
        state = dict(self.model.state_dict())
        for name, tensor in state.items():
            state[name] = self._add(name, tensor)
        self.model.load_state_dict(state)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()

    def _add_values(self, kind: str) -> None:
        writer, config = self._writer, self.model.config
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(256)
        writer.add_embedding_length(WIDE)
        writer.add_feed_forward_length(WIDE)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        if kind != "qwen2_moe":
            writer.add_key_length(64)
            writer.add_value_length(64)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
        writer.add_vocab_size(VOCABULARY)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if kind != "mixtral":
            writer.add_expert_feed_forward_length(WIDE)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*(chr(48 + i) for i in range(VOCABULARY - 1)), "ab"])
        writer.add_token_merges(["a b"])

    def _kind(self, name: str) -> str:
        if name.startswith(("ffn_gate_inp", "output", "token_embd")):
            return "F32"
        return next((self._mix[begin] for begin in self._mix if begin and name.startswith(begin)), self._mix[""])

    def _stored(self, name: str, weight: Tensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType, Tensor]:
        """The bytes of a matrix, their type, and what they stand for; random ones where gguf does not quantise."""
        label = self._kind(name)
        kind = gguf.GGMLQuantizationType[label]
        if label.endswith("_K"):
            rows, columns = weight.shape
            data = random_gguf_weights(self._random, rows, columns, label, columns**-0.5)
        else:
            data = gguf.quants.quantize(weight.numpy(), kind)
        return data, kind, torch.from_numpy(gguf.quants.dequantize(data, kind)).view(weight.shape)

    def _add(self, name: str, tensor: Tensor) -> Tensor:
        """Writes a tensor of transformers; returns what it stands for."""
        module, _, suffix = name.rpartition(".")
        if module.endswith(".experts"):
            return self._add_experts(module, suffix, tensor)
        begin, _, place = module.partition("layers.")[2].partition(".")
        block = f"blk.{begin}." if place else ""
        target = f"{block}{PLACES[place or module]}.{suffix}"
        if tensor.dim() == 1 or ("shexp" in target and len(tensor) == 1):
            self._writer.add_tensor(target, tensor.flatten().numpy())
            return tensor
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(PLACES[place or module])
        turned = heads is not None and self._is_llama
        if turned:  # the numbers that turn together become neighbours
            count = getattr(self.model.config, str(heads))
            tensor = tensor.view(count, 2, -1, WIDE).transpose(1, 2).reshape(-1, WIDE)
        data, kind, found = self._stored(PLACES[place or module], tensor)
        self._writer.add_tensor(target, data, raw_dtype=kind)
        return found.view(count, -1, 2, WIDE).transpose(1, 2).reshape(-1, WIDE) if turned else found

    def _add_experts(self, module: str, suffix: str, stack: Tensor) -> Tensor:
        block = f"blk.{module.split('.')[2]}"
        parts = {"ffn_down": stack} if suffix == "down_proj" else dict(
            zip(("ffn_gate", "ffn_up"), stack.chunk(2, dim=1), strict=True)
        )  # fmt: skip
        found = []
        for part, weights in parts.items():
            stored = [self._stored(part, weight.contiguous()) for weight in weights]
            kind = stored[0][1]
            if self._single:
                for expert, (data, _, _) in enumerate(stored):
                    self._writer.add_tensor(f"{block}.{part}.{expert}.weight", data, raw_dtype=kind)
            else:
                whole = np.stack([data for data, _, _ in stored])
                self._writer.add_tensor(f"{block}.{part}_exps.weight", whole, raw_dtype=kind)
            found.append(torch.stack([weight for _, _, weight in stored]))
        return torch.cat(found, dim=1)

    def references(self) -> tuple[Tensor, Tensor]:
        """Logits of the dense model by what rounding can do in fp32, and in fp64."""
        self.model.set_experts_implementation("eager")
        dense = rounded_logits(self.model, logits)
        return dense, logits(self.model.double())


@pytest.mark.parametrize(
    ("kind", "mix"),
    [
        *(("qwen3_moe", mix) for mix in MIXES if mix != UNLIKE),
        *((kind, mix) for kind in ("mixtral", "qwen2_moe") for mix in ("Q8_0", "Q4_K_M")),
    ],
)
def test_logits_are_those_of_the_dequantised_model(kind: str, mix: str, tmp_path: Path, seed: int) -> None:
    written = Written(tmp_path / "tiny.gguf", kind, mix, seed)
    dense, exact = written.references()
    for anew in (False, True):
        done = models.convert(written.path, tmp_path / f"{anew}", requantize=anew, verify=True)
        assert done.layers == done.verified
        assert not done.requantized
        model = load(tmp_path / f"{anew}")
        check_structure(model, kind)
        assert noise_ratio(logits(model), dense, exact) <= NOISE


def test_minimums_beside_zeros_become_zeros(tmp_path: Path, seed: int) -> None:
    written = Written(tmp_path / "tiny.gguf", "qwen3_moe", UNLIKE, seed)
    with pytest.raises(UnsupportedError, match="--requantize"):
        models.convert(written.path, tmp_path / "as it is")
    done = models.convert(written.path, tmp_path / "new", requantize=True, verify=True)
    assert len(done.requantized) == 2 * EXPERTS
    for name, lost in done.requantized.items():  # codes and scales stay
        assert name.endswith("gate_proj")
        assert lost.stored.endswith("minimums")
        assert lost.error < 1e-6
    dense, exact = written.references()
    assert noise_ratio(logits(load(tmp_path / "new")), dense, exact) <= NOISE


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_older_files_have_a_tensor_for_each_expert(kind: str, tmp_path: Path, seed: int) -> None:
    for single in (False, True):
        written = Written(tmp_path / f"{single}.gguf", kind, "Q8_0", seed, single=single)
        models.convert(written.path, tmp_path / str(single))
    one, other = ((tmp_path / str(single) / "model.safetensors").read_bytes() for single in (False, True))
    assert len(one) == len(other)
    folders = [models.ConvertedFolder(tmp_path / str(single)) for single in (False, True)]
    assert set(folders[0]) == set(folders[1])
    for name in folders[0]:
        assert torch.equal(models.weights_of(folders[0][name]), models.weights_of(folders[1][name]))


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_configuration_is_that_of_transformers(kind: str, tmp_path: Path, seed: int) -> None:
    from transformers import AutoConfig

    path = Written(tmp_path / "tiny.gguf", kind, "Q8_0", seed).path
    found = GGUFModel(formats.load(path), path).config
    expected = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    added = {"architectures", "dtype", "_name_or_path", "moe_intermediate_size", "shared_expert_intermediate_size"}
    differ = {key for key in found.keys() | expected if found.get(key) != expected.get(key)}
    assert differ <= added | {"head_dim"}
    assert found["moe_intermediate_size"] == WIDE


def test_weights_of_experts_are_normed_where_the_header_says_so(tmp_path: Path) -> None:
    sizes = {"expert_count": 4, "expert_used_count": 2}
    for norms in ({}, {"expert_weights_norm": 0}, {"expert_weights_norm": 1}):
        for architecture, usual in (("qwen2moe", False), ("qwen3moe", True)):
            path = write_small(tmp_path / "tiny.gguf", architecture, STACK, **sizes, **norms)
            checkpoint = formats.load(path)
            found = model_values(path, checkpoint.metadata, checkpoint.tensors)["norm_topk_prob"]
            assert found is bool(norms.get("expert_weights_norm", usual))


def test_the_commands(tmp_path: Path, seed: int) -> None:
    written, new = Written(tmp_path / "tiny.gguf", "qwen3_moe", "Q4_K_M", seed), tmp_path / "new"
    listed = command("inspect", written.path)
    assert f"blk.*.ffn_gate.* 256 x 256 w4 g32 minimums {2 * EXPERTS}" in " ".join(listed.stdout.split())
    text = command("generate", written.path, "--prompt", "567", "--max-new-tokens", 4)
    assert text.exit_code == 0, text.output
    unlike = Written(tmp_path / "unlike.gguf", "qwen3_moe", UNLIKE, seed)
    made = command("convert", unlike.path, new, "--requantize", "--verify")
    assert made.exit_code == 0, made.output
    assert f"{2 * EXPERTS} of w4 g32 minimums: " in made.stdout
    assert "w4 g32 real zeros, anew from w4 g32 minimums (error up to" in command("inspect", new).stdout
    text = command("generate", new, "--prompt", "567", "--max-new-tokens", 4)
    assert text.exit_code == 0, text.output
    (tmp_path / "text.txt").write_text("0123456789" * 16)
    score = command("eval", new, "--text", tmp_path / "text.txt", "--window", 32)
    assert score.exit_code == 0, score.output
    load(new).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(load(new)))
    saved = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert len(saved["requantized"]) == 2 * EXPERTS


def test_quantising_anew_by_a_method(tmp_path: Path, seed: int) -> None:
    written = Written(tmp_path / "tiny.gguf", "qwen2_moe", "Q4_K_M", seed)
    models.quantize_model(written.path, tmp_path / "new", models.Method("rtn", models_scheme()))
    exact, found = logits(written.model), logits(load(tmp_path / "new"))
    of_tokens = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert of_tokens.median() < 0.1  # tokens near a router's boundary go to another expert


def models_scheme() -> Any:
    from qcutlass import WeightOnly

    return WeightOnly(8, 32)


def test_a_block_without_experts(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    add = gguf.GGUFWriter.add_tensor

    def add_others(writer: gguf.GGUFWriter, name: str, *arguments: Any, **options: Any) -> None:
        if not name.startswith("blk.1.") or "_exps" not in name:
            add(writer, name, *arguments, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_others)
    path = Written(tmp_path / "tiny.gguf", "mixtral", "Q8_0", seed).path
    with pytest.raises(CheckpointError, match=r"a tensor for model\.layers\.1\.mlp\.experts\.\w+; it is absent"):
        models.convert(path, tmp_path / "new")


def write_small(path: Path, architecture: str, tensors: dict[str, tuple[int, ...]], **values: int) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"block_count": 1, "feed_forward_length": 32, "embedding_length": 32, **values}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_uint32(f"{architecture}.attention.head_count", 1)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


STACK = {"blk.0.ffn_gate_exps.weight": (4, 32, 32)}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, int], str]] = {
    "deepseek": ("deepseek2", STACK, {"expert_count": 4}, "got a model of 'deepseek2' with experts"),
    "no number": ("qwen3moe", STACK, {}, "got a model of 'qwen3moe'"),
    "no use": ("llama", STACK, {"expert_count": 4}, r"expected the key llama\.expert_used_count and tensors"),
    "no experts": (
        "llama", {"blk.0.attn_norm.weight": (32,)}, {"expert_count": 4, "expert_used_count": 2},
        "expected the key .* tensors of experts; one of them is absent",
    ),
    "weights as they are": (
        "llama", STACK, {"expert_count": 4, "expert_used_count": 2, "expert_weights_norm": 0},
        r"llama\.expert_weights_norm: expected it absent, or True, got 0;",
    ),
    "sigmoid": (
        "qwen3moe", STACK, {"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 2},
        r"qwen3moe\.expert_gating_func: expected it absent, or 1, got 2, which the models that are read do not compute",
    ),
    "twice": (
        "llama", STACK | {"blk.0.ffn_gate.1.weight": (32, 32)}, {"expert_count": 4, "expert_used_count": 2},
        r"'blk\.0\.ffn_gate\.1\.weight' is there twice",
    ),
    "gate and up in one": (
        "llama", STACK | {"blk.0.ffn_gate_up_exps.weight": (4, 64, 32)}, {"expert_count": 4, "expert_used_count": 2},
        r"'blk\.0\.ffn_gate_up_exps' has no place",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_files_that_are_refused(what: str, tmp_path: Path) -> None:
    architecture, tensors, values, message = REFUSED[what]
    path = write_small(tmp_path / "tiny.gguf", architecture, tensors, **values)
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        models.convert(path, tmp_path / "new")
