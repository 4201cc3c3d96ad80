"""The products of a layer in an engine: modules that call operators alone, so that graphs and compilers see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from qcutlass.formats import CanonicalBlockwise, CanonicalFp8, CanonicalInt8, CanonicalLinear, FloatLinear
from qcutlass.layers.base import QuantLinear, from_layer
from qcutlass.vllm.cutting import Share, joined
from qcutlass.vllm.stored import with_scales


class Product(nn.Module):
    """One product: `x[..., columns] @ w.T + bias`.

    Args:
        share: what is multiplied; its bias is not read.
        dtype: of the activations.
    """

    columns: Tensor | None

    def __init__(self, share: Share, dtype: torch.dtype) -> None:
        super().__init__()
        make, self._multiply = _PRODUCTS[share.layer.kind]
        self.layer: Any = make(share.layer, dtype)
        self.register_buffer("columns", share.columns, persistent=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., K]` to `[..., N]`, of the same type."""
        return self._multiply(self.layer, x if self.columns is None else x.index_select(-1, self.columns), bias)


class Products(nn.Module):
    """The products whose outputs lie side by side.

    Args:
        shares: of the parts, in the order of their channels.
        dtype: of the activations.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.formats import CanonicalLinear
        >>> from qcutlass.vllm.cutting import Share
        >>> q, k = (CanonicalLinear(qcutlass.quantize(torch.randn(n, 64), bits=4, group_size=32)) for n in (48, 16))
        >>> products = Products([Share(q), Share(k)], torch.float32)
        >>> len(products.products), products(torch.randn(3, 64), None).shape
        (1, torch.Size([3, 64]))
    """

    def __init__(self, shares: Sequence[Share], dtype: torch.dtype) -> None:
        super().__init__()
        found = joined([Share(with_scales(share.layer, dtype), share.columns) for share in shares])
        self.products = nn.ModuleList(Product(share, dtype) for share in found)
        self.sizes = [share.layer.shape[0] for share in found]

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., K]` to `[..., N]`, of the same type."""
        if len(self.sizes) == 1:
            out: Tensor = self.products[0](x, bias)
            return out
        biases = [None] * len(self.sizes) if bias is None else torch.split(bias, self.sizes)
        return torch.cat([product(x, part) for product, part in zip(self.products, biases, strict=True)], dim=-1)


def _quantised(layer: Any, dtype: torch.dtype) -> QuantLinear:
    return from_layer(layer, "layer")


def _floats(layer: FloatLinear, dtype: torch.dtype) -> nn.Module:
    linear = nn.Linear(layer.shape[1], layer.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    return linear


def _multiply_weight_only(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.qcutlass.gemm(
        x, layer.w_packed, layer.scales, layer.zeros, bias, None, layer.act_scale, layer.perm, layer.group_size,
        layer.bits, weight_dtype=layer.weight_dtype, global_scale=layer.global_scale, minimums=layer.minimums,
        super_scales=layer.super_scales, super_minimums=layer.super_minimums,
    )  # fmt: skip
    return out


def _multiply_int8(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    codes, scale, _ = torch.ops.qcutlass.quantize_8bit(
        x, torch.int8, False, False, layer.a_scale, None, layer.smooth
    )  # fmt: skip
    out: Tensor = torch.ops.qcutlass.gemm_w8a8(
        codes, layer.w_packed, scale, layer.w_scale, bias, None, None, x.dtype, layer.out_features
    )
    return out


def _multiply_fp8(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    codes, scale, _ = torch.ops.qcutlass.quantize_8bit(
        x, torch.float8_e4m3fn, False, False, layer.a_scale, None, layer.smooth
    )  # fmt: skip
    out: Tensor = torch.ops.qcutlass.gemm_fp8(
        codes, layer.w_packed, scale, layer.w_scale, bias, None, x.dtype, layer.out_features
    )
    return out


def _multiply_blocks(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    codes, scale = torch.ops.qcutlass.quantize_blocks(x, layer.block_size, False, layer.dtype)
    out: Tensor = torch.ops.qcutlass.blockwise_gemm(
        codes, scale, layer.w_packed, layer.w_scale, bias, None, x.dtype, layer.dtype, layer.out_features,
        layer.block_size,
    )  # fmt: skip
    return out


def _multiply_floats(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, layer.weight, bias)


_Make = Callable[[Any, torch.dtype], nn.Module]
_Multiply = Callable[[Any, Tensor, "Tensor | None"], Tensor]
_PRODUCTS: Final[dict[str, tuple[_Make, _Multiply]]] = {
    CanonicalLinear.kind: (_quantised, _multiply_weight_only),
    CanonicalInt8.kind: (_quantised, _multiply_int8),
    CanonicalFp8.kind: (_quantised, _multiply_fp8),
    CanonicalBlockwise.kind: (_quantised, _multiply_blocks),
    FloatLinear.kind: (_floats, _multiply_floats),
}
