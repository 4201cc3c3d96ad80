"""Tensors that hold a matrix of every expert of a block, one behind the other: which there are, and how they lie.

transformers 5 has `experts.gate_up_proj` `[E, 2 I, H]`, of each expert I rows of gate, then I of up, and
`experts.down_proj` `[E, H, I]`, in the memory of these models and, where it saves them so, in their files. Others
(gpt-oss, Llama 4) have tensors of these names whose matrices are transposed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

MODELS: Final = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
"""The models (`model_type`) that have such tensors."""
_PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The layers of an expert that a tensor holds, as transformers calls them."""
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
    parts = _PARTS[found["stack"]]
    if shape[1] % len(parts):
        return []
    return list(_rows(found["block"], shape[0], parts, shape[1] // len(parts)))


def _rows(block: str, experts: int, parts: Sequence[str], size: int) -> Iterator[Rows]:
    for expert in range(experts):
        for index, part in enumerate(parts):
            yield Rows(f"{block}.{expert}.{part}.weight", (expert * len(parts) + index) * size, size)
