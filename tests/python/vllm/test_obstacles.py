"""Which checkpoints are taken, by what they say of their quantisation."""

from __future__ import annotations

from typing import Any

import pytest

from qcutlass.vllm.obstacles import obstacle

INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
ALL_NATIVE = (8, 4)


def says(found: str | None, reason: str | None) -> bool:
    return found is None if reason is None else reason in str(found)


def groups(*each: tuple[Any, Any]) -> dict[str, Any]:
    described = {f"group_{i}": {"weights": one, "input_activations": other} for i, (one, other) in enumerate(each)}
    return {"quant_method": "compressed-tensors", "config_groups": described}


@pytest.mark.parametrize(
    ("weights", "activations", "reason"),
    [
        (INT4, None, None),
        (INT8, None, None),
        (INT8, {**INT8, "dynamic": True}, None),
        (INT4, INT8, "activations"),
        (INT4, FP8, "activations"),
        (INT8, {**INT8, "symmetric": False}, "activations"),
        ({"num_bits": 2, "type": "int"}, None, "2 bits"),
        (FP8, None, None),
        (FP8, FP8, None),
        (NVFP4, None, None),
        (NVFP4, NVFP4, None),
        (NVFP4, FP8, "activations"),
        ({**FP8, "scale_dtype": "torch.uint8"}, None, "torch.uint8"),
    ],
)
def test_what_is_read_of_compressed_tensors(weights: Any, activations: Any, reason: str | None) -> None:
    assert says(obstacle(groups((weights, activations))), reason)


@pytest.mark.parametrize(
    ("weights", "activations", "native", "reason"),
    [
        (FP8, FP8, (8,), "8-bit floats are left"),
        (FP8, None, ALL_NATIVE, None),
        (NVFP4, NVFP4, (8,), None),
        (NVFP4, NVFP4, ALL_NATIVE, "4-bit floats are left"),
        (NVFP4, None, ALL_NATIVE, None),
        (INT8, INT8, ALL_NATIVE, None),
    ],
)
def test_what_the_device_multiplies_itself_is_left(
    weights: Any, activations: Any, native: tuple[int, ...], reason: str | None
) -> None:
    assert says(obstacle(groups((weights, activations)), native=native), reason)
    assert says(obstacle(groups((INT4, None), (weights, activations)), native=native), reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "gptq", "bits": 8}, None),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "format": "gptq_v2", "checkpoint_format": "gptq_v2"}, None),
        ({"quant_method": "awq", "w_bit": 4, "version": "GEMM"}, None),
        ({"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 8}, "8 bits"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (groups((INT4, None)) | {"kv_cache_scheme": {"a": 1}}, "kv_cache"),
        (groups((INT4, None)) | {"transform_config": {"a": 1}}, "transform"),
        ({"quant_method": "fp8"}, None),
        ({"quant_method": "fp8", "activation_scheme": "static"}, None),
        ({"quant_method": "fp8", "store_dtype": "mxfp4"}, "mxfp4"),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, "kv_cache"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "nvfp4"}}, None),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "kv_cache"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "MXFP8"),
        ({"quant_method": "modelopt"}, "unnamed"),
        ({"quant_method": "mxfp4"}, "not read"),
        ({}, "not read"),
    ],
)
def test_what_is_read(config: dict[str, Any], reason: str | None) -> None:
    found = obstacle(config)
    assert says(found, reason)
    assert obstacle(config, experts=True) == found


@pytest.mark.parametrize(
    ("config", "native", "is_left"),
    [
        ({"quant_method": "fp8"}, (8,), True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, (8,), True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (8,), False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ALL_NATIVE, True),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, ALL_NATIVE, False),
        ({"quant_method": "qcutlass"}, ALL_NATIVE, False),
    ],
)
def test_floats_of_other_makers(config: dict[str, Any], native: tuple[int, ...], is_left: bool) -> None:
    assert (obstacle(config, native=native) is not None) == is_left


def test_experts_of_int8_activations_are_left() -> None:
    values = groups((INT8, {**INT8, "dynamic": True}))
    assert obstacle(values) is None
    assert says(obstacle(values, experts=True), "int8 activations")
