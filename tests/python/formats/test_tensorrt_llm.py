"""TensorRT-LLM's groupwise weights: scales and Z."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.python.formats.stored import as_modelopt, as_tensorrt_llm, canonical, dequantized, named, stored
from torch import Tensor

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, formats, testing
from qcutlass.formats import CanonicalLinear

CONFIG = {"quant_algo": "W4A16_AWQ", "group_size": 16, "has_zero_point": True}


def loaded(tensors: dict[str, Tensor], config: dict[str, Any] = CONFIG) -> CanonicalLinear:
    checkpoint = formats.load(named(tensors, "fc"), config=config)
    assert checkpoint.format == "tensorrt-llm"
    assert checkpoint.rest == []
    return canonical(checkpoint["fc"])


def test_bytes_worked_out_by_hand() -> None:
    """N = 2, K = 2: channel 0 in low nibbles, channel 1 in high ones, in two's complement; w = s (q - 8) + Z."""
    tensors = {
        "weight": torch.tensor([[0x78], [0x0F]], dtype=torch.uint8),  # k = 0: -8 and 7; k = 1: -1 and 0
        "weights_scaling_factor": torch.tensor([[2.0, 4.0]]),
        "zero": torch.tensor([[6.0, 1.0]]),
    }
    layer = loaded(tensors, {"quant_algo": "W4A16_GPTQ"})
    assert layer.weight.codes.tolist() == [[0, 7], [15, 8]]
    assert layer.weight.zeros is not None
    assert layer.weight.zeros.tolist() == [[5, 7.75]]
    assert dequantized(layer).tolist() == [[-10, 4], [29, 1]]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    n=st.integers(1, 12),
    groups=st.integers(1, 4),
    group_size=st.integers(1, 24),
    channels_first=st.booleans(),
    kind=st.sampled_from(["symmetric", "integer", "real"]),
    seed=st.integers(0, 2**16),
)
def test_any_shape(n: int, groups: int, group_size: int, channels_first: bool, kind: str, seed: int) -> None:
    layer = stored(2 * n, groups * group_size, group_size, seed=seed, symmetric=kind == "symmetric")
    random = np.random.default_rng(seed)
    if kind == "integer":  # powers of two: Z = (8 - z) s is exact, as AWQ's conversion means it
        layer.scales[:] = 2.0 ** -random.integers(3, 9, layer.scales.shape)
        offsets = (8 - layer.zeros) * layer.scales.astype(np.float32)
    else:
        offsets = random.normal(0, 0.1, layer.scales.shape).astype(np.float16).astype(np.float32)
    tensors = as_tensorrt_llm(layer, None if kind == "symmetric" else offsets, channels_first=channels_first)
    result = loaded(tensors, CONFIG | {"group_size": group_size})
    weight = dequantized(result)
    if kind == "real":
        by_column = (values[layer.group_of].T.astype(np.float64) for values in (layer.scales, offsets))
        scales, offset = by_column
        exact = torch.from_numpy((layer.codes - 8) * scales + offset)
        testing.assert_close(weight, testing.reference(exact.float(), torch.eye(exact.shape[1])), label=kind)
    else:
        assert torch.equal(weight, layer.weight)
        assert result.weight.zeros is None or result.weight.zeros.dtype == torch.uint8


def test_groups_with_scale_zero_hold_their_z() -> None:
    tensors = {
        "weight": torch.tensor([[0x78, 0x12, 0x34, 0x56]], dtype=torch.int8),  # [N / 2, K]
        "weights_scaling_factor": torch.tensor([[0.0, 0.5], [0.25, 0.0]]).half(),
        "zero": torch.tensor([[-3.0, 0.5], [0.75, 0.0]]).half(),
    }
    weight = dequantized(loaded(tensors, {"quant_algo": "W4A16_AWQ"}))
    assert weight.tolist() == [[-3, -3, 2.5, 3.5], [2.5, 1.0, 0, 0]]


def test_activations_are_scaled_first(seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed, symmetric=True)
    scale = (torch.rand(32) + 0.5).half()
    for shape in ((32,), (1, 32)):
        tensors = as_tensorrt_llm(layer, None, channels_first=True) | {"prequant_scaling_factor": scale.view(shape)}
        result = loaded(tensors)
        assert result.act_scale is not None
        assert torch.equal(result.act_scale, scale)
        packed = qcutlass.preprocess_weights(result.weight.codes, bits=4)
        y = qcutlass.gemm(torch.eye(32), packed, result.weight.scales, bits=4, act_scale=result.act_scale)
        assert torch.equal(y.T, layer.weight * scale.float())


@pytest.mark.parametrize("config", [{"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, CONFIG])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_modelopts_folders_for_transformers(dtype: torch.dtype, config: dict[str, Any], seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed, symmetric=True)
    factors = (torch.rand(32) + 0.5).to(dtype)
    tensors = named(as_modelopt(layer) | {"pre_quant_scale": factors, "bias": torch.ones(16)}, "fc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = formats.load(tensors, config=config | {"group_size": 16})
    assert (checkpoint.format, checkpoint.rest) == ("modelopt-awq", [])
    found = canonical(checkpoint["fc"])
    assert torch.equal(dequantized(found), layer.weight)
    assert torch.equal(found.effective_weight(), layer.weight * factors.float())
    with pytest.raises(CheckpointError, match=r"2 groups of K = 32 columns, config says group_size 8"):
        formats.load(tensors, config=config | {"group_size": 8})["fc"]


def test_modelopts_w4a8_is_not_read(seed: int) -> None:
    tensors = as_modelopt(stored(16, 32, 16, seed=seed, symmetric=True))
    tensors |= {"weight_scale_2": torch.ones(1), "input_scale": torch.ones(1)}
    config = {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}
    with pytest.raises(
        UnsupportedError, match=r"fc\.weight_scale_2: 4-bit weights for 8-bit float .* qcutlass quantize"
    ):
        formats.load(named(tensors, "fc"), config=config)["fc"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(32, 4).half()}, "one GPU generation"),
        ({"weights_scaling_factor_2": torch.ones(1)}, "8-bit float activations"),
        ({"activation_scaling_factor": torch.ones(1)}, "8-bit float activations"),
    ],
)
def test_what_is_not_read(changes: dict[str, Tensor], message: str, seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed)
    with pytest.raises(UnsupportedError, match=message):
        loaded(as_tensorrt_llm(layer, layer.zeros, channels_first=True) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_scaling_factor": torch.ones(15, 2)}, r"weights_scaling_factor.*\[16, G\] or \[G, 64\].*\[15, 2\]"),
        ({"weights_scaling_factor": torch.ones(16, 33)}, r"weights_scaling_factor"),
        ({"weights_scaling_factor": torch.ones(16)}, r"weights_scaling_factor.*matrix"),
        ({"weights_scaling_factor": torch.full((16, 2), float("nan"))}, r"weights_scaling_factor.*NaN"),
        ({"zero": torch.ones(2, 16)}, r"fc\.zero.*\[16, 2\]"),
        ({"zero": torch.full((16, 2), float("inf"))}, r"fc\.zero.*NaN or infinity"),
        ({"prequant_scaling_factor": torch.ones(16)}, r"prequant_scaling_factor.*\[32\]"),
    ],
)
def test_tensors_that_contradict_each_other(changes: dict[str, Tensor], message: str, seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed)
    with pytest.raises(CheckpointError, match=message):
        loaded(as_tensorrt_llm(layer, layer.zeros, channels_first=True) | changes)


def test_another_group_size(seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed)
    with pytest.raises(CheckpointError, match=r"2 groups of K = 32 columns, config says group_size 8"):
        loaded(as_tensorrt_llm(layer, layer.zeros, channels_first=True), CONFIG | {"group_size": 8})
