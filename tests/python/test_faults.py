"""The oracles of every kind against its catalogue of faults that kernels have: every fault is rejected, the sound
product is not.

Each fault is put into the kind's model of its kernel. What the oracles share is tested here too: activations, NaN and
infinity, poisoned memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import EXACT, Description, Judged

from qcutlass import testing


def each(name: str) -> list[Any]:
    """(kind, cases) for each entry of one of the mappings of each kind."""
    return [
        pytest.param(kind, cases, id=f"{kind.name}-{key}")
        for kind in DESCRIPTIONS.values()
        for key, cases in getattr(kind, name).items()
    ]


FAULTS = [
    pytest.param(kind, fault, judged, id=f"{kind.name}-{fault.__name__}-{key}")
    for kind in DESCRIPTIONS.values()
    for fault in kind.faults
    for key, judged in kind.fault_cases.items()
]


@pytest.mark.parametrize(("kind", "fault", "cases"), FAULTS)
def test_every_fault_is_rejected(kind: Description, fault: type[Any], cases: list[Judged], seed: int) -> None:
    for judged in cases:
        assert kind.rejects(fault, judged, seed), f"{fault.__name__} passes {judged.case}, seed {seed}"


@pytest.mark.parametrize(("kind", "cases"), each("sound_cases"))
def test_the_sound_product_is_accepted(kind: Description, cases: list[Judged], seed: int) -> None:
    for judged in cases:
        real = judged.case.random(seed=seed)
        if judged.case.activation in EXACT:
            accepted, ratio = kind.verdicts(kind.model, judged, seed)
            assert accepted, f"oracle E rejects the sound product, {judged.case}, seed {seed}"
        else:
            ratio = kind.ratio(kind.model(real).run(), real, judged)
        assert ratio <= 1, f"oracle T rejects the sound product: ratio {ratio}, {real}"


@pytest.mark.parametrize(("kind", "cases"), each("narrow"))
def test_exact_problems_show_narrow_accumulators(kind: Description, cases: list[Any], seed: int) -> None:
    for case in cases:
        problem, expected = case.exact(seed=seed)
        assert kind.peak(problem, expected) > kind.narrowest(problem), problem
        assert bool(expected.isfinite().all()), problem


def test_every_kind_has_the_faults_that_all_can_have() -> None:
    shared = {"LastKDropped", "TwoKSwapped", "OneStaleElement", "LastRowUnwritten", "LastEightColumnsUnwritten"}
    for kind in DESCRIPTIONS.values():
        names = {fault.__name__ for fault in kind.faults}
        assert len(names) == len(kind.faults) > 15, kind.name
        assert shared <= names or not kind.has_out, kind.name


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_results_are_held_to_their_own_size(dtype: torch.dtype, seed: int) -> None:
    """Types with the exponents of fp32 hold results far below fp16's smallest: zeros are wrong there, too."""
    generator = torch.Generator().manual_seed(seed)
    a = (torch.randn(3, 64, generator=generator) * 2.0**-60).to(dtype)
    ref = testing.reference(a, torch.randn(8, 64, generator=generator))
    assert testing.assert_close(ref.value.to(dtype), ref) <= 1
    assert testing.error_ratio(torch.zeros_like(ref.value, dtype=dtype), ref) > 1


def test_overflow_rounds_to_infinity() -> None:
    ref = testing.reference(torch.full((1, 2), 60000.0, dtype=torch.float16), torch.ones(1, 2))
    assert testing.error_ratio(torch.tensor([[torch.inf]], dtype=torch.float16), ref) == 0
    assert testing.error_ratio(torch.tensor([[-torch.inf]], dtype=torch.float16), ref) == torch.inf
    assert testing.error_ratio(torch.tensor([[65504.0]], dtype=torch.float16), ref) > 1


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float8_e5m2])
def test_poison_of_other_types(dtype: torch.dtype) -> None:
    box = testing.Poisoned((3, 5), dtype, offset=2, padding=1)
    assert box.is_untouched()
    with pytest.raises(AssertionError, match="15 elements were not written"):
        box.check()
    box.tensor.copy_(torch.ones(3, 5))
    box.check()
