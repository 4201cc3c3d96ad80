"""Marlin, version 1 (IST-DASLab): `B` int32 `[K / 16, 2 N]`, `s` float16 `[G, N]`; 4 bits, symmetric.

`B` holds 16 x 64 tiles of the K x N matrix. The 128 words of a tile belong to 32 lanes, four words to each, one for
every 16 channels. Lane 4 g + t has the rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of channel g, then of channel g + 8; the
nibbles of its words hold elements [0, 2, 4, 6, 1, 3, 5, 7] of these eight. Scales of groups are the transpose of each
8 x 8 block of 64 channels; one scale a channel is stored as [0, 1, 8, 9, 16, 17, 24, 25] + 2 i, i = 0 to 3, of each 32.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qcutlass.formats.layers import CanonicalLinear
from qcutlass.formats.tensors import FLOATS, INT32, LayerTensors
from qcutlass.quantized import QuantizedTensor

SUFFIXES: Final = ("B", "s", "workspace", "bias")
_ELEMENT_OF_NIBBLE: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def matches(layer: LayerTensors) -> bool:
    """Whether there are scales."""
    return "s" in layer


def load(layer: LayerTensors) -> CanonicalLinear:
    """See `qcutlass.formats.load`."""
    groups, n = layer.matrix("s", FLOATS)
    tiles, _ = layer.matrix("B", INT32)
    k = 16 * tiles
    layer.check("B", INT32, (tiles, 2 * n))
    if n % 64:
        raise layer.error("s", f"expected channels in multiples of 64, got {n}")
    size = layer.group_size("s", k, groups)
    bias = layer.bias(n)
    scales = _scales(layer.finite("s"))
    return CanonicalLinear(QuantizedTensor(_codes(layer.read("B"), n), scales, None, 4, size), bias)


def _codes(words: Tensor, n: int) -> Tensor:
    """uint8 `[N, K]`."""
    tiles = len(words)
    # stored: tile of k, tile of n, g, t, 16 channels; words in the order of the result make each field one pass
    words = words.view(tiles, n // 64, 8, 4, 4).permute(1, 4, 2, 0, 3).contiguous()
    # tile of n, 16 channels, channel + 0 or 8, g, tile of k, row + 0 or 8, t, row + 0 or 1
    codes = torch.empty((n // 64, 4, 2, 8, tiles, 2, 4, 2), dtype=torch.uint8)
    for nibble, element in enumerate(_ELEMENT_OF_NIBBLE):
        codes[:, :, element // 4, :, :, element // 2 % 2, :, element % 2] = (words >> (4 * nibble)) & 15
    return codes.view(n, 16 * tiles)


def _scales(stored: Tensor) -> Tensor:
    groups, n = stored.shape
    if groups > 1:
        return stored.view(groups, n // 64, 8, 8).transpose(2, 3).reshape(groups, n)
    # stored: i of 4, then four pairs 8 apart; in order: pair, i, the two of a pair
    return stored.view(1, n // 32, 4, 4, 2).transpose(2, 3).reshape(1, n)
