"""Random weights in the blocks of GGUF files: the gguf package quantises into few of their types."""

from __future__ import annotations

import gguf
import numpy as np

from qcutlass.formats.gguf_blocks import QUANTIZED


def random_gguf_weights(random: np.random.Generator, n: int, k: int, kind: str, deviation: float) -> np.ndarray:
    """Blocks of weights `[N, K]` of about this standard deviation, of random bytes but for the blocks' scales.

    Args:
        random: what is drawn from.
        n, k: K is a multiple of the type's columns, 32 or 256.
        kind: a type as GGUF names it, of those that are read: "Q4_K".
        deviation: of the weights.

    Returns:
        uint8 `[N, bytes]`, as a file has them.

    Example:
        >>> import gguf, numpy as np
        >>> from bench.gguf_weights import random_gguf_weights
        >>> blocks = random_gguf_weights(np.random.default_rng(0), 64, 512, "Q4_K", 0.1)
        >>> blocks.shape
        (64, 288)
        >>> round(float(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K).std()), 2)
        0.1
    """
    quantization = gguf.GGMLQuantizationType[kind]
    columns, size = gguf.GGML_QUANT_SIZES[quantization]
    blocks = random.integers(0, 256, (n, k // columns, size), dtype=np.uint8)
    scales = {begin: random.uniform(0.5, 1, (n, k // columns, 1)) for begin in QUANTIZED[kind].halves}

    def scaled(rows: np.ndarray, part: slice, factor: float) -> np.ndarray:
        for begin, values in scales.items():
            rows[:, :, begin : begin + 2] = (values[part] * factor).astype(np.float16).view(np.uint8)
        return rows.reshape(len(rows), -1)

    some = slice(0, max(1, 2**20 // k))  # rows that tell the deviation of all
    found = gguf.quants.dequantize(scaled(blocks[some].copy(), some, 1), quantization)
    return scaled(blocks, slice(None), deviation / float(found.std()))
