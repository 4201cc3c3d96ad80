"""Tensors that hold a matrix of every expert of a block, one behind the other: which there are, and how they lie.

transformers 5 has `experts.gate_up_proj` `[E, 2 I, H]`, of each expert I rows of gate, then I of up, and
`experts.down_proj` `[E, H, I]`, in the memory of these models and, where it saves them so, in their files. Others
(gpt-oss, Llama 4) have tensors of these names whose matrices are transposed. Those of e4m3 have the scales of their
blocks in `gate_up_proj_scale_inv` `[E, 2 rows of blocks, columns of blocks]`, of gate first, and
`down_proj_scale_inv`; so have, in files of transformers, e4m3 matrices in tensors of their own. The matrices get the
names that files have for each expert's, which transformers reads, too, where they stay floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from qcutlass.products.checks import ceil_div

MODELS: Final = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
"""The models (`model_type`) that have such tensors."""
USUAL: Final = ("gate_proj", "up_proj", "down_proj")
"""The names of an expert's layers, in memory and in the files of most models."""
WORDS: Final = {"mixtral": ("w1", "w3", "w2")}
"""Their names in the files of a model that calls them otherwise."""
FOLDERS: Final = {".mlp.": ".block_sparse_moe."}
"""Parts of a module's name, as transformers calls it, that files of these models have otherwise."""
BLOCK: Final = 128
"""Rows of weights that share a scale, where nothing says."""
_PARTS: Final = {"gate_up_proj": slice(2), "down_proj": slice(2, 3)}
"""The layers of an expert that a tensor holds."""
SCALES: Final = "_scale_inv"
"""What follows the name of a tensor in that of its scales."""
_NAME: Final = re.compile(r"(?P<block>.+\.experts)\.(?P<stack>gate_up_proj|down_proj)")


class Model(NamedTuple):
    """What a configuration says of a model.

    Attributes:
        type: in the words of transformers ("mixtral").
        block: rows of weights that share a scale; None: it does not say.
    """

    type: str = ""
    block: int | None = None


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


def scale_rows_of(weights: Sequence[Rows], scales: Sequence[int], block: int | None) -> list[Rows] | None:
    """The scales of the matrices in a stack; None if they have another shape, or blocks that matrices share.

    Args:
        weights: of a stack, as `rows_of` gives them.
        scales: the shape of their scales.
        block: rows of weights that share one; None: 128, but for one scale a matrix.

    Example:
        >>> from qcutlass.formats.expert_rows import rows_of, scale_rows_of
        >>> gate_and_up = rows_of("mlp.experts.gate_up_proj", (2, 512, 384), "olmoe")
        >>> scale_rows_of(gate_and_up, (2, 4, 3), 128)[1]
        Rows(name='mlp.experts.0.up_proj.weight_scale_inv', begin=2, size=2)
    """
    if len(scales) != 3 or math.prod(scales) < 1 or len(weights) % scales[0]:
        return None
    count, size = len(weights) // scales[0], weights[0].size
    if block is None:
        block = {(1, 1): count * size, (count, 1): size}.get((scales[1], scales[2]), BLOCK)
    if scales[1] == 1 and count * size <= block:  # one block has the rows of all matrices of an expert
        return [Rows(f"{name}{SCALES}", begin // size // count, 1) for name, begin, _ in weights]
    rows = ceil_div(size, block)
    if scales[1] != count * rows or (count > 1 and rows > 1 and size % block):
        return None
    return [Rows(f"{name}{SCALES}", begin // size * rows, rows) for name, begin, _ in weights]
