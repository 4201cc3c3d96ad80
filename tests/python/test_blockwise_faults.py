"""The oracles of blockwise products and their quantised outputs against faults: each is rejected, the sound one is not.

Each fault is put into a model of the kernel: exact sums of blocks, scaled and added in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.python.blockwise import ACTIVATIONS, FLOATS
from tests.python.faults import faults_of
from torch import Tensor

from qcutlass import testing
from qcutlass.testing import BlockwiseCase, BlockwiseProblem

M, N, K, SIZE = 64, 256, 1024, 128


@dataclass
class Model:
    """The stations of the product, each of which a fault may replace."""

    problem: BlockwiseProblem

    def columns(self) -> Tensor:
        """float64 [M, K]."""
        return self.problem.a.double()

    def weight(self) -> Tensor:
        """float64 [N, K]."""
        return self.problem.b.double()

    def row_scale(self) -> Tensor:
        """fp32 [M, G]."""
        return self.problem.a_s

    def channel_scale(self) -> Tensor:
        """fp32 [N, G]."""
        return self.problem.b_s.repeat_interleave(SIZE, 0)

    def sums(self) -> list[Tensor]:
        """Of each block, float64 [M, N], integers."""
        parts = zip(self.columns().split(SIZE, 1), self.weight().split(SIZE, 1), strict=True)
        return [a @ b.T for a, b in parts]

    def promote(self, total: Tensor, sums: Tensor, block: int) -> Tensor:
        """fp32 [M, N] with the next block."""
        return total + sums.float() * (self.row_scale()[:, block, None] * self.channel_scale()[:, block])

    def accumulate(self) -> Tensor:
        total = torch.zeros(M, N)
        for block, sums in enumerate(self.sums()):
            total = self.promote(total, sums, block)
        return total

    def convert(self, value: Tensor) -> Tensor:
        return value.to(self.problem.out_dtype)

    def store(self, out: Tensor) -> Tensor:
        """The output as memory holds it after the launch."""
        return out

    def epilogue(self) -> Tensor:
        """fp32 [M, N]: what is converted."""
        total = self.accumulate()
        biased = total if self.problem.bias is None else total + self.problem.bias
        return testing.activate(biased, self.problem.activation)

    def run(self) -> Tensor:
        return self.store(self.convert(self.epilogue()))


class RowScaleOfTheNextBlock(Model):
    def row_scale(self) -> Tensor:
        return super().row_scale().roll(-1, 1)


class RowScaleOfTheLastBlockIsThatBeforeIt(Model):
    def row_scale(self) -> Tensor:
        scale = super().row_scale().clone()
        scale[:, -1] = scale[:, -2]
        return scale


class RowScaleOfTheNextRow(Model):
    def row_scale(self) -> Tensor:
        return super().row_scale().roll(-1, 0)


class WeightScaleOfTheNextBlockOfColumns(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().roll(-1, 1)


class WeightScaleOfTheNextBlockOfChannels(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().roll(-SIZE, 0)


class WeightScaleOfTheNextBlockOneChannelEarly(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().roll(-1, 0)


class WeightScaleRoundedToBfloat16(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().bfloat16().float()


class LastBlockNotPromoted(Model):
    def sums(self) -> list[Tensor]:
        return super().sums()[:-1]


class LastBlockPromotedTwice(Model):
    def accumulate(self) -> Tensor:
        return self.promote(super().accumulate(), self.sums()[-1], K // SIZE - 1)


class SumsNotClearedBetweenBlocks(Model):
    def sums(self) -> list[Tensor]:
        sums = super().sums()
        return [sums[0], sums[0] + sums[1], *sums[2:]]


class BoundaryOffByOneStep(Model):
    """The first 32 columns of a block are scaled with the block before it."""

    def sums(self) -> list[Tensor]:
        a, b = self.columns(), self.weight()
        moved = a[:, SIZE : SIZE + 32] @ b[:, SIZE : SIZE + 32].T
        first, second, *rest = super().sums()
        return [first + moved, second - moved, *rest]


class LastK32StepDropped(Model):
    def columns(self) -> Tensor:
        a = super().columns().clone()
        a[:, -32:] = 0
        return a


class SixteenBitAccumulator(Model):
    def sums(self) -> list[Tensor]:
        return [(total + 2**15) % 2**16 - 2**15 for total in super().sums()]


class SumsOfBlocksRoundedToFloat16(Model):
    def sums(self) -> list[Tensor]:
        return [(total / 64).half().double() * 64 for total in super().sums()]


class AccumulatorRoundedToBfloat16(Model):
    def promote(self, total: Tensor, sums: Tensor, block: int) -> Tensor:
        return super().promote(total, sums, block).bfloat16().float()


class OneScaleForAllBlocks(Model):
    def row_scale(self) -> Tensor:
        return super().row_scale()[:, :1].expand(-1, K // SIZE)


class WeightsSaturateAtMinus127(Model):
    def weight(self) -> Tensor:
        return super().weight().clamp(min=-127)


class BiasOfTheNextChannel(Model):
    def accumulate(self) -> Tensor:
        assert self.problem.bias is not None
        return super().accumulate() - self.problem.bias + self.problem.bias.roll(-1)


class OutputTruncated(Model):
    def convert(self, value: Tensor) -> Tensor:
        nearest = super().convert(value)
        if nearest.dtype == torch.float32:
            return nearest * (1 - 2.0**-19)  # nothing is rounded: the fault of losing bits elsewhere
        bits = nearest.view(torch.int16)
        return torch.where(nearest.float().abs() > value.abs(), bits - 1, bits).view(nearest.dtype)


OF_SUMS: list[type[Model]] = [
    RowScaleOfTheNextBlock,
    RowScaleOfTheLastBlockIsThatBeforeIt,
    RowScaleOfTheNextRow,
    WeightScaleOfTheNextBlockOfColumns,
    WeightScaleOfTheNextBlockOfChannels,
    WeightScaleOfTheNextBlockOneChannelEarly,
    LastBlockNotPromoted,
    LastBlockPromotedTwice,
    SumsNotClearedBetweenBlocks,
    BoundaryOffByOneStep,
    LastK32StepDropped,
    SixteenBitAccumulator,
    OneScaleForAllBlocks,
    BiasOfTheNextChannel,
]
FAULTS = [
    *faults_of(Model),
    *OF_SUMS,
    WeightScaleRoundedToBfloat16,
    SumsOfBlocksRoundedToFloat16,
    AccumulatorRoundedToBfloat16,
    WeightsSaturateAtMinus127,
    OutputTruncated,
]


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_rejected(fault: type[Model], out_dtype: torch.dtype, seed: int) -> None:
    case = BlockwiseCase(M, N, K, SIZE, out_dtype, bias=True)
    exact, expected = case.exact(seed=seed)
    real = case.random(seed=seed)
    ratio = testing.error_ratio(fault(real).run(), real.reference())
    accepted = torch.equal(fault(exact).run(), expected)
    assert not accepted or ratio > 1, f"{fault.__name__} passes: ratio {ratio}, seed {seed}"


@pytest.mark.parametrize("fault", OF_SUMS)
def test_the_bound_alone_rejects_wrong_scales_and_sums(fault: type[Model], seed: int) -> None:
    """Whatever the type of the output, and however many shares K was cut into."""
    for out_dtype in FLOATS:
        real = BlockwiseCase(M, N, K, SIZE, out_dtype, bias=True).random(seed=seed)
        assert testing.error_ratio(fault(real).run(), real.reference(), splits=16) > 1


@pytest.mark.parametrize("out_dtype", FLOATS)
def test_the_sound_product_is_accepted(out_dtype: torch.dtype, seed: int) -> None:
    for bias in (False, True):
        for activation in ACTIVATIONS:
            case = BlockwiseCase(M, N, K, SIZE, out_dtype, bias, activation=activation)
            real = case.random(seed=seed)
            testing.assert_close(Model(real).run(), real.reference(), label=real)
            if activation in (None, "relu"):
                exact, expected = case.exact(seed=seed)
                testing.assert_equal(Model(exact).run(), expected, label=exact)


def quantize(y: Tensor, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """Codes [M, N] and scales [M, N / size] of fp32 numbers."""
    blocks = y.view(M, -1, size)
    scales = blocks.abs().amax(-1) / 127
    return (blocks / scales[..., None]).round().to(torch.int8).view(M, N), scales


def truncating(y: Tensor) -> tuple[Tensor, Tensor]:
    _, scales = quantize(y)
    return (y.view(M, -1, SIZE) / scales[..., None]).trunc().to(torch.int8).view(M, N), scales


def of_the_next_block(y: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(y)
    return codes, scales.roll(1, 1)


def of_the_next_row(y: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(y)
    return codes, scales.roll(1, 0)


def without_the_last_channels(y: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude of all but 32 channels of a block, and codes that wrap or saturate."""
    scales = y.view(M, -1, SIZE)[..., :-32].abs().amax(-1) / 127
    return (y.view(M, -1, SIZE) / scales[..., None]).round().clamp(-127, 127).to(torch.int8).view(M, N), scales


def by_128(y: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(y)
    return codes, scales * (127 / 128)


def of_half_precision(y: Tensor) -> tuple[Tensor, Tensor]:
    return quantize(y.half().float())


def with_half_scales(y: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(y)
    return codes, scales.half().float()


def with_one_code_off(y: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(y)
    codes[41, 77] += 1 if codes[41, 77] < 127 else -1
    return codes, scales


def with_a_code_of_minus_128(y: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(y)
    row, column = (codes == -127).nonzero()[0]
    codes[row, column] = -128
    return codes, scales


QUANTIZERS = (
    truncating,
    of_the_next_block,
    of_the_next_row,
    without_the_last_channels,
    by_128,
    of_half_precision,
    with_half_scales,
    with_one_code_off,
    with_a_code_of_minus_128,
)


@pytest.mark.parametrize("fault", QUANTIZERS, ids=lambda f: f.__name__)
def test_every_fault_of_quantised_outputs_is_rejected(fault: type[Model], seed: int) -> None:
    p = BlockwiseCase(M, N, K, SIZE, torch.float32, bias=True).random(seed=seed)
    y = Model(p).run()
    testing.assert_quantized(*quantize(y), p.reference(), SIZE)
    with pytest.raises(AssertionError, match="times what is allowed"):
        testing.assert_quantized(*fault(y), p.reference(), SIZE)


@pytest.mark.parametrize("fault", OF_SUMS)
def test_every_fault_of_sums_shows_in_quantised_outputs(fault: type[Model], seed: int) -> None:
    p = BlockwiseCase(M, N, K, SIZE, torch.float32, bias=True).random(seed=seed)
    with pytest.raises(AssertionError, match="times what is allowed"):
        testing.assert_quantized(*quantize(fault(p).run()), p.reference(), SIZE)


def test_scales_of_zeros_are_one(seed: int) -> None:
    p = BlockwiseCase(M, N, K, SIZE, torch.float32).random(seed=seed)
    p.a[3] = 0
    codes, scales = quantize(Model(p).run())
    codes[3], scales[3] = 0, 1
    testing.assert_quantized(codes, scales, p.reference(), SIZE)
    for wrong in (0.0, torch.nan, 2.0**-126):
        scales[3] = wrong
        with pytest.raises(AssertionError, match="times what is allowed"):
            testing.assert_quantized(codes, scales, p.reference(), SIZE)


def test_the_tanh_form_of_gelu_is_rejected(seed: int) -> None:
    """It differs from the erf form by up to 5e-4: codes of small blocks show it, and scales of blocks of one sign."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (M, N), generator=g).to(torch.int8)
    x_s = torch.full((M, N // SIZE), 3.0 / 127)
    v = x.float() * (3.0 / 127)
    testing.assert_gelu(*quantize(torch.nn.functional.gelu(v)), x, x_s, SIZE)
    with pytest.raises(AssertionError, match="times what is allowed"):
        testing.assert_gelu(*quantize(torch.nn.functional.gelu(v, approximate="tanh")), x, x_s, SIZE)


def test_exact_problems_show_narrow_accumulators(seed: int) -> None:
    for k in (200, 1000, 20000):
        problem, expected = BlockwiseCase(17, 40, k, out_dtype=torch.float32, bias=True).exact(seed=seed)
        assert max(float((t / 2.0**-12).abs().max()) for t in problem.terms()) > 2**11, problem  # fp16: 11 bits
        assert bool(expected.isfinite().all()), problem


def test_every_code_occurs_in_random_problems(seed: int) -> None:
    p = BlockwiseCase(M, N, K).random(seed=seed)
    assert len(p.a.unique()) == len(p.b.unique()) == 256
