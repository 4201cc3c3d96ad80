"""int8 or e4m3 weights and activations with a scale for each block."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from qcutlass.algorithms.blocks import fp8_weight_quant, quantized, weight_dequant, weight_quant
from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.formats import CanonicalBlockwise
from qcutlass.formats.specs import LayerSpec
from qcutlass.layers.base import QuantLinear, copied, copy_of_bias
from qcutlass.layers.packed import Parts
from qcutlass.products import preprocess_weights
from qcutlass.products.block_operators import TYPES, BlocksCall, check_block_size, check_weight_scales
from qcutlass.products.blockwise import BLOCKWISE, BlockwiseCall
from qcutlass.products.checks import ceil_div, check_matrix, check_operand, check_tensor
from qcutlass.products.layer_calls import Steps
from qcutlass.products.packing import check_packed_form
from qcutlass.products.quantizer_operators import QuantizedRows
from qcutlass.schemes import Blockwise


class BlockwiseLinear(QuantLinear, scheme=Blockwise, stored="blockwise"):
    """A linear layer on `qcutlass.blockwise`: `act_quant`, then `int8_addmm`; of e4m3 `fp8_act_quant`, then `fp8_gemm`.

    See also `QuantLinear`. Buffers: `w_packed` int8 or float8_e4m3fn; `w_scale` float32 `[ceil(N / block_size),
    ceil(K / block_size)]`; `bias` `[N]` or None.
    The block size is the `group_size` of its state's layout.

    Args:
        w_q, w_s: int8 `[N, K]` and its scales, from `weight_quant`, or float8_e4m3fn ones, from `fp8_weight_quant`.
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
    HAS_GATES: ClassVar = True

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
        check_matrix("w_q", w_q, tuple(TYPES.values()))
        check_operand("w_s", w_s, (torch.float32,), w_q.device, "w_q")
        check_block_size("block_size", block_size)
        n, k = w_q.shape
        check_weight_scales("w_s", w_s, n, k, block_size)
        is_int8 = w_q.dtype == torch.int8
        packed = preprocess_weights(w_q, 8, "int8" if is_int8 else "fp8")
        parts = {"w_packed": packed, "w_scale": w_s, "bias": bias}
        super().__init__(k, n, 8, block_size, activation, parts, None if is_int8 else "e4m3")

    @classmethod
    def _of_linear(
        cls, linear: nn.Linear, scheme: Blockwise, statistics: ActivationStatistics | None, activation: str | None
    ) -> BlockwiseLinear:
        """Statistics are not used: scales of blocks follow the activations."""
        quantize = weight_quant if scheme.type == "int8" else fp8_weight_quant
        w_q, w_s = quantize(linear.weight.detach(), scheme.block_size)
        return BlockwiseLinear(w_q, w_s, scheme.block_size, bias=copy_of_bias(linear), activation=activation)

    @classmethod
    def _of_stored(cls, layer: CanonicalBlockwise, activation: str | None) -> BlockwiseLinear:
        return BlockwiseLinear(layer.codes, layer.scales, layer.block_size, bias=layer.bias, activation=activation)

    @classmethod
    def _empty(cls, spec: LayerSpec, n: int, k: int) -> BlockwiseLinear:
        size, dtype = spec.group_size, torch.int8 if spec.weight_dtype is None else torch.float8_e4m3fn
        codes = torch.empty((n, k), dtype=dtype, device="meta")
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

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.int8 if self.weight_dtype is None else torch.float8_e4m3fn

    def channels_of(self, name: str) -> tuple[int, int]:
        return (0, self.block_size) if name == "w_scale" else super().channels_of(name)

    def _check(self, parts: Parts) -> None:
        w_packed, w_scale = parts["w_packed"], parts["w_scale"]
        check_tensor("w_packed", w_packed, (self.dtype,))
        assert w_packed is not None
        check_packed_form("w_packed", w_packed)
        check_operand("w_scale", w_scale, (torch.float32,), w_packed.device, "w_packed")
        assert w_scale is not None
        check_weight_scales("w_scale", w_scale, self.out_features, self.in_features, self.block_size)
        a = w_packed.new_empty((0, self.in_features))
        a_s = w_scale.new_empty((0, w_scale.shape[1]))
        self._call(a, a_s, parts, self.activation, torch.float16).check(None)

    def _steps(self, input: Tensor, activation: str | None, ready: QuantizedRows | None) -> Steps:
        quantizer = BlocksCall(input, self.block_size, dtype=self.dtype)
        codes, scales = outputs = quantized(quantizer)
        return Steps(BLOCKWISE, self._call(codes, scales, self._buffers, activation, input.dtype), quantizer, outputs)

    def _call(
        self, a: Tensor, a_s: Tensor, parts: Any, activation: str | None, out_dtype: torch.dtype
    ) -> BlockwiseCall:
        operands = a, a_s, parts["w_packed"], parts["w_scale"], parts["bias"]
        options: dict[str, Any] = {"n": self.out_features, "block_size": self.block_size}
        return BlockwiseCall(*operands, activation, out_dtype, self.dtype, **options)

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
        return [f"block_size={self.block_size}", *([] if self.weight_dtype is None else ["type='fp8'"])]
