"""The argument in which models of transformers take a cache of keys and values, whose name depends on the version."""

from __future__ import annotations

import inspect
from typing import Any, Final

from transformers.models.llama.modeling_llama import LlamaModel

_NEW: Final = "cache"
_OLD: Final = "past_key_values"  # before transformers 5.24

CACHE: Final = _NEW if _NEW in inspect.signature(LlamaModel.forward).parameters else _OLD
"""Its name, which is that of the result's field, too."""


def pop_cache(options: dict[str, Any]) -> Any:
    """Takes the cache out of a call's options, whichever name it has; None where there is none."""
    old, new = options.pop(_OLD, None), options.pop(_NEW, None)
    return old if new is None else new
