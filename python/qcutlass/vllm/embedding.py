"""Embeddings whose rows are packed, as converted folders may have them, and the output heads that are tied to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from qcutlass.errors import UnsupportedError
from qcutlass.layers import QuantEmbedding, WeightOnlyLinear
from qcutlass.vllm.method import QCutlassLinearMethod
from qcutlass.vllm.products import Products


class QCutlassEmbeddingMethod(QCutlassLinearMethod):
    """How an embedding is loaded and looked up. A head that is tied to it multiplies by the same packed weights.

    Args:
        values, prefix: as for `QCutlassLinearMethod`.
    """

    def create_weights(self, layer: Any, *sizes: Any, **options: Any) -> None:
        super().create_weights(layer, *sizes, **options)
        self._owner = layer

    def process_weights_after_loading(self, layer: Any) -> None:
        owner = self._owner
        if not hasattr(owner, "rows"):
            super().process_weights_after_loading(owner)
            owner.rows = rows_of(owner.products, self._dtype, self._prefix)
        if layer is not owner:
            layer.products = owner.products
            if hasattr(layer, "weight"):  # what stood for it until the embedding was loaded
                del layer.weight

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Integers `[...]` to their rows `[..., K]`."""
        out: Tensor = layer.rows(input_)
        return out


def rows_of(products: Products, dtype: torch.dtype, name: str) -> nn.Module:
    """The rows of the matrix of a product, which share its memory.

    Args:
        products: one, which stands for the whole matrix.
        dtype: of the rows.
        name: for errors.

    Raises:
        UnsupportedError: its weights are neither integers, with activations as they are, nor floats.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.formats import CanonicalLinear
        >>> from qcutlass.vllm.cutting import Share
        >>> from qcutlass.vllm.embedding import rows_of
        >>> share = Share(CanonicalLinear(qcutlass.quantize(torch.randn(48, 64), bits=8)))
        >>> rows_of(Products([share], torch.float32), torch.float32, "embed_tokens")(torch.tensor([3, 40])).shape
        torch.Size([2, 64])
    """
    (product,) = products.products
    layer: Any = product.layer
    make = _ROWS.get(type(layer))
    if make is None:
        raise UnsupportedError(f"{name}: expected an embedding of weights that are quantised alone, got {layer}")
    return make(layer, dtype)


def _floats(layer: nn.Linear, dtype: torch.dtype) -> nn.Embedding:
    embedding = nn.Embedding(layer.out_features, layer.in_features, device="meta")
    embedding.weight = layer.weight
    return embedding


_ROWS: Final[dict[type[nn.Module], Callable[[Any, torch.dtype], nn.Module]]] = {
    WeightOnlyLinear: QuantEmbedding,
    nn.Linear: _floats,
}
