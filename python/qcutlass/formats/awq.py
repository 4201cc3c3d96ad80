"""AWQ, version "gemm" (AutoAWQ): `qweight` int32 `[K, N / 8]`, `qzeros` int32 `[G, N / 8]`, `scales` `[G, N]`, 4 bits.

Nibble i of a word, from low to high, holds column [0, 2, 4, 6, 1, 3, 5, 7][i] of the word's eight; zero points are
stored as they are. The method: Lin et al., "AWQ: Activation-aware Weight Quantization" (2023).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.formats.layers import CanonicalLinear
from qcutlass.formats.tensors import FLOATS, INT32, LayerTensors, settle_zeros
from qcutlass.quantized import QuantizedTensor

SUFFIXES: Final = ("qweight", "qzeros", "scales", "bias")
_OTHERS: Final = ("gemv", "llm-awq", "marlin")
"""Versions that lay out codes in other orders, or begin with one of these."""
_COLUMN_OF_NIBBLE: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def matches(layer: LayerTensors) -> bool:
    """Whether there are eight of `scales` for each column of `qweight`."""
    if "scales" not in layer:
        return False
    words, scales = layer.info("qweight").shape, layer.info("scales").shape
    return len(words) == len(scales) == 2 and 8 * words[1] == scales[1]


def load(layer: LayerTensors) -> CanonicalLinear:
    """See `qcutlass.formats.load`."""
    said = {f"{layer.config.where}: version": layer.config.text("version"), **layer.config.versions()}
    for place, version in said.items():
        if version is not None and version.startswith(_OTHERS):
            raise UnsupportedError(f"{place} {version!r} of AWQ is not read; export version 'gemm'")
    if layer.info("qweight").dtype == "I16":
        raise UnsupportedError(
            f"{layer.full_name('qweight')}: AWQ's words of 16 bits (gemv_fast) are not read; export version 'gemm'"
        )
    groups, n = layer.matrix("scales", FLOATS)
    k, width = layer.matrix("qweight", INT32)
    bits = layer.bits("qweight", width, n)
    if bits != 4:
        raise UnsupportedError(f"{layer.full_name('qweight')}: {bits}-bit AWQ weights are not read, only 4-bit ones")
    size = layer.group_size("scales", k, groups)
    if "qzeros" in layer:
        layer.check("qzeros", INT32, (groups, width))
    bias, scales = layer.bias(n), layer.finite("scales")
    zeros = settle_zeros(_channels(layer.read("qzeros")).T, bits) if "qzeros" in layer else None
    codes = _channels(layer.read("qweight"))
    return CanonicalLinear(QuantizedTensor(codes, scales, zeros, bits, size), bias)


def _channels(words: Tensor) -> Tensor:
    """uint8 `[N, rows]` of words `[rows, N / 8]`: channels first, so that each field is a copy of whole rows."""
    words = words.T.contiguous()
    fields = torch.empty((len(words), 8, words.shape[1]), dtype=torch.uint8)
    for nibble, column in enumerate(_COLUMN_OF_NIBBLE):
        fields[:, column] = (words >> (4 * nibble)) & 15
    return fields.view(-1, words.shape[1])
