"""Token embeddings with quantised weights, and the output head that is tied to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from qcutlass.errors import UnsupportedError
from qcutlass.layers.base import QuantLinear
from qcutlass.layers.offloading import is_offloaded, present
from qcutlass.layers.packed import PackedModule, Parts
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.products.checks import FLOATING, check_dense, check_dtype, check_number, check_tensor, check_vector
from qcutlass.products.library import is_traced
from qcutlass.products.rows import dequantize_rows
from qcutlass.products.weight_operators import DequantizeCall, dequantize

_IDS: Final = (torch.int32, torch.int64)
_WHOLE_TILES: Final = 64
"""Columns of which `dequantize` need not look at those that all rows are padded with."""


class QuantEmbedding(WeightOnlyLinear):
    """An embedding whose rows are those of a packed weight `[N, K]`; only rows that are looked up are dequantised.

    Its buffers and its state are those of a `WeightOnlyLinear`, without bias, act_scale and perm, so that an output
    head can multiply by the same weights: see `TiedLinear`. The number of rows cannot be changed.

    Args:
        layer: whose buffers it takes over.
        dtype: of what is looked up. As with `torch.nn.Embedding`, `.half()` and `.to(dtype)` change it.
        scale: what rows are multiplied by when they are looked up, rounded to `dtype`, as in Gemma's embeddings; an
            output head that shares the weights has none of it.

    Raises:
        TypeError: `layer` is no `WeightOnlyLinear`, or `dtype` no floating type.
        ValueError: the layer has a bias, act_scale, perm or an activation.
        UnsupportedError: its codes are floating numbers.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers import QuantEmbedding, WeightOnlyLinear
        >>> layer = WeightOnlyLinear(qcutlass.quantize(torch.randn(1000, 256), bits=8))
        >>> QuantEmbedding(layer, torch.float16)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 256])
    """

    def __init__(self, layer: WeightOnlyLinear, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
        if not isinstance(layer, WeightOnlyLinear):
            raise TypeError(f"layer: expected a WeightOnlyLinear, got {type(layer).__name__}")
        check_dtype("dtype", dtype, FLOATING)
        check_number("scale", scale)
        if layer.weight_dtype is not None:
            raise UnsupportedError(f"layer: embeddings look up integer codes, got {layer.weight_dtype} ones")
        parts = {name: part for name, part in layer._buffers.items() if name != "layout"}
        QuantLinear.__init__(
            self, layer.in_features, layer.out_features, layer.bits, layer.group_size, layer.activation, parts
        )
        self.dtype, self.stored_form, self.scale = dtype, layer.stored_form, scale
        self._factor = self._rounded_scale()
        self.train(layer.training)

    @property
    def num_embeddings(self) -> int:
        """N."""
        return self.out_features

    @property
    def embedding_dim(self) -> int:
        """K."""
        return self.in_features

    def forward(self, input: Tensor) -> Tensor:
        """Integers `[...]` in [0, N) to their rows `[..., K]`; IndexError for others on the CPU."""
        options: dict[str, Any] = {
            "k": self.in_features,
            "group_size": self.group_size,
            "bits": self.bits,
            "dtype": self.dtype,
            "minimums": self.minimums,
            "super_scales": self.super_scales,
            "super_minimums": self.super_minimums,
        }
        check_dense({"input": input})
        check_tensor("input", input, _IDS)
        row = self._only_row(input)
        if row is None:
            rows = dequantize_rows(self.w_packed, self.scales, self.zeros, input.reshape(-1), **options)
        else:
            one = DequantizeCall(self.w_packed, self.scales, self.zeros, row_begin=row, row_end=row + 1, **options)
            rows = dequantize(one)
        rows = rows if self._factor == 1 else rows * self._factor
        return rows.view(*input.shape, self.in_features)

    def _rounded_scale(self) -> float:
        return torch.tensor(self.scale, device="cpu").to(self.dtype).item()

    def _only_row(self, ids: Tensor) -> int | None:
        """The row, if it is one on the CPU, which the extension reads in one call; others take a dozen operators."""
        if not ids.is_cpu or ids.numel() != 1 or ids.dtype not in _IDS or is_traced():
            return None
        if self.dtype not in FLOATING or self.in_features % _WHOLE_TILES:
            return None
        row = int(ids)
        return row if 0 <= row < self.out_features else None

    def project(self, a: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`: the product of an output head with these weights."""
        return super().forward(a)

    def _check(self, parts: Parts) -> None:
        for name in ("global_scale", "bias", "act_scale", "perm"):
            if parts[name] is not None:
                raise ValueError(f"{name}: an embedding has none; got a tensor")
        if self.activation is not None:
            raise ValueError(f"activation: an embedding has none; got {self.activation!r}")
        super()._check(parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.w_packed.device)).dtype
        self._factor = self._rounded_scale()
        return super()._apply(fn, recurse)

    def _description(self) -> list[str]:
        scale = [] if self.scale == 1 else [f"scale={self.scale:g}"]
        return [*super()._description(), f"dtype={self.dtype}", *scale]


class TiedLinear(nn.Module):
    """An output head that multiplies by the weights of a `QuantEmbedding` elsewhere in the model.

    It holds no weights, so that they are moved, saved and loaded once, with the embedding; both are on one device.

    Args:
        embedding: whose weights are shared.
        bias: of the head, or None.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers import QuantEmbedding, TiedLinear, WeightOnlyLinear
        >>> layer = WeightOnlyLinear(qcutlass.quantize(torch.randn(1000, 256), bits=8))
        >>> TiedLinear(QuantEmbedding(layer))(torch.randn(2, 256)).shape
        torch.Size([2, 1000])
    """

    def __init__(self, embedding: QuantEmbedding, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        if not isinstance(embedding, QuantEmbedding):
            raise TypeError(f"embedding: expected a QuantEmbedding, got {type(embedding).__name__}")
        if bias is not None:
            check_tensor("bias", bias, FLOATING)
            check_vector("bias", bias, embedding.out_features, "N")
        self._embedding = (embedding,)  # in a tuple, as modules in attributes would be children
        self.in_features, self.out_features = embedding.in_features, embedding.out_features
        self.bias = bias

    @property
    def embedding(self) -> QuantEmbedding:
        """The module that holds the weights."""
        return self._embedding[0]

    def forward(self, input: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`, of the same type."""
        embedding = self.embedding
        if is_offloaded(embedding):
            with present(embedding):
                out = embedding.project(input)
        else:
            out = embedding.project(input)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
