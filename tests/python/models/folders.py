"""Folders of models in several formats."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tests.python.formats.bitsandbytes_files import CONFIG, INT8, as_four_bits, as_int8
from tests.python.formats.stored import (
    Stored,
    Tensors,
    as_awq,
    as_compressed,
    as_fp8,
    as_gptq,
    as_nvfp4,
    named,
    stored,
)  # fmt: skip
from torch import Tensor

import qcutlass
from qcutlass import formats
from qcutlass.models.gguf import GGUFModel

BLOCKS = 2
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 64, "strategy": "group", "symmetric": False, "type": "int"},
        }
    },
    "ignore": ["lm_head"],
}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "strategy": "channel", "symmetric": True, "type": "int"},
            "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True, "type": "int"},
        }
    },
    "ignore": ["lm_head"],
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    },
}


def write_model(folder: Path, tensors: Tensors, config: dict[str, Any], quantization: dict[str, Any] | None) -> Path:
    """A folder as transformers and the quantisers of others write it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    described = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**config, **described}))
    return folder


def random_model(
    folder: Path, layers: int = 4, shape: tuple[int, int] = (64, 128), *, seed: int, **options: Any
) -> Path:
    """A GPTQ folder of random layers, with a norm, an embedding and a tokenizer of sorts; `options` of `stored`."""
    tensors: Tensors = {
        "model.embed_tokens.weight": torch.arange(96.0).half().view(12, 8),
        "model.norm.weight": torch.ones(7),
    }
    for i in range(layers):
        layer = stored(*shape, 64, seed=seed + i, **options)
        tensors |= named(as_gptq(layer), f"model.layers.{i}.mlp.up_proj")
        tensors[f"model.layers.{i}.mlp.up_proj.bias"] = torch.full((shape[0],), 0.5 + i).half()
    write_model(folder, tensors, {"model_type": "llama", "seed": seed}, {**GPTQ, "bits": options.get("bits", 4)})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "quantize_config.json").write_text("{}")
    return folder


def requantized(
    weight: Tensor, seed: int, *, act_order: bool = False, bits: int = 4, group_size: int = 64, symmetric: bool = False
) -> Stored:
    """Groups of columns, neighbours or, as act-order has it, from anywhere."""
    k = weight.shape[1]
    order = np.random.default_rng(seed).permutation(k) if act_order else np.arange(k)
    ordered = weight[:, torch.from_numpy(order)].half()
    q = qcutlass.quantize(ordered, bits=bits, group_size=group_size, symmetric=symmetric)
    zeros = torch.full_like(q.scales, 2 ** (bits - 1)) if q.zeros is None else q.zeros
    codes, group_of = np.empty(weight.shape, dtype=np.int64), np.empty(k, dtype=np.int64)
    codes[:, order], group_of[order] = q.codes.numpy(), np.arange(k) // group_size
    return Stored(codes, zeros.numpy().astype(np.int64), q.scales.numpy(), group_of, bits, group_size)


def write_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer of the numbers below `size`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="1").save_pretrained(folder)


@dataclass
class Cut:
    """A folder, and the weights that its layers stand for, by name."""

    folder: Path
    weights: dict[str, Tensor]


class Cuts(ABC):
    """A small Llama whose layers are quantised anew, in folders of several formats.

    Args:
        folder: to write into.
        config: of the model.
        names: of its layers.
        rest: its other tensors.
    """

    def __init__(self, folder: Path, config: dict[str, Any], names: list[str], rest: Tensors) -> None:
        self.root = folder
        self.config, self.names, self.rest = config, names, rest
        self._tokenizer = folder / "tokenizer"
        self._tokenizer.mkdir()
        self._written: dict[str, Cut] = {}

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """float32 `[N, K]`, of a layer."""

    def gptq(self) -> Cut:
        """With act-order."""
        return self._stored("gptq", lambda layer: as_gptq(layer), GPTQ, act_order=True)

    def awq(self) -> Cut:
        return self._stored("awq", as_awq, AWQ)

    def compressed(self) -> Cut:
        return self._stored("compressed", as_compressed, COMPRESSED)

    def floats(self) -> Cut:
        weights = {name: self.weight(name).half() for name in self.names}
        tensors = {**self.rest, **{f"{name}.weight": weight for name, weight in weights.items()}}
        return self._write("floats", tensors, None, weights)

    def w8a8(self) -> Cut:
        def store(weight: Tensor) -> tuple[Tensors, Tensor]:
            codes, scales = qcutlass.quantize_weights_int8(weight)
            return {"weight": codes, "weight_scale": scales[:, None]}, codes.float() * scales[:, None]

        return self._quantized("w8a8", store, W8A8)

    def bitsandbytes(self, kind: str, nested: int = 0) -> Cut:
        """Of 4 bits, "nf4" or "fp4", or "int8"."""
        if kind == "int8":
            return self._quantized("int8-0", as_int8, INT8)
        return self._quantized(f"{kind}-{nested}", lambda weight: as_four_bits(weight, kind, nested=nested), CONFIG)

    def fp8(self, block: int | None = 128) -> Cut:
        """In square blocks, for 16-bit activations; None: with a scale a channel, for fp8 ones."""
        size = block and (block, block)
        name = "weight_scale" if size is None else "weight_scale_inv"
        config = FP8 | ({} if size is None else {"weight_block_size": [*size]})
        return self._quantized(f"fp8-{block}", lambda weight: as_fp8(weight, size, name), config)

    def fp8_channels(self) -> Cut:
        return self.fp8(None)

    def nvfp4(self) -> Cut:
        """That of compressed-tensors; each layer has a global scale of its own."""
        return self._quantized("nvfp4", as_nvfp4, NVFP4)

    def _quantized(self, kind: str, store: Callable[[Tensor], tuple[Tensors, Tensor]], config: dict[str, Any]) -> Cut:
        """`store`: the tensors of a layer's weights, and what they stand for."""
        if kind in self._written:
            return self._written[kind]
        tensors, weights = dict(self.rest), {}
        for name in self.names:
            found, weights[name] = store(self.weight(name))
            tensors |= named(found, name)
        return self._write(kind, tensors, config, weights)

    def _stored(
        self,
        kind: str,
        pack: Callable[[Stored], Tensors],
        config: dict[str, Any],
        **options: Any,
    ) -> Cut:
        """`options` of `requantized`."""
        if kind in self._written:
            return self._written[kind]
        tensors, weights = dict(self.rest), {}
        for seed, name in enumerate(self.names):
            weight = self.weight(name)
            layer = requantized(weight, seed, **options)
            tensors |= named(pack(layer), name)
            weights[name] = layer.weight
        return self._write(kind, tensors, config, weights)

    def _write(self, kind: str, tensors: Tensors, config: dict[str, Any] | None, weights: dict[str, Tensor]) -> Cut:
        folder = write_model(self.root / kind, tensors, self.config, config)
        for path in self._tokenizer.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        self._written[kind] = Cut(folder, weights)
        return self._written[kind]

    def dense(self, cut: Cut, dtype: torch.dtype) -> Any:
        """The model with the dequantised weights of a cut, in transformers' own layers."""
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = LlamaConfig(**self.config)
        with torch.device("meta"):  # random numbers take most of the time
            model = LlamaForCausalLM(config)
        state = {**self.rest, **{f"{name}.weight": weight for name, weight in cut.weights.items()}}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, assign=True)
        model.tie_weights()
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
        return model.eval()


class SmolCut(Cuts):
    """The first blocks of SmolLM2.

    Args:
        path: of the GGUF file.
        folder: to write into.
        blocks: how many.
    """

    def __init__(self, path: Path, folder: Path, blocks: int = BLOCKS) -> None:
        self.source = source = GGUFModel(formats.load(path), path)
        names = [name for name in source.names if "layers" in name and int(name.split(".")[2]) < blocks]
        rest = [name for name in source.rest if "layers" not in name or int(name.split(".")[2]) < blocks]
        config = {**source.config, "num_hidden_layers": blocks, "dtype": "float16"}
        tensors = {name: source.tensor(name).half() for name in rest}
        embeddings = "model.embed_tokens"  # packed in the file
        tensors[f"{embeddings}.weight"] = source.layer(embeddings).dequantize(torch.float16)
        super().__init__(folder, config, names, tensors)
        source.write_files(self._tokenizer)

    def weight(self, name: str) -> Tensor:
        return self.source.layer(name).dequantize(torch.float32)


class RandomCut(Cuts):
    """Random weights, and a tokenizer of numbers: for machines without a model."""

    VOCABULARY = 128

    def __init__(self, folder: Path, seed: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            dtype="float16",
            architectures=["LlamaForCausalLM"],
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).named_parameters()}
        g = torch.Generator().manual_seed(seed)
        tensors = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
        layers = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if "_proj" in name}
        self._weights = {name: tensor / tensor.shape[1] ** 0.5 for name, tensor in layers.items()}
        rest = {name: tensor for name, tensor in tensors.items() if "_proj" not in name}
        rest = {name: (tensor / 8 + (tensor.ndim == 1)).half() for name, tensor in rest.items()}  # norms around 1
        super().__init__(folder, config.to_dict(), list(layers), rest)
        write_tokenizer(self._tokenizer, self.VOCABULARY)

    def weight(self, name: str) -> Tensor:
        return self._weights[name]
