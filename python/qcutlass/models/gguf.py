"""GGUF files: llama.cpp's names and order of rows, undone; the configuration and the tokenizer that the header holds.

llama.cpp stores the rows of q and k of Llama-like models (`general.architecture` "llama") so that the two numbers that
rotary embedding turns together are neighbours; transformers keeps them half a head apart. A row is quantised by itself,
so that moving rows loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import CanonicalLinear, Checkpoint, FloatLinear, Layer
from qcutlass.formats.gguf_blocks import QUANTIZED
from qcutlass.formats.source import TensorInfo
from qcutlass.models.experts import part_names
from qcutlass.models.extras import SAFE, import_transformers, reading
from qcutlass.models.sources import ModelSource

_KINDS: Final = {  # by architecture, and whether there are experts: what transformers calls it
    ("llama", False): "llama",
    ("llama", True): "mixtral",
    ("qwen2", False): "qwen2",
    ("qwen3", False): "qwen3",
    ("qwen2moe", True): "qwen2_moe",
    ("qwen3moe", True): "qwen3_moe",
}
_PERMUTED: Final = "llama"  # the architecture whose rows of q and k are
_EMBEDDINGS: Final = "token_embd"
_WHOLE: Final = {_EMBEDDINGS: "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERT: Final = ("ffn_gate", "ffn_up", "ffn_down")
_FOLDERS: Final = {"mixtral": "block_sparse_moe"}
"""What a model's files have for "mlp"."""
_EXPERT_COUNTS: Final = {"mixtral": "num_local_experts", "qwen2_moe": "num_experts", "qwen3_moe": "num_experts"}
_SIZES: Final = {  # keys of the header, behind the architecture's name: what transformers calls them
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_TOKENS: Final = {  # the same, behind "tokenizer.ggml"
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
}
_SHARED: Final = "mlp.shared_expert_gate.weight"
_NEEDED: Final = ("block_count", "feed_forward_length", "embedding_length", "attention.head_count")


def model_values(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What a header says of the model, in the words of transformers' configurations.

    Raises:
        CheckpointError: a size is absent.
    """
    architecture = metadata["general.architecture"]
    for key in _NEEDED:
        if f"{architecture}.{key}" not in metadata:
            raise CheckpointError(f"{path}: expected the key {architecture}.{key}; it is absent, or an array")
    keys = {f"{architecture}.{key}": name for key, name in _SIZES.items()}
    keys |= {f"tokenizer.ggml.{key}": name for key, name in _TOKENS.items()}
    values = {name: metadata[key] for key, name in keys.items() if key in metadata}
    heads = metadata.get(f"{architecture}.attention.key_length")
    if heads is None and architecture == "llama":
        heads = metadata.get("llama.rope.dimension_count")  # turns whole heads there
    if heads is not None:
        values["head_dim"] = heads
    embedding = tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    return {**values, **_mixture_values(path, metadata, tensors), "tie_word_embeddings": "output.weight" not in tensors}


def model_kind(metadata: Mapping[str, Any]) -> str | None:
    """What transformers calls a model (`model_type`); None for one that is not taken."""
    architecture = str(metadata.get("general.architecture"))
    return _KINDS.get((architecture, bool(metadata.get(f"{architecture}.expert_count"))))


def _mixture_values(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Those of a mixture of experts; of other models none."""
    kind, architecture = model_kind(metadata), metadata["general.architecture"]
    if kind not in _EXPERT_COUNTS:
        return {}
    used = metadata.get(f"{architecture}.expert_used_count")
    widths = {
        part: info.shape[0]
        for name, info in tensors.items()
        for part in ("ffn_gate.0", "ffn_gate_shexp")
        if name.endswith(f".{part}.weight")
    }
    if used is None or "ffn_gate.0" not in widths:
        raise CheckpointError(
            f"{path}: expected the key {architecture}.expert_used_count and tensors of experts; one of them is absent"
        )
    values = {_EXPERT_COUNTS[kind]: metadata[f"{architecture}.expert_count"], "num_experts_per_tok": used}
    if kind == "mixtral":
        return values
    values |= {"moe_intermediate_size": widths["ffn_gate.0"], "norm_topk_prob": kind == "qwen3_moe"}
    if "ffn_gate_shexp" in widths:
        values["shared_expert_intermediate_size"] = widths["ffn_gate_shexp"]
    dense = (re.fullmatch(r"blk\.(\d{1,6})\.ffn_gate\.weight", name) for name in tensors)
    return {**values, "mlp_only_layers": sorted(int(found[1]) for found in dense if found is not None)}


class GGUFModel(ModelSource):
    """A GGUF file of a decoder with Llama's layers, or a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE.

    Raises:
        UnsupportedError: of another architecture, or with tensors that have no place in it; or transformers is absent.
    """

    def __init__(self, checkpoint: Checkpoint, path: Path) -> None:
        self._path = path
        self._metadata, self._tensors = checkpoint.metadata, checkpoint.tensors
        architecture, kind = str(self._metadata.get("general.architecture")), model_kind(self._metadata)
        if kind is None:
            experts = " with experts" if self._metadata.get(f"{architecture}.expert_count") else ""
            known = ", ".join(f"{name}{' with experts' * mixed}" for name, mixed in _KINDS)
            raise UnsupportedError(f"{path}: expected one of {known}, got a model of {architecture!r}{experts}")
        self._kind = kind
        super().__init__(checkpoint, path.parent)
        self._permuted = architecture == _PERMUTED
        self.names = {self._name(name): name for name in checkpoint}
        parts = (name.rpartition(".") for name in checkpoint.rest)
        self.rest = {f"{self._name(module)}.{suffix}": f"{module}.{suffix}" for module, _, suffix in parts}
        embeddings = f"{_EMBEDDINGS}.weight"
        if embeddings in checkpoint.rest and checkpoint.info(embeddings).dtype in QUANTIZED:
            del self.rest[f"{_WHOLE[_EMBEDDINGS]}.weight"]
            self.names[_WHOLE[_EMBEDDINGS]] = _EMBEDDINGS

    def _config(self) -> dict[str, Any]:
        transformers = import_transformers("reading the configuration of a GGUF file")
        values = model_values(self._path, self._metadata, self._tensors)
        with reading(self._path, "configuration"):
            self._parsed = transformers.AutoConfig.for_model(self._kind, **values)
        architecture = transformers.AutoModelForCausalLM._model_mapping[type(self._parsed)].__name__
        return {**self._parsed.to_dict(), "architectures": [architecture], "dtype": "float32"}  # dtype: of norms

    def _name(self, name: str) -> str:
        found = re.fullmatch(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?", name)
        folder = _FOLDERS.get(self._kind, "mlp")
        if found is not None and found[3] is not None and found[2] in _EXPERT:
            part = part_names(self._kind)[_EXPERT.index(found[2])]
            return f"model.layers.{found[1]}.{folder}.experts.{found[3]}.{part}"
        if found is not None and found[3] is None and found[2] in _IN_BLOCK:
            return f"model.layers.{found[1]}.{_IN_BLOCK[found[2]].replace('mlp.', f'{folder}.')}"
        if name in _WHOLE:
            return _WHOLE[name]
        raise UnsupportedError(f"{self._path}: the tensor {name!r} has no place in a model of Llama's kind")

    def tensor(self, name: str) -> Tensor:
        tensor = super().tensor(name)
        return tensor[None] if name.endswith(_SHARED) and tensor.dim() == 1 else tensor  # one row, as a vector

    def layer(self, name: str) -> Layer:
        layer = super().layer(name)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.rpartition(".")[2])
        return layer if heads is None or not self._permuted else self._in_order(layer, name, self.config[heads])

    def _in_order(self, layer: Layer, name: str, heads: object) -> Layer:
        n, _ = layer.shape
        if not isinstance(heads, int) or heads < 1 or n % (2 * heads):
            raise CheckpointError(f"{self._path}: {name}: expected {heads!r:.40} heads of even size, got {n} rows")
        rows = torch.arange(n).view(heads, n // heads // 2, 2).transpose(1, 2).reshape(-1)
        assert isinstance(layer, CanonicalLinear | FloatLinear)  # all that GGUF files hold
        return layer.rows(rows)

    def tokenizer(self) -> Any:
        transformers = import_transformers("a tokenizer")
        from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

        # AutoTokenizer would read the whole header for its configuration, with a reader that takes seconds.
        kind = TOKENIZER_MAPPING.get(type(self._parsed), None) or transformers.PreTrainedTokenizerFast
        with reading(self._path, "tokenizer"):
            return kind.from_pretrained(self._path.parent, gguf_file=self._path.name, **SAFE)

    def write_files(self, folder: Path) -> None:
        tokenizer = self.tokenizer()
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise OSError(f"{folder}: the tokenizer cannot be written ({error})") from error  # the disk is full
