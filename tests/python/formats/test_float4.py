"""Checkpoints of 4-bit floats, against the package that writes them, and bytes worked out by hand."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.formats.stored import canonical, named
from torch import Tensor

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, formats
from qcutlass.algorithms import quantize_floats
from qcutlass.formats import CanonicalLinear, compressed_tensors, gptq
from qcutlass.formats.float4 import reciprocal
from qcutlass.products.checks import E8M0

pytestmark = pytest.mark.skipif(not E8M0, reason="this torch has no float8_e8m0fnu")

GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


def config_of(name: str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": GROUPS[name]}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def loaded(tensors: dict[str, Tensor], config: dict[str, Any]) -> CanonicalLinear:
    return canonical(formats.load(named(tensors, "up"), config=config)["up"])


def stored_scales(tensors: dict[str, Tensor]) -> torch.dtype:
    """The type that scales keep: that of the file, unless they have to be divided."""
    if "weight_global_scale" not in tensors:
        return E8M0[0]
    if reciprocal(tensors["weight_global_scale"], tensors["weight_scale"]) is None:
        return torch.float32
    return torch.float8_e4m3fn


def scheme_of_the_package(name: str) -> Any:
    """What the package calls these weights."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    size = GROUPS[name]
    strategy = "tensor_group" if size == 16 else "group"
    arguments = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=size, symmetric=True)
    return QuantizationScheme(targets=["Linear"], weights=arguments)


@pytest.mark.parametrize("name", GROUPS)
def test_what_the_package_compresses(name: str, seed: int) -> None:
    """Its dequantised weights, which are bfloat16, bit for bit; and a layer multiplies by these."""
    from compressed_tensors.compressors import BaseCompressor

    size, whole = GROUPS[name], scheme_of_the_package(name)
    compressor = BaseCompressor.get_value_from_registry(name)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(8):
        weight = torch.randn(24, 128, generator=generator)
        amax = weight.view(24, -1, size).abs().amax(dim=2)
        state = {"weight": weight, "weight_scale": torch.exp2(amax.log2().floor() - 2)}
        if size == 16:
            divisor = (448 * 6 / weight.abs().max()).reshape(1)
            scales = (amax / 6 * divisor).clamp(max=448).to(torch.float8_e4m3fn).float()
            state |= {"weight_scale": scales, "weight_global_scale": divisor}
        tensors = compressor.compress(state, whole)
        expected = compressor.decompress(tensors, whole)["weight"]
        layer = loaded(tensors, config_of(name))
        assert torch.equal(layer.dequantize(torch.bfloat16), expected)
        assert layer.weight.scales.dtype == stored_scales(tensors)
        linear = qcutlass.QuantLinear.from_checkpoint(named(tensors, "up"), "up", config=config_of(name))
        assert torch.equal(linear(torch.eye(128)).T.bfloat16(), expected)


def test_bytes_of_modelopt_worked_out_by_hand() -> None:
    packed = torch.zeros(2, 16, dtype=torch.uint8)
    packed[0, 0], packed[1, 9] = 0x9F, 0x21  # -6 and -0.5; 0.5 and 1
    tensors = {
        "weight": packed,
        "weight_scale": torch.tensor([[1.0, 2.0], [0.5, 448.0]]).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.25),
        "input_scale": torch.tensor(1.0),
    }
    checkpoint = formats.load(named(tensors, "up"), config={"quant_method": "modelopt"})
    assert (checkpoint.format, checkpoint.rest) == ("nvfp4", [])
    expected = torch.zeros(2, 32)
    expected[0, 0], expected[0, 1], expected[1, 18], expected[1, 19] = -1.5, -0.125, 56, 112
    assert torch.equal(canonical(checkpoint["up"]).dequantize(torch.float32), expected)


def modelopt_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randint(0, 256, (32, 32), generator=generator).to(torch.uint8),
        "weight_scale": torch.ones(32, 4).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.25),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_factors_of_the_activations(dtype: torch.dtype) -> None:
    """NVFP4_AWQ: the layer multiplies its input by them, channel by channel."""
    factors = torch.rand(64) + 0.5
    tensors = modelopt_tensors() | {"pre_quant_scale": factors.to(dtype)}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}
    checkpoint = formats.load(named(tensors, "up"), config=config)
    assert checkpoint.rest == []
    layer = canonical(checkpoint["up"])
    expected = layer.dequantize(torch.float32) * factors.to(dtype).float()
    assert torch.equal(layer.effective_weight(), expected)
    linear = qcutlass.QuantLinear.from_checkpoint(named(tensors, "up"), "up", config=config)
    assert torch.equal(linear(torch.eye(64)).T, expected)
    with pytest.raises(CheckpointError, match=r"pre_quant_scale: expected .* \[64\], got .* \[63\]"):
        loaded(tensors | {"pre_quant_scale": factors[:63]}, config)


@pytest.mark.parametrize("scheme", ["NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"])
def test_modelopts_name_of_the_scheme_alone(scheme: str) -> None:
    """As `hf_quant_config.json` has it, which names no method."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert formats.detect(named(modelopt_tensors(), "up"), {"quant_algo": scheme}) == "nvfp4"


ALL_SCALES = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # those above 0 that a file may have


def test_scales_are_multiplied_by_a_reciprocal() -> None:
    factor = reciprocal(torch.tensor([3.0]), ALL_SCALES)
    assert factor is not None
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal((ALL_SCALES.float() * factor).to(dtype), (ALL_SCALES.float() / 3).to(dtype))


def test_scales_that_no_reciprocal_serves_are_divided() -> None:
    divisor = torch.tensor([722.491455078125])  # one of some ten thousand; no number near its reciprocal rounds alike
    assert reciprocal(divisor, ALL_SCALES) is None
    tensors = {
        "weight_packed": torch.full((1, 8 * len(ALL_SCALES)), 0x77, dtype=torch.uint8),
        "weight_scale": ALL_SCALES[None],
        "weight_global_scale": divisor,
    }
    layer = loaded(tensors, config_of("nvfp4-pack-quantized"))
    assert layer.weight.global_scale is None
    expected = 6 * (ALL_SCALES.float() / divisor).repeat_interleave(16)[None]
    assert torch.equal(layer.dequantize(torch.float32), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_global_scale": torch.zeros(1)}, "weight_global_scale: expected a positive number, got 0"),
        (
            {"weight_scale": torch.ones(2, 3).to(torch.float8_e4m3fn)},
            r"expected F8_E4M3 \[2, 2\], got F8_E4M3 \[2, 3\]",
        ),
        ({"weight_packed": torch.zeros(2, 12, dtype=torch.uint8)}, "whole groups of 16 columns, got K = 24"),
        ({"weight_scale": torch.full((2, 2), torch.nan).to(torch.float8_e4m3fn)}, "expected finite numbers, got NaN"),
    ],
)
def test_damaged_files(changed: dict[str, Tensor], message: str) -> None:
    tensors = {
        "weight_packed": torch.zeros(2, 16, dtype=torch.uint8),
        "weight_scale": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.ones(1),
    }
    with pytest.raises(CheckpointError, match=message):
        loaded(tensors | changed, config_of("nvfp4-pack-quantized"))


def quantised(size: int, scales: torch.dtype, k: int = 64, seed: int = 0) -> CanonicalLinear:
    weight = torch.randn(32, k, generator=torch.Generator().manual_seed(seed))
    return CanonicalLinear(quantize_floats(weight, "e2m1", size, scale_dtype=scales))


@pytest.mark.parametrize("name", GROUPS)
def test_what_is_stored_is_read_back_bit_for_bit(name: str, seed: int) -> None:
    """Codes, scales and the global scale; and the package makes the same weights of them."""
    from compressed_tensors.compressors import BaseCompressor

    size, whole = GROUPS[name], scheme_of_the_package(name)
    for index in range(8):
        layer = quantised(size, torch.float8_e4m3fn if size == 16 else E8M0[0], seed=seed + index)
        tensors = compressed_tensors.store(layer)
        found = loaded(tensors, config_of(name))
        assert found.tensors.keys() == layer.tensors.keys()
        for key, tensor in layer.tensors.items():
            assert torch.equal(found.tensors[key].view(torch.uint8), tensor.view(torch.uint8)), key
        expected = BaseCompressor.get_value_from_registry(name).decompress(tensors, whole)["weight"]
        assert torch.equal(expected, layer.dequantize(torch.bfloat16))


def test_a_layer_without_a_global_scale_has_a_divisor_of_1() -> None:
    layer = quantised(16, torch.float8_e4m3fn)
    layer = replace(layer, weight=replace(layer.weight, global_scale=None))
    tensors = compressed_tensors.store(layer)
    assert tensors["weight_global_scale"].tolist() == [1]
    assert torch.equal(loaded(tensors, config_of("nvfp4-pack-quantized")).dequantize(), layer.dequantize())


def test_a_global_scale_that_is_no_reciprocal_is_refused() -> None:
    layer = quantised(16, torch.float8_e4m3fn)
    lone = torch.tensor([2.0]).nextafter(torch.zeros(1))  # between the reciprocals of 0.5 and of the next number
    layer = replace(layer, weight=replace(layer.weight, global_scale=lone))
    message = "global_scale: expected the reciprocal of a float32 number, .* got 1.99999988, which is none; quantise"
    with pytest.raises(UnsupportedError, match=message):
        compressed_tensors.store(layer)


def test_floats_of_4_bits_that_compressed_tensors_does_not_hold() -> None:
    for layer, message in (
        (quantised(32, torch.float32), r"scales of float8_e4m3fn \(NVFP4\) or float8_e8m0fnu \(MXFP4\), got float32"),
        (quantised(32, torch.float8_e4m3fn), "whole groups of 16 columns .* groups of 32 .*--format nvfp4"),
        (quantised(32, E8M0[0], 48), "whole groups of 32 columns .* K = 48; .*--format mxfp4"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            compressed_tensors.store(layer)


def test_gptq_holds_integers_alone() -> None:
    with pytest.raises(UnsupportedError, match="expected integer codes, got e2m1 ones"):
        gptq.store(quantised(32, E8M0[0]), 2)
