"""A linear kernel for layers that vLLM loads by its own rules: symmetric GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from qcutlass.products.checks import names_of
from qcutlass.products.packing import GROUP_STEP
from qcutlass.vllm import interface
from qcutlass.vllm.cutting import Share
from qcutlass.vllm.products import Products
from qcutlass.vllm.stored import layer_of

_MIDDLE_WORD: Final = {4: 0x88888888 - 2**32, 8: 0x80808080 - 2**32}
"""A word of int32 whose fields are all zero points in the middle."""


class QCutlassLinearKernel(interface.MPLinearKernel):
    """Products of floating activations by codes of 4 and 8 bits, by `qcutlass.gemm`."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        bits, (k, n) = c.weight_type.size_bits, c.partition_weight_shape
        is_code = c.weight_type.is_integer() and c.weight_type.bias in (0, 2 ** (bits - 1))
        if bits not in (4, 8) or not is_code or c.weight_type.is_signed() or bool(c.weight_type.bias) == c.zero_points:
            return False, f"qcutlass multiplies unsigned codes of 4 and 8 bits, got {c.weight_type}"
        types = interface.activation_types()
        if c.act_type not in types:
            return False, f"qcutlass multiplies activations of {names_of(types)} here, got {c.act_type}"
        if c.group_size != -1 and (c.group_size % GROUP_STEP or k % c.group_size):
            return False, f"groups of {c.group_size} columns are no multiple of {GROUP_STEP}, or do not divide {k}"
        if interface.has_act_order(c) and k != c.full_weight_shape[0]:
            return False, "act-order across ranks is served by the method 'qcutlass' alone"
        fields = 32 // bits
        return (True, None) if n % fields == 0 and k % fields == 0 else (False, f"sizes are no multiples of {fields}")

    def process_weights_after_loading(self, layer: Any) -> None:
        c = self.config
        bits = c.weight_type.size_bits
        codes, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        interface.permute_param_layout_(codes, input_dim=0, output_dim=1, packed_dim=0)
        interface.permute_param_layout_(scales, input_dim=0, output_dim=1)
        tensors = {"qweight": codes.data, "scales": scales.data, "qzeros": self._zeros(layer, scales.data, bits)}
        if interface.has_act_order(c):
            tensors["g_idx"] = getattr(layer, self.w_gidx_name).data
        config = {
            "quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": bits, "group_size": c.group_size,
            "sym": not c.zero_points,
        }  # fmt: skip
        device = codes.device
        products = Products([Share(layer_of(tensors, config, type(layer).__name__, device))], c.act_type)
        for name in (self.w_q_name, self.w_s_name, self.w_zp_name, getattr(self, "w_gidx_name", None)):
            if name is not None and getattr(layer, name, None) is not None:
                delattr(layer, name)
                mark = torch.zeros(1, dtype=torch.uint8, device=device)
                layer.register_parameter(name, nn.Parameter(mark, requires_grad=False))
        layer.products = products.to(device)

    def _zeros(self, layer: Any, scales: Tensor, bits: int) -> Tensor:
        """Zero points as GPTQ packs them: int32 `[G, N * bits / 32]`."""
        if not self.config.zero_points:
            groups, n = scales.shape
            return torch.full((groups, n * bits // 32), _MIDDLE_WORD[bits], dtype=torch.int32)
        zeros = getattr(layer, self.w_zp_name)
        interface.permute_param_layout_(zeros, input_dim=0, output_dim=1, packed_dim=1)
        stored: Tensor = zeros.data
        return stored

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = layer.products(x, bias)
        return out


def register_kernel() -> None:
    """Makes the kernel the first that vLLM asks, once."""
    interface.put_first(QCutlassLinearKernel)
