"""SmoothQuant's parts: the factors, the calibration, the folding into two layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.python.modules import RMSNorm, randn, randomized
from torch import nn

import qcutlass
from qcutlass.algorithms.calibration import ActivationStatistics

# Factors


@pytest.mark.parametrize("alpha", [0, 0.25, 0.5, 0.85, 1])
@pytest.mark.parametrize("count", [1, 3])
def test_factors_are_those_of_the_formula(alpha: float, count: int, seed: int) -> None:
    weights = [randn(5 + i, 40, seed=seed + i) for i in range(count)]
    absmax = randn(40, seed=seed + 9).abs() * 10
    s = qcutlass.smooth(absmax, weights if count > 1 else weights[0], alpha)
    largest = [max(abs(float(w[n, k])) for w in weights for n in range(w.shape[0])) for k in range(40)]
    expected = [float(absmax[k]) ** alpha / largest[k] ** (1 - alpha) for k in range(40)]
    assert s.dtype == torch.float32
    assert max(abs(a / b - 1) for a, b in zip(s.tolist(), expected, strict=True)) < 2.0**-23


def test_half_way_both_sides_are_equally_hard(seed: int) -> None:
    weight, absmax = randn(8, 32, seed=seed), randn(32, seed=seed + 1).abs()
    s = qcutlass.smooth(absmax, weight)
    ratio = (absmax / s) / (weight * s).abs().amax(dim=0)
    assert float((ratio - 1).abs().max()) < 2.0**-20


@pytest.mark.parametrize("alpha", [0, 0.3, 0.5, 1])
def test_dead_channels_stay_as_they_are(alpha: float) -> None:
    weight = torch.tensor([[0.0, 2.0, 0.0, 3.0], [0.0, -1.0, 0.0, 0.5]])
    s = qcutlass.smooth(torch.tensor([5.0, 0.0, 0.0, 4.0]), weight, alpha)
    assert s[:3].tolist() == [1, 1, 1]
    assert abs(float(s[3]) - 4**alpha / 3 ** (1 - alpha)) < 1e-6


@pytest.mark.parametrize("alpha", [0, 0.5, 0.9, 1])
def test_extreme_channels_get_normal_factors(alpha: float) -> None:
    smallest, largest = 2.0**-149, torch.finfo(torch.float32).max
    values = [smallest, torch.finfo(torch.float32).tiny, 1.0, largest]
    grid = torch.tensor([(a, w) for a in values for w in values])
    s = qcutlass.smooth(grid[:, 0], grid[:, 1][None], alpha)
    assert bool((s >= torch.finfo(torch.float32).tiny).all())
    assert bool(s.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_factors_of_16_bit_operands_are_computed_in_full(dtype: torch.dtype, seed: int) -> None:
    weight, absmax = randn(8, 32, seed=seed).to(dtype), randn(32, seed=seed + 1).abs().to(dtype)
    s = qcutlass.smooth(absmax, weight)
    assert s.dtype == torch.float32
    assert torch.equal(s, qcutlass.smooth(absmax.float(), weight.float()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"act_absmax": torch.ones(3)}, ValueError, r"act_absmax: expected shape \[K\] = \[4\], got \[3\]"),
        ({"act_absmax": [1.0] * 4}, TypeError, "act_absmax: expected a torch.Tensor"),
        ({"act_absmax": torch.tensor([1.0, -1, 1, 1])}, ValueError, "act_absmax: .*negative"),
        ({"act_absmax": torch.tensor([1.0, math.nan, 1, 1])}, ValueError, "act_absmax: expected finite"),
        ({"weight": torch.full((2, 4), math.inf)}, ValueError, "weight: expected finite"),
        ({"weight": [torch.ones(2, 4), torch.full((2, 4), math.nan)]}, ValueError, r"weight\[1\]: expected finite"),
        ({"weight": [torch.ones(2, 4), torch.ones(2, 5)]}, ValueError, r"weight\[1\]: expected K = 4 columns"),
        ({"weight": []}, ValueError, "weight: expected a matrix or several"),
        ({"weight": torch.ones(4)}, ValueError, r"weight: expected shape \[N, K\]"),
        ({"alpha": 1.5}, ValueError, r"alpha: expected a number in \[0, 1\], got 1.5"),
        ({"alpha": math.nan}, ValueError, r"alpha: expected a number in \[0, 1\]"),
        ({"alpha": "half"}, TypeError, "alpha: expected a number"),
    ],
)
def test_smooth_says_what_is_wrong(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"act_absmax": torch.ones(4), "weight": torch.ones(2, 4)}
    with pytest.raises(error, match=message):
        qcutlass.smooth(**(good | arguments))


# Calibration


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_extremes_of_all_batches_are_recorded(dtype: torch.dtype, seed: int) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).to(dtype)
    batches = [randn(*shape, 6, seed=seed + i).to(dtype) for i, shape in enumerate([(7,), (2, 3), (1,), (0,), ()])]
    with torch.no_grad(), qcutlass.calibrate(model) as statistics:
        for batch in batches:
            model(batch)
    rows = torch.cat([batch.reshape(-1, 6) for batch in batches])
    with torch.no_grad():
        hidden = torch.cat([model[1](model[0](batch)).reshape(-1, 5) for batch in batches])
    assert list(statistics) == ["0", "2"]
    for record, seen in ((statistics["0"], rows), (statistics["2"], hidden)):
        assert record.minimum.dtype == record.maximum.dtype == torch.float32
        assert torch.equal(record.minimum, seen.amin(dim=0).float())
        assert torch.equal(record.maximum, seen.amax(dim=0).float())
        assert torch.equal(record.absmax, seen.abs().amax(dim=0).float())
        assert record.smooth is None
        low, high = record.extremes()
        assert float(low) == min(0.0, float(seen.min()))
        assert float(high) == max(0.0, float(seen.max()))


@pytest.mark.parametrize(("values", "extremes"), [([2.0, 3], (0, 3)), ([-2.0, -3], (-3, 0)), ([-1.0, 4], (-1, 4))])
def test_zero_is_in_every_range(values: list[float], extremes: tuple[float, float]) -> None:
    record = ActivationStatistics.of(torch.tensor([values], requires_grad=True))
    assert tuple(map(float, record.extremes())) == extremes
    assert not record.absmax.requires_grad
    halved = ActivationStatistics(record.minimum, record.maximum, smooth=torch.full((2,), 2.0))
    assert tuple(map(float, halved.extremes())) == (extremes[0] / 2, extremes[1] / 2)


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_hooks_go_with_the_block_even_on_errors() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    with qcutlass.calibrate(model) as statistics:
        assert hooks_of(model) == 2
        model(torch.ones(2, 6))
    assert hooks_of(model) == 0
    before = statistics["0"]
    model(torch.full((2, 6), 100.0))
    assert statistics["0"] is before
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), qcutlass.calibrate(model):
        model(torch.ones(2, 7))
    assert hooks_of(model) == 0


def test_shared_layers_are_recorded_under_each_name() -> None:
    shared = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        shared.weight.copy_(2 * torch.eye(4))
    model = nn.Sequential(shared, nn.Sequential(shared), nn.Linear(4, 4))
    with qcutlass.calibrate(model) as statistics:
        model[1](input=model[0](torch.tensor([[1.0, -2, 0, 3]])))
    assert list(statistics) == ["0", "1.0"]  # the third was not called
    assert statistics["0"] is statistics["1.0"]
    assert statistics["0"].minimum.tolist() == [1, -4, 0, 3]
    assert statistics["0"].maximum.tolist() == [2, -2, 0, 6]


def test_recording_needs_no_gradients_and_keeps_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with qcutlass.calibrate(model) as statistics:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        with torch.inference_mode():
            model(torch.zeros(2, 4))
    assert not statistics["0"].maximum.requires_grad
    assert model[0].weight.grad is not None
    assert statistics["0"].minimum.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (torch.ones(3), TypeError, "model: expected a torch.nn.Module, got Tensor"),
        (nn.ReLU(), ValueError, "model: it has no layer of type Linear"),
    ],
)
def test_calibrate_says_what_is_wrong(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), qcutlass.calibrate(model):
        pass


def test_statistics_that_are_not_finite_cannot_scale() -> None:
    record = ActivationStatistics(torch.zeros(2), torch.tensor([1.0, math.inf]))
    with pytest.raises(ValueError, match="statistics: the recorded activations hold NaN or infinity"):
        record.extremes()
    poisoned = ActivationStatistics.of(torch.tensor([[1.0, math.nan]])).merged(
        ActivationStatistics.of(torch.ones(1, 2))
    )
    with pytest.raises(ValueError, match="NaN or infinity"):
        poisoned.extremes()


# Folding

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer_norm": nn.LayerNorm,
    "layer_norm_without_bias": lambda k: nn.LayerNorm(k, bias=False),
    "rms_norm": nn.RMSNorm,
    "llama_norm": RMSNorm,
    "linear": lambda k: nn.Linear(k, k),
    "linear_without_bias": lambda k: nn.Linear(k, k, bias=False),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_powers_of_two_fold_without_any_error(norm: Callable[[int], nn.Module], seed: int) -> None:
    previous, q, k = (randomized(module, seed) for module in (norm(32), nn.Linear(32, 8), nn.Linear(32, 5, bias=False)))
    x, s = randn(6, 32, seed=seed), torch.exp2(randn(32, seed=seed + 1).round())
    with torch.no_grad():
        before = previous(x), q(previous(x)), k(previous(x))
        weight = q.weight.clone()
        qcutlass.fold_smoothing(previous, [q, k], s)
        assert torch.equal(previous(x), before[0] / s)
        assert torch.equal(q.weight, weight * s)
        assert torch.equal(q(previous(x)), before[1])
        assert torch.equal(k(previous(x)), before[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_folded_weights_are_rounded_once(dtype: torch.dtype, seed: int) -> None:
    norm, linear = (randomized(module, seed).to(dtype) for module in (nn.LayerNorm(32), nn.Linear(32, 8)))
    s = qcutlass.smooth(randn(32, seed=seed).abs(), linear.weight)
    expected = [(norm.weight.float() / s).to(dtype), (norm.bias.float() / s).to(dtype), (linear.weight * s).to(dtype)]
    bias = linear.bias.clone()
    qcutlass.fold_smoothing(norm, linear, s)
    for found, right in zip((norm.weight, norm.bias, linear.weight), expected, strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, right)
    assert torch.equal(linear.bias, bias)


class BiasFirst(nn.LayerNorm):
    """A norm whose weight multiplies its bias, too."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (nn.functional.layer_norm(input, self.normalized_shape) + self.bias) * self.weight


def _tied() -> list[nn.Module]:
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)
    second.weight = first.weight
    return [first, second]


@pytest.mark.parametrize(
    ("previous", "linears", "s", "error", "message"),
    [
        (RMSNorm(8, offset=1.0), nn.Linear(8, 4), 2, ValueError, "RMSNorm is not proportional to its weight"),
        (BiasFirst(8), nn.Linear(8, 4), 2, ValueError, "BiasFirst is not proportional to its weight, plus its bias"),
        (nn.ReLU(), nn.Linear(8, 4), 2, TypeError, "norm_or_linear: ReLU has no weight to divide"),
        (nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 4), 2, TypeError, "LayerNorm has no weight to divide"),
        (nn.Conv2d(3, 8, 1), nn.Linear(8, 4), 2, TypeError, "expected a Linear, or a norm with a weight"),
        (nn.LayerNorm(6), nn.Linear(8, 4), 2, ValueError, r"s, for norm_or_linear: expected shape \[K\] = \[6\]"),
        (nn.Linear(8, 6), nn.Linear(8, 4), 2, ValueError, r"s, for norm_or_linear: expected shape \[K\] = \[6\]"),
        (nn.LayerNorm(8), [nn.Linear(8, 4), nn.Linear(6, 4)], 2, ValueError, r"s, for linears\[1\]: expected shape"),
        (nn.LayerNorm(8), [nn.Linear(8, 4), nn.ReLU()], 2, TypeError, r"linears\[1\]: expected a torch.nn.Linear"),
        (nn.LayerNorm(8), [nn.Linear(8, 4)] * 2, 2, ValueError, "linears: a layer or a weight comes twice"),
        (nn.LayerNorm(8), _tied(), 2, ValueError, "linears: a layer or a weight comes twice"),
        (nn.LayerNorm(8), [], 2, ValueError, "linears: expected at least one"),
        (nn.LayerNorm(8), nn.Linear(8, 4), 0, ValueError, "s: expected positive factors"),
        (nn.LayerNorm(8), nn.Linear(8, 4), math.nan, ValueError, "s, for norm_or_linear: expected finite"),
        (
            nn.LayerNorm(8),
            nn.Linear(8, 4).half(),
            1e7,
            ValueError,
            r"linears\[0\].weight: smoothing overflows",
        ),
        (nn.LayerNorm(8).half(), nn.Linear(8, 4), 1e-6, ValueError, "norm_or_linear.weight: smoothing overflows"),
        (nn.LayerNorm(8).half(), nn.Linear(8, 4), 1e9, ValueError, "norm_or_linear.weight: .* channel 0 to zero"),
        (nn.Linear(3, 8).half(), nn.Linear(8, 4), 1e9, ValueError, "norm_or_linear.weight: .* channel 0 to zero"),
        (nn.LayerNorm(8), nn.Linear(8, 4).half(), 1e-9, ValueError, r"linears\[0\].weight: .* channel 0 to zero"),
        (nn.BatchNorm1d(8), nn.Linear(8, 4), 2, ValueError, r"norm_or_linear: .* \[1, 8\], but BatchNorm1d .*eval\(\)"),
        (nn.BatchNorm2d(8).eval(), nn.Linear(8, 4), 2, ValueError, "norm_or_linear: .* but BatchNorm2d raised"),
    ],
)
def test_what_cannot_be_folded_stays_as_it_was(
    previous: nn.Module, linears: Any, s: float, error: type[Exception], message: str
) -> None:
    modules = [previous, *(linears if isinstance(linears, list) else [linears])]
    before = [value.clone() for module in modules for value in module.state_dict().values()]
    with pytest.raises(error, match=message):
        qcutlass.fold_smoothing(previous, linears, torch.full((8,), float(s)))
    after = [value for module in modules for value in module.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_only_channels_that_vanish_whole_are_refused() -> None:
    """Tiny weights beside larger ones of their channel may round to zero, and so may biases; zeros may stay zero."""
    for rows in (False, True):  # the channels of the layer before, of the layer behind
        channels = torch.tensor([[1.0, 6e-8], [0.0, 0.0], [2.0, 6e-8]])
        first, second = nn.Linear(2, 3).half(), nn.Linear(3, 2).half()
        with torch.no_grad():
            (first.weight if rows else second.weight).copy_(channels if rows else channels.T)
            first.bias.fill_(6e-8)
        s = torch.full((3,), 8.0 if rows else 0.125)
        changed = [(first.weight, 1 / s[:, None]), (first.bias, 1 / s), (second.weight, s)]
        expected = [(tensor.detach().float() * factor).half() for tensor, factor in changed]
        qcutlass.fold_smoothing(first, second, s)
        assert all(torch.equal(tensor, right) for (tensor, _), right in zip(changed, expected, strict=True))
        assert (first.weight if rows else second.weight.T).ne(0).sum(dim=1).tolist() == [1, 0, 1]
        assert bool((first.bias == 0).all()) == rows


def test_a_norm_with_buffers_keeps_them() -> None:
    norm = nn.BatchNorm1d(8, momentum=0.5)
    norm.forward = lambda x: nn.BatchNorm1d.forward(norm, torch.cat([x, -x]))  # type: ignore[method-assign]
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    qcutlass.fold_smoothing(norm, nn.Linear(8, 4), torch.full((8,), 2.0))
    assert torch.equal(norm.weight, before["weight"] / 2)
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
