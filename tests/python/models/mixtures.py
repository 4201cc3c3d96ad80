"""Small random mixtures of experts, made by transformers, in folders of several formats."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from tests.python.formats.stored import as_awq, as_compressed, as_gptq
from tests.python.models.folders import (
    AWQ,
    COMPRESSED,
    GPTQ,
    Cut,
    Cuts,
    named,
    requantized,
    write_model,
    write_tokenizer,
)
from torch import Tensor

from qcutlass.models.experts import is_router

VOCABULARY: Final = 64
EXPERTS: Final = 4
_SIZES: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_DEEPSEEK: Final = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    # gate has no whole number of strips of 16 channels, down a narrow group
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 40, "head_dim": 32},
    "olmoe": {"num_experts": EXPERTS},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
_KEPT: Final = ("embed_tokens", "lm_head", "shared_expert_gate")


def compressed(old: str, new: str) -> dict[str, Any]:
    """The description of compressed-tensors with another value of a key."""
    found: dict[str, Any] = json.loads(json.dumps(COMPRESSED).replace(old, new))
    return found


def model_of(kind: str, seed: int = 0, **options: Any) -> Any:
    """A model, one of `KINDS` or another with `options`; its experts matter to its logits, its router is decided."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**_SIZES, **KINDS.get(kind, {}), **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


class MixtureCut(Cuts):
    """One of `KINDS`, or another with `options`, with a tokenizer of numbers.

    Args:
        folder: to write into.
        kind, options: of the model, as for `model_of`.
    """

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        saved = folder / "saved"
        model_of(kind, **options).save_pretrained(saved)
        tensors = load_file(saved / "model.safetensors")
        self._weights = {
            name.removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if tensor.ndim == 2 and not any(word in name for word in _KEPT) and not is_router(name[: -len(".weight")])
        }
        rest = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in self._weights}
        super().__init__(folder, json.loads((saved / "config.json").read_text()), list(self._weights), rest)
        write_tokenizer(self._tokenizer, VOCABULARY)

    @property
    def experts(self) -> list[str]:
        """The names of the experts' layers."""
        return [name for name in self.names if ".experts." in name]

    def weight(self, name: str) -> Tensor:
        return self._weights[name]

    def gptq(self) -> Cut:
        """Without act-order."""
        return self._stored("gptq", as_gptq, {**GPTQ, "desc_act": False})

    def act_order(self) -> Cut:
        """GPTQ whose columns are in an order of each expert's own, one for its gate and up."""
        if "act_order" in self._written:
            return self._written["act_order"]
        tensors, weights = dict(self.rest), {}
        for name in self.names:
            seed = zlib.crc32(name.replace("up_proj", "gate_proj").replace(".w3", ".w1").encode())
            layer = requantized(self.weight(name), seed, act_order=True, group_size=16)
            tensors |= named(as_gptq(layer), name)
            weights[name] = layer.weight
        return self._write("act_order", tensors, {**GPTQ, "group_size": 16}, weights)

    def compressed_8(self) -> Cut:
        return self._stored("compressed_8", as_compressed, compressed('"num_bits": 4', '"num_bits": 8'), bits=8)

    def awq_16(self) -> Cut:
        """Groups of 16 columns: several an expert."""
        return self._stored("awq_16", as_awq, {**AWQ, "group_size": 16}, group_size=16)

    def compressed_16(self) -> Cut:
        config = compressed('"group_size": 64', '"group_size": 16')
        return self._stored("compressed_16", as_compressed, config, group_size=16)

    def compressed_symmetric(self) -> Cut:
        config = compressed('"symmetric": false', '"symmetric": true')
        return self._stored("compressed_symmetric", as_compressed, config, symmetric=True)

    def fp8(self, block: int = 32) -> Cut:
        """In blocks, as DeepSeek-V3 and Qwen3-MoE are published."""
        return super().fp8(block)

    def dense(self, cut: Cut, dtype: torch.dtype) -> Any:
        """The model with the dequantised weights of a cut, joined and multiplied by transformers itself."""
        from transformers import AutoModelForCausalLM

        weights = {f"{name}.weight": weight.float() for name, weight in cut.weights.items()}
        folder = write_model(self.root / f"dense-{cut.folder.name}", self.rest | weights, self.config, None)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
