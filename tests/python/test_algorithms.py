"""Quantisers that look at data: what they minimise, their special cases, and inputs that are hard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import qcutlass
from qcutlass import WeightOnly
from qcutlass.algorithms import (
    GptqResult,
    InputStatistics,
    awq,
    awq_scales,
    gptq,
    output_error,
    round_to_nearest,
    search_smoothing,
)
from qcutlass.quantized import QuantizedTensor
from qcutlass.testing import quantizing

SCHEMES = [
    WeightOnly(bits, group, symmetric)
    for bits, group, symmetric in [(4, 32, True), (4, 48, False), (4, None, True), (4, 192, False), (8, 64, False)]
]


def layer(seed: int, n: int = 48, k: int = 160, rank: int = 24) -> tuple[Tensor, InputStatistics, Tensor]:
    """Weights, and inputs that lie near a few dimensions with a few loud channels: [N, K], statistics, [512, K]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, rank, generator=generator) @ torch.randn(rank, k, generator=generator)
    x += 0.1 * torch.randn(512, k, generator=generator)
    x[:, torch.randperm(k, generator=generator)[:4]] *= 12
    statistics = InputStatistics.empty(k, rows_a_call=64)
    for part in x.split(100):
        statistics.add(part)
    return torch.randn(n, k, generator=generator), statistics, x


def in_order(found: GptqResult) -> Tensor:
    weight = found.weight.dequantize(torch.float32)
    if found.perm is None:
        return weight
    ordered = torch.empty_like(weight)
    ordered[:, found.perm.long()] = weight
    return ordered


def same(a: Any, b: Any) -> bool:
    pairs = [(a.codes, b.codes), (a.scales, b.scales), (a.zeros, b.zeros)]
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


def same_but_for_ties(weight: Tensor, a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Equal, except in groups where both grids cost the same within the rounding of a sum of squares in fp32."""
    n, columns = len(weight), range(0, weight.shape[1], a.group_size)
    other = a.scales.T != b.scales.T  # [N, G]
    if a.zeros is not None and b.zeros is not None:
        other |= a.zeros.T != b.zeros.T
    costs = []
    for q in (a, b):
        errors = (q.dequantize(torch.float32) - weight).double().square()
        costs.append(torch.stack([errors[:, k : k + a.group_size].sum(dim=1) for k in columns], dim=1))
    tied = costs[0].maximum(costs[1]) <= costs[0].minimum(costs[1]) * quantizing.SUM_SLACK
    elsewhere = ~other.repeat_interleave(a.group_size, dim=1)[:, : weight.shape[1]]
    codes = torch.equal(a.codes[elsewhere], b.codes[elsewhere])
    return codes and bool(tied[other].all()) and int(other.sum()) <= n // 8


def test_statistics_are_means_over_all_tokens(seed: int) -> None:
    _, found, x = layer(seed)
    assert x.shape == (512, 160)
    exact = x.double()
    assert found.count == len(x)
    assert quantizing.relative_error(found.second_moment, exact.T @ exact / len(x)) <= quantizing.MEANS
    assert quantizing.relative_error(found.mean_abs, exact.abs().mean(dim=0)) <= quantizing.MEANS
    assert torch.equal(found.absmax, x.abs().amax(dim=0))
    assert found.rows.shape == (64 * 5 + 12, 160)  # the last call has 12 tokens
    assert all(bool((x == row).all(dim=1).any()) for row in found.rows)
    halved = found.divided(torch.full((160,), 2.0))
    assert torch.equal(halved.second_moment, found.second_moment / 4)
    assert torch.equal(halved.mean_abs * 2, found.mean_abs)
    assert torch.equal(halved.absmax * 2, found.absmax)
    assert torch.equal(halved.rows * 2, found.rows)
    with pytest.raises(ValueError, match="factors: expected positive numbers, got 0"):
        found.divided(torch.arange(160.0))


def test_statistics_do_not_grow_with_the_tokens() -> None:
    found = InputStatistics.empty(4)
    for _ in range(3):
        found.add(torch.full((200, 4), 2.0, dtype=torch.float16))
    found.add(torch.empty(0, 4))
    assert quantizing.relative_error(found.second_moment, torch.full((4, 4), 4.0)) <= quantizing.MEANS
    assert found.count == 600
    with pytest.raises(ValueError, match=r"a: expected shape \[\.\.\., 4\]"):
        found.add(torch.ones(2, 5))
    assert found.count == 600


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_clipping_never_makes_a_group_worse(scheme: WeightOnly, seed: int) -> None:
    weight = torch.randn(40, 200, generator=torch.Generator().manual_seed(seed))
    weight[::5] = 0.0
    weight[1::5, ::7] *= 4
    plain = qcutlass.quantize(weight, scheme.bits, scheme.group_size, scheme.symmetric)
    assert same(round_to_nearest(weight, scheme, clip=False), plain)
    found = round_to_nearest(weight, scheme)
    step, errors = plain.group_size, [(q.dequantize(torch.float32) - weight).square() for q in (found, plain)]
    for begin in range(0, 200, step):
        ours, theirs = (error[:, begin : begin + step].double().sum(dim=1) for error in errors)
        assert bool((ours <= theirs * quantizing.SUM_SLACK).all())
    assert bool((found.dequantize(torch.float32)[::5] == 0).all())
    if scheme.bits == 4 and scheme.group_size is None:
        assert errors[0].sum() < 0.95 * errors[1].sum()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_beats_rounding_on_correlated_inputs(scheme: WeightOnly, act_order: bool, seeds: Iterator[int]) -> None:
    """By five times in four layers together; in a single one loud channels may come last, where nothing makes up."""
    errors = []
    for _ in range(4):
        weight, statistics, x = layer(next(seeds))
        found = gptq(weight, statistics.second_moment, scheme, act_order=act_order)
        nearest = round_to_nearest(weight, scheme).dequantize(torch.float32)
        errors.append([output_error(weight, other, statistics.second_moment) for other in (in_order(found), nearest)])
        exact = ((in_order(found).double() - weight.double()) @ x.double().T).square().sum() / len(x)
        assert abs(errors[-1][0] / float(exact) - 1) <= quantizing.OUTPUTS
        assert found.damping == 0.01
    ours, theirs = (sum(error) for error in zip(*errors, strict=True))
    assert ours < theirs / 5


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("clip", [False, True])
def test_gptq_rounds_to_nearest_where_inputs_are_uncorrelated(scheme: WeightOnly, clip: bool, seed: int) -> None:
    weight = torch.randn(33, 200, generator=torch.Generator().manual_seed(seed))
    nearest = round_to_nearest(weight, scheme, clip=clip)
    found = gptq(weight, 4 * torch.eye(200), scheme, clip=clip)
    assert same_but_for_ties(weight, found.weight, nearest)
    assert found.perm is None
    unseen = gptq(weight, torch.zeros(200, 200), scheme, clip=clip)
    assert same_but_for_ties(weight, unseen.weight, nearest)


def test_gptq_and_rounding_break_a_tie_alike() -> None:
    """In one group here two ranges cost the same but for 1.4e-8 of it; sums in two orders would choose differently."""
    weight = torch.randn(33, 200, generator=torch.Generator().manual_seed(1926971175))
    nearest = round_to_nearest(weight, WeightOnly(4, 32, True))
    assert same(gptq(weight, 4 * torch.eye(200), WeightOnly(4, 32, True)).weight, nearest)


def test_gptq_is_the_elimination_of_one_column_after_the_other(seed: int) -> None:
    """Without blocks and Cholesky factors: the inverse Hessian of the columns left, in float64."""
    weight, statistics, _ = layer(seed, n=8, k=48)
    hessian = statistics.second_moment.double()
    hessian += 0.05 * hessian.diagonal().mean() * torch.eye(48)
    q = gptq(weight, statistics.second_moment, WeightOnly(4, 16, False), damping=0.05, clip=False).weight
    values, left = q.dequantize(torch.float64), weight.double()
    for column in range(48):
        inverse = torch.linalg.inv(hessian[column:, column:])
        error = (left[:, column] - values[:, column]) / inverse[0, 0]
        left[:, column + 1 :] -= error[:, None] * inverse[0, 1:]
        if column + 1 < 48:  # the code of the next column is the nearest one to what is left of it
            group = (column + 1) // 16
            assert q.zeros is not None
            scale, zero = q.scales[group].double(), q.zeros[group].double()
            expected = (left[:, column + 1] / scale + zero).clamp(0, 15)
            off = (q.codes[:, column + 1].double() - expected).abs()
            assert float(off.max()) <= 0.5 + quantizing.ELIMINATION


def test_act_order_takes_loud_columns_first(seed: int) -> None:
    weight, statistics, _ = layer(seed)
    found = gptq(weight, statistics.second_moment, WeightOnly(4, 32), act_order=True)
    assert found.perm is not None
    assert found.perm.dtype == torch.int32
    assert found.perm.sort().values.tolist() == list(range(160))
    diagonal = statistics.second_moment.diagonal()[found.perm.long()].view(5, 32)
    assert bool((diagonal[1:].amax(dim=1) <= diagonal[:-1].amin(dim=1)).all())
    assert bool((found.perm.view(5, 32).diff(dim=1) > 0).all())
    linear = qcutlass.QuantLinear.from_quantized(found.weight, perm=found.perm)
    x = torch.eye(160)
    assert torch.equal(linear(x).T, in_order(found))


def test_damping_grows_until_there_is_a_factor(seed: int) -> None:
    weight, _, _ = layer(seed, k=64)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    singular = 1e6 * (x.T @ x)  # of rank 3
    found = gptq(weight, singular, WeightOnly(4, 32), damping=0.0)
    assert 0 < found.damping < 0.1
    nearest = round_to_nearest(weight, WeightOnly(4, 32)).dequantize()
    assert output_error(weight, in_order(found), singular) < output_error(weight, nearest, singular)
    with pytest.raises(ValueError, match="second_moment: expected a positive semidefinite matrix"):
        gptq(weight, torch.full((64, 64), -1000.0) + torch.eye(64) * 1001, WeightOnly(4, 32))


def test_gptq_leaves_channels_that_were_never_seen(seed: int) -> None:
    weight, statistics, _ = layer(seed)
    moment = statistics.second_moment.clone()
    moment[7], moment[:, 7] = 0.0, 0.0
    found = gptq(weight, moment, WeightOnly(8, 32))
    column = in_order(found)[:, 7]
    assert float((column - weight[:, 7]).abs().max()) <= float(found.weight.scales[0].max()) / 2


def test_quantisers_repeat(seed: int) -> None:
    weight, statistics, _ = layer(seed)
    scheme, moment = WeightOnly(4, 32), statistics.second_moment
    assert same(gptq(weight, moment, scheme).weight, gptq(weight.clone(), moment.clone(), scheme).weight)
    assert same(awq(weight, moment, scheme), awq(weight.clone(), moment.clone(), scheme))
    first, second = (awq_scales([weight], statistics, scheme) for _ in range(2))
    assert torch.equal(first.scales, second.scales)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_awq_scales_are_the_best_of_those_tried(scheme: WeightOnly, seed: int) -> None:
    weight, statistics, _ = layer(seed)
    parts = [weight[:20], weight[20:]]
    errors = {}
    for exponent in (0.0, 0.25, 0.5, 0.75):
        found = awq_scales(parts, statistics, scheme, exponents=[exponent])
        errors[exponent] = found.plain_error if exponent == 0 else min(found.error, found.plain_error)
        if found.exponent == exponent:
            s = found.scales
            approximations = [round_to_nearest(part * s, scheme, clip=False).dequantize() / s for part in parts]
            total = sum(
                output_error(p, a, statistics.second_moment) for p, a in zip(parts, approximations, strict=True)
            )
            assert abs(total / found.error - 1) <= quantizing.OUTPUTS
    best = awq_scales(parts, statistics, scheme, exponents=list(errors))
    assert best.error == min(errors.values())
    assert best.error <= best.plain_error
    if scheme.bits == 4:
        assert best.error < 0.9 * best.plain_error
        assert best.exponent > 0
    assert bool((best.scales > 0).all())


def test_awq_clips_for_the_outputs(seed: int) -> None:
    weight, statistics, _ = layer(seed)
    scheme, moment = WeightOnly(4, None), statistics.second_moment
    found, nearest = awq(weight, moment, scheme).dequantize(), round_to_nearest(weight, scheme).dequantize()
    assert output_error(weight, found, moment) < output_error(weight, nearest, moment)
    assert same(awq(weight, torch.eye(160), scheme), round_to_nearest(weight, scheme))


def test_smoothing_is_the_best_of_those_tried(seed: int) -> None:
    weight, statistics, _ = layer(seed)
    best = search_smoothing([weight[:20], weight[20:]], statistics)
    assert best.alpha is not None
    assert best.factors is not None
    assert best.error < 0.7 * best.plain_error
    layers = [
        qcutlass.layers.Int8Linear(*qcutlass.quantize_weights_int8(weight * s), smooth=s)
        for s in (best.factors, torch.ones(160))
    ]
    errors = [float((linear(statistics.rows) - statistics.rows @ weight.T).square().sum()) for linear in layers]
    assert abs(errors[0] / best.error - 1) <= quantizing.OUTPUTS
    assert abs(errors[1] / best.plain_error - 1) <= quantizing.OUTPUTS
    flat = InputStatistics.empty(8, rows_a_call=4)
    flat.add(torch.eye(8))
    assert search_smoothing([torch.ones(2, 8)], flat).factors is None


EYE = torch.eye(8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"second_moment": torch.eye(7)}, r"second_moment: .* = \[8, 8\] for weight \[2, 8\], got \[7, 7\]"),
        ({"second_moment": torch.ones(8)}, r"second_moment: .* = \[8, 8\] for weight \[2, 8\], got \[8\]"),
        ({"second_moment": EYE * torch.nan}, "second_moment: expected finite values.*were activations finite"),
        ({"second_moment": -2 * EYE}, "second_moment: expected a mean of x xT, .* got -2 there"),
        ({"second_moment": EYE.to("meta")}, "second_moment is on meta, weight is on cpu"),
        ({"weight": torch.full((2, 8), torch.inf)}, "weight: expected finite values"),
        ({"weight": torch.ones(8)}, r"weight: expected shape \[N, K\], got \[8\]"),
        ({"weight": torch.ones(2, 0)}, r"weight: K must be at least 1, got shape \[2, 0\]"),
    ],
)
@pytest.mark.parametrize("quantizer", [gptq, awq])
def test_refusals(quantizer: Any, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"weight": torch.ones(2, 8), "second_moment": EYE, **change}
    with pytest.raises(ValueError, match=message):
        quantizer(**arguments)


def test_refusals_of_options() -> None:
    weight, statistics = torch.ones(2, 8), InputStatistics.empty(8)
    with pytest.raises(ValueError, match="damping: expected a number in"):
        gptq(weight, EYE, damping=-1.0)
    w8a8: Any = qcutlass.W8A8()
    message = r"scheme: expected a qcutlass\.WeightOnly or None, got W8A8; activations keep their type"
    for call in (
        lambda: round_to_nearest(weight, w8a8),
        lambda: gptq(weight, EYE, w8a8),
        lambda: awq(weight, EYE, w8a8),
        lambda: awq_scales([weight], statistics, w8a8),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(TypeError, match="clip: expected True or False, got int"):
        round_to_nearest(weight, clip=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight: a scale overflows torch\.float16"):
        round_to_nearest(weight * 1e9, WeightOnly(4, scale_dtype=torch.float16))
    with pytest.raises(ValueError, match="weight: K must be at least 1"):
        round_to_nearest(torch.ones(2, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranges_past_float32_are_told_what_helps(dtype: torch.dtype) -> None:
    """Other types of scales do not."""
    weight = torch.tensor([3e38, -3e38]).repeat(4, 16).to(dtype)
    calls: list[Any] = [
        lambda symmetric: qcutlass.quantize(weight, 4, 32, symmetric),
        lambda symmetric: round_to_nearest(weight, WeightOnly(4, 32, symmetric)),
        lambda symmetric: gptq(weight, torch.eye(32), WeightOnly(4, 32, symmetric)).weight,
    ]
    for call in calls:
        message = r"^weight: the range of a group overflows float32, got weights from -3e\+38 to .* pass symmetric=True"
        with pytest.raises(ValueError, match=message):
            call(False)
        assert bool(call(True).scales.isfinite().all())  # as it says


@pytest.mark.parametrize("search", [awq_scales, search_smoothing])
def test_refusals_of_searches(search: Any) -> None:
    weight = torch.ones(2, 8)

    def refused(error: type[Exception], message: str, weights: Any = (weight,), **change: Any) -> None:
        statistics = InputStatistics.empty(8, rows_a_call=4)
        statistics.add(torch.ones(4, 8))
        for name, value in change.items():
            setattr(statistics, name, value)
        with pytest.raises(error, match=message):
            search(weights, statistics)

    refused(ValueError, "weights: expected a matrix or several, got none", [])
    refused(TypeError, "weights: expected a list of matrices, got Tensor", torch.ones(2, 8))
    refused(ValueError, r"second_moment: .* = \[9, 9\] for weights\[1\] \[2, 9\]", [torch.ones(2, 8), torch.ones(2, 9)])
    refused(ValueError, r"weights\[0\]: K must be at least 1", [torch.ones(2, 0)])
    refused(ValueError, r"weights\[0\]: expected finite values", [torch.full((2, 8), torch.nan)])
    refused(ValueError, "second_moment: expected a mean of x xT", second_moment=-EYE)
    refused(ValueError, r"statistics\.mean_abs: expected finite values", mean_abs=torch.full((8,), torch.nan))
    refused(ValueError, r"statistics\.mean_abs: expected magnitudes, got a negative one", mean_abs=-torch.ones(8))
    refused(ValueError, r"statistics\.absmax: expected shape \[K\] = \[8\], got \[7\]", absmax=torch.ones(7))
    refused(ValueError, r"statistics\.rows: expected finite values", rows=torch.full((1, 8), torch.nan))
    with pytest.raises(TypeError, match="statistics: expected an InputStatistics, got Tensor"):
        search([torch.ones(2, 8)], EYE)
    if search is search_smoothing:
        refused(ValueError, "statistics: expected some rows", rows=torch.empty(0, 8))


def test_refusals_of_errors() -> None:
    with pytest.raises(ValueError, match=r"other: expected the shape of weight, \[2, 8\], got \[1, 8\]"):
        output_error(torch.ones(2, 8), torch.ones(1, 8), EYE)
    with pytest.raises(ValueError, match=r"second_moment: .* = \[8, 8\] for weight \[2, 8\], got \[7, 7\]"):
        output_error(torch.ones(2, 8), torch.ones(2, 8), torch.eye(7))


def reads_of(call: Callable[[], object]) -> int:
    """How often the host waits for a number of the device: each is a synchronisation on a GPU."""
    found = 0

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal found
            found += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    with Reads():
        call()
    return found


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_reads_nothing_back_in_a_column(act_order: bool, seed: int) -> None:
    """A thousand columns would be a thousand synchronisations of a GPU: one a group is allowed, for errors."""
    for k in (256, 1024):
        weight, statistics, _ = layer(seed, k=k)
        found = reads_of(lambda w=weight, s=statistics: gptq(w, s.second_moment, act_order=act_order))  # type: ignore[misc]
        assert k // 128 <= found <= k // 128 + 8
