"""Round-to-nearest quantisation: the codes are the best ones for their scales, and nothing degenerate breaks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import testing

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
GROUP_SIZES = [7, 16, 32, 64, 128, 200]


def normal(n: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Normal weights whose channels differ in size, with some outliers."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=g) * torch.logspace(-3, 0, n)[:, None]
    weight[:, ::17] *= 6
    return weight.to(dtype)


def dequantized(qt: qcutlass.QuantizedTensor, group_size: int, bits: int) -> Tensor:
    return testing.dequantized_weight(qt.codes, qt.scales, qt.zeros, group_size, bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_codes_are_the_nearest(group_size: int, bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    n, k = 20, 200
    weight = normal(n, k, dtype)
    qt = qcutlass.quantize(weight, bits=bits, group_size=group_size, symmetric=symmetric)
    groups = -(-k // group_size)
    assert qt.codes.dtype == torch.uint8
    assert qt.codes.shape == (n, k)
    assert qt.scales.shape == (groups, n)
    assert bool((qt.scales > 0).all())
    assert (qt.zeros is None) == symmetric
    if qt.zeros is not None:
        assert qt.zeros.shape == (groups, n)
        assert not qt.zeros.is_floating_point()
        assert 0 <= int(qt.zeros.min()) <= int(qt.zeros.max()) < 2**bits
    assert int(qt.codes.max()) < 2**bits

    def error(codes: Tensor) -> Tensor:
        return (
            testing.dequantized_weight(codes, qt.scales, qt.zeros, group_size, bits).double() - weight.double()
        ).abs()

    chosen = error(qt.codes)
    for code in range(0, 2**bits, 1 if bits == 4 else 5):
        better = error(torch.full_like(qt.codes, code)) < chosen
        assert not bool(better.any()), f"code {code} is nearer than {int(qt.codes[better][0])} at {better.nonzero()[0]}"


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_range_of_codes_is_used(bits: int, symmetric: bool) -> None:
    """Every group's extremes reach the ends of the range, to within one step."""
    qt = qcutlass.quantize(normal(30, 256), bits=bits, group_size=64, symmetric=symmetric)
    codes = qt.codes.reshape(30, 4, 64).int()
    low, high = codes.amin(2), codes.amax(2)
    reach = torch.maximum(high, 2**bits - low) if symmetric else high - low
    assert int(reach.min()) >= 2**bits - 2


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-7, 6e4, -6e4])
def test_constant_groups(value: float, bits: int, symmetric: bool) -> None:
    weight = torch.full((3, 64), value)
    qt = qcutlass.quantize(weight, bits=bits, group_size=32, symmetric=symmetric)
    result = dequantized(qt, 32, bits)
    assert bool(qt.scales.isfinite().all())
    assert bool(result.isfinite().all())
    step = float(qt.scales.float().max())
    assert float((result - weight).abs().max()) <= step
    if value == 0:
        assert bool((result == 0).all())


def test_weights_that_are_on_a_grid_come_back_exactly() -> None:
    codes = torch.randint(0, 16, (24, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scales = torch.full((4, 24), 0.125, dtype=torch.float16)
    zeros = torch.full((4, 24), 6, dtype=torch.uint8)
    weight = testing.dequantized_weight(codes, scales, zeros, 32, 4)
    qt = qcutlass.quantize(weight, bits=4, group_size=32, symmetric=False)
    testing.assert_equal(dequantized(qt, 32, 4), weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_quantized_weights_go_through_the_product(bits: int, symmetric: bool, seed: int) -> None:
    weight = normal(48, 200, torch.float16, seed)
    qt = qcutlass.quantize(weight, bits=bits, group_size=64, symmetric=symmetric)
    packed = qcutlass.preprocess_weights(qt.codes, bits=bits)
    a = torch.randn(5, 200, generator=torch.Generator().manual_seed(seed)).half()
    out = qcutlass.gemm(a, packed, qt.scales, qt.zeros, group_size=64)
    testing.assert_close(out, testing.reference(a, dequantized(qt, 64, bits)), label=f"seed {seed}")


def test_one_group_a_channel_is_asked_for_by_none_or_k() -> None:
    weight = normal(8, 100)
    per_channel = qcutlass.quantize(weight, bits=4, group_size=None)
    whole = qcutlass.quantize(weight, bits=4, group_size=100)
    assert per_channel.scales.shape == (1, 8)
    assert torch.equal(per_channel.codes, whole.codes)
    assert torch.equal(per_channel.scales, whole.scales)


def test_views_and_larger_weights_give_the_same_codes() -> None:
    weight = normal(64, 96)
    expected = qcutlass.quantize(weight, bits=4, group_size=32)
    for view in (weight.T.contiguous().T, weight.repeat_interleave(2, dim=1)[:, ::2]):
        qt = qcutlass.quantize(view, bits=4, group_size=32)
        assert torch.equal(qt.codes, expected.codes)
        assert torch.equal(qt.scales, expected.scales)


def test_the_weight_is_left_alone() -> None:
    weight = normal(8, 64)
    before = weight.clone()
    qcutlass.quantize(weight, bits=8, group_size=32)
    assert torch.equal(weight, before)


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.uint8), (4, torch.int32), (8, torch.int32)])
def test_zeros_out_of_range_are_refused(bits: int, dtype: torch.dtype) -> None:
    qt = qcutlass.quantize(normal(20, 64), bits=bits, group_size=32)
    for value in (0, 2**bits):
        dataclasses.replace(qt, zeros=torch.full((2, 20), value, dtype=dtype))
    for value in (2**bits + 1, 255 if dtype == torch.uint8 else -1):
        with pytest.raises(ValueError, match=rf"zeros: expected integers in \[0, {2**bits}\]"):
            dataclasses.replace(qt, zeros=torch.full((2, 20), value, dtype=dtype))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 5}, "bits: expected one of 4, 8, got 5"),
        ({"codes": torch.zeros(4, dtype=torch.uint8)}, r"codes: expected shape \[N, K\], got \[4\]"),
        ({"group_size": 0}, "group_size: expected at least 1, got 0; pass K for one group a channel"),
        (
            {"scales": torch.ones(1, 3)},
            r"scales: expected shape \[G, N\] = \[2, 3\] beside codes \[3, 16\] in gr",
        ),
        ({"scales": torch.ones(2, 4)}, r"scales: .*, got \[2, 4\]"),
        ({"zeros": torch.ones(2, dtype=torch.uint8)}, r"zeros: expected shape \[G, N\] = \[2, 3\] .*, got \[2\]"),
        ({"minimums": torch.ones(3, 3)}, r"minimums: expected shape \[G, N\] = \[2, 3\] .*, got \[3, 3\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {
        "codes": torch.zeros(3, 16, dtype=torch.uint8),
        "scales": torch.ones(2, 3),
        "zeros": None,
        "bits": 4,
        "group_size": 8,
    }
    assert qcutlass.QuantizedTensor(**parts).dequantize().shape == (3, 16)
    with pytest.raises(ValueError, match=message):
        qcutlass.QuantizedTensor(**(parts | changed))


@pytest.mark.parametrize("shape", [(2, 1), (0, 1), (1, 2)])
def test_super_blocks_of_other_scales_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"super_scales: expected shape \[B, N\], B a divisor of G, beside scales"):
        qcutlass.expand_scales(torch.ones(5, 1, dtype=torch.uint8), torch.ones(shape, dtype=torch.float16))
