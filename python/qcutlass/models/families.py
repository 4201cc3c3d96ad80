"""The modelling files of transformers whose decoder blocks are of Llama's kind."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Final

from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

FAMILIES: Final[Mapping[str, ModuleType]] = {
    "Llama": modeling_llama,
    "Mistral": modeling_mistral,
    "Qwen2": modeling_qwen2,
    "Qwen3": modeling_qwen3,
}
"""By what the names of their classes begin with."""
