"""Models with random weights as the engine reads them: int4 codes in GPTQ's format, or a description alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.llama import SIZES, Size

MODELS: Final = {"tiny": Size(128, 256, 2, 4, 2, 128), "8b": SIZES["llama3-8b"]}
"""By their names on the command line; the engine's attention takes no heads as narrow as `SIZES["tiny"]` has."""
GROUP: Final = 128
_SEVENS: Final = 0x77777777
"""Zero points in the middle, as version 1 of GPTQ stores them."""


def write_dense(folder: Path, size: Size) -> None:
    """A description without a file of weights, which the engine draws itself (`load_format="dummy"`)."""
    _write_config(folder, size, {})


def write_gptq(folder: Path, size: Size, device: str) -> None:
    """A model in GPTQ's format: random codes in groups of 128, symmetric; a file a block."""
    quantization = {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False,
        "checkpoint_format": "gptq",
    }  # fmt: skip
    _write_config(folder, size, {"quantization_config": quantization})
    weight_map: dict[str, str] = {}
    for block in range(size.blocks):
        _save(folder, f"block-{block:03d}.safetensors", _block(size, f"model.layers.{block}", device), weight_map)
    rest = {
        "model.embed_tokens.weight": _random(size.vocabulary, size.hidden, device),
        "model.norm.weight": torch.ones(size.hidden),
    }
    if not size.tied:
        rest["lm_head.weight"] = _random(size.vocabulary, size.hidden, device)
    _save(folder, "rest.safetensors", {name: tensor.half() for name, tensor in rest.items()}, weight_map)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_config(folder: Path, size: Size, more: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16",
        "hidden_size": size.hidden, "intermediate_size": size.intermediate, "num_hidden_layers": size.blocks,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "vocab_size": size.vocabulary,
        "tie_word_embeddings": size.tied, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 500000.0, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | more))


def _save(folder: Path, name: str, tensors: dict[str, Tensor], weight_map: dict[str, str]) -> None:
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, folder / name, {"format": "pt"})
    weight_map.update(dict.fromkeys(tensors, name))


def _random(rows: int, columns: int, device: str) -> Tensor:
    return 0.02 * torch.randn(rows, columns, device=device)


def _block(size: Size, prefix: str, device: str) -> dict[str, Tensor]:
    head = size.hidden // size.heads
    kv, width, inner = head * size.kv_heads, size.hidden, size.intermediate
    shapes = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for name, (n, k) in shapes.items():
        words = torch.randint(-(2**31), 2**31, (k // 8, n), dtype=torch.int32, device=device)
        tensors |= {
            f"{prefix}.{name}.qweight": words,
            f"{prefix}.{name}.qzeros": torch.full((k // GROUP, n // 8), _SEVENS, dtype=torch.int32),
            f"{prefix}.{name}.scales": (0.002 + 0.004 * torch.rand(k // GROUP, n, device=device)).half(),
            f"{prefix}.{name}.g_idx": (torch.arange(k) // GROUP).int(),
        }
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = torch.ones(width, dtype=torch.float16)
    return tensors
