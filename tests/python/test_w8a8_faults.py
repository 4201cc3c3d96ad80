"""The oracles of 8-by-8-bit products against a catalogue of faults: every one is rejected, the sound product is not.

Each fault is put into a model of the kernel: exact sums, then scales and bias in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tests.python.eight_bit import ACTIVATIONS, FLOAT8, FLOATS
from tests.python.faults import faults_of
from torch import Tensor

from qcutlass import testing
from qcutlass.testing import EightBitCase, EightBitProblem

M, N, K = 64, 256, 1024


@dataclass
class Model:
    """The stations of the product, each of which a fault may replace."""

    problem: EightBitProblem

    def columns(self) -> Tensor:
        """Activations less their zero points, float64 [M, K]."""
        a = self.problem.a.double()
        return a if self.problem.azp is None else a - self.problem.azp.double()[:, None]

    def weight(self) -> Tensor:
        """float64 [N, K]."""
        return self.problem.w.double()

    def accumulate(self) -> Tensor:
        """float64 [M, N]: exact for integers."""
        return self.columns() @ self.weight().T

    def row_scale(self) -> Tensor:
        assert self.problem.a_scale is not None
        return self.problem.a_scale

    def channel_scale(self) -> Tensor:
        assert self.problem.w_scale is not None
        return self.problem.w_scale

    def scale(self, total: Tensor) -> Tensor:
        """fp32 [M, N]: what the activation function is applied to."""
        scaled = total.float() * self.row_scale()[:, None] * self.channel_scale()
        return scaled if self.problem.bias is None else scaled + self.problem.bias

    def convert(self, value: Tensor) -> Tensor:
        return value.to(self.problem.out_dtype)

    def store(self, out: Tensor) -> Tensor:
        """The output as memory holds it after the launch."""
        return out

    def run(self) -> Tensor:
        total = self.accumulate()
        if self.problem.out_dtype == torch.int32:
            return self.store(total.to(torch.int32))
        return self.store(self.convert(testing.activate(self.scale(total), self.problem.activation)))


class RowScaleOffByOne(Model):
    def row_scale(self) -> Tensor:
        return super().row_scale().roll(1)


class ChannelScaleOffByOne(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().roll(1)


class ChannelScaleOfTheOtherHalfOfATile(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().view(-1, 2, 8).flip(1).flatten()


class RowScaleRoundedToBfloat16(Model):
    def row_scale(self) -> Tensor:
        return super().row_scale().bfloat16().float()


class ZeroPointIgnored(Model):
    def columns(self) -> Tensor:
        return self.problem.a.double()


class ZeroPointOfTheNextRow(Model):
    def columns(self) -> Tensor:
        assert self.problem.azp is not None
        return self.problem.a.double() - self.problem.azp.double().roll(1)[:, None]


class ZeroPointAdded(Model):
    def columns(self) -> Tensor:
        return 2 * self.problem.a.double() - super().columns()


class ActivationsSaturateAtMinus127(Model):
    def columns(self) -> Tensor:
        return super().columns() + (self.problem.a == -128)


class WeightsSaturateAtMinus127(Model):
    def weight(self) -> Tensor:
        return super().weight().clamp(min=-127)


class OneWeightSaturates(Model):
    def weight(self) -> Tensor:
        w = super().weight().clone()
        n, k = (w == -128).nonzero()[0].tolist()
        w[n, k] = -127
        return w


class BiasBeforeScale(Model):
    def scale(self, total: Tensor) -> Tensor:
        assert self.problem.bias is not None
        return (total.float() + self.problem.bias) * self.row_scale()[:, None] * self.channel_scale()


class BiasOfTheNextChannel(Model):
    def scale(self, total: Tensor) -> Tensor:
        assert self.problem.bias is not None
        return super().scale(total) - self.problem.bias + self.problem.bias.roll(1)


class LastK32StepDropped(Model):
    def columns(self) -> Tensor:
        a = super().columns().clone()
        a[:, -32:] = 0
        return a


class SixteenBitAccumulator(Model):
    def accumulate(self) -> Tensor:
        return (super().accumulate() + 2**15) % 2**16 - 2**15


class SumsScaledInFloat16(Model):
    def scale(self, total: Tensor) -> Tensor:
        return super().scale((total / 64).half().double() * 64)


class OutputTruncated(Model):
    def convert(self, value: Tensor) -> Tensor:
        nearest = super().convert(value)
        if nearest.dtype == torch.float32:
            return nearest * (1 - 2.0**-20)  # nothing is rounded: the fault of losing bits elsewhere
        bits = nearest.view(torch.int16)
        return torch.where(nearest.float().abs() > value.abs(), bits - 1, bits).view(nearest.dtype)


def align(terms: Tensor, largest: Tensor) -> Tensor:
    """The terms of a sum, cut off 13 bits below the exponent of `largest`, the largest number in it."""
    unit = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - 13)
    return torch.trunc(terms / unit) * unit


class Promoted(Model):
    """Asynchronous MMAs of fp8: steps of 32 columns align with the sum so far, which is promoted every 128."""

    every = 128

    def accumulate(self) -> Tensor:
        a, w = self.columns(), self.weight()
        total = torch.zeros(len(a), len(w), dtype=torch.float64)
        for begin in range(0, a.shape[1], self.every):
            block = torch.zeros_like(total)
            for k in range(begin, min(begin + self.every, a.shape[1]), 32):
                terms = a[:, None, k : k + 32] * w[None, :, k : k + 32]
                largest = torch.maximum(terms.abs().amax(-1), block.abs())
                block = align(block, largest) + align(terms, largest[..., None]).sum(-1)
            total += block
        return total


class PromotedEvery512(Promoted):
    every = 512


class NotPromoted(Promoted):
    every = 1 << 30


SHARED = faults_of(Model)
GENERAL: list[type[Model]] = [
    *SHARED,
    RowScaleOffByOne,
    ChannelScaleOffByOne,
    ChannelScaleOfTheOtherHalfOfATile,
    RowScaleRoundedToBfloat16,
    BiasBeforeScale,
    BiasOfTheNextChannel,
    LastK32StepDropped,
    SumsScaledInFloat16,
    OutputTruncated,
]
OF_INT8: list[type[Model]] = [
    ZeroPointIgnored,
    ZeroPointOfTheNextRow,
    ZeroPointAdded,
    ActivationsSaturateAtMinus127,
    WeightsSaturateAtMinus127,
    SixteenBitAccumulator,
]
OF_INTEGER_SUMS: list[type[Model]] = [
    *SHARED,
    *OF_INT8,
    OneWeightSaturates,
    LastK32StepDropped,
]


def verdicts(model: type[Model], case: EightBitCase, seed: int, aligned: bool = False) -> tuple[bool, float]:
    """(oracle E accepts, largest ratio of oracle T) for a model of the product."""
    exact, expected = case.exact(seed=seed)
    real = case.random(seed=seed)
    ratio = testing.error_ratio(model(real).run(), real.reference(aligned=aligned))
    return torch.equal(model(exact).run(), expected), ratio


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("fault", [*GENERAL, *OF_INT8])
def test_every_fault_of_int8_products_is_rejected(fault: type[Model], out_dtype: torch.dtype, seed: int) -> None:
    case = EightBitCase(M, N, K, torch.int8, out_dtype, azp="each", bias=True)
    accepted, ratio = verdicts(fault, case, seed)
    integers = replace(case, out_dtype=torch.int32, bias=False).random(seed=seed)
    wrong_sums = fault in OF_INTEGER_SUMS and not torch.equal(fault(integers).run(), integers.integer_sums())
    assert wrong_sums or not accepted or ratio > 1, f"{fault.__name__} passes: ratio {ratio}, seed {seed}"


@pytest.mark.parametrize("fault", OF_INTEGER_SUMS)
def test_every_fault_of_integer_sums_is_rejected(fault: type[Model], seed: int) -> None:
    p = EightBitCase(M, N, K, torch.int8, torch.int32, azp="each").random(seed=seed)
    testing.assert_equal(Model(p).run(), p.integer_sums())
    with pytest.raises(AssertionError, match=r"\d+ of \d+ elements differ"):
        testing.assert_equal(fault(p).run(), p.integer_sums())


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("fault", GENERAL)
def test_every_fault_of_fp8_products_is_rejected(
    fault: type[Model], dtype: torch.dtype, aligned: bool, seed: int
) -> None:
    for out_dtype in FLOATS:
        accepted, ratio = verdicts(fault, EightBitCase(M, N, K, dtype, out_dtype, bias=True), seed, aligned)
        assert not accepted or ratio > 1, f"{fault.__name__} passes: ratio {ratio}, {out_dtype}, seed {seed}"


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("k", [129, 449, 1024])
def test_sums_that_are_promoted_too_late_are_rejected(k: int, dtype: torch.dtype, seed: int) -> None:
    case = EightBitCase(32, 48, k, dtype, torch.float32)
    accepted, ratio = verdicts(Promoted, case, seed, aligned=True)
    assert accepted, "sums of 128 small integers are exact"
    assert ratio <= 1, f"the sound loop is rejected: ratio {ratio}, seed {seed}"
    assert verdicts(Promoted, case, seed)[1] > 1, "the bound of fp32 sums is narrower"
    if k > 256:
        for fault in (PromotedEvery512, NotPromoted):
            assert (found := verdicts(fault, case, seed, aligned=True)[1]) > 1, (
                f"{fault.__name__}: {found}, seed {seed}"
            )


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", [torch.int8, *FLOAT8])
def test_the_sound_product_is_accepted(dtype: torch.dtype, out_dtype: torch.dtype, seed: int) -> None:
    for bias in (False, True):
        for activation in ACTIVATIONS:
            azp: testing.Scope = "each" if dtype == torch.int8 else "none"
            case = EightBitCase(M, N, K, dtype, out_dtype, azp=azp, bias=bias, activation=activation)
            real = case.random(seed=seed)
            testing.assert_close(Model(real).run(), real.reference(), label=real)
            if activation in (None, "relu"):
                exact, expected = case.exact(seed=seed)
                testing.assert_equal(Model(exact).run(), expected, label=exact)


def test_faults_between_two_roundings_are_told_from_fp32_ones(seed: int) -> None:
    """The bound of int8 products is as narrow as their roundings: a sum that was rounded to 22 bits is out of it."""
    p = EightBitCase(M, N, K, out_dtype=torch.float32).random(seed=seed)
    total = p.sums().double()
    coarse = (total + total * 2.0**-21).float()
    scaled = Model(p).scale(coarse.double())
    assert testing.error_ratio(scaled, p.reference()) > 1


@pytest.mark.parametrize("dtype", [torch.int8, *FLOAT8])
def test_exact_problems_show_narrow_accumulators(dtype: torch.dtype, seed: int) -> None:
    for k in (200, 1000, 20000):
        problem, expected = EightBitCase(17, 40, k, dtype, torch.float32, bias=True).exact(seed=seed)
        assert problem.sums().abs().max() > (2**15 if dtype == torch.int8 else 2**11), problem  # fp16: 11 bits
        assert bool(expected.isfinite().all()), problem


def test_every_code_occurs_in_random_problems(seed: int) -> None:
    p = EightBitCase(M, N, K).random(seed=seed)
    assert len(p.a.unique()) == len(p.w.unique()) == 256


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float8_e5m2])
def test_poison_of_other_types(dtype: torch.dtype) -> None:
    box = testing.Poisoned((3, 5), dtype, offset=2, padding=1)
    assert box.is_untouched()
    with pytest.raises(AssertionError, match="15 elements were not written"):
        box.check()
    box.tensor.copy_(torch.ones(3, 5))
    box.check()
