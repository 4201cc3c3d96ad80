"""A decoder block of Llama's kind on the CPU, for one token of each sequence: one call of the extension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import ACTIVATION_OF_GATE, ceil_div
from qcutlass.products.extension import DTYPES
from qcutlass.products.memory import counted
from qcutlass.products.packing import TILE_N
from qcutlass.products.product import Product
from qcutlass.products.weight_only import WEIGHT_ONLY, GemmCall

_NO_NORM: Final = 0, _C.DType.NONE, 0.0
OF_GROUPS: Final = "scales", "zeros", "minimums", "super_scales", "super_minimums"
"""Operands of a product that a prepared block has copies of, unless they are tensors of inference mode."""

Snapshot: Final = _C.Held
"""Snapshot(entries, objects, ways, empty, tensors): asked whether it `is_unchanged`, it compares all of them with what
they were: dictionaries with a name and its very value, which is None where they lack it; the classes of modules, and
the `forward` and `__call__` of each class; dictionaries that are empty; where tensors lie, and with True beside them
how often they were changed in place. Beside that it takes the addresses of what torch has for them, which it fetches
ahead. It keeps nothing alive.
"""


class Norm(NamedTuple):
    """An RMS norm: its weight, a vector without gaps, and what is added to the mean square."""

    weight: Tensor
    eps: float


class DecoderBlock:
    """The block, prepared. It keeps alive what it points into; of `OF_GROUPS` it has copies as they were.

    Args:
        qkv, gate_up: products of one row each whose channels follow one another: one or several.
        output, down: of attention; of the MLP.
        heads, kv_heads: of queries, and of keys and values.
        head_size: of a head.
        gate: a key of `ACTIVATION_OF_GATE`.
        head_norms: of queries and of keys, before they are rotated; None: there are none.
        mlp_norm: between attention and MLP.
        next_norm: of what reads the block's output.

    Raises:
        TypeError, ValueError: a product is wrong as `gemm` says it, or they do not fit each other.
    """

    def __init__(
        self,
        *,
        qkv: Sequence[GemmCall],
        output: GemmCall,
        gate_up: Sequence[GemmCall],
        down: GemmCall,
        heads: int,
        kv_heads: int,
        head_size: int,
        gate: str,
        head_norms: tuple[Norm, Norm] | None,
        mlp_norm: Norm | None,
        next_norm: Norm | None,
    ) -> None:
        products = [_product(call) for call in (*qkv, *gate_up, output, down)]
        arguments = [product.arguments for product in products]
        norms = [*(head_norms or (None, None)), mlp_norm, next_norm]
        # `.data`: the memory stays, whatever is assigned to a parameter's data.
        weights = [norm.weight.data for norm in norms if norm is not None]
        self._alive: Final = products, weights, list(map(_order_by_strip, products))
        query_norm, key_norm, mlp, following = (_NO_NORM if norm is None else _described(norm) for norm in norms)
        self._block: Final = _C.DecoderBlock(
            type=DTYPES[down.a.dtype],
            heads=heads,
            kv_heads=kv_heads,
            size=head_size,
            activation=ACTIVATION_OF_GATE[gate],
            qkv=arguments[: len(qkv)],
            gate_up=arguments[len(qkv) : -2],
            output=arguments[-2],
            down=arguments[-1],
            query_norm=query_norm,
            key_norm=key_norm,
            mlp_norm=mlp,
            next_norm=following,
        )


class Place(NamedTuple):
    """Where a block has its tokens, and how attention scales.

    Attributes:
        keys, values: `[B, heads, capacity, size]`, of one shape; written.
        scaling: of the products of queries and keys.
    """

    keys: Tensor
    values: Tensor
    scaling: float


class PlacedBlocks:
    """Blocks that follow one another, each of which has its place: all of them take a token in one call.

    Nothing is checked here: types, shapes and devices are the caller's affair, and memory is read and written as it is
    described. It keeps blocks alive, and places not.

    Args:
        blocks: each of which reads what the one before it makes.
        places: of each block.
    """

    def __init__(self, blocks: Sequence[DecoderBlock], places: Sequence[Place]) -> None:
        self._alive: Final = blocks
        self._blocks: Final = _C.PlacedBlocks(
            [block._block for block in blocks],
            [(_heads(place.keys), _heads(place.values), place.scaling) for place in places],
        )

    def run(self, used: int, normed: Tensor, residual: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The residual stream behind the last block, and the norm of what follows, `[B, 1, K]`.

        Args:
            used: tokens in each place; the new one is written behind them.
            normed, residual: `[B, 1, K]` without gaps, of the type of the products: the norm of the stream before the
                first block, and the stream.
            angles: cosines and sines, `[B or 1, 1, size]`, of that type.
        """
        total, out = counted(residual, 2)  # the norm is computed ahead of what may change the stream
        cos, sin = (each.contiguous() for each in angles)
        self._blocks.run(
            used + 1,
            len(residual),
            normed.data_ptr(),
            residual.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            len(cos) == 1,
            total.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return total, out


def _product(call: GemmCall) -> Product:
    shape = call.check(None)
    out = torch.empty((1, shape.n), dtype=call.out_dtype)
    return Product(WEIGHT_ONLY, call.prepared(shape), shape, out)


def _order_by_strip(product: Product) -> dict[str, Tensor]:
    """Lets a product read copies of what belongs to groups, in the order in which it does; the copies by name.

    In the matrices themselves each group of a strip of channels has a line of the cache of its own, and often a page.
    """
    parts = {name: getattr(product.call, name) for name in OF_GROUPS}
    given = {name: part for name, part in parts.items() if part is not None}
    if given["scales"].ndim < 2 or any(part.is_inference() for part in given.values()):
        return {}  # numbers of channels lie in order; changes in place of tensors of inference mode leave no trace
    copies = {name: _by_strip(part) for name, part in given.items()}
    weights = product.arguments.weights
    weights.by_strip = True
    for name, copy in copies.items():
        setattr(weights, name, copy.data_ptr())
    return copies


def _by_strip(rows: Tensor) -> Tensor:
    """`[groups, N]` as `[strips, groups, TILE_N]`; channels past N are 0."""
    groups, n = rows.shape
    strips = rows.new_zeros((ceil_div(n, TILE_N), groups, TILE_N))
    whole = n // TILE_N
    strips[:whole] = rows[:, : whole * TILE_N].reshape(groups, whole, TILE_N).transpose(0, 1)
    if whole < len(strips):
        strips[whole, :, : n - whole * TILE_N] = rows[:, whole * TILE_N :]
    return strips


def _described(norm: Norm) -> tuple[int, _C.DType, float]:
    return norm.weight.data_ptr(), DTYPES[norm.weight.dtype], norm.eps


def _heads(memory: Tensor) -> tuple[int, int, int, int]:
    """Where `[B, heads, tokens, size]` lies, and the distances of rows, heads and tokens."""
    row, head, token, _ = memory.stride()
    return memory.data_ptr(), row, head, token
