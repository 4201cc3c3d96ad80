"""Quantised output heads, and the embeddings that are tied to them."""

from __future__ import annotations

from typing import Any, Final

import torch

from qcutlass.algorithms.nearest import quantize
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import CanonicalLinear, Layer
from qcutlass.models.sources import ModelSource
from qcutlass.products.checks import check_integer
from qcutlass.schemes import WeightOnly

HEAD: Final = "lm_head"
HEADS: Final = (HEAD, "embed_out")
"""The names of output heads in files; transformers calls each of them by the first."""
HEAD_SCHEMES: Final = {
    8: WeightOnly(8, 128, symmetric=True, scale_dtype=torch.float16),
    4: WeightOnly(4, 32, symmetric=True, scale_dtype=torch.float16),
}
"""The schemes of output heads by bits. Errors of a head reach the logits as they are, so 4 bits get small groups.

Perplexity of SmolLM2-135M (14.69) with a head of 4 bits: 15.90 so, 16.29 with zero points, and with these 16.98 in
groups of 64, 17.07 of 128. Ranges that are clipped for the least error of the weights make it worse (16.52 for 16.29).
"""

_EMBEDDINGS: Final = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")
"""Last parts of the names that models give their token embeddings."""


def is_embedding(name: str) -> bool:
    """Whether this is the name of a module with token embeddings.

    Example:
        >>> from qcutlass.models.heads import is_embedding
        >>> is_embedding("model.embed_tokens"), is_embedding("lm_head")
        (True, False)
    """
    return name.rpartition(".")[2] in _EMBEDDINGS


def check_head(lm_head: object) -> None:
    """Raises TypeError or ValueError unless it is None or a key of `HEAD_SCHEMES`."""
    if lm_head is not None:
        check_integer("lm_head", lm_head, HEAD_SCHEMES)


def with_head(source: ModelSource, bits: int | None) -> ModelSource:
    """A source whose output head is quantised to the nearest.

    A head that is tied has no weights of its own in the files: then the embedding is quantised, for both.

    Args:
        source: of which nothing is changed.
        bits: a key of `HEAD_SCHEMES`; None: `source` as it is.

    Raises:
        UnsupportedError: neither a head nor an embedding has a name that is known.
    """
    return source if bits is None else _WithHead(source, HEAD_SCHEMES[bits])


class _WithHead(ModelSource):
    """A source with a quantised head in place of its own."""

    def __init__(self, source: ModelSource, scheme: WeightOnly) -> None:
        self._source, self._scheme = source, scheme
        self.checkpoint, self.config, self.model = source.checkpoint, source.config, source.model
        self.names, self.rest = dict(source.names), dict(source.rest)
        modules = [*self.names, *(name.removesuffix(".weight") for name in self.rest)]
        heads = [*(name for name in HEADS if name in modules), *filter(is_embedding, modules)]
        if not heads:
            raise UnsupportedError(
                f"lm_head: the model has neither a head named {' or '.join(HEADS)} nor an embedding named "
                f"{', '.join(_EMBEDDINGS)}; leave it out"
            )
        found = heads[0]
        self._name = HEAD if found in HEADS else found
        if found in HEADS and self.config.get("tie_word_embeddings"):
            self.config = {**self.config, "tie_word_embeddings": False}  # both are in the files, one is quantised now
        if found not in self.names:
            self.names[self._name] = self.rest.pop(f"{found}.weight").removesuffix(".weight")
            self.rest.pop(f"{found}.bias", None)  # of the layer

    def layer(self, name: str) -> Layer:
        if name != self._name:
            return self._source.layer(name)
        layer, scheme = super().layer(name), self._scheme
        weight = layer.effective_weight()
        try:
            quantized = quantize(
                weight, scheme.bits, scheme.group_size, scheme.symmetric, scale_dtype=scheme.scale_dtype
            )
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
        return CanonicalLinear(quantized, layer.bias)

    def tokenizer(self) -> Any:
        return self._source.tokenizer()

    def write_files(self, folder: Any) -> None:
        self._source.write_files(folder)
