"""GGUF files: llama.cpp's names and order of rows, undone; the configuration and the tokenizer that the header holds.

llama.cpp stores the rows of q and k of Llama-like models (`general.architecture` "llama") so that the two numbers that
rotary embedding turns together are neighbours; transformers keeps them half a head apart. A row is quantised by itself,
so that moving rows loses nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import torch

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import Checkpoint, Layer
from qcutlass.formats.gguf import QUANTIZED
from qcutlass.formats.gguf_header import read_header
from qcutlass.models.extras import SAFE, import_transformers, load_tokenizer, reading
from qcutlass.models.sources import ModelSource

_PERMUTED: Final = {"llama": True, "qwen2": False, "qwen3": False}  # by architecture: the rows of q and k
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
}


class GGUFModel(ModelSource):
    """A GGUF file of a decoder with Llama's layers.

    Raises:
        UnsupportedError: of another architecture, or with tensors that have no place in it; or transformers is absent.
    """

    def __init__(self, checkpoint: Checkpoint, path: Path) -> None:
        self._path = path
        self._metadata = read_header(path)[0]
        architecture = str(self._metadata.get("general.architecture"))
        if architecture not in _PERMUTED:
            raise UnsupportedError(f"{path}: expected one of {', '.join(_PERMUTED)}, got a model of {architecture!r}")
        super().__init__(checkpoint, path.parent)
        self._permuted = _PERMUTED[architecture]
        self.names = {self._name(name): name for name in checkpoint}
        parts = (name.rpartition(".") for name in checkpoint.rest)
        self.rest = {f"{self._name(module)}.{suffix}": f"{module}.{suffix}" for module, _, suffix in parts}
        embeddings = f"{_EMBEDDINGS}.weight"
        if embeddings in checkpoint.rest and checkpoint.info(embeddings).dtype in QUANTIZED:
            del self.rest[f"{_WHOLE[_EMBEDDINGS]}.weight"]
            self.names[_WHOLE[_EMBEDDINGS]] = _EMBEDDINGS

    def _config(self) -> dict[str, Any]:
        transformers = import_transformers("reading the configuration of a GGUF file")
        with reading(self._path, "configuration"):
            config = transformers.AutoConfig.from_pretrained(self._path.parent, gguf_file=self._path.name, **SAFE)
        values: dict[str, Any] = config.to_dict()
        if not values.get("architectures"):
            values["architectures"] = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
        head = self._metadata.get(f"{self._metadata['general.architecture']}.attention.key_length")
        if head is not None:  # transformers does not read it for every architecture
            values["head_dim"] = head
        values["dtype"] = values.get("dtype") or "float32"  # of norms; else transformers takes that of some scales
        return values

    def _name(self, name: str) -> str:
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
        if found is not None and found[2] in _IN_BLOCK:
            return f"model.layers.{found[1]}.{_IN_BLOCK[found[2]]}"
        if name in _WHOLE:
            return _WHOLE[name]
        raise UnsupportedError(f"{self._path}: the tensor {name!r} has no place in a model of Llama's kind")

    def layer(self, name: str) -> Layer:
        layer = super().layer(name)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.rpartition(".")[2])
        return layer if heads is None or not self._permuted else self._in_order(layer, name, self.config[heads])

    def _in_order(self, layer: Layer, name: str, heads: int) -> Layer:
        n, _ = layer.shape
        if n % (2 * heads):
            raise CheckpointError(f"{self._path}: {name}: expected {heads} heads of even size, got {n} rows")
        rows = torch.arange(n).view(heads, n // heads // 2, 2).transpose(1, 2).reshape(-1)
        return layer.rows(rows)

    def tokenizer(self) -> Any:
        return load_tokenizer(self._path.parent, gguf_file=self._path.name)

    def write_files(self, folder: Path) -> None:
        tokenizer = self.tokenizer()
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise OSError(f"{folder}: the tokenizer cannot be written ({error})") from error  # the disk is full
