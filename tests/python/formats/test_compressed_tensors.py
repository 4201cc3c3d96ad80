"""compressed-tensors checkpoints, against that package."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.python.formats.stored import as_compressed, canonical, dequantized, named, stored
from torch import Tensor

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, formats
from qcutlass.formats import CanonicalLinear, Int8Linear, compressed_tensors, gptq


def scheme(
    bits: int = 4, group_size: int = 16, symmetric: bool = False, activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def loaded(tensors: dict[str, Tensor], config: dict[str, Any]) -> formats.Layer:
    checkpoint = formats.load(named(tensors, "up"), config=config)
    assert checkpoint.format == "compressed-tensors"
    assert checkpoint.rest == []
    return checkpoint["up"]


def test_bytes_worked_out_by_hand() -> None:
    """K = 9 in two words a row; the signed values -8 to 0 are stored as 0 to 8, zero points alike along N."""
    packed = torch.tensor([[0x76543210, 0x8], [0x0, 0xF]], dtype=torch.int32)
    tensors = {
        "weight_packed": packed,
        "weight_scale": torch.tensor([[1.0], [2.0]]),
        "weight_zero_point": torch.tensor([[0x7A]], dtype=torch.int32),
        "weight_shape": torch.tensor([2, 9]),
    }
    weight = canonical(loaded(tensors, scheme(group_size=9))).weight
    assert weight.codes.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0, 0, 0, 15]]
    assert weight.zeros is not None
    assert weight.zeros.tolist() == [[10, 7]]
    assert weight.scales.tolist() == [[1, 2]]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    n=st.integers(1, 20),
    groups=st.integers(1, 4),
    group_size=st.integers(3, 20),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_packed_weights_of_any_shape(
    n: int, groups: int, group_size: int, bits: int, symmetric: bool, act_order: bool, seed: int
) -> None:
    layer = stored(n, groups * group_size, group_size, bits, seed=seed, symmetric=symmetric, act_order=act_order)
    tensors = as_compressed(layer, act_order=act_order)
    result = canonical(loaded(tensors, scheme(bits, group_size, symmetric)))
    assert torch.equal(dequantized(result), layer.weight)
    assert (result.weight.bits, result.weight.group_size) == (bits, group_size)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    n=st.integers(9, 20),
    groups=st.integers(1, 3),
    group_size=st.integers(3, 20),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_what_the_package_compresses(
    n: int, groups: int, group_size: int, bits: int, symmetric: bool, seed: int
) -> None:
    """From nine channels on: the package fails to unpack zero points that fill one word."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, groups * group_size, generator=generator)
    arguments = QuantizationArgs(num_bits=bits, strategy="group", group_size=group_size, symmetric=symmetric)
    zeros = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, groups), generator=generator, dtype=torch.int8)
    state = {
        "weight": weight,
        "weight_scale": torch.rand(n, groups, generator=generator) * 0.1 + 0.01,
        "weight_zero_point": zeros.zero_() if symmetric else zeros,
    }
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    whole = QuantizationScheme(targets=["Linear"], weights=arguments)
    tensors = compressor.compress(state, whole)
    expected = compressor.decompress(tensors, whole)["weight"]
    result = canonical(loaded(tensors, scheme(bits, group_size, symmetric)))
    assert torch.equal(dequantized(result), expected)


def test_old_files_have_zero_points_in_bytes(seed: int) -> None:
    layer = stored(12, 48, 16, seed=seed)
    tensors = as_compressed(layer) | {"weight_zero_point": torch.from_numpy((layer.zeros.T - 8).astype("int8"))}
    assert torch.equal(dequantized(canonical(loaded(tensors, scheme()))), layer.weight)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_zero_point_for_all(shape: tuple[int, ...], seed: int) -> None:
    layer = stored(12, 48, 16, seed=seed, symmetric=True)
    layer.zeros[:] = 5
    tensors = as_compressed(layer) | {"weight_zero_point": torch.full(shape, 5 - 8, dtype=torch.int8)}
    assert torch.equal(dequantized(canonical(loaded(tensors, scheme()))), layer.weight)


@pytest.mark.parametrize("value", [-128, -9, 8, 100])
def test_zero_points_out_of_range(value: int, seed: int) -> None:
    layer = stored(12, 48, 16, seed=seed)
    zeros = torch.from_numpy((layer.zeros.T - 8).astype("int8"))
    zeros[3, 1] = value
    with pytest.raises(CheckpointError, match=r"up\.weight_zero_point: expected zero points in \[-8, 8\)"):
        loaded(as_compressed(layer) | {"weight_zero_point": zeros}, scheme())


def test_zero_points_that_fit_no_field_are_not_stored(seed: int) -> None:
    """16 is a zero that products take, and one more than 4 bits hold."""
    q = qcutlass.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)), group_size=32)
    weight = dataclasses.replace(q, zeros=torch.full_like(q.scales, 16, dtype=torch.uint8), scales=q.scales.half())
    for store in (compressed_tensors.store, lambda layer: gptq.store(layer, 2)):
        with pytest.raises(UnsupportedError, match="zero points below 16"):
            store(CanonicalLinear(weight))


def test_one_scale_for_all(seed: int) -> None:
    layer = stored(12, 48, -1, seed=seed, symmetric=True)
    layer.scales[:] = layer.scales[0, 0]
    tensors = as_compressed(layer) | {"weight_scale": torch.from_numpy(layer.scales[0, :1])}
    config = scheme(group_size=48) | {"config_groups": {}}
    assert torch.equal(dequantized(canonical(loaded(tensors, config))), layer.weight)


def test_an_index_that_is_not_used(seed: int) -> None:
    layer = stored(12, 48, 16, seed=seed)
    tensors = as_compressed(layer) | {"weight_g_idx": torch.full((48,), -1, dtype=torch.int32)}
    assert canonical(loaded(tensors, scheme())).perm is None


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_few_columns_do_not_tell_bits(k: int, seed: int) -> None:
    """Both 4-bit and 8-bit fields fit one word: the configuration tells."""
    for bits in (4, 8):
        layer = stored(5, k, -1, bits, seed=seed)
        result = canonical(loaded(as_compressed(layer), scheme(bits, k)))
        assert torch.equal(dequantized(result), layer.weight)


def int8_tensors(seed: int, **extra: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (12, 40), generator=generator, dtype=torch.int8)
    return {"weight": weight, "weight_scale": torch.rand(12, 1, generator=generator), **extra}


def test_int8_weights_for_dynamic_activations(seed: int) -> None:
    tensors = int8_tensors(seed, bias=torch.ones(12))
    layer = loaded(tensors, scheme(8, -1, True, DYNAMIC))
    assert isinstance(layer, Int8Linear)
    assert torch.equal(layer.codes, tensors["weight"])
    assert torch.equal(layer.scales, tensors["weight_scale"].flatten())
    assert layer.input_scale is None
    assert layer.bias is not None
    assert layer.shape == (12, 40)
    assert torch.equal(layer.dequantize(), tensors["weight"] * tensors["weight_scale"])


def test_int8_weights_that_the_package_compresses(seed: int) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(seed)
    arguments = QuantizationArgs(num_bits=8, strategy="channel", symmetric=True)
    whole = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=QuantizationArgs(**DYNAMIC))
    compressor = BaseCompressor.get_value_from_registry("int-quantized")
    tensors = compressor.compress({"weight": torch.randn(12, 40), "weight_scale": torch.rand(12, 1) * 0.1}, whole)
    layer = loaded(tensors, scheme(8, -1, True, DYNAMIC))
    assert isinstance(layer, Int8Linear)
    assert torch.equal(layer.dequantize(), compressor.decompress(tensors, whole)["weight"])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_int8_weights_for_static_activations(shape: tuple[int, ...], seed: int) -> None:
    tensors = int8_tensors(seed, input_scale=torch.full(shape, 0.25, dtype=torch.bfloat16))
    layer = loaded(tensors, scheme(8, -1, True, DYNAMIC | {"dynamic": False}))
    assert isinstance(layer, Int8Linear)
    assert layer.input_scale is not None
    assert layer.input_scale.dtype == torch.float32
    assert layer.input_scale.tolist() == [0.25]


def test_int8_storage_alone(seed: int) -> None:
    tensors = int8_tensors(seed)
    layer = canonical(loaded(tensors, scheme(8, -1, True)))
    assert layer.weight.bits == 8
    assert torch.equal(dequantized(layer), tensors["weight"] * tensors["weight_scale"])
    zeros = torch.arange(-6, 6, dtype=torch.int8)[:, None]
    layer = canonical(loaded(tensors | {"weight_zero_point": zeros}, scheme(8, -1, False)))
    expected = (tensors["weight"].float() - zeros) * tensors["weight_scale"]
    assert torch.equal(dequantized(layer), expected)


UNSUPPORTED = {
    "bytes of integers": ({"weight_packed": torch.zeros(12, 20, dtype=torch.uint8)}, scheme(), "bytes of int weights"),
    "packed and static activations": (
        {}, scheme(4, 16, True, DYNAMIC | {"dynamic": False}), "up.weight_packed: .*remove input_activations from",
    ),
    "packed and 4-bit activations": ({}, scheme(4, 16, True, DYNAMIC | {"num_bits": 4}), "remove input_activations"),
    "packed and activations in groups": (
        {}, scheme(4, 16, True, DYNAMIC | {"strategy": "group"}), "remove input_activations",
    ),
    "a transform": ({}, scheme() | {"transform_config": {"config_groups": {"u": {}}}}, "transform"),
    "sparse": ({}, scheme() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_packed_weights_that_are_not_read(case: str, seed: int) -> None:
    changes, config, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedError, match=message):
        loaded(as_compressed(stored(12, 48, 16, seed=seed)) | changes, config)


def test_dense_sparsity_is_none(seed: int) -> None:
    layer = stored(12, 48, 16, seed=seed)
    config = scheme() | {"sparsity_config": {"format": "dense"}, "transform_config": {}}
    assert torch.equal(dequantized(canonical(loaded(as_compressed(layer), config))), layer.weight)


@pytest.mark.parametrize(("type", "activations"), [("int", "int8"), ("float", "fp8")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_weights_for_8_bit_activations(type: str, activations: str, symmetric: bool, seed: int) -> None:
    stored_layer = stored(16, 64, 32, seed=seed, symmetric=symmetric)
    layer = loaded(as_compressed(stored_layer), scheme(4, 32, symmetric, DYNAMIC | {"type": type}))
    assert layer.kind == f"w4a8_{activations}"
    assert torch.equal(dequantized(canonical(layer)), stored_layer.weight)
    with pytest.raises(UnsupportedError, match=r"up\.weight_packed: packed weights with quantised activations"):
        loaded(as_compressed(stored(16, 64, 32, 8, seed=seed)), scheme(8, 32, True, DYNAMIC | {"type": type}))


def test_activations_that_are_not_symmetric(seed: int) -> None:
    """Another rounding of the activations than the file's, which is said; the weights are the same."""
    for tensors, config in (
        (int8_tensors(seed), scheme(8, -1, True, DYNAMIC | {"symmetric": False})),
        (as_compressed(stored(16, 64, 32, seed=seed)), scheme(4, 32, True, DYNAMIC | {"symmetric": False})),
    ):
        with pytest.warns(UserWarning, match="group_0: input_activations: symmetric is false; each token"):
            assert loaded(tensors, config).quantises_activations


def groups(*described: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    """A configuration of several groups, each the one group of another."""
    found = {
        f"group_{index}": {**one["config_groups"]["group_0"], "targets": targets}
        for index, (targets, one) in enumerate(described)
    }
    return {"quant_method": "compressed-tensors", "config_groups": found}


TARGETS = [  # that match first, and second
    (["up"], ["re:.*", "Linear"]),
    (["re:.*u"], ["Linear"]),
    (["re:a|u"], ["re:u"]),
    (["re:.p"], ["p", "re:p", "u", "Linear"]),
    (["Linear"], ["Conv2d", "down", "re:p"]),
]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_the_group_of_a_layer(targets: tuple[list[str], list[str]], reverse: bool, seed: int) -> None:
    """Whether activations are quantised is told by the group, as the package finds it, whatever comes first."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    weights_alone, both = scheme(8, -1, True), scheme(8, -1, True, DYNAMIC)
    described = [(targets[0], weights_alone), (targets[1], both)]
    config = groups(*(described[::-1] if reverse else described))
    assert isinstance(loaded(int8_tensors(seed), config), CanonicalLinear)
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(40, 12)})
    config["config_groups"] = {
        name: group | {"weights": {"num_bits": 8, "strategy": "channel"}}
        for name, group in config["config_groups"].items()
    }
    apply_quantization_config(model, QuantizationConfig(**config))
    assert model["up"].quantization_scheme.input_activations is None


def test_each_group_has_its_own_scheme(seed: int) -> None:
    config = groups((["re:up"], scheme(4, 16)), (["re:down"], scheme(8, 32)), (["gate"], scheme(8, -1, True, DYNAMIC)))
    up, down = stored(16, 64, 16, seed=seed), stored(16, 64, 32, 8, seed=seed)
    tensors = named(as_compressed(up), "up") | named(as_compressed(down), "down") | named(int8_tensors(seed), "gate")
    checkpoint = formats.load(tensors, config=config)
    assert torch.equal(dequantized(canonical(checkpoint["up"])), up.weight)
    assert torch.equal(dequantized(canonical(checkpoint["down"])), down.weight)
    assert isinstance(checkpoint["gate"], Int8Linear)
    with pytest.raises(CheckpointError, match=r"4-bit fields, config: config_groups: group_1: weights says 8"):
        formats.load(named(as_compressed(up), "down"), config=config)["down"]


def test_embeddings_have_a_class_of_their_own(seed: int) -> None:
    config = groups((["Linear"], scheme(8, -1, True, DYNAMIC)), (["Embedding"], scheme(8, -1, True)))
    checkpoint = formats.load(named(int8_tensors(seed), "model.embed_tokens"), config=config)
    assert isinstance(checkpoint["model.embed_tokens"], CanonicalLinear)


def test_layers_that_no_target_matches(seed: int) -> None:
    """Where groups are alike, any of them will do."""
    alike = groups((["re:down"], scheme(8, -1, True)), (["re:gate"], scheme(8, -1, True)))
    assert isinstance(loaded(int8_tensors(seed), alike), CanonicalLinear)
    differ = groups((["re:down"], scheme(8, -1, True)), (["re:gate"], scheme(8, -1, True, DYNAMIC)))
    message = r"config: config_groups: expected a target that matches up, got re:down, re:gate; add its name"
    with pytest.raises(CheckpointError, match=message):
        loaded(int8_tensors(seed), differ)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("up", "group_0: targets: expected a list of names and patterns, got 'up'"),
        ([4], r"targets: expected a list of names and patterns, got \[4\]"),
        (["re:("], r"config_groups: expected a regular expression, got '\('"),
    ],
)
def test_targets_that_are_none(targets: Any, message: str, seed: int) -> None:
    with pytest.raises(CheckpointError, match=message):
        loaded(int8_tensors(seed), groups((targets, scheme(8, -1, True)), (["Linear"], scheme(8, -1, True, DYNAMIC))))


def test_factors_of_int8_activations(seed: int) -> None:
    """ModelOpt's INT8_SQ, whose tensors have these names."""
    with pytest.raises(UnsupportedError, match=r"up\.pre_quant_scale: factors of int8 activations are not read"):
        formats.load(named(int8_tensors(seed, pre_quant_scale=torch.ones(40)), "up"))["up"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": torch.ones(12, 2)}, "one scale a channel"),
        ({"weight_zero_point": torch.ones(12, 1, dtype=torch.int8)}, "symmetric"),
        ({"input_zero_point": torch.ones(1, dtype=torch.int8)}, "symmetric"),
    ],
)
def test_int8_weights_that_are_not_read(changes: dict[str, Tensor], message: str, seed: int) -> None:
    config = scheme(8, -1, True, DYNAMIC) | {"config_groups": {}}
    with pytest.raises(UnsupportedError, match=message):
        loaded(int8_tensors(seed) | changes, config)


def test_float8_layers_among_others(seed: int) -> None:
    float8 = {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.ones(4, 1)}
    tensors = named(int8_tensors(seed), "up") | named(float8, "down")
    int8, fp8 = scheme(8, -1, True, DYNAMIC), scheme(8, -1, True, DYNAMIC | {"type": "float"})
    config = groups((["up"], int8), (["down"], fp8))
    checkpoint = formats.load(tensors, config=config)
    assert isinstance(checkpoint["up"], Int8Linear)
    assert torch.equal(checkpoint["down"].dequantize(torch.float32), torch.ones(4, 4))
    float8["weight"] = float8["weight"].float().to(torch.float8_e5m2)
    with pytest.raises(UnsupportedError, match=r"down\.weight: F8_E5M2"):
        formats.load(tensors | named(float8, "down"), config=config)["down"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_shape": torch.tensor([12, 2**60])}, r"weight_packed.*words for rows of 1152921504606846976"),
        ({"weight_shape": torch.tensor([13, 48])}, r"weight_shape.*expected 12 rows"),
        ({"weight_shape": torch.tensor([12, 0])}, r"weight_shape"),
        ({"weight_shape": torch.tensor([12.0, 48.0])}, r"weight_shape.*I64 or I32"),
        ({"weight_shape": torch.tensor([12, 48, 1])}, r"weight_shape.*\[2\]"),
        ({"weight_scale": torch.ones(11, 3)}, r"weight_scale.*\[12, 3\], got F32 \[11, 3\]"),
        ({"weight_scale": torch.ones(12, 4)}, r"weight_scale.*4 groups"),
        ({"weight_scale": torch.full((12, 3), float("inf"))}, r"weight_scale.*NaN or infinity"),
        ({"weight_zero_point": torch.ones(3, 3, dtype=torch.int32)}, r"weight_zero_point.*\[2, 3\], got I32 \[3, 3\]"),
        ({"weight_zero_point": torch.ones(2, 3, dtype=torch.int8)}, r"weight_zero_point.*\[12, 3\], got I8"),
        ({"weight_g_idx": torch.full((48,), 3, dtype=torch.int32)}, r"weight_g_idx.*\[0, 3\), got 3 at column 0"),
        ({"weight_packed": torch.zeros(12, 7, dtype=torch.int32)}, r"weight_packed.*got 7 words"),
    ],
)
def test_packed_tensors_that_contradict_each_other(changes: dict[str, Tensor], message: str, seed: int) -> None:
    with pytest.raises(CheckpointError, match=message):
        loaded(as_compressed(stored(12, 48, 16, seed=seed)) | changes, scheme())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (scheme(bits=8), r"4-bit fields, config: config_groups: group_0: weights says 8"),
        (scheme(group_size=48), r"3 groups of K = 48"),
        ({"config_groups": [1]}, r"config_groups: expected an object, got \[1\]"),
        ({"config_groups": {"a": {"weights": 4}}}, r"weights: expected an object, got 4"),
    ],
)
def test_configurations_that_contradict_the_tensors(config: dict[str, Any], message: str, seed: int) -> None:
    with pytest.raises(CheckpointError, match=message):
        loaded(as_compressed(stored(12, 48, 16, seed=seed)), config)


def test_the_product_of_a_layer_with_act_order_and_bias(seed: int) -> None:
    stored_layer = stored(24, 64, 16, seed=seed, act_order=True)
    bias = torch.randn(24)
    layer = canonical(loaded(as_compressed(stored_layer, act_order=True) | {"bias": bias}, scheme()))
    assert isinstance(layer, CanonicalLinear)
    packed = qcutlass.preprocess_weights(layer.weight.codes, bits=4)
    a = torch.randn(5, 64)
    y = qcutlass.gemm(a, packed, layer.weight.scales, layer.weight.zeros, perm=layer.perm, bias=layer.bias)
    reference = qcutlass.testing.reference(a, stored_layer.weight, bias=bias)
    qcutlass.testing.assert_close(y, reference, label="act-order")
