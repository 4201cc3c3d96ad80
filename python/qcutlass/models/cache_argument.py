"""The argument in which models of transformers take a cache of keys and values, whose name depends on the version."""

from __future__ import annotations

import inspect
from typing import Any, Final, TypeVar

from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.models.llama.modeling_llama import LlamaModel

Layer = TypeVar("Layer", bound=CacheLayerMixin)

_NEW: Final = "cache"
_OLD: Final = "past_key_values"  # before transformers 5.24

CACHE: Final = _NEW if _NEW in inspect.signature(LlamaModel.forward).parameters else _OLD
"""Its name, which is that of the result's field, too."""


def pop_cache(options: dict[str, Any]) -> Any:
    """Takes the cache out of a call's options; None where there is none.

    The older name serves with every version. The newer one was that of another argument before.
    """
    old = options.pop(_OLD, None)
    return options.pop(CACHE, None) if old is None else old


def cache_layer(cache: Any, index: int, kind: type[Layer]) -> Layer | None:
    """A layer of a cache that has it, of this very kind and in use; None otherwise, and for caches without layers."""
    if not isinstance(cache, Cache) or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    return layer if type(layer) is kind and layer.is_initialized else None
