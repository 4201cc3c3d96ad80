"""The oracles against a catalogue of faults that kernels have: every fault is rejected, the sound product is not.

Each fault is put into a float model of the fused kernel: weights rounded to 16 bits, products summed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from tests.python.faults import faults_of
from torch import Tensor

from qcutlass import testing

M, N, K, GROUP = 64, 256, 4096, 128


@dataclass
class Model:
    """The stations of the fused product, each of which a fault may replace."""

    problem: testing.Problem

    def columns(self) -> Tensor:
        """Activations, fp32 [M, K]."""
        return self.problem.a.float()

    def weight(self) -> Tensor:
        """Dequantised weights, fp32 [N, K]."""
        return self.problem.weight(self.problem.a.dtype).float()

    def accumulate(self, a: Tensor, w: Tensor) -> Tensor:
        """fp32 [M, N]."""
        return a @ w.T

    def convert(self, total: Tensor) -> Tensor:
        """The output's type."""
        return total.to(self.problem.a.dtype)

    def store(self, out: Tensor) -> Tensor:
        """The output as memory holds it after the launch."""
        return out

    def run(self) -> Tensor:
        return self.store(self.convert(self.accumulate(self.columns(), self.weight())))


class WithProblem(Model):
    """The sound product of a changed problem."""

    def change(self, problem: testing.Problem) -> testing.Problem:
        raise NotImplementedError

    def run(self) -> Tensor:
        return Model(self.change(self.problem)).run()


class LastK16StepDropped(Model):
    def columns(self) -> Tensor:
        a = super().columns().clone()
        a[:, -16:] = 0
        return a


class ZeroPlusOneEverywhere(WithProblem):
    where = (slice(None), slice(None))

    def change(self, problem: testing.Problem) -> testing.Problem:
        assert problem.zeros is not None
        zeros = problem.zeros.clone()
        zeros[self.where] += 1
        return replace(problem, zeros=zeros)


class ZeroPlusOneInOneGroup(ZeroPlusOneEverywhere):
    where = (slice(3, 4), slice(None))


class ZeroPlusOneInOneGroupAndChannel(ZeroPlusOneEverywhere):
    where = (slice(3, 4), slice(200, 201))


class GroupBoundaryOffByOne(Model):
    def weight(self) -> Tensor:
        p = self.problem
        shifted = torch.cat([p.codes[:, :1], p.codes[:, :-1]], dim=1)  # code k - 1 at k: its group is that of k
        w = replace(p, codes=shifted).weight(p.a.dtype).float()
        return torch.cat([w[:, 1:], super().weight()[:, -1:]], dim=1)


class NeighbourScaleInOneGroup(WithProblem):
    def change(self, problem: testing.Problem) -> testing.Problem:
        scales = problem.scales.clone()
        scales[5] = scales[6]
        return replace(problem, scales=scales)


class SixteenBitAccumulator(Model):
    def accumulate(self, a: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(a.shape[0], w.shape[0])
        for begin in range(0, a.shape[1], 16):
            step = slice(begin, begin + 16)
            total = (total + a[:, step] @ w[:, step].T).to(self.problem.a.dtype).float()
        return total


class OneTileFromAStaleStage(Model):
    def accumulate(self, a: Tensor, w: Tensor) -> Tensor:
        total = super().accumulate(a, w)
        a_stale = a[16:24].clone()
        a_stale[:, 1024:1088] = a[16:24, 960:1024]  # one 64-wide stage still holds the one before
        total[16:24, 32:48] = a_stale @ w[32:48].T
        return total


class ScalesRoundedToBfloat16(WithProblem):
    def change(self, problem: testing.Problem) -> testing.Problem:
        return replace(problem, scales=problem.scales.bfloat16().to(problem.scales.dtype))


class ScaledCodeMinusScaledZero(Model):
    def weight(self) -> Tensor:
        p = self.problem
        assert p.zeros is not None
        code = testing.dequantized_weight(p.codes, p.scales, torch.zeros_like(p.zeros), p.group_size, p.bits, p.a.dtype)
        zero = (p.zeros.float() * p.scales.float()).to(p.a.dtype).T.repeat_interleave(p.group_size, dim=1)
        return (code - zero).float()


class ScaleFoldedIntoTheMagicNumber(Model):
    def weight(self) -> Tensor:
        p = self.problem
        assert p.zeros is not None
        scale = p.scales.float().T.repeat_interleave(p.group_size, dim=1)
        magic = ((1024 + p.zeros.float()).T.repeat_interleave(p.group_size, dim=1) * scale).to(p.a.dtype).float()
        return ((1024 + p.codes.float()) * scale - magic).to(p.a.dtype).float()


class OutputTruncated(Model):
    def convert(self, total: Tensor) -> Tensor:
        nearest = total.to(self.problem.a.dtype)
        bits = nearest.view(torch.int16)
        return torch.where(nearest.float().abs() > total.abs(), bits - 1, bits).view(nearest.dtype)


FAULTS: list[type[Model]] = [
    *faults_of(Model),
    LastK16StepDropped,
    ZeroPlusOneEverywhere,
    ZeroPlusOneInOneGroup,
    ZeroPlusOneInOneGroupAndChannel,
    GroupBoundaryOffByOne,
    NeighbourScaleInOneGroup,
    SixteenBitAccumulator,
    OneTileFromAStaleStage,
    ScalesRoundedToBfloat16,
    ScaledCodeMinusScaledZero,
    ScaleFoldedIntoTheMagicNumber,
    OutputTruncated,
]


def verdicts(model: type[Model], dtype: torch.dtype, bits: int, seed: int) -> tuple[bool, float]:
    """(oracle E accepts, largest ratio of oracle T) for a model of the product."""
    case = testing.Case(M, N, K, bits=bits, group_size=GROUP, zeros="int", dtype=dtype, scale_dtype=torch.float16)
    exact, expected = case.exact(seed=seed)
    real = case.random(seed=seed)
    return torch.equal(model(exact).run(), expected), testing.error_ratio(model(real).run(), real.reference(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_rejected(fault: type[Model], dtype: torch.dtype, seed: int) -> None:
    accepted, ratio = verdicts(fault, dtype, 4, seed)
    assert not accepted or ratio > 1, f"{fault.__name__} passes: ratio {ratio}, seed {seed}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_sound_product_is_accepted(bits: int, dtype: torch.dtype, seed: int) -> None:
    accepted, ratio = verdicts(Model, dtype, bits, seed)
    assert accepted, f"oracle E rejects the sound product, seed {seed}"
    assert ratio <= 1, f"oracle T rejects the sound product: ratio {ratio}, seed {seed}"


EPILOGUE_FAULTS: dict[str, Callable[[testing.Problem, Tensor], Tensor]] = {
    "bias left out": lambda p, total: testing.activate(total, p.activation),
    "bias after the activation": lambda p, total: testing.activate(total, p.activation) + p.bias.float(),
    "bias of the neighbouring channel": lambda p, total: testing.activate(total + p.bias.float().roll(1), p.activation),
    "no activation": lambda p, total: total + p.bias.float(),
    "16-bit argument": lambda p, total: testing.activate((total + p.bias.float()).to(p.a.dtype).float(), p.activation),
}


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("fault", EPILOGUE_FAULTS)
def test_epilogue_faults_are_rejected(fault: str, activation: str, seed: int) -> None:
    p = testing.random_problem(M, N, K, dtype=torch.bfloat16, bias=True, activation=activation, seed=seed)
    total = p.a.float() @ p.weight().T
    sound = testing.activate(total + p.bias.float(), activation).bfloat16()
    testing.assert_close(sound, p.reference(), label=p)
    if (fault, activation) != ("16-bit argument", "relu"):  # rounding commutes with relu: no fault
        ratio = testing.error_ratio(EPILOGUE_FAULTS[fault](p, total).bfloat16(), p.reference())
        assert ratio > 1, f"{fault}: ratio {ratio}, seed {seed}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_two_gelus_are_told_apart(dtype: torch.dtype, seed: int) -> None:
    p = testing.random_problem(M, N, 256, dtype=dtype, activation="gelu", seed=seed)
    out = testing.activate(p.a.float() @ p.weight().T, "gelu_tanh").to(dtype)
    assert testing.error_ratio(out, p.reference()) > 1


@pytest.mark.parametrize("activation", list(testing.SLOPE))
def test_slopes_bound_the_derivatives(activation: str | None) -> None:
    x = torch.linspace(-12, 12, 240001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(testing.activate(x, activation).sum(), x)
    assert 0.99 * testing.SLOPE[activation] <= float(slope.abs().max()) <= testing.SLOPE[activation]


def test_nan_and_infinity_count_where_the_reference_has_none() -> None:
    a, w = torch.ones(3, 8, dtype=torch.float16), torch.ones(4, 8)
    a[1, 0], a[2, 0] = torch.nan, torch.inf
    ref = testing.reference(a, w)
    out = ref.value.half()
    assert testing.error_ratio(out, ref) == 0
    for row, wrong in [(0, torch.nan), (0, torch.inf), (1, 8.0), (2, torch.nan), (2, -torch.inf), (2, 65504.0)]:
        bad = out.clone()
        bad[row, 2] = wrong
        assert testing.error_ratio(bad, ref) == torch.inf, (row, wrong)


def test_overflow_rounds_to_infinity() -> None:
    ref = testing.reference(torch.full((1, 2), 60000.0, dtype=torch.float16), torch.ones(1, 2))
    assert testing.error_ratio(torch.tensor([[torch.inf]], dtype=torch.float16), ref) == 0
    assert testing.error_ratio(torch.tensor([[-torch.inf]], dtype=torch.float16), ref) == torch.inf
    assert testing.error_ratio(torch.tensor([[65504.0]], dtype=torch.float16), ref) > 1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["none", "int", "real"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_exact_problems_show_narrow_accumulators(
    bits: int, zeros: testing.Zeros, dtype: torch.dtype, seed: int
) -> None:
    case = testing.Case(17, 40, 1000, bits=bits, zeros=zeros, dtype=dtype, bias=True, act_scale=True, perm=True)
    problem, expected = case.exact(seed=seed)
    assert expected.float().abs().max() > {torch.float16: 2048, torch.bfloat16: 256, torch.float32: 2**14}[dtype], (
        problem
    )
    assert bool(expected.isfinite().all()), problem


def test_poisoned_buffers_tell_what_was_not_written_and_what_was_written_outside() -> None:
    box = testing.Poisoned((4, 6), torch.float16, offset=3, padding=2)
    assert box.is_untouched()
    assert bool(box.tensor.isnan().all())
    with pytest.raises(AssertionError, match="24 elements were not written"):
        box.check()
    box.tensor.fill_(1)
    box.check()
    box.tensor.as_strided((4, 7), box.tensor.stride(), box.tensor.storage_offset())[1, 6] = 1
    with pytest.raises(AssertionError, match="1 elements around the tensor were written, the first one 14"):
        box.check()
