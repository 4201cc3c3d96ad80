"""What the plug-in uses of vLLM: the one place that knows where it lies, and how versions differ.

Read in 0.26 and 0.33. Between them `has_g_idx` of kernels' configurations went (0.30), and models began to drop
tensors named `g_idx` unless a configuration of quantisation says otherwise (0.30).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size as get_tensor_model_parallel_world_size
from vllm.model_executor.kernels import linear as _linear_kernels
from vllm.model_executor.kernels.linear import MPLinearKernel as MPLinearKernel
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase as FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod as UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase as LinearBase
from vllm.model_executor.layers.linear import LinearMethodBase as LinearMethodBase
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as QUANTIZATION_METHODS
from vllm.model_executor.layers.quantization import register_quantization_config as register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead as ParallelLMHead
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding as VocabParallelEmbedding
from vllm.model_executor.parameter import permute_param_layout_ as permute_param_layout_
from vllm.platforms import PlatformEnum as PlatformEnum
from vllm.platforms import current_platform as _platform

from qcutlass.errors import UnsupportedError
from qcutlass.layers.experts import Gate

PLATFORMS: Final = (PlatformEnum.CUDA, PlatformEnum.CPU)
"""Those on which there are products."""
_FLOATS_SINCE: Final = {8: 89, 4: 100}
"""The compute capability since which GPUs have products of floats of so many bits."""
_GATES: Final = {"silu": ("silu", 0.0), "gelu_tanh": ("gelu_tanh", 0.0), "swigluoai_uninterleave": ("swigluoai", 1.0)}
"""Of vLLM's activations of experts: `qcutlass.moe.experts`' name, and what is added to the channels of up."""
_ACTIVATION_NAMES: Final = ("hidden_act", "hidden_activation", "mlp_hidden_act")
_ACTIVATIONS: Final = ("silu", "swish", "gelu_tanh", "gelu_pytorch_tanh", "swigluoai")
"""Values of these in configurations of models."""
_LEFT: Final = {
    "gpt_oss": "vLLM loads all of a block as one tensor",
    "llama4_text": "the router's weights multiply their input",
    **dict.fromkeys(("deepseek_v4", "deepseek_v41"), "vLLM has a method of its own for this model"),
}
"""Mixtures (`model_type`) whose experts are not multiplied, and why."""


def is_cpu() -> bool:
    """Whether the engine runs on a CPU."""
    return bool(_platform.is_cpu())


def activation_types() -> list[torch.dtype]:
    """Of activations that products take in an engine: on a GPU those of 16 bits."""
    return [torch.float16, torch.bfloat16, *([torch.float32] if is_cpu() else [])]


def native_floats() -> tuple[int, ...]:
    """Bits of floats by which the device multiplies floats of as many bits."""
    return (
        ()
        if is_cpu()
        else tuple(bits for bits, least in _FLOATS_SINCE.items() if _platform.has_device_capability(least))
    )


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


def experts_obstacle(hf_config: Any) -> str | None:
    """The reason why the experts of a mixture are not multiplied; None if they are, or there are none."""
    text = getattr(hf_config, "text_config", None) or hf_config
    if not is_mixture(hf_config):
        return None
    kind = str(getattr(text, "model_type", ""))
    if kind in _LEFT:
        return f"experts of {kind} are left to the engine, as {_LEFT[kind]}"
    names = (getattr(text, name, None) for name in _ACTIVATION_NAMES)
    activation = next((name for name in names if name is not None), "silu")
    return None if activation in _ACTIVATIONS else f"experts with the activation {activation!r} are left to the engine"


def gate_of(layer: Any, name: str) -> Gate:
    """What the experts of a block compute between their products; UnsupportedError where that is another function."""
    activation = getattr(layer.activation, "value", layer.activation)
    limit, alpha, beta = (getattr(layer, f"swiglu_{key}", None) for key in ("limit", "alpha", "beta"))
    kind, added = _GATES.get(activation, (None, 0.0))
    own_alpha = kind == "swigluoai" or alpha in (None, 1.0)
    if kind is None or not own_alpha or (beta is not None and beta != added) or layer.apply_router_weight_on_input:
        raise UnsupportedError(
            f"{name}: expected experts whose outputs are weighted, with activation {' or '.join(_GATES)}, got "
            f"{activation} with limit {limit}, alpha {alpha}, beta {beta}, weights on the "
            f"{'input' if layer.apply_router_weight_on_input else 'output'}; set VLLM_PLUGINS='' to have vLLM's own"
        )
    return Gate(kind, limit, alpha if kind == "swigluoai" else None)


def local_expert(layer: Any) -> Callable[[int], int]:
    """The number on this rank of an expert of the model; -1: it is on another one."""
    found: Callable[[int], int] = layer._map_global_expert_id_to_local_expert_id
    return found


def places_of_experts(layer: Any, device: torch.device) -> Tensor | None:
    """int32 `[experts + 1]`: the number on this rank of each expert of the model, or -1; None: all are here.

    The last one, which an id of -1 leads to, is -1.
    """
    found = layer.expert_map
    nobody = torch.full((1,), -1, dtype=torch.int32, device=device)
    return None if found is None else torch.cat([found.to(device, torch.int32), nobody])


def rank_among_experts(layer: Any) -> tuple[int, int]:
    """The rank that cuts this block's experts, and how many ranks do; with expert parallelism none does: 0 of 1."""
    return layer.moe_config.tp_rank, layer.moe_config.tp_size


def replace_method(layer: Any, method: Any) -> None:
    """Has a block of experts computed by another method."""
    layer._replace_quant_method(method)


def whole_sizes(layer: Any) -> list[int]:
    """The channels of each part of a layer on all ranks together, as checkpoints hold them."""
    if hasattr(layer, "total_num_kv_heads"):  # `output_sizes` counts heads of keys that several ranks have
        values = layer.total_num_kv_heads * getattr(layer, "v_head_size", layer.head_size)
        return [layer.total_num_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size, values]
    return list(getattr(layer, "output_sizes", None) or [layer.output_size])
