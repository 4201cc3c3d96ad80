"""Quantisers that look at data, on a GPU: how long a large layer takes, and that all of it repeats."""

from __future__ import annotations

import time

import pytest
import torch
from tests.python.test_algorithms import SCHEMES, in_order, layer, same
from torch import Tensor

from qcutlass import QuantizedTensor, WeightOnly, testing
from qcutlass.algorithms import (
    InputStatistics,
    awq,
    awq_scales,
    gptq,
    output_error,
    round_to_nearest,
    search_smoothing,
)

pytestmark = pytest.mark.gpu

SECONDS = 20.0  # for a layer of 4096 x 4096
DEVICE = "cuda"


def on_gpu(seed: int, n: int, k: int) -> tuple[Tensor, InputStatistics]:
    """`layer`, whose inputs are looked at on the GPU."""
    weight, _, x = layer(seed, n, k)
    statistics = InputStatistics.empty(k, DEVICE, rows_a_call=64)
    for part in x.to(DEVICE).split(100):
        statistics.add(part)
    return weight.to(DEVICE), statistics


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_of_a_large_layer(symmetric: bool, act_order: bool, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    weight, statistics = on_gpu(seed, 4096, 4096)
    scheme, moment = WeightOnly(4, 128, symmetric), statistics.second_moment
    torch.cuda.synchronize()
    begin = time.perf_counter()
    found = gptq(weight, moment, scheme, act_order=act_order)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    with capsys.disabled():
        print(f"\ngptq of 4096 x 4096, {scheme}, act_order={act_order}: {seconds:.2f} s")
    assert seconds < SECONDS
    nearest = round_to_nearest(weight, scheme).dequantize(torch.float32)
    assert output_error(weight, in_order(found), moment) < output_error(weight, nearest, moment) / 3
    testing.poison_free_memory(DEVICE, megabytes=512)
    again = gptq(weight, moment, scheme, act_order=act_order)
    assert same(again.weight, found.weight)
    assert again.damping == found.damping
    assert (found.perm is None and again.perm is None) if not act_order else torch.equal(again.perm, found.perm)


def assert_same_but_for_ties(found: QuantizedTensor, expected: QuantizedTensor, weight: Tensor) -> None:
    """Codes less their zeros are the same, or neighbours whose weight is half a step from both."""
    size = expected.group_size

    def of_weights(groups: Tensor) -> Tensor:
        return groups.cpu().T.repeat_interleave(size, 1)[:, : weight.shape[1]]

    middle = 2 ** (expected.bits - 1)
    steps, others = (
        q.codes.cpu().long() - (middle if q.zeros is None else of_weights(q.zeros).long()) for q in (expected, found)
    )
    exact = weight.double() / of_weights(expected.scales).double()
    apart = steps != others
    assert bool(((steps - others).abs()[apart] == 1).all())
    # A scale's error of 2^-23 moves a quotient of up to 2^8 by 2^-15.
    assert bool(((exact - (steps + others) / 2).abs()[apart] < 2**-14).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_they_find_what_they_find_on_the_cpu(scheme: WeightOnly, seed: int) -> None:
    weight, statistics = on_gpu(seed, 48, 160)
    moment = statistics.second_moment
    plain = round_to_nearest(weight, scheme, clip=False)
    assert plain.codes.device.type == DEVICE
    on_cpu = round_to_nearest(weight.cpu(), scheme, clip=False)
    # CUDA divides by a number by multiplying with its inverse: neighbouring floats, other codes for what is between.
    bits, expected = (scales.float().view(torch.int32) for scales in (plain.scales.cpu(), on_cpu.scales))
    assert (bits - expected).abs().max() <= 1
    assert_same_but_for_ties(plain, on_cpu, weight.cpu())
    nearest = output_error(weight, round_to_nearest(weight, scheme).dequantize(torch.float32), moment)
    for act_order in (False, True):
        found = gptq(weight, moment, scheme, act_order=act_order)
        assert output_error(weight, in_order(found), moment) < nearest / 3
    scales = awq_scales([weight], statistics, scheme)
    assert scales.error <= scales.plain_error
    assert scales.exponent > 0 or scheme.bits == 8
    scaled = awq(weight * scales.scales, statistics.divided(scales.scales).second_moment, scheme)
    assert output_error(weight, scaled.dequantize(torch.float32) / scales.scales, moment) < nearest
    smoothing = search_smoothing([weight], statistics)
    assert smoothing.alpha is not None
    assert smoothing.error < 0.7 * smoothing.plain_error


def test_they_repeat(seed: int) -> None:
    weight, statistics = on_gpu(seed, 512, 1024)
    scheme, moment = WeightOnly(4, 64), statistics.second_moment
    first = (
        awq(weight, moment, scheme),
        awq_scales([weight], statistics, scheme),
        search_smoothing([weight], statistics),
    )
    for _ in range(5):
        testing.poison_free_memory(DEVICE, megabytes=64)
        again = on_gpu(seed, 512, 1024)[1]
        for name in ("second_moment", "mean_abs", "absmax", "rows"):
            assert torch.equal(getattr(again, name), getattr(statistics, name)), name
        assert same(awq(weight, moment, scheme), first[0])
        scales, smoothing = awq_scales([weight], statistics, scheme), search_smoothing([weight], statistics)
        assert torch.equal(scales.scales, first[1].scales)
        assert (smoothing.alpha, smoothing.error) == (first[2].alpha, first[2].error)
