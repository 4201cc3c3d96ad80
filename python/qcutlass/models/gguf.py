"""GGUF files: llama.cpp's names and order of rows, undone; the configuration and the tokenizer that the header holds.

llama.cpp stores the rows of q and k of Llama-like models (`general.architecture` "llama") so that the two numbers that
rotary embedding turns together are neighbours; transformers keeps them half a head apart. A row is quantised by itself,
so that moving rows loses nothing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import CanonicalLinear, Checkpoint, FloatLinear, Layer
from qcutlass.formats.gguf_blocks import DEQUANTIZED, FLOAT_CODES, QUANTIZED
from qcutlass.formats.source import TensorInfo
from qcutlass.formats.tensors import FROM_FLOATS
from qcutlass.models.experts import expert_layer, part_names
from qcutlass.models.extras import SAFE, import_transformers, reading
from qcutlass.models.gguf_families import FAMILIES, Family, family_of
from qcutlass.models.gguf_rope import DIVISORS, RopeKeys
from qcutlass.models.sources import ModelSource

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
_BLOCK: Final = re.compile(r"blk\.(\d{1,6})\.")
_EXPERT: Final = ("ffn_gate", "ffn_up", "ffn_down")
_FOLDERS: Final = {"mixtral": "block_sparse_moe"}
"""What a model's files have for "mlp"."""
_EXPERT_COUNTS: Final = {"mixtral": "num_local_experts", "qwen2_moe": "num_experts", "qwen3_moe": "num_experts"}
_EPSILON: Final = "attention.layer_norm_rms_epsilon"
_SIZES: Final = {  # keys of the header, behind the architecture's name: what transformers calls them
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    _EPSILON: "rms_norm_eps",
}
_TOKENS: Final = {  # the same, behind "tokenizer.ggml"
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
}
_ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Behind "tokenizer.ggml", tokens that end what a model says: of a text, a turn, a message."""
_ATTENTION: Final = ("attn_q", "attn_k", "attn_v", "attn_output")
_BIASES: Final[
    dict[str, dict[str, tuple[str, ...]]]
] = {  # keys of configurations of some models: the layers that have biases then
    "llama": {"attention_bias": _ATTENTION, "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")},
    "qwen3": {"attention_bias": _ATTENTION},
    "qwen3_moe": {"attention_bias": _ATTENTION},
}
_SPLIT_AS_GPT2: Final = (
    "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "smollm", "starcoder", "refact", "codeshell", "command-r",
)  # fmt: skip
"""Ways to split text into words, by the names of GGUF files, that are GPT-2's, or give the same tokens: those that keep
digits apart, which their merges do, too."""
_HEAD: Final = f"{_WHOLE['output']}.weight"
_SHARED: Final = "mlp.shared_expert_gate.weight"
_NEUTRAL: Final[dict[str, tuple[float, ...]]] = {
    "attention.causal": (True,),
    "attention.scale": (0,),  # and the usual one
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "use_parallel_residual": (False,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_scale": (0, 1),
    "expert_group_count": (0, 1),
}
"""Keys of the header, behind the architecture's name, that say what none of these models computes: the values that
change nothing."""
_NEEDED: Final = ("block_count", "feed_forward_length", "embedding_length", "attention.head_count", _EPSILON)


def model_values(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What a header says of the model, in the words of transformers' configurations.

    Raises:
        CheckpointError: a size is absent.
    """
    architecture, family = metadata["general.architecture"], family_of(metadata) or Family("")
    for key in (*_NEEDED, *family.needed):
        if f"{architecture}.{key}" not in metadata:
            raise CheckpointError(f"{path}: expected the key {architecture}.{key}; it is absent")
    _check_blocks(path, metadata[f"{architecture}.block_count"], tensors)
    keys = {f"{architecture}.{key}": name for key, name in _SIZES.items()}
    keys |= {f"tokenizer.ggml.{key}": name for key, name in _TOKENS.items()}
    keys |= {f"{architecture}.{key}": name for key, name in family.values.items()}
    values: dict[str, Any] = {
        name: _of_all_blocks(path, metadata, key) for key, name in keys.items() if key in metadata
    }
    named = [metadata.get(f"tokenizer.ggml.{end}") for end in _ENDS]
    ends = list(dict.fromkeys(end for end in named if type(end) is int))
    if len(ends) > 1:
        values["eos_token_id"] = ends
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("pad_token_id", None)  # some configurations name one that not every vocabulary has
    size = f"{architecture}.attention.key_length"
    if size not in metadata and family.is_permuted:
        size = f"{architecture}.rope.dimension_count"  # turns whole heads there
    if size in metadata:
        values["head_dim"] = _of_all_blocks(path, metadata, size)
    _check_neutral(path, metadata, _head_size(values), family.values)
    values |= family.query_scale(
        values["num_hidden_layers"], values["hidden_size"], values["num_attention_heads"], _head_size(values)
    )
    embedding = tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    modules = {name.removesuffix(".bias").rpartition(".")[2] for name in tensors if name.endswith(".bias")}
    biases = _BIASES.get(model_kind(metadata) or "", {})
    values |= {key: True for key, layers in biases.items() if modules.intersection(layers)}
    return {**values, **_mixture_values(path, metadata, tensors), "tie_word_embeddings": "output.weight" not in tensors}


def _check_blocks(path: Path, count: object, tensors: Iterable[str]) -> None:
    """Raises CheckpointError unless there are tensors of as many blocks as the header says."""
    found = {int(block[1]) for block in map(_BLOCK.match, tensors) if block is not None}
    if count != len(found) or found != set(range(len(found))):
        raise CheckpointError(
            f"{path}: expected tensors of {count!r:.40} blocks, as the header says, got those of {len(found)}; "
            "download it again"
        )


def _check_neutral(path: Path, metadata: Mapping[str, Any], size: int | None, known: Container[str] = ()) -> None:
    """Raises UnsupportedError where the header says of a model that it computes what the one of transformers does not.

    Args:
        size: columns of a head; None where that is unknown.
        known: keys of which the model's configuration knows.
    """
    for key, neutral in _NEUTRAL.items():
        if key in known:
            continue
        name = f"{metadata['general.architecture']}.{key}"
        value = metadata.get(name, neutral[0])
        is_usual = key == "attention.scale" and isinstance(value, float) and round(value * (size or 0) ** 0.5, 5) == 1
        if value not in neutral and not is_usual:
            raise UnsupportedError(
                f"{path}: {name}: expected it absent, or {neutral[-1]}, got {value!r:.80}, which the models that are "
                f"read do not compute; {FROM_FLOATS}"
            )


def _of_all_blocks(path: Path, metadata: Mapping[str, Any], key: str) -> Any:
    """A value; of a list with one for each block that which all have."""
    value = metadata[key]
    if not isinstance(value, tuple):
        return value
    if len(set(value)) != 1:
        got = ", ".join(map(str, sorted(set(value))[:8])) or "none"
        raise UnsupportedError(
            f"{path}: {key}: expected one number for all blocks, got {got}; models whose blocks have different "
            "shapes are not read"
        )
    return value[0]


def _head_size(values: Mapping[str, Any]) -> int | None:
    """Columns of a head; None where the sizes are none."""
    size, heads = values.get("head_dim"), values["num_attention_heads"]
    if size is None and isinstance(values["hidden_size"], int) and isinstance(heads, int) and heads > 0:
        return int(values["hidden_size"] // heads)
    return size if isinstance(size, int) else None


def model_kind(metadata: Mapping[str, Any]) -> str | None:
    """What transformers calls a model (`model_type`); None for one that is not taken."""
    family = family_of(metadata)
    return None if family is None else family.kind


def _mixture_values(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Those of a mixture of experts; of other models none."""
    kind, architecture = model_kind(metadata), metadata["general.architecture"]
    if kind not in _EXPERT_COUNTS:
        return {}
    used, count = (metadata.get(f"{architecture}.{key}") for key in ("expert_used_count", "expert_count"))
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
    values = {_EXPERT_COUNTS[kind]: count, "num_experts_per_tok": used}
    norm = f"{architecture}.expert_weights_norm"
    is_normed = metadata.get(norm, kind != "qwen2_moe")
    if kind == "mixtral":
        if not is_normed:
            raise UnsupportedError(f"{path}: {norm}: expected it absent, or True, got {is_normed!r:.80}; {FROM_FLOATS}")
        return values
    values |= {"moe_intermediate_size": widths["ffn_gate.0"], "norm_topk_prob": bool(is_normed)}
    if "ffn_gate_shexp" in widths:
        values["shared_expert_intermediate_size"] = widths["ffn_gate_shexp"]
    dense = (re.fullmatch(r"blk\.(\d{1,6})\.ffn_gate\.weight", name) for name in tensors)
    return {**values, "mlp_only_layers": sorted(int(found[1]) for found in dense if found is not None)}


class GGUFModel(ModelSource):
    """A GGUF file of a decoder with Llama's layers, Gemma's among them, or a mixture of experts: Mixtral, Qwen2-MoE,
    Qwen3-MoE.

    A layer without a bias, where the model has one, gets a bias of zeros.

    Raises:
        UnsupportedError: of another architecture, with rotary embeddings that transformers has no words for, or with
            tensors that have no place in it; or transformers is absent.
        CheckpointError: a size or a tensor is absent, or a tensor has another shape than its place.
    """

    def __init__(self, checkpoint: Checkpoint, path: Path) -> None:
        self._path = path
        self._metadata, self._tensors = checkpoint.metadata, checkpoint.tensors
        architecture, family = str(self._metadata.get("general.architecture")), family_of(self._metadata)
        if family is None:
            experts = " with experts" if self._metadata.get(f"{architecture}.expert_count") else ""
            known = ", ".join(f"{name}{' with experts' * mixed}" for name, mixed in FAMILIES)
            raise UnsupportedError(f"{path}: expected one of {known}, got a model of {architecture!r}{experts}")
        self._family, self._kind = family, family.kind
        super().__init__(checkpoint, path.parent)
        self.names = {self._name(name): name for name in checkpoint}
        parts = (name.rpartition(".") for name in checkpoint.rest if not self._are_divisors(name))
        self.rest = {f"{self._name(module)}.{suffix}": f"{module}.{suffix}" for module, _, suffix in parts}
        self._check_places()
        embeddings = f"{_EMBEDDINGS}.weight"
        kind = checkpoint.info(embeddings).dtype if embeddings in checkpoint.rest else None
        if kind in QUANTIZED and kind not in FLOAT_CODES:  # in others they become floats, without loss
            del self.rest[f"{_WHOLE[_EMBEDDINGS]}.weight"]
            self.names[_WHOLE[_EMBEDDINGS]] = _EMBEDDINGS

    def _are_divisors(self, name: str) -> bool:
        """Whether this tensor belongs into the configuration: only files of Llama and its like have it."""
        return self._family.is_permuted and name == DIVISORS

    def _config(self) -> dict[str, Any]:
        transformers = import_transformers("reading the configuration of a GGUF file")
        values = model_values(self._path, self._metadata, self._tensors)
        divisors = next(
            (self.checkpoint.tensor(name) for name in self.checkpoint.rest if self._are_divisors(name)), None
        )
        rope = RopeKeys(self._path, self._metadata, _head_size(values))
        values |= rope.values_by_reach() if self._family.has_local_rope else rope.values(divisors)
        with reading(self._path, "configuration"):
            self._parsed = transformers.AutoConfig.for_model(self._kind, **values)
        with reading(self._path, "model"), torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(self._parsed)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        architecture = type(model).__name__
        return {**self._parsed.to_dict(), "architectures": [architecture], "dtype": "float32"}  # dtype: of norms

    def _check_places(self) -> None:
        """Raises unless the tensors of the file are those of the model: transformers leaves out what it does not know.

        Layers in blocks may have biases where the model has none: they stay in the packed layer.
        """
        found = {}
        for name, stored in self.names.items():
            found[f"{name}.weight"] = f"{stored}.weight"
            in_blocks = self._tensors[f"{stored}.weight"].dtype in (*QUANTIZED, *DEQUANTIZED)
            if f"{stored}.bias" in self._tensors and not in_blocks:
                found[f"{name}.bias"] = f"{stored}.bias"
        found |= self.rest
        for name, stored in found.items():
            if expert_layer(name.removesuffix(".weight")) is not None:
                continue  # a part of a tensor of the model
            shape, expected = self._tensors[stored].shape, self._shapes.get(self._in_module(name))
            if name.endswith(_SHARED) and len(shape) == 1:
                shape = (1, *shape)
            if expected is None:
                raise UnsupportedError(f"{self._path}: the tensor {stored!r} has no place in a {self._kind} model")
            if shape != expected:
                raise CheckpointError(
                    f"{self._path}: {stored}: expected {list(expected)} by the header's sizes, got {list(shape)}"
                )
        known = {self._in_module(name) for name in found}
        known |= {_HEAD} if self._parsed.tie_word_embeddings else set()
        experts = {self._in_module(part.block) for part in map(expert_layer, self.names) if part is not None}
        for name in self._shapes:
            is_elsewhere = name.rpartition(".")[0] in experts or name.endswith(".bias")  # zeros, or packed
            if name not in known and not is_elsewhere:
                raise CheckpointError(f"{self._path}: expected a tensor for {name}; it is absent, download it again")

    def _in_module(self, name: str) -> str:
        """What transformers calls a tensor that has this name in files."""
        return name.replace(f".{_FOLDERS.get(self._kind, 'mlp')}.", ".mlp.")

    def _name(self, name: str) -> str:
        found = re.fullmatch(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?", name)
        folder = _FOLDERS.get(self._kind, "mlp")
        if found is not None and found[3] is not None and found[2] in _EXPERT:
            part = part_names(self._kind)[_EXPERT.index(found[2])]
            return f"model.layers.{found[1]}.{folder}.experts.{found[3]}.{part}"
        in_block = {**_IN_BLOCK, **self._family.in_block}
        if found is not None and found[3] is None and found[2] in in_block:
            return f"model.layers.{found[1]}.{in_block[found[2]].replace('mlp.', f'{folder}.')}"
        if name in _WHOLE:
            return _WHOLE[name]
        raise UnsupportedError(f"{self._path}: the tensor {name!r} has no place in a model of Llama's kind")

    def tensor(self, name: str) -> Tensor:
        tensor = super().tensor(name)
        if self._family.norm_offset and name.endswith("norm.weight"):
            return tensor - self._family.norm_offset
        return tensor[None] if name.endswith(_SHARED) and tensor.dim() == 1 else tensor  # one row, as a vector

    def layer(self, name: str) -> Layer:
        layer = super().layer(name)
        if layer.bias is None and f"{self._in_module(name)}.bias" in self._shapes:
            layer = replace(layer, bias=torch.zeros(layer.shape[0], dtype=torch.float32))
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.rpartition(".")[2])
        if heads is None or not self._family.is_permuted:
            return layer
        return self._in_order(layer, name, self.config[heads])

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
            found = kind.from_pretrained(self._path.parent, gguf_file=self._path.name, **SAFE)
        self._check_split(found)
        return found

    def _check_split(self, tokenizer: Any) -> None:
        """Warns where transformers splits text as GPT-2 does before it merges, since it knows no other way by the
        name that the file has for it."""
        name, before = self._metadata.get("tokenizer.ggml.pre"), tokenizer.backend_tokenizer.pre_tokenizer
        if self._metadata.get("tokenizer.ggml.model") != "gpt2" or name in (None, *_SPLIT_AS_GPT2) or before is None:
            return
        if [begin for _, (begin, _) in before.pre_tokenize_str("\tb 1234")] == [0, 1, 2]:
            warnings.warn(
                f"{self._path}: tokenizer.ggml.pre is {name!r:.80}, which transformers does not know: it splits text "
                "as GPT-2 does, and some tokens may be others than the model learned; put the tokenizer of the model's "
                "float original into the converted folder",
                stacklevel=2,
            )

    def write_files(self, folder: Path) -> None:
        tokenizer = self.tokenizer()
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise OSError(f"{folder}: the tokenizer cannot be written ({error})") from error  # the disk is full
