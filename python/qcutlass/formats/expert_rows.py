"""Tensors that hold a matrix of every expert of a block, one behind the other: which there are, and how they lie.

transformers 5 has `experts.gate_up_proj` `[E, 2 I, H]`, of each expert I rows of gate, then I of up, and
`experts.down_proj` `[E, H, I]`, in the memory of these models and, where it saves them so, in their files. Others
(gpt-oss, Llama 4) have tensors of these names whose matrices are transposed. The matrices get the names that files have
for each expert's, which transformers reads, too, where they stay floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

MODELS: Final = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
"""The models (`model_type`) that have such tensors."""
USUAL: Final = ("gate_proj", "up_proj", "down_proj")
"""The names of an expert's layers, in memory and in the files of most models."""
WORDS: Final = {"mixtral": ("w1", "w3", "w2")}
"""Their names in the files of a model that calls them otherwise."""
FOLDERS: Final = {".mlp.": ".block_sparse_moe."}
"""Parts of a module's name, as transformers calls it, that files of these models have otherwise."""
_PARTS: Final = {"gate_up_proj": slice(2), "down_proj": slice(2, 3)}
"""The layers of an expert that a tensor holds."""
_NAME: Final = re.compile(r"(?P<block>.+\.experts)\.(?P<stack>gate_up_proj|down_proj)")


class Rows(NamedTuple):
    """A matrix in a stack.

    Attributes:
        name: of its tensor, as if it were one of its own.
        begin: its first row, of all that the stack has.
        size: how many they are.
    """

    name: str
    begin: int
    size: int


def rows_of(name: str, shape: Sequence[int], model_type: str) -> list[Rows]:
    """The matrices in a tensor of a model; none if it is no such stack.

    Example:
        >>> from qcutlass.formats.expert_rows import rows_of
        >>> rows_of("mlp.experts.down_proj", (2, 64, 32), "olmoe")[1]
        Rows(name='mlp.experts.1.down_proj.weight', begin=64, size=64)
    """
    found = _NAME.fullmatch(name)
    if found is None or model_type not in MODELS or len(shape) != 3 or math.prod(shape) < 1:
        return []
    parts, block = WORDS.get(model_type, USUAL)[_PARTS[found["stack"]]], found["block"]
    if shape[1] % len(parts):
        return []
    for ours, theirs in FOLDERS.items() if model_type in WORDS else ():
        block = block.replace(ours, theirs)
    return list(_rows(block, shape[0], parts, shape[1] // len(parts)))


def _rows(block: str, experts: int, parts: Sequence[str], size: int) -> Iterator[Rows]:
    for expert in range(experts):
        for index, part in enumerate(parts):
            yield Rows(f"{block}.{expert}.{part}.weight", (expert * len(parts) + index) * size, size)
