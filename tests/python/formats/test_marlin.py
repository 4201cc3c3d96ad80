"""Marlin checkpoints, version 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.python.formats.stored import as_marlin, canonical, dequantized, named, stored

from qcutlass import CheckpointError, formats
from qcutlass.formats import CanonicalLinear


def loaded(tensors: dict[str, torch.Tensor], **config: Any) -> CanonicalLinear:
    checkpoint = formats.load(named(tensors, "up"), config=config)
    assert checkpoint.format == "marlin"
    assert checkpoint.rest == []
    return canonical(checkpoint["up"])


def test_bytes_worked_out_by_hand() -> None:
    """One tile of 16 x 64. Word 4 * lane + j serves channels 16 j to 16 j + 15; lane 4 g + t has channel g."""
    words = torch.zeros(1, 128, dtype=torch.int32)
    words[0, 0] = 0x75316420  # lane 0, channels 0 and 8: rows 0, 1, 8, 9 of channel 0, then of channel 8
    words[0, 127] = 0x0000000F  # lane 31 (g = 7, t = 3), j = 3: row 6 of channel 48 + 7
    words[0, 2 + 4 * 5] = -0x80000000  # lane 5 (g = 1, t = 1), j = 2, nibble 7: row 11 of channel 32 + 1 + 8
    expected = torch.zeros(64, 16, dtype=torch.uint8)
    expected[0, [0, 1, 8, 9]] = torch.tensor([0, 1, 2, 3], dtype=torch.uint8)
    expected[8, [0, 1, 8, 9]] = torch.tensor([4, 5, 6, 7], dtype=torch.uint8)
    expected[55, 6] = 15
    expected[41, 11] = 8
    result = loaded({"B": words, "s": torch.arange(64).half()[None]}, group_size=-1)
    assert torch.equal(result.weight.codes, expected)
    scales = result.weight.scales[0].tolist()
    assert [scales.index(i) for i in range(16)] == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27]
    assert [scales.index(i) for i in range(32, 36)] == [32, 33, 40, 41]


def test_group_scales_worked_out_by_hand() -> None:
    stored_scales = torch.arange(128).half().view(2, 64)
    result = loaded({"B": torch.zeros(2, 128, dtype=torch.int32), "s": stored_scales})
    assert result.weight.scales[0, :10].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1, 9]
    assert result.weight.scales[1, 63] == 127
    assert result.weight.group_size == 16


@settings(derandomize=True, deadline=None, max_examples=12)
@given(n=st.integers(1, 3), groups=st.integers(1, 3), tiles=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_any_shape(n: int, groups: int, tiles: int, seed: int) -> None:
    layer = stored(64 * n, groups * tiles * 16, tiles * 16, seed=seed, symmetric=True)
    bias = torch.ones(64 * n)
    workspace = torch.zeros(4, dtype=torch.int32)
    result = loaded(as_marlin(layer) | {"bias": bias, "workspace": workspace}, quant_method="gptq", bits=4)
    assert torch.equal(dequantized(result), layer.weight)
    assert result.weight.zeros is None
    assert result.bias is not None


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("B", lambda t: t[:, :-2], r"up\.B.*\[2, 128\], got I32 \[2, 126\]"),
        ("B", lambda t: t.long(), r"up\.B.*I64"),
        ("s", lambda t: t[:, :32], r"up\.B.*\[2, 64\]"),
        ("s", lambda t: t / 0, r"up\.s.*NaN or infinity"),
    ],
)
def test_tensors_that_contradict_each_other(suffix: str, change: Any, message: str, seed: int) -> None:
    tensors = as_marlin(stored(64, 32, 16, seed=seed))
    tensors[suffix] = change(tensors[suffix])
    with pytest.raises(CheckpointError, match=message):
        loaded(tensors)


def test_channels_that_fill_no_tile() -> None:
    with pytest.raises(CheckpointError, match="multiples of 64, got 32"):
        loaded({"B": torch.zeros(1, 64, dtype=torch.int32), "s": torch.ones(1, 32).half()})
