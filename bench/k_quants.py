"""A GGUF file of K-quants to measure with, whose rows are the multiples of 256 columns that their blocks take."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import gguf
import numpy as np

from bench.gguf_weights import random_gguf_weights

HIDDEN: Final = 768
INTERMEDIATE: Final = 2048
HEAD: Final = 64
HEADS: Final = 12
KV_HEADS: Final = 4
BLOCKS: Final = 24
"""With the others: about as large as SmolLM2-135M."""
_MORE_BITS: Final = ("attn_v", "ffn_down")
_TOKENIZER: Final = "tokenizer."


def kind(name: str, block: int, blocks: int) -> str:
    """The type of a tensor in llama.cpp's mix Q4_K_M: some of each block have more bits in half of the blocks."""
    edge = blocks // 8
    is_better = block < edge or block >= 7 * blocks // 8 or (block - edge) % 3 == 2
    return "Q6_K" if name == "token_embd" or (name in _MORE_BITS and is_better) else "Q4_K"


def write(path: Path, source: Path, blocks: int = BLOCKS, seed: int = 0) -> Path:
    """A Llama with random weights, its head tied to its embeddings, and the tokenizer of another file."""
    random, writer = np.random.default_rng(seed), gguf.GGUFWriter(path, "llama")
    tokens = 0
    for key, field in gguf.GGUFReader(source).fields.items():
        if key.startswith(_TOKENIZER):
            value, types = field.contents(), field.types
            tokens = len(value) if key.endswith(".tokens") else tokens
            writer.add_key_value(key, value, types[0], types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None)
    writer.add_block_count(blocks)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(tokens)

    def add(prefix: str, name: str, rows: int, columns: int, block: int = 0) -> None:
        label = kind(name, block, blocks)
        data = random_gguf_weights(random, rows, columns, label, columns**-0.5)
        writer.add_tensor(f"{prefix}{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[label])

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))

    add("", "token_embd", tokens, HIDDEN)
    add_norm("output_norm")
    for i in range(blocks):
        prefix = f"blk.{i}."
        for name, rows, columns in (
            ("attn_q", HEADS * HEAD, HIDDEN),
            ("attn_k", KV_HEADS * HEAD, HIDDEN),
            ("attn_v", KV_HEADS * HEAD, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD),
            ("ffn_gate", INTERMEDIATE, HIDDEN),
            ("ffn_up", INTERMEDIATE, HIDDEN),
            ("ffn_down", HIDDEN, INTERMEDIATE),
        ):
            add(prefix, name, rows, columns, i)
        add_norm(f"{prefix}attn_norm")
        add_norm(f"{prefix}ffn_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
