"""Which checkpoints are taken, by what they say of their quantisation, and why others are left to the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from qcutlass.formats.config import VERSIONS
from qcutlass.formats.specs import METHOD

_Config = Mapping[str, Any]
_Native = Collection[int]
_MODELOPT: Final = {"FP8": 8, "FP8_PER_CHANNEL_PER_TOKEN": 8, "NVFP4": 4, "W4A16_NVFP4": None}
"""ModelOpt's schemes that are read, and the bits of the floats that their activations are quantised to; None: none."""
_SCALES_OF_FLOATS: Final = (None, "torch.float8_e4m3fn", "torch.float16", "torch.bfloat16", "torch.float32")
"""Types of scales of 8-bit floats that are read; others are powers of two."""


def obstacle(config: _Config, experts: bool = False, native: _Native = ()) -> str | None:
    """The reason why layers of a folder are not multiplied; None if they are.

    Args:
        config: `quantization_config` of the folder.
        experts: whether the model is a mixture of experts.
        native: bits of floats by which the device multiplies floats of as many bits itself, which the engine does:
            layers whose activations are to be quantised so are left to it. Weights alone are taken wherever it is.

    Example:
        >>> from qcutlass.vllm.obstacles import obstacle
        >>> obstacle({"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True})
        >>> obstacle({"quant_method": "gptq", "bits": 3})
        'gptq of 3 bits, only 4 and 8 are read'
        >>> obstacle({"quant_method": "fp8", "activation_scheme": "dynamic"}, native=(8,))
        'activations of 8-bit floats are left to the engine on this device, which multiplies them itself'
    """
    method = str(config.get("quant_method", "")).lower()
    if method == METHOD:
        return None
    if config.get("kv_cache_scheme"):
        return "kv_cache_scheme is left to the engine"
    if experts and _has_int8_activations(config):
        return "experts of int8 activations are left to the engine"
    return _OBSTACLES[method](config, native) if method in _OBSTACLES else f"quant_method {method!r} is not read"


def _gptq(config: _Config, native: _Native) -> str | None:
    bits, versions = config.get("bits"), [config[key] for key in VERSIONS if config.get(key)]
    if bits not in (4, 8):
        return f"gptq of {bits} bits, only 4 and 8 are read"
    unknown = [version for version in versions if str(version).lower() not in ("gptq", "gptq_v2")]
    return f"checkpoint_format {unknown[0]!r} is not read" if unknown else None


def _awq(config: _Config, native: _Native) -> str | None:
    bits = config.get("bits", config.get("w_bit"))
    version = next((str(config[key]).lower() for key in ("version", *VERSIONS) if config.get(key)), "gemm")
    if bits != 4:
        return f"awq of {bits} bits, only 4 are read"
    return None if version == "gemm" else f"awq of version {version!r}, only 'gemm' is read"


def _fp8(config: _Config, native: _Native) -> str | None:
    scheme, stored = config.get("activation_scheme"), config.get("store_dtype")
    if scheme not in (None, "dynamic", "static") or stored is not None:
        return f"fp8 with activation_scheme {scheme!r} and store_dtype {stored!r} is not read"
    return _activations_of_floats(8, native)


def _modelopt(config: _Config, native: _Native) -> str | None:
    described = config.get("quantization")
    described = described if isinstance(described, Mapping) else config
    scheme = str(described.get("quant_algo", "")).upper()
    if scheme not in _MODELOPT:
        return f"modelopt's {scheme or 'unnamed scheme'} is not read, only {', '.join(_MODELOPT)}"
    if described.get("kv_cache_quant_algo"):
        return "kv_cache_quant_algo is left to the engine"
    return _activations_of_floats(_MODELOPT[scheme], native)


def _compressed_tensors(config: _Config, native: _Native) -> str | None:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "compressed-tensors without config_groups"
    for key in ("transform_config", "sparsity_config"):
        section = config.get(key)
        if section and section.get("format") != "dense":
            return f"{key} is not read"
    reasons = [_group(group, native) for group in groups.values()]
    return next((reason for reason in reasons if reason), None)


def _group(group: _Config, native: _Native) -> str | None:
    """The reason why one of compressed-tensors' groups of layers is not multiplied."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    kind, bits = weights.get("type"), weights.get("num_bits")
    if kind not in ("int", "float") or bits not in (4, 8):
        return f"weights of {bits} bits of type {kind!r}"
    if group.get("output_activations"):
        return "quantised outputs"
    if kind == "float" and bits == 8 and weights.get("scale_dtype") not in _SCALES_OF_FLOATS:
        return f"8-bit floats with scales of {weights['scale_dtype']}"
    if inputs is None:
        return None
    if kind == "float" and (inputs.get("type"), inputs.get("num_bits")) == (kind, bits):
        return _activations_of_floats(bits, native)
    whole = (kind, bits, weights.get("strategy")) == ("int", 8, "channel")
    plain = inputs.get("type") == "int" and inputs.get("num_bits") == 8 and inputs.get("symmetric", True)
    return None if whole and plain else "activations that are quantised other than to symmetric int8"


def _activations_of_floats(bits: int | None, native: _Native) -> str | None:
    if bits is None or bits not in native:
        return None
    return f"activations of {bits}-bit floats are left to the engine on this device, which multiplies them itself"


def _has_int8_activations(config: _Config) -> bool:
    groups = config.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    return any((group.get("input_activations") or {}).get("type") == "int" for group in groups)


_OBSTACLES: Final[dict[str, Callable[[_Config, _Native], str | None]]] = {
    "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}  # fmt: skip
