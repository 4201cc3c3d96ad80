"""Blocks of every type of GGUF that is read, of random bytes: the gguf package quantises into few of them."""

from __future__ import annotations

import gguf
import numpy as np

from qcutlass.formats.gguf_blocks import QUANTIZED

KINDS = {name: gguf.GGMLQuantizationType[name] for name in QUANTIZED}


def random_blocks(random: np.random.Generator, n: int, count: int, kind: str) -> np.ndarray:
    """uint8 `[n, bytes]`: any bytes, but finite scales; the first block has scales of 0, where all of 256 columns."""
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    blocks = random.integers(0, 256, (n, count, size), dtype=np.uint8)
    for begin in QUANTIZED[kind].halves:
        heads = random.normal(0, 0.1, (n, count, 1)).astype(np.float16)
        heads[-1, -1] = 6e-8  # the least there is
        blocks[:, :, begin : begin + 2] = heads.view(np.uint8)
    blocks[0, 0, QUANTIZED[kind].halves[0] : QUANTIZED[kind].halves[0] + 2] = 0
    return blocks.reshape(n, -1)
