"""AWQ checkpoints, version gemm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.python.formats.stored import as_awq, canonical, dequantized, named, stored

from qcutlass import CheckpointError, UnsupportedError, formats
from qcutlass.formats import CanonicalLinear

CONFIG: dict[str, Any] = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}


def loaded(tensors: dict[str, torch.Tensor], **config: Any) -> CanonicalLinear:
    checkpoint = formats.load(named(tensors, "up"), config=CONFIG | config)
    assert checkpoint.format == "awq"
    assert checkpoint.rest == []
    return canonical(checkpoint["up"])


def test_bytes_worked_out_by_hand() -> None:
    """One word holds, from the low nibble, channels 0, 2, 4, 6, 1, 3, 5, 7."""
    tensors = {
        "qweight": torch.tensor([[0x75316420], [0x00000010]], dtype=torch.int32),
        "qzeros": torch.tensor([[0x000F0000]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = loaded(tensors, group_size=2).weight
    assert weight.codes[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert weight.codes[:, 1].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert weight.zeros is not None
    assert weight.zeros.tolist() == [[0, 15, 0, 0, 0, 0, 0, 0]]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    n=st.integers(1, 6),
    groups=st.integers(1, 4),
    group_size=st.integers(1, 40),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(n: int, groups: int, group_size: int, symmetric: bool, seed: int) -> None:
    layer = stored(8 * n, groups * group_size, group_size, seed=seed, symmetric=symmetric)
    result = loaded(as_awq(layer), group_size=group_size)
    assert torch.equal(dequantized(result), layer.weight)
    assert (result.weight.zeros is None) == bool((layer.zeros == 8).all())


def test_old_names_in_the_configuration(seed: int) -> None:
    layer = stored(16, 40, 16, seed=seed)
    old = {"w_bit": 4, "q_group_size": 16, "version": "GEMM", "bits": None}
    assert torch.equal(dequantized(loaded(as_awq(layer), **old)), layer.weight)
    with pytest.raises(CheckpointError, match="config says 8"):
        loaded(as_awq(layer), **(old | {"w_bit": 8}))


def test_without_zero_points(seed: int) -> None:
    layer = stored(16, 32, 16, seed=seed, symmetric=True)
    tensors = as_awq(layer) | {"bias": torch.ones(16)}
    del tensors["qzeros"]
    result = loaded(tensors)
    assert torch.equal(dequantized(result), layer.weight)
    assert result.bias is not None


@pytest.mark.parametrize("key", ["version", "checkpoint_format", "format"])
@pytest.mark.parametrize("version", ["GEMV", "gemv_fast", "llm-awq", "marlin"])
def test_other_versions(key: str, version: str, seed: int) -> None:
    """GPTQModel writes AWQ, too, and calls its version as that of GPTQ."""
    config = CONFIG | {"version": None, key: version}
    with pytest.raises(UnsupportedError, match=f"config: {key} '{version.lower()}' of AWQ .* export version 'gemm'"):
        loaded(as_awq(stored(16, 32, 16, seed=seed)), **config)


@pytest.mark.parametrize("n", [64, 128])
def test_words_of_16_bits(n: int) -> None:
    """gemv_fast, by whatever name: square layers have as many columns of words as channels, like GPTQ's."""
    tensors = {
        "qweight": torch.zeros(n // 4, 64, dtype=torch.int16),
        "qzeros": torch.zeros(8, n, dtype=torch.float16),
        "scales": torch.ones(8, n, dtype=torch.float16),
    }
    with pytest.raises(UnsupportedError, match=r"up\.qweight: AWQ's words of 16 bits .* export version 'gemm'"):
        loaded(tensors, version=None)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("qzeros", lambda t: t[:, :1], r"up\.qzeros.*expected I32 \[2, 2\], got I32 \[2, 1\]"),
        ("qzeros", lambda t: t.short(), r"up\.qzeros.*I32"),
        ("qweight", lambda t: t[:31], r"up\.scales.*2 groups do not divide K = 31"),
        ("scales", lambda t: t.double(), r"up\.scales.*F64"),
        ("scales", lambda t: t * float("nan"), r"up\.scales.*NaN or infinity at \[0, 0\]"),
        ("bias", lambda t: t[:3], r"up\.bias.*\[16\], got F32 \[3\]"),
    ],
)
def test_tensors_that_contradict_each_other(suffix: str, change: Any, message: str, seed: int) -> None:
    tensors = as_awq(stored(16, 32, 16, seed=seed)) | {"bias": torch.ones(16)}
    tensors[suffix] = change(tensors[suffix])
    with pytest.raises(CheckpointError, match=message):
        loaded(tensors)
