"""Blocks of every type of GGUF that is read, of random bytes: the gguf package quantises into few of them."""

from __future__ import annotations

import gguf
import numpy as np

from qcutlass.formats.gguf_blocks import DEQUANTIZED, QUANTIZED

_KNOWN = gguf.GGMLQuantizationType.__members__
KINDS = {name: _KNOWN[name] for name in QUANTIZED if name in _KNOWN}  # the package's first versions have not all


def random_blocks(random: np.random.Generator, n: int, count: int, kind: str) -> np.ndarray:
    """uint8 `[n, bytes]`: any bytes, but finite scales; the first block has scales of 0, where all of 256 columns."""
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    blocks = random.integers(0, 256, (n, count, size), dtype=np.uint8)
    for begin in QUANTIZED[kind].halves:
        heads = random.normal(0, 0.1, (n, count, 1)).astype(np.float16)
        heads[-1, -1] = 6e-8  # the least there is
        blocks[:, :, begin : begin + 2] = heads.view(np.uint8)
    for begin in QUANTIZED[kind].bytes:  # any, but for exponents of numbers that are more than fp32 holds
        blocks[:, :, begin] = random.integers(0, 252, (n, count), dtype=np.uint8)
        blocks[0, 0, begin] = 0
    for begin in QUANTIZED[kind].halves[:1]:
        blocks[0, 0, begin : begin + 2] = 0
    return blocks.reshape(n, -1)


_HALVES = np.array([6e-8, 0.01, 1, 65504], np.float16)
"""The least there is, and the greatest, of blocks' float16 numbers."""
_BYTES = {"MXFP4": 253, "NVFP4": 255}
"""What bytes that are scales lie below: above, 6 times the power of two is more than float32 holds, or they are NaN."""


def blocks_of_every_scale(random: np.random.Generator, n: int, count: int, kind: str) -> np.ndarray:
    """uint8 `[n, bytes]`: scales of blocks, and minimums, below, at and above 0, in all pairs; else any bytes."""
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    blocks = random.integers(0, 256, (n, count, size), dtype=np.uint8)
    places = np.arange(n * count).reshape(n, count, 1)
    for step, begin in enumerate(QUANTIZED[kind].halves):
        signs = (places // 3**step % 3 - 1).astype(np.float16)
        blocks[:, :, begin : begin + 2] = (signs * random.choice(_HALVES, signs.shape)).view(np.uint8)
    for begin in QUANTIZED[kind].bytes:
        blocks[:, :, begin] = places[:, :, 0] % _BYTES[kind]
    return blocks.reshape(n, -1)


_SCALE: dict[str, int] = {"TQ1_0": 52, "TQ2_0": 64}
"""Where the float16 scale of blocks lies that only the gguf package reads; of the others at their beginning."""
_HIGH_NIBBLE = 55
"""The byte of IQ1_M's blocks with the highest bits of the scale, which lie apart."""


def random_rows(random: np.random.Generator, n: int, k: int, kind: str, deviation: float = 0.1) -> np.ndarray:
    """uint8 `[n, bytes]` of one of `DEQUANTIZED`: any bytes, but scales of this deviation where they lie whole."""
    assert kind in DEQUANTIZED
    columns, size = gguf.GGML_QUANT_SIZES[_KNOWN[kind]]
    blocks = random.integers(0, 256, (n, k // columns, size), dtype=np.uint8)
    if kind == "IQ1_M":
        blocks[:, :, _HIGH_NIBBLE] &= 0x3F  # scales below 2
    else:
        begin, scales = _SCALE.get(kind, 0), random.normal(0, deviation, (n, k // columns, 1)).astype(np.float16)
        blocks[:, :, begin : begin + 2] = scales.view(np.uint8)
    return blocks.reshape(n, -1)
