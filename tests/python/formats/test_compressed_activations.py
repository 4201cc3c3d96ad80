"""What compressed-tensors says of the activations of integers in bytes and of fp8: loaded so, or refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.python.formats.stored import canonical, dequantized, named
from torch import Tensor

from qcutlass import CheckpointError, UnsupportedError, formats
from qcutlass.formats import Int8Linear

TOKEN: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_TOKEN = TOKEN | {"type": "float"}
STATIC = TOKEN | {"strategy": "tensor", "dynamic": False}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
OTHERS = {
    "4 bits": {"num_bits": 4},
    "groups": {"strategy": "group", "group_size": 32},
    "local": {"dynamic": "local"},
    "FP4": FP4,
}


def config(bits: int, activations: dict[str, Any] | None, type: str = "int", **weights: Any) -> dict[str, Any]:
    described = {"num_bits": bits, "type": type, "strategy": "channel", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": described, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def codes(bits: int, seed: int, groups: int = 1) -> dict[str, Tensor]:
    """int-quantized weights `[32, 128]`."""
    generator = torch.Generator().manual_seed(seed)
    half = 2 ** (bits - 1)
    weight = torch.randint(-half, half, (32, 128), generator=generator, dtype=torch.int8)
    return {"weight": weight, "weight_scale": torch.rand(32, groups, generator=generator) * 0.1}


def fp8_codes(seed: int) -> dict[str, Tensor]:
    return {**(tensors := codes(8, seed)), "weight": tensors["weight"].float().to(torch.float8_e4m3fn)}


def loaded(tensors: dict[str, Tensor], described: dict[str, Any]) -> formats.Layer:
    checkpoint = formats.load(named(tensors, "up"), config=described)
    assert checkpoint.rest == []
    return checkpoint["up"]


@pytest.mark.parametrize("other", [*OTHERS, "fp8"])
def test_int8_weights_take_int8_activations_alone(other: str, seed: int) -> None:
    described = config(8, TOKEN | {**OTHERS, "fp8": FP8_TOKEN}[other])
    message = "up.weight: int8 weights are read with int8 activations, .*group_0: input_activations says"
    with pytest.raises(UnsupportedError, match=f"{message}.*remove input_activations from its group"):
        loaded(codes(8, seed), described)


@pytest.mark.parametrize("other", [*OTHERS, "int8"])
def test_fp8_weights_take_fp8_activations_alone(other: str, seed: int) -> None:
    described = config(8, FP8_TOKEN | {**OTHERS, "int8": TOKEN}[other], "float")
    message = "up.weight: fp8 weights are read with fp8 activations, .*group_0: input_activations says"
    with pytest.raises(UnsupportedError, match=f"{message}.*remove input_activations from its group"):
        loaded(fp8_codes(seed), described)


def test_the_message_names_what_was_said(seed: int) -> None:
    told = r"says num_bits 4, type float, strategy tensor_group, group_size 16, dynamic local;"
    with pytest.raises(UnsupportedError, match=told):
        loaded(codes(8, seed), config(8, FP4))


@pytest.mark.parametrize("activations", [TOKEN, STATIC])
def test_activations_that_fit_are_no_surprise(activations: dict[str, Any], seed: int) -> None:
    extra = {} if activations["dynamic"] else {"input_scale": torch.full((1,), 0.5)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = [
            loaded(codes(8, seed) | extra, config(8, activations)),
            loaded(fp8_codes(seed) | extra, config(8, activations | {"type": "float"}, "float")),
        ]
    words = "dynamic" if activations["dynamic"] else "static"
    assert [layer.words for layer in layers] == [f"w8a8 channel {words}", f"fp8 channel {words}"]


def test_one_scale_for_all_tokens_becomes_one_each(seed: int) -> None:
    """A little more exact than the file says, and told."""
    both = TOKEN | {"strategy": "tensor"}
    for tensors, described in (
        (codes(8, seed), config(8, both)),
        (fp8_codes(seed), config(8, both | {"type": "float"}, "float")),
        (codes(4, seed), config(4, both)),
    ):
        with pytest.warns(UserWarning, match="group_0: input_activations: strategy tensor is dynamic; each token"):
            assert loaded(tensors, described).quantises_activations


def test_static_activations_have_a_scale(seed: int) -> None:
    with pytest.raises(CheckpointError, match=r"up\.weight: expected input_scale beside it, as .*it is absent"):
        loaded(codes(8, seed), config(8, STATIC))


def test_activations_of_fp8_blocks_and_groups_stay_as_they_are(seed: int) -> None:
    weights = fp8_codes(seed)["weight"]
    groups = {"weight": weights, "weight_scale": torch.full((32, 4), 0.5)}
    blocks = {"weight": weights, "weight_scale": torch.full((1, 4), 0.5)}
    activations = FP8_TOKEN | {"strategy": "group", "group_size": 32}
    for tensors, said in (
        (groups, {"strategy": "group", "group_size": 32}),
        (blocks, {"strategy": "block", "block_structure": [32, 32]}),
    ):
        layer = canonical(loaded(tensors, config(8, activations, "float", **said)))
        assert not layer.quantises_activations
        assert torch.equal(layer.dequantize(torch.float32), weights.float() * 0.5)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("type", "kind"), [("int", "w4a8_int8"), ("float", "w4a8_fp8"), (None, "weight_only")])
@pytest.mark.parametrize("size", [32, None])
def test_codes_of_4_bits_in_bytes(size: int | None, type: str | None, kind: str, bits: int, seed: int) -> None:
    """As compressed-tensors' presets W4A8 and W4AFP8 have them: with a scale for each of the groups, or channels."""
    tensors = codes(bits, seed, 1 if size is None else 128 // size)
    said: dict[str, Any] = {} if size is None else {"strategy": "group", "group_size": size}
    layer = canonical(loaded(tensors, config(bits, type and TOKEN | {"type": type}, **said)))
    assert (layer.kind, layer.weight.bits, layer.weight.group_size) == (kind, 4, size or 128)
    expected = tensors["weight"] * tensors["weight_scale"].repeat_interleave(size or 128, dim=1)
    assert torch.equal(dequantized(layer), expected)


@pytest.mark.parametrize("type", ["int", "float"])
def test_asymmetric_codes_of_4_bits_in_bytes(type: str, seed: int) -> None:
    zeros = torch.randint(-8, 8, (32, 4), dtype=torch.int8)
    tensors = codes(4, seed, 4) | {"weight_zero_point": zeros}
    described = config(4, TOKEN | {"type": type}, strategy="group", group_size=32, symmetric=False)
    expected = (tensors["weight"].float() - zeros.repeat_interleave(32, 1)) * tensors["weight_scale"].repeat_interleave(
        32, 1
    )
    assert torch.equal(dequantized(canonical(loaded(tensors, described))), expected)
    with pytest.raises(CheckpointError, match=r"expected zero points in \[-8, 8\), got 9 to 9"):
        loaded(tensors | {"weight_zero_point": torch.full_like(zeros, 9)}, described)


def test_codes_of_4_bits_with_static_activations(seed: int) -> None:
    """Products of 4-bit codes compute the scale of each token; those of int8 take one from a file, and such codes."""
    tensors = codes(4, seed) | {"input_scale": torch.full((1,), 0.25)}
    layer = loaded(tensors, config(4, STATIC))
    assert isinstance(layer, Int8Linear)
    assert torch.equal(layer.codes, tensors["weight"])
    with pytest.raises(UnsupportedError, match=r"up\.weight_scale: int8 activations need one scale a channel"):
        loaded(codes(4, seed, 4) | {"input_scale": torch.ones(1)}, config(4, STATIC, strategy="group", group_size=32))


@pytest.mark.parametrize("activations", [TOKEN, FP8_TOKEN, STATIC, None])
def test_codes_that_fewer_bits_do_not_hold(activations: dict[str, Any] | None, seed: int) -> None:
    tensors = codes(4, seed)
    tensors["weight"][3, 5] = 8
    with pytest.raises(CheckpointError, match=r"up\.weight: expected codes in \[-8, 8\), as .* says num_bits 4, got"):
        loaded(tensors, config(4, activations))
    with pytest.raises(CheckpointError, match=r"weights: num_bits: expected 1 to 8 of integers in bytes, got 0"):
        loaded(tensors, config(0, activations))


def test_codes_of_5_to_8_bits_keep_8(seed: int) -> None:
    tensors = codes(6, seed)
    layer = loaded(tensors, config(6, TOKEN))
    assert isinstance(layer, Int8Linear)
    assert torch.equal(layer.codes, tensors["weight"])
    with pytest.raises(UnsupportedError, match="int8 activations need one scale a channel"):
        loaded(codes(6, seed, 4), config(6, TOKEN, strategy="group", group_size=32))


def floats_of_each_form(seed: int) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """fp8 with a scale a channel, and for each of groups; NVFP4."""
    groups = {"strategy": "group", "group_size": 32}
    scales = torch.rand(32, 4, generator=torch.Generator().manual_seed(seed)) + 0.5
    nvfp4 = {
        "weight_packed": torch.full((32, 64), 0x21, dtype=torch.uint8),
        "weight_scale": torch.ones(32, 8).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.ones(1),
    }
    return [
        (fp8_codes(seed), config(8, FP8_TOKEN, "float")),
        (fp8_codes(seed) | {"weight_scale": scales}, config(8, None, "float", **groups)),
        (nvfp4, config(4, None, "float", strategy="tensor_group", group_size=16)),
    ]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_zero_points_of_floats_are_refused(dtype: torch.dtype, seed: int) -> None:
    for tensors, described in floats_of_each_form(seed):
        zeros = torch.zeros(tensors["weight_scale"].shape)
        layer = loaded(tensors | {"weight_zero_point": zeros.to(dtype)}, described)
        assert torch.equal(layer.dequantize(torch.float32), loaded(tensors, described).dequantize(torch.float32))
        zeros[3, 0] = 1
        with pytest.raises(UnsupportedError, match=r"up\.weight_zero_point: floats with zero points are not read"):
            loaded(tensors | {"weight_zero_point": zeros.to(dtype)}, described)


def test_floats_whose_groups_have_columns_in_another_order_are_refused(seed: int) -> None:
    for tensors, described in floats_of_each_form(seed)[1:]:
        size = 128 // tensors["weight_scale"].shape[1]
        kept = loaded(tensors | {"weight_g_idx": (torch.arange(128) // size).int()}, described)
        assert torch.equal(kept.dequantize(torch.float32), loaded(tensors, described).dequantize(torch.float32))
        with pytest.raises(UnsupportedError, match=r"up\.weight_g_idx: floats with act-order are not read"):
            loaded(tensors | {"weight_g_idx": (torch.arange(128) // size).flip(0).int()}, described)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_columns_in_another_order(bits: int, seed: int) -> None:
    tensors = codes(bits, seed, 4)
    index = torch.randperm(128, generator=torch.Generator().manual_seed(seed)) % 4
    tensors["weight_g_idx"] = index.int()
    layer = canonical(loaded(tensors, config(bits, None, strategy="group", group_size=32)))
    assert torch.equal(dequantized(layer), tensors["weight"] * tensors["weight_scale"][:, index])
