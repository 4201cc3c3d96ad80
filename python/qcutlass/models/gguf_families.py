"""The architectures of GGUF files that are read, and how each differs from Llama's: a new one is a row of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Family:
    """An architecture of llama.cpp in the words of transformers.

    Attributes:
        kind: what transformers calls it (`model_type`).
        in_block: modules of a block that are more than Llama's, or called otherwise: llama.cpp's name, transformers'.
        values: keys of the header, behind the architecture's name, that say more than sizes; what configurations call
            them.
        needed: those of these keys that have to be there.
        is_permuted: whether rows of q and k are in the order of llama.cpp's first models.
        norm_offset: what files add to the weights of norms: these modules add it themselves.
        scales_queries: whether configurations say what queries are scaled by: a head's size, but in models of
            `wide_blocks` blocks, of which llama.cpp knows that it is the model's width over the number of heads.
        has_local_rope: whether blocks whose attention reaches back so far alone have rotary embeddings of their own.
    """

    kind: str
    in_block: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    is_permuted: bool = False
    norm_offset: float = 0.0
    scales_queries: bool = False
    wide_blocks: int = 0
    has_local_rope: bool = False

    def query_scale(self, blocks: object, width: Any, heads: Any, head_size: int | None) -> dict[str, Any]:
        """The key for what queries are scaled by, its square: where configurations have one."""
        if not self.scales_queries or head_size is None:
            return {}
        return {"query_pre_attn_scalar": width // heads if blocks == self.wide_blocks else head_size}


_AROUND: Final = {  # norms before and behind attention and MLP
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_CAPS: Final = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_BEHIND: Final = {name: module for name, module in _AROUND.items() if name != "ffn_norm"}
_MULTIPLIERS: Final = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
_WINDOW: Final = {"attention.sliding_window": "sliding_window"}

FAMILIES: Final = {  # by architecture, and whether there are experts
    ("llama", False): Family("llama", is_permuted=True),
    ("llama", True): Family("mixtral", is_permuted=True),
    ("granite", False): Family("granite", {}, _MULTIPLIERS, ("attention.scale",), is_permuted=True),
    ("smollm3", False): Family("smollm3", is_permuted=True),
    ("olmo2", False): Family("olmo2", _BEHIND),
    ("qwen2", False): Family("qwen2"),
    ("qwen3", False): Family("qwen3"),
    ("gemma", False): Family("gemma", norm_offset=1.0),
    ("gemma2", False): Family("gemma2", _AROUND, _WINDOW | _CAPS, norm_offset=1.0, scales_queries=True, wide_blocks=46),
    ("gemma3", False): Family(
        "gemma3_text",
        _AROUND,
        {
            **_WINDOW,
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norm_offset=1.0,
        scales_queries=True,
        wide_blocks=62,
        has_local_rope=True,
    ),
    ("phi3", False): Family("phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, _WINDOW),
    ("qwen2moe", True): Family("qwen2_moe"),
    ("qwen3moe", True): Family("qwen3_moe"),
}


def family_of(metadata: Mapping[str, Any]) -> Family | None:
    """That of a header; None for one that is not read.

    Example:
        >>> from qcutlass.models.gguf_families import family_of
        >>> family_of({"general.architecture": "llama", "llama.expert_count": 8}).kind
        'mixtral'
    """
    architecture = str(metadata.get("general.architecture"))
    return FAMILIES.get((architecture, bool(metadata.get(f"{architecture}.expert_count"))))
