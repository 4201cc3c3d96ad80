"""GGUF files (llama.cpp): linear layers in blocks of 32 along K, converted to the canonical form without loss.

A block of Q4_0 holds a float16 scale d and sixteen bytes, w = d * (q - 8); of Q4_1 a further float16 minimum m,
w = d * q + m; of Q8_0 32 signed bytes, w = d * q. Low nibbles are elements 0 to 15, high nibbles 16 to 31.
The format is described in the ggml project's docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from qcutlass.errors import CheckpointError
from qcutlass.quantization import QuantizedTensor

GROUP: Final = 32
_NOT_LINEAR: Final = ("token_embd", "token_types", "position_embd", "per_layer_token_embd")


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """The float16 number in bytes [begin, begin + 2) of every block `[N, G, bytes]`, as `[G, N]`."""
    return blocks[:, :, begin : begin + 2].contiguous().view(torch.float16).squeeze(2).T.contiguous()


def _nibbles(blocks: Tensor, begin: int) -> Tensor:
    """4-bit codes `[N, K]`."""
    packed = blocks[:, :, begin:]
    return torch.cat([packed & 15, packed >> 4], dim=2).reshape(len(blocks), -1)


def _q4_0(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(_nibbles(blocks, 2), _halves(blocks, 0), None, 4, GROUP)


def _q4_1(blocks: Tensor) -> QuantizedTensor:
    codes, scales, minima = _nibbles(blocks, 4), _halves(blocks, 0).float(), _halves(blocks, 2).float()
    flat = scales == 0  # every weight is the minimum m: (0 - -1) * m
    zeros = torch.where(flat, -1.0, -minima / torch.where(flat, 1.0, scales))
    codes.view(len(blocks), -1, GROUP).masked_fill_(flat.T[:, :, None], 0)
    return QuantizedTensor(codes, torch.where(flat, minima, scales).half(), zeros, 4, GROUP)


def _q8_0(blocks: Tensor) -> QuantizedTensor:
    codes = (blocks[:, :, 2:] ^ 0x80).reshape(len(blocks), -1)  # q + 128
    return QuantizedTensor(codes, _halves(blocks, 0), None, 8, GROUP)


_QUANTIZED: Final[dict[str, Callable[[Tensor], QuantizedTensor]]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_BYTES: Final = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


class GGUFCheckpoint:
    """An open GGUF file; `qcutlass.formats.Checkpoint` describes the members.

    Args:
        path: of the file, which is mapped into memory.

    Raises:
        CheckpointError: the file is not GGUF, is truncated, or its header contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        tensors = _read_header(path)
        matrices = {t.name: t for t in tensors if _is_linear(t.name) and len(t.shape) == 2}
        types = {name: t.tensor_type.name for name, t in matrices.items()}
        readable = _QUANTIZED.keys() | _FLOATS.keys()
        self._tensors = {name: t for name, t in matrices.items() if types[name] in readable}
        self.linears: list[str] = list(self._tensors)
        self.skipped: dict[str, str] = {
            name: f"{kind} blocks are not read, only {', '.join(sorted(readable))}"
            for name, kind in types.items()
            if kind not in readable
        }

    def load(self, name: str) -> QuantizedTensor | Tensor:
        """See `qcutlass.formats.Checkpoint`; KeyError for a name that is not in `linears`."""
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        k, n = (int(extent) for extent in tensor.shape)
        data = torch.from_numpy(np.array(tensor.data))  # a copy: the map is read-only
        if kind in _FLOATS:
            weight = data.contiguous().view(_FLOATS[kind]).reshape(n, k)
            if not bool(weight.isfinite().all()):
                raise CheckpointError(f"{self._path}: {name} holds NaN or infinity")
            return weight
        if k % GROUP != 0 or data.numel() != n * (k // GROUP) * _BLOCK_BYTES[kind]:
            raise CheckpointError(f"{self._path}: {name} of shape {[n, k]} is no whole number of {kind} blocks")
        quantized = _QUANTIZED[kind](data.reshape(n, k // GROUP, _BLOCK_BYTES[kind]))
        for part in (quantized.scales, quantized.zeros):
            if part is not None and not bool(part.isfinite().all()):
                raise CheckpointError(f"{self._path}: {name} has a scale or a minimum that is NaN or infinite")
        return quantized


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and not name.startswith(_NOT_LINEAR)


def _read_header(path: Path) -> list[Any]:
    """The tensors of a file, each with name, type, shape and mapped data."""
    from gguf import GGUFReader

    try:
        return list(GGUFReader(path).tensors)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path}: not a whole GGUF file ({type(error).__name__}: {error})") from error
