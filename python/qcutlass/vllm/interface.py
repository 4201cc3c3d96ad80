"""What the plug-in uses of vLLM: the one place that knows where it lies, and how versions differ.

Read in 0.26 and 0.33. Between them `has_g_idx` of kernels' configurations went (0.30), and models began to drop
tensors named `g_idx` unless a configuration of quantisation says otherwise (0.30).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.distributed import get_tensor_model_parallel_world_size as get_tensor_model_parallel_world_size
from vllm.model_executor.kernels import linear as _linear_kernels
from vllm.model_executor.kernels.linear import MPLinearKernel as MPLinearKernel
from vllm.model_executor.layers.linear import LinearBase as LinearBase
from vllm.model_executor.layers.linear import LinearMethodBase as LinearMethodBase
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as QUANTIZATION_METHODS
from vllm.model_executor.layers.quantization import register_quantization_config as register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead as ParallelLMHead
from vllm.model_executor.parameter import permute_param_layout_ as permute_param_layout_
from vllm.platforms import PlatformEnum as PlatformEnum
from vllm.platforms import current_platform as _platform

PLATFORMS: Final = (PlatformEnum.CUDA, PlatformEnum.CPU)
"""Those on which there are products."""


def is_cpu() -> bool:
    """Whether the engine runs on a CPU."""
    return bool(_platform.is_cpu())


def activation_types() -> list[torch.dtype]:
    """Of activations that products take in an engine: on a GPU those of 16 bits."""
    return [torch.float16, torch.bfloat16, *([torch.float32] if is_cpu() else [])]


def put_first(kernel: type[MPLinearKernel]) -> None:
    """Has vLLM ask a kernel for mixed precision before its own ones; `register_linear_kernel` would append it."""
    for platform in PLATFORMS:
        kernels = _linear_kernels._POSSIBLE_KERNELS.setdefault(platform, [])
        if kernel not in kernels:
            kernels.insert(0, kernel)


def is_batch_invariant() -> bool:
    """Whether vLLM was asked for batch invariance, by `VLLM_BATCH_INVARIANT=1`."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def has_act_order(config: Any) -> bool:
    """Whether the layers of a kernel's configuration have `g_idx`; since 0.30 none has."""
    return bool(getattr(config, "has_g_idx", False))


def keeping_everything() -> Any:
    """A map of names in checkpoints that changes and drops none."""
    from vllm.model_executor.models.utils import WeightsMapper

    return WeightsMapper()


def is_mixture(hf_config: Any) -> bool:
    """Whether a model is a mixture of experts, by the names that models have for their number."""
    text = getattr(hf_config, "text_config", None) or hf_config
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)


def whole_sizes(layer: Any) -> list[int]:
    """The channels of each part of a layer on all ranks together, as checkpoints hold them."""
    if hasattr(layer, "total_num_kv_heads"):  # `output_sizes` counts heads of keys that several ranks have
        values = layer.total_num_kv_heads * getattr(layer, "v_head_size", layer.head_size)
        return [layer.total_num_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size, values]
    return list(getattr(layer, "output_sizes", None) or [layer.output_size])
