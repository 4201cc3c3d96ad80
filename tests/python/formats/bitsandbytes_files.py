"""Layers as bitsandbytes stores them, written element by element from its description, and what they stand for."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import torch
from tests.python.formats.stored import Tensors
from torch import Tensor

TABLES: Final = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(sign * x / 12 for sign in (1, -1) for x in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}  # fmt: skip
CONFIG: Final[dict[str, Any]] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8: Final[dict[str, Any]] = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def as_four_bits(
    weight: Tensor, kind: str = "nf4", *, size: int = 64, nested: int = 0, storage: torch.dtype = torch.uint8
) -> tuple[Tensors, Tensor]:
    """The tensors of a matrix, and float32 `[N, K]` that they stand for.

    Args:
        size: elements, row by row, that share a largest magnitude.
        nested: how many of these share one of their own; 0: they are float32.
        storage: the type that bytes of codes are seen as.
    """
    flat = weight.double().flatten().numpy()
    table = np.array(TABLES[kind], dtype=np.float32)
    blocks = -(-len(flat) // size)
    absmax = np.array([np.abs(flat[i * size : (i + 1) * size]).max() for i in range(blocks)], dtype=np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "float16", "shape": [*weight.shape]}
    tensors: Tensors = {"weight.quant_map": torch.from_numpy(table)}
    if nested:
        offset = float(absmax.mean(dtype=np.float64))
        levels = np.linspace(-1, 1, 256, dtype=np.float32)
        largest = np.array(
            [np.abs(absmax[i : i + nested] - offset).max() for i in range(0, blocks, nested)], dtype=np.float32
        )
        codes = np.array(
            [int(np.abs(levels * largest[i // nested] - (absmax[i] - offset)).argmin()) for i in range(blocks)]
        )
        tensors |= {
            "weight.absmax": torch.from_numpy(codes.astype(np.uint8)),
            "weight.nested_absmax": torch.from_numpy(largest),
            "weight.nested_quant_map": torch.from_numpy(levels),
        }
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
        absmax = np.array(
            [np.float32(levels[codes[i]] * largest[i // nested]) + np.float32(offset) for i in range(blocks)],
            np.float32,
        )
    else:
        tensors["weight.absmax"] = torch.from_numpy(absmax)
    packed = np.zeros((len(flat) + 1) // 2, dtype=np.uint8)
    exact = np.empty(len(flat), dtype=np.float32)
    scaled = flat / np.maximum(absmax, 1e-30).repeat(size)[: len(flat)]
    for i, code in enumerate(np.abs(scaled[:, None] - table[None]).argmin(axis=1)):
        packed[i // 2] |= np.uint8(code << (0 if i % 2 else 4))
        exact[i] = table[code] * absmax[i // size]
    tensors["weight"] = torch.from_numpy(packed).view(storage)[:, None].clone()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return tensors, torch.from_numpy(exact).view(weight.shape)


def as_int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Those of LLM.int8, and float64 `[N, K]`."""
    largest = weight.float().abs().amax(dim=1)
    codes = (weight.double() / largest[:, None].double() * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.double() * largest[:, None].double() / 127
