"""HQQ checkpoints, groups along axis 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.python.formats.stored import as_hqq, canonical, dequantized, named, stored
from torch import Tensor

from qcutlass import CheckpointError, UnsupportedError, formats
from qcutlass.formats import CanonicalLinear

CONFIG = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 16, "axis": 1}}}


def loaded(tensors: dict[str, Tensor], config: dict[str, Any] = CONFIG) -> CanonicalLinear:
    checkpoint = formats.load(named(tensors, "up"), config=config)
    assert checkpoint.format == "hqq"
    assert checkpoint.rest == []
    return canonical(checkpoint["up"])


def test_bytes_worked_out_by_hand() -> None:
    """N = 2, K = 4, groups of 2: groups 0 and 1 (row 0) in high nibbles, groups 2 and 3 (row 1) in low ones."""
    tensors = {
        "W_q": torch.tensor([[0x1A, 0x2B], [0x3C, 0x4D]], dtype=torch.uint8),
        "scale": torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        "zero": torch.tensor([[0.5], [1.5], [2.5], [3.5]]),
        "shape": torch.tensor([2, 4]),
        "nbits": torch.tensor(4, dtype=torch.int32),
        "axis": torch.tensor(1, dtype=torch.int32),
    }
    weight = loaded(tensors).weight
    assert weight.codes.tolist() == [[1, 2, 3, 4], [10, 11, 12, 13]]
    assert weight.scales.tolist() == [[1, 3], [2, 4]]
    assert weight.zeros is not None
    assert weight.zeros.tolist() == [[0.5, 2.5], [1.5, 3.5]]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    n=st.integers(1, 12),
    groups=st.integers(1, 4),
    group_size=st.integers(1, 24),
    bits=st.sampled_from([4, 8]),
    whole=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(n: int, groups: int, group_size: int, bits: int, whole: bool, seed: int) -> None:
    n = 2 * n if bits == 4 else n
    layer = stored(n, groups * group_size, group_size, bits, seed=seed)
    if not whole:
        shift = np.random.default_rng(seed).normal(0, 3, layer.zeros.shape)
        layer = replace(layer, zeros=(layer.zeros + shift).astype(np.float16).astype(np.float32))
    tensors = as_hqq(layer) | {"bias": torch.ones(n, dtype=torch.bfloat16)}
    result = loaded(tensors)
    assert torch.equal(dequantized(result), layer.weight)
    if result.weight.zeros is not None:
        assert result.weight.zeros.is_floating_point() != whole


@pytest.mark.parametrize("zero", [-1, 0, 15, 16, 255, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_at_the_ends_of_a_byte(bits: int, zero: int, seed: int) -> None:
    layer = stored(16, 32, 16, bits, seed=seed)
    layer.zeros[0, 3] = zero
    result = loaded(as_hqq(layer))
    assert torch.equal(dequantized(result), layer.weight)
    assert result.weight.zeros is not None
    assert result.weight.zeros.is_floating_point() == (not 0 <= zero < 2**bits)


def test_the_axis_of_the_configuration(seed: int) -> None:
    tensors = as_hqq(stored(16, 32, 16, seed=seed))
    del tensors["axis"], tensors["group_size"], tensors["nbits"], tensors["view_as_float"]
    assert loaded(tensors).shape == (16, 32)
    with pytest.raises(UnsupportedError, match="axis None"):
        loaded(tensors, {"quant_method": "hqq"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": torch.tensor(0, dtype=torch.int32)}, "axis 0"),
        ({"view_as_float": torch.tensor(1, dtype=torch.uint8)}, "view_as_float=False"),
        ({"quant_scale": torch.tensor(1, dtype=torch.uint8)}, "quant_scale=False"),
        ({"quant_zero": torch.tensor(1, dtype=torch.uint8)}, "quant_scale=False"),
        ({"W_q": torch.zeros(8, 16, dtype=torch.uint8), "nbits": torch.tensor(2, dtype=torch.int32)}, "2-bit"),
        ({"shape": torch.tensor([64, 8])}, "groups of 16 reach over the end of rows of 8"),
    ],
)
def test_what_is_not_read(changes: dict[str, Tensor], message: str, seed: int) -> None:
    with pytest.raises(UnsupportedError, match=message):
        loaded(as_hqq(stored(16, 32, 16, seed=seed)) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": torch.tensor([16, 33])}, r"up\.shape.*product of 512.*\[16, 33\]"),
        ({"shape": torch.tensor([-16, -32])}, r"up\.shape"),
        ({"shape": torch.tensor([16, 32, 1])}, r"up\.shape.*\[2\]"),
        ({"nbits": torch.tensor(8, dtype=torch.int32)}, r"up\.nbits.*expected 4.*got 8"),
        ({"nbits": torch.tensor(4.0)}, r"up\.nbits.*one integer, got F32"),
        ({"group_size": torch.tensor(32, dtype=torch.int32)}, r"up\.group_size.*expected 16.*got 32"),
        ({"zero": torch.ones(31, 1)}, r"up\.zero.*\[32, 1\], got F32 \[31, 1\]"),
        ({"scale": torch.ones(31, 1)}, r"up\.zero.*\[31, 1\]"),
        ({"scale": torch.ones(32, 2)}, r"up\.scale.*\[32, 1\]"),
        ({"scale": torch.full((32, 1), float("nan"))}, r"up\.scale.*NaN"),
        ({"zero": torch.full((32, 1), float("inf"))}, r"up\.zero.*NaN or infinity"),
        ({"W_q": torch.zeros(15, 16, dtype=torch.uint8)}, r"up\.W_q.*32 scales, got 15"),
        ({"W_q": torch.zeros(16, 16, dtype=torch.int32)}, r"up\.W_q.*U8"),
    ],
)
def test_tensors_that_contradict_each_other(changes: dict[str, Tensor], message: str, seed: int) -> None:
    with pytest.raises(CheckpointError, match=message):
        loaded(as_hqq(stored(16, 32, 16, seed=seed)) | changes)
