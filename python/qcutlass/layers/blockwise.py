"""int8 weights and activations with a scale for each block."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from qcutlass.algorithms.blocks import act_quant, weight_dequant, weight_quant
from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.blockwise import int8_addmm
from qcutlass.formats import CanonicalBlockwise
from qcutlass.formats.specs import LayerSpec
from qcutlass.layers.base import QuantLinear, copied, copy_of_bias
from qcutlass.layers.packed import Parts
from qcutlass.products import preprocess_weights
from qcutlass.products.block_operators import check_block_size, check_weight_scales
from qcutlass.products.blockwise import BlockwiseCall
from qcutlass.products.checks import ceil_div, check_matrix, check_operand, check_tensor
from qcutlass.products.packing import check_packed_form
from qcutlass.schemes import Blockwise


class BlockwiseLinear(QuantLinear, scheme=Blockwise, stored="blockwise"):
    """A linear layer on `qcutlass.blockwise`: `act_quant`, then `int8_addmm`. See also `QuantLinear`.

    Buffers: `w_packed` int8; `w_scale` float32 `[ceil(N / block_size), ceil(K / block_size)]`; `bias` `[N]` or None.
    The block size is the `group_size` of its state's layout.

    Args:
        w_q, w_s: int8 `[N, K]` and its scales, from `weight_quant`.
        block_size: 32, 64 or 128.
        bias: the buffer.
        activation: as for `int8_addmm`.

    Raises:
        TypeError, ValueError: as for `int8_addmm`.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import weight_quant
        >>> from qcutlass.layers import BlockwiseLinear
        >>> layer = BlockwiseLinear(*weight_quant(torch.randn(48, 256)))
        >>> layer(torch.randn(2, 3, 256)).shape
        torch.Size([2, 3, 48])
    """

    OPTIONAL: ClassVar = ("bias",)

    w_packed: Tensor
    w_scale: Tensor

    def __init__(
        self,
        w_q: Tensor,
        w_s: Tensor,
        block_size: int = 128,
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> None:
        check_matrix("w_q", w_q, (torch.int8,))
        check_operand("w_s", w_s, (torch.float32,), w_q.device, "w_q")
        check_block_size("block_size", block_size)
        n, k = w_q.shape
        check_weight_scales("w_s", w_s, n, k, block_size)
        parts = {"w_packed": preprocess_weights(w_q, 8, "int8"), "w_scale": w_s, "bias": bias}
        super().__init__(k, n, 8, block_size, activation, parts)

    @classmethod
    def _of_linear(
        cls, linear: nn.Linear, scheme: Blockwise, statistics: ActivationStatistics | None, activation: str | None
    ) -> BlockwiseLinear:
        """Statistics are not used: scales of blocks follow the activations."""
        w_q, w_s = weight_quant(linear.weight.detach(), scheme.block_size)
        return BlockwiseLinear(w_q, w_s, scheme.block_size, bias=copy_of_bias(linear), activation=activation)

    @classmethod
    def _of_stored(cls, layer: CanonicalBlockwise, activation: str | None) -> BlockwiseLinear:
        return BlockwiseLinear(layer.codes, layer.scales, layer.block_size, bias=layer.bias, activation=activation)

    @classmethod
    def _empty(cls, spec: LayerSpec, n: int, k: int) -> BlockwiseLinear:
        size, codes = spec.group_size, torch.empty((n, k), dtype=torch.int8, device="meta")
        scales = torch.empty((ceil_div(n, size), ceil_div(k, size)), dtype=torch.float32, device="meta")
        return BlockwiseLinear(codes, scales, size, bias=spec.tensors(n, k).get("bias"))

    def canonical(self) -> CanonicalBlockwise:
        """The layer with its codes unpacked, as converted folders describe it."""
        return CanonicalBlockwise(self._codes(), self.w_scale, self.block_size, self.bias)

    def weights(self) -> Tensor:
        """The weights float32 `[N, K]`, dequantised from the packed ones."""
        return weight_dequant(self._codes(), self.w_scale, self.block_size, torch.float32)

    @property
    def block_size(self) -> int:
        """Of rows and columns that share a scale."""
        return self.group_size

    def _check(self, parts: Parts) -> None:
        w_packed, w_scale = parts["w_packed"], parts["w_scale"]
        check_tensor("w_packed", w_packed, (torch.int8,))
        assert w_packed is not None
        check_packed_form("w_packed", w_packed)
        check_operand("w_scale", w_scale, (torch.float32,), w_packed.device, "w_packed")
        assert w_scale is not None
        check_weight_scales("w_scale", w_scale, self.out_features, self.in_features, self.block_size)
        a = w_packed.new_empty((0, self.in_features))
        a_s = w_scale.new_empty((0, w_scale.shape[1]))
        options: dict[str, Any] = {"n": self.out_features, "block_size": self.block_size}
        BlockwiseCall(a, a_s, w_packed, w_scale, parts["bias"], self.activation, **options).check(None)

    def forward(self, a: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`, of the same type."""
        self._check_input(a)
        return int8_addmm(
            *act_quant(a, self.block_size),
            self.w_packed,
            self.w_scale,
            self.bias,
            a.dtype,
            activation=self.activation,
            block_size=self.block_size,
            n=self.out_features,
        )

    def _shard(self, part: slice, axis: Literal["out", "in"]) -> BlockwiseLinear:
        size, step, codes = part.stop - part.start, self.block_size, self._codes()
        if size % step and size < (self.out_features if axis == "out" else self.in_features):
            raise ValueError(f"world_size: parts of {size} cut through blocks of {step}; use a smaller world_size")
        blocks = slice(part.start // step, -(-part.stop // step))
        if axis == "out":
            codes, scales, bias = codes[part], self.w_scale[blocks], None if self.bias is None else self.bias[part]
        else:
            codes, scales, bias = codes[:, part], self.w_scale[:, blocks], self.bias if part.start == 0 else None
        scales = scales.clone(memory_format=torch.contiguous_format)
        return BlockwiseLinear(codes, scales, step, bias=copied(bias), activation=self.activation)

    def _description(self) -> list[str]:
        return [f"block_size={self.block_size}"]
