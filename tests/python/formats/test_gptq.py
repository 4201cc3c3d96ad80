"""GPTQ checkpoints: versions 1 and 2, act-order, 4 and 8 bits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.python.formats.stored import Stored, as_gptq, canonical, dequantized, named, stored, write_folder

from qcutlass import CheckpointError, UnsupportedError, formats
from qcutlass.formats import CanonicalLinear

CONFIG: dict[str, Any] = {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": False}


def loaded(tensors: dict[str, torch.Tensor], **config: Any) -> CanonicalLinear:
    checkpoint = formats.load(named(tensors, "up"), config=config)
    assert checkpoint.format == "gptq"
    assert checkpoint.rest == []
    return canonical(checkpoint["up"])


def test_bytes_worked_out_by_hand() -> None:
    """K = 16, N = 8, two groups: fields along K in qweight, along N in qzeros, low nibble first."""
    qweight = torch.zeros(2, 8, dtype=torch.int32)
    qweight[0, 0] = 0x76543210  # columns 0 to 7 of channel 0
    qweight[1, 7] = 0x0000000F  # column 8 of channel 7
    qzeros = torch.tensor([[0x0000000E], [-0x10000000]], dtype=torch.int32)  # 14 for channel 0; 15 for channel 7
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": torch.ones(2, 8, dtype=torch.float16)}
    weight = loaded(tensors, **CONFIG).weight
    assert weight.codes[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, *[0] * 8]
    assert weight.codes[7].tolist() == [*[0] * 8, 15, *[0] * 7]
    assert weight.zeros is not None
    assert weight.zeros.tolist() == [[15, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]]
    assert weight.group_size == 8


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    n=st.integers(1, 5),
    groups=st.integers(1, 4),
    group_words=st.integers(1, 4),
    bits=st.sampled_from([4, 8]),
    version=st.sampled_from([1, 2]),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(
    n: int, groups: int, group_words: int, bits: int, version: int, symmetric: bool, act_order: bool, seed: int
) -> None:
    n, group_size = 32 // bits * n, 32 // bits * group_words
    layer = stored(n, groups * group_size, group_size, bits, seed=seed, symmetric=symmetric, act_order=act_order)
    label = "gptq" if version == 1 else "gptq_v2"
    config = {"bits": bits, "group_size": group_size, "desc_act": act_order, "sym": symmetric}
    result = loaded(as_gptq(layer, version), checkpoint_format=label, quant_method="gptq", **config)
    assert torch.equal(dequantized(result), layer.weight)
    assert (result.weight.zeros is None) == bool((layer.zeros == 2 ** (bits - 1)).all())
    assert result.weight.bits == bits
    assert result.weight.group_size == group_size


def test_one_group_a_channel(seed: int) -> None:
    layer = stored(16, 48, -1, seed=seed)
    result = loaded(as_gptq(layer), group_size=-1, **CONFIG)
    assert torch.equal(dequantized(result), layer.weight)
    assert result.perm is None


def test_a_ragged_last_group(seed: int) -> None:
    layer = stored(16, 40, 16, seed=seed, act_order=True)
    result = loaded(as_gptq(layer), group_size=16, **CONFIG)
    assert torch.equal(dequantized(result), layer.weight)
    with pytest.raises(CheckpointError, match=r"group_size"):
        loaded(as_gptq(layer), **CONFIG)


@pytest.mark.parametrize("bits", [4, 8])
def test_version_1_wraps_in_every_field(bits: int) -> None:
    """A zero point of 0 is stored as all ones; adding 1 to the packed words would carry into the next field."""
    zeros = np.arange(2**bits).reshape(1, -1)
    layer = Stored(np.ones((2**bits, 32), int), zeros, np.ones((1, 2**bits), np.float16), np.zeros(32, int), bits, 32)
    result = loaded(as_gptq(layer, 1), **CONFIG)
    assert result.weight.zeros is not None
    assert result.weight.zeros.tolist() == zeros.tolist()


@pytest.mark.parametrize(("bits", "ones"), [(4, 0x11111111), (8, 0x01010101)])
def test_version_1_of_gptqmodel_borrows(bits: int, ones: int, seed: int) -> None:
    """It subtracts one from whole words: 0x00000050 becomes 0xEEEEEF3F, whose fields alone would be read as ...0040."""
    layer = stored(32, 32, 16, bits, seed=seed)
    layer.zeros[:, ::3] = 0
    tensors = as_gptq(layer, 2)
    tensors["qzeros"] = (tensors["qzeros"].long() - ones).to(torch.int32)
    result = loaded(tensors, meta={"quantizer": ["gptqmodel:5.0.0"]}, **CONFIG)
    assert torch.equal(dequantized(result), layer.weight)
    assert not torch.equal(dequantized(loaded(tensors, **CONFIG)), layer.weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_files_show_their_version(bits: int, label: str | None, version: int, seed: int) -> None:
    layer = stored(16, 32, 16, bits, seed=seed, symmetric=True)
    config: dict[str, Any] = {"sym": True} if label is None else {"sym": True, "checkpoint_format": label}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = loaded(as_gptq(layer, version), **config)
    lies = label is not None and (label == "gptq") != (version == 1)
    assert [str(warning.message).split(" is ")[0] for warning in caught] == (
        ["config: checkpoint_format"] if lies else []
    )
    assert torch.equal(dequantized(result), layer.weight)
    assert result.weight.zeros is None


def test_constant_zero_points_of_asymmetric_weights_follow_the_label(seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed, symmetric=True)
    result = loaded(as_gptq(layer, 1), quant_method="gptq", checkpoint_format="gptq_v2", sym=False)
    assert result.weight.zeros is not None
    assert bool((result.weight.zeros == 7).all())


def test_files_without_a_version_are_version_1(seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed)
    result = loaded(as_gptq(layer, 1), quant_method="gptq", sym=False)
    assert torch.equal(dequantized(result), layer.weight)


@pytest.mark.parametrize("config", [{}, {"quant_method": "gptq", "sym": True}])
def test_undecidable_versions(config: dict[str, Any], seed: int) -> None:
    with pytest.raises(CheckpointError, match=r"up\.qzeros.*pass config=\{'checkpoint_format'"):
        loaded(as_gptq(stored(16, 32, 16, seed=seed)), **config)


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
@pytest.mark.parametrize("file", ["config.json", "quantize_config.json"])
def test_places_of_the_version(key: str, file: str, tmp_path: Path, seed: int) -> None:
    """`quantize_config.json` is read beside a description in `config.json`, too."""
    layer = stored(16, 32, 16, seed=seed)
    described = {"quant_method": "gptq", "bits": 4, "sym": False}
    folder = write_folder(tmp_path / "model", named(as_gptq(layer, 2), "up"), described)
    values = {"bits": 4, key: "GPTQ_v2"}
    (folder / file).write_text(json.dumps({"quantization_config": described | values} if file[0] == "c" else values))
    assert torch.equal(dequantized(canonical(formats.load(folder)["up"])), layer.weight)


@pytest.mark.parametrize("key", ["packing_format", "backend"])
@pytest.mark.parametrize(
    ("packing", "version"),
    [
        ("auto_round", 2), ("auto_round:exllamav2", 2), ("autoround:triton", 2), ("auto-round", 2),
        ("auto_round:auto_gptq", 1), ("auto_round:gptqmodel", 1), ("auto_round:gptq:exllamav2", 1),
    ],
)  # fmt: skip
def test_autoround_names_its_packing(key: str, packing: str, version: int, seed: int) -> None:
    """Its own stores zero points as they are; those named after GPTQ store them minus one."""
    layer = stored(16, 32, 16, seed=seed)
    config = {"quant_method": "auto-round", "sym": False, key: packing}
    assert torch.equal(dequantized(loaded(as_gptq(layer, version), **config)), layer.weight)
    override = {"checkpoint_format": f"gptq{'_v2' * (version == 1)}"}
    with pytest.raises(CheckpointError, match=rf"expected one version, got .* in config: {key}; pass config="):
        loaded(as_gptq(layer, version), **config, **override)


def test_versions_that_contradict_each_other(tmp_path: Path, seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed)
    folder = write_folder(tmp_path / "model", named(as_gptq(layer, 2), "up"), CONFIG)
    (folder / "quantize_config.json").write_text(json.dumps({"format": "gptq_v2"}))
    message = (
        r"up\.qzeros: expected one version, got gptq in .*config: checkpoint_format and gptq_v2 in .*: format; pass"
    )
    with pytest.raises(CheckpointError, match=message):
        formats.load(folder)["up"]
    for key in ("checkpoint_format", "format"):
        result = formats.load(folder, config={key: "gptq_v2"})["up"]
        assert torch.equal(dequantized(canonical(result)), layer.weight)
    with pytest.raises(CheckpointError, match="expected one version"):
        loaded(as_gptq(layer, 2), **CONFIG, format="gptq_v2")


def test_symmetric_label_on_zero_points_that_vary(seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed)
    with pytest.warns(UserWarning, match="sym is true"):
        result = loaded(as_gptq(layer, 2), sym=True, checkpoint_format="gptq_v2")
    assert torch.equal(dequantized(result), layer.weight)


def test_bias_and_scale_types(seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed)
    bias = torch.randn(16)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        tensors = as_gptq(layer) | {"bias": bias}
        tensors["scales"] = tensors["scales"].to(dtype)
        result = loaded(tensors, **CONFIG)
        assert result.weight.scales.dtype == dtype
        assert result.bias is not None
        assert torch.equal(result.bias, bias)


def test_an_empty_index_is_none(seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed)
    result = loaded(as_gptq(layer) | {"g_idx": torch.empty(0, dtype=torch.int32)}, **CONFIG)
    assert result.perm is None


@pytest.mark.parametrize(("column", "group"), [(3, 2), (5, -1), (0, 2**31 - 1)])
def test_groups_out_of_range(column: int, group: int, seed: int) -> None:
    tensors = as_gptq(stored(16, 32, 16, seed=seed, act_order=True))
    tensors["g_idx"][column] = group
    with pytest.raises(CheckpointError, match=rf"up\.g_idx.*\[0, 2\), got {group} at column {column}"):
        loaded(tensors, **CONFIG)


def test_uneven_groups(seed: int) -> None:
    tensors = as_gptq(stored(16, 32, 16, seed=seed, act_order=True))
    tensors["g_idx"][int((tensors["g_idx"] == 0).nonzero()[0])] = 1
    with pytest.raises(CheckpointError, match=r"up\.g_idx.*expected 16 columns in group 0, got 15"):
        loaded(tensors, **CONFIG)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("scales", lambda t: t[:, :8], r"up\.qweight.*expected I32 \[4, 8\], got I32 \[4, 16\]"),
        ("scales", lambda t: t[:1], r"up\.qzeros.*expected I32 \[1, 2\]"),
        ("scales", lambda t: t.int(), r"up\.scales.*F16 or BF16 or F32"),
        ("qzeros", lambda t: t[:, :1], r"up\.qzeros.*4 or 8 bits|2-bit"),
        ("qzeros", lambda t: t.flatten(), r"up\.qzeros.*expected a matrix"),
        ("qweight", lambda t: t[:3], r"up\.g_idx.*\[24\]|group_size"),
        ("qweight", lambda t: t.half(), r"up\.qweight.*I32"),
        ("g_idx", lambda t: t[:-1], r"up\.g_idx.*\[32\], got I32 \[31\]"),
        ("g_idx", lambda t: t.float(), r"up\.g_idx.*I32 or I64"),
    ],
)
def test_tensors_that_contradict_each_other(suffix: str, change: Any, message: str, seed: int) -> None:
    tensors = as_gptq(stored(16, 32, 16, seed=seed, act_order=True))
    tensors[suffix] = change(tensors[suffix])
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        loaded(tensors, group_size=16, **CONFIG)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 8}, r"4-bit fields, config says 8"),
        ({"bits": "4"}, r"bits: expected an integer, got '4'"),
        ({"bits": True}, r"bits: expected an integer"),
        ({"group_size": 32}, r"2 groups of K = 32 columns, config says group_size 32"),
        ({"group_size": 0}, r"group_size 0"),
        ({"group_size": -1}, r"group_size -1"),
        ({"group_size": 1.5}, r"group_size: expected an integer"),
        ({"sym": "no"}, r"sym: expected true or false"),
        ({"checkpoint_format": 2}, r"checkpoint_format: expected a string"),
    ],
)
def test_configurations_that_contradict_the_tensors(config: dict[str, Any], message: str, seed: int) -> None:
    with pytest.raises(CheckpointError, match=message):
        loaded(as_gptq(stored(16, 32, 16, seed=seed)), **(CONFIG | config))


def test_layers_with_settings_of_their_own(seed: int) -> None:
    """GPTQModel's `dynamic` overrides bits and group size layer by layer: the tensors tell."""
    layer = stored(16, 32, 16, 8, seed=seed)
    result = loaded(as_gptq(layer), bits=4, group_size=32, dynamic={r"+:.*up": {"bits": 8, "group_size": 16}}, **CONFIG)
    assert torch.equal(dequantized(result), layer.weight)


@pytest.mark.parametrize("g_idx", [True, False])
@pytest.mark.parametrize(
    "rules",
    [
        {"dynamic": {"+:.*up": {"group_size": 32}}},
        {"dynamic": {"+:down": {"group_size": 8}, "u": {"group_size": 32}, ".*": {"bits": 2}}},
        {"extra_config": {"up": {"group_size": 32}, "u.": {"bits": 2}}},
        {"extra_config": {"down": {"bits": 2}, "p$": {"group_size": 32}}},
    ],
)
def test_groups_of_a_rule_need_not_divide_the_columns(rules: dict[str, Any], g_idx: bool, seed: int) -> None:
    """48 columns in two groups: of 32 and 16, as the rule says, and not of 24."""
    layer = stored(16, 48, 32, seed=seed)
    result = loaded(as_gptq(layer, g_idx=g_idx), bits=4, group_size=16, **rules, **CONFIG)
    assert torch.equal(dequantized(result), layer.weight)


def test_several_widths_of_autoround(seed: int) -> None:
    layer = stored(16, 32, 16, 8, seed=seed)
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
    result = loaded(as_gptq(layer), **config, extra_config={"up": {"bits": 8, "group_size": 16, "sym": False}})
    assert torch.equal(dequantized(result), layer.weight)


@pytest.mark.parametrize(
    "rules",
    [
        {"dynamic": {"+:.*down": {"bits": 8}}},
        {"dynamic": {"-:up": {}, "+:.*": {"bits": 8}}},
        {"dynamic": {"+:p": {"bits": 8}}},  # patterns match from the beginning
        {"extra_config": {"u": {"bits": 8}}},  # a name, no pattern
    ],
)
def test_rules_of_other_layers(rules: dict[str, Any], seed: int) -> None:
    with pytest.raises(CheckpointError, match="holds 8-bit fields, config says 4"):
        loaded(as_gptq(stored(16, 32, 16, 8, seed=seed)), bits=4, **rules, **CONFIG)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"dynamic": {"+:(": {}}}, r"config: dynamic: expected a regular expression, got '\('"),
        ({"dynamic": {"up": 4}}, r"config: dynamic: up: expected an object, got 4"),
        ({"dynamic": {"+:up": {"bits": 8}}}, r"4-bit fields, config: dynamic: \+:up says 8"),
        ({"extra_config": 4}, r"config: extra_config: expected an object, got 4"),
        ({"extra_config": {"(": {}}}, r"config: extra_config: expected a regular expression, got '\('"),
    ],
)
def test_rules_that_are_none(rules: dict[str, Any], message: str, seed: int) -> None:
    with pytest.raises(CheckpointError, match=message):
        loaded(as_gptq(stored(16, 32, 16, seed=seed)), **rules, **CONFIG)


@pytest.mark.parametrize("key", ["-:.*embed_tokens$", "+:.*down"])
def test_a_ragged_group_beside_exceptions(key: str, seed: int) -> None:
    """Layers that are not quantised, or others with settings of their own, say nothing of this one."""
    layer = stored(16, 40, 16, seed=seed)
    result = loaded(as_gptq(layer), bits=4, group_size=16, dynamic={key: {}}, **CONFIG)
    assert torch.equal(dequantized(result), layer.weight)


def test_what_is_not_quantised_excuses_nothing(seed: int) -> None:
    tensors = as_gptq(stored(16, 32, 16, seed=seed))
    with pytest.raises(CheckpointError, match=r"2 groups of K = 32 columns, .* says group_size 32"):
        loaded(tensors, bits=4, group_size=32, dynamic={"-:.*embed_tokens$": {}}, **CONFIG)


@pytest.mark.parametrize("missing", ["qzeros", "scales"])
def test_missing_tensors(missing: str, seed: int) -> None:
    tensors = as_gptq(stored(16, 32, 16, seed=seed))
    del tensors[missing]
    with pytest.raises(CheckpointError, match=f"up: expected a tensor {missing}"):
        formats.load(named(tensors, "up"), config=CONFIG)["up"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("suffix", ["scales", "bias"])
def test_numbers_that_are_not_finite(suffix: str, value: float, seed: int) -> None:
    tensors = as_gptq(stored(16, 32, 16, seed=seed)) | {"bias": torch.zeros(16)}
    tensors[suffix].view(-1)[5] = value
    with pytest.raises(CheckpointError, match=rf"up\.{suffix}.*NaN or infinity at \[(0, )?5\]"):
        loaded(tensors, **CONFIG)


@pytest.mark.parametrize("label", ["marlin", "bitblas"])
def test_other_checkpoint_formats(label: str, seed: int) -> None:
    with pytest.raises(UnsupportedError, match=label):
        loaded(as_gptq(stored(16, 32, 16, seed=seed)), quant_method="gptq", checkpoint_format=label)


def test_three_bits() -> None:
    tensors = {
        "qweight": torch.zeros(3, 32, dtype=torch.int32),
        "qzeros": torch.zeros(1, 3, dtype=torch.int32),
        "scales": torch.ones(1, 32, dtype=torch.float16),
    }
    with pytest.raises(UnsupportedError, match="3-bit"):
        loaded(tensors, **CONFIG)
