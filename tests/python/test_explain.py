"""qcutlass.explain: the chosen kernel, the reason and the predictions, without a GPU."""

from __future__ import annotations

import dataclasses
import doctest
from typing import Any

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import _C, testing
from qcutlass.products import selection
from qcutlass.products.weight_only import WEIGHT_ONLY, GemmCall

H200 = selection.GPUS["h200"]


def operands(
    m: int, n: int = 512, k: int = 1024, device: str = "cpu", **options: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of gemm, positional and by name."""
    problem = testing.Case(m, n, k, **options).random(seed=1)
    packed = qcutlass.preprocess_weights(problem.codes, bits=problem.bits)
    tensors = (problem.a, packed, problem.scales, problem.zeros)
    keywords = {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in problem.keywords.items()
    }
    return tuple(t if t is None else t.to(device) for t in tensors), keywords


@pytest.mark.parametrize("gpu", selection.GPUS)
@pytest.mark.parametrize("m", [1, 16, 300])
def test_the_choice_is_the_first_candidate(m: int, gpu: str) -> None:
    tensors, keywords = operands(m)
    why = qcutlass.explain(qcutlass.gemm, *tensors, device=gpu, **keywords)
    assert why.source == "cost model"
    assert (why.plan.tactic, why.plan.split_k) == (why.candidates[0].plan.tactic, why.candidates[0].plan.split_k)
    totals = [candidate.cost.total for candidate in why.candidates]
    assert totals == sorted(totals)
    assert why.cost.total == totals[0]
    traits = {t.name: t for t in _C.tactics(selection._query(WEIGHT_ONLY, *_call(tensors, keywords)).arguments)}
    for candidate in why.candidates:
        cost = candidate.cost
        assert min(cost.load, cost.compute, cost.fixed) > 0
        assert cost.total <= (cost.load + cost.compute + cost.fixed) * (1 + 1e-12)
        if not candidate.plan.dense:
            assert traits[candidate.plan.tactic].shared_memory <= selection.GPUS[gpu].shared_memory_per_block


def _call(tensors: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    call = GemmCall(*tensors, **keywords)
    return call, call.check(None)


def test_the_table_names_every_tactic_and_marks_the_choice() -> None:
    tensors, keywords = operands(300, bias=True, activation="silu", zeros="int")
    why = qcutlass.explain(qcutlass.gemm, *tensors, device="h200", **keywords)
    lines = str(why).splitlines()
    assert lines[0] == (
        "300 x 1024 float16 activations by 512 x 1024 4-bit weights, groups of 128, float16 scales, uint8 zeros, "
        "bias, silu"
    )
    assert lines[1].startswith("on H200 (compute capability 9.0, 132 SMs): " + why.plan.tactic)
    assert lines[2].startswith("chosen by the cost model: ")
    assert f"{why.cost.total:.1f} us predicted, most of it " in lines[2]
    marked = [line for line in lines if line.startswith("> ")]
    assert len(marked) == 1
    assert marked[0].split()[1:3] == [why.plan.tactic, str(why.plan.split_k)]
    assert marked[0].split()[-1] == f"{why.cost.total:.1f}"
    text = str(why)
    for candidate in why.candidates:
        assert candidate.plan.tactic in text
    assert {line.split()[0] for line in lines[5:] if line.startswith("  w4a16")} == {
        candidate.plan.tactic for candidate in why.candidates
    } - {why.plan.tactic}


def test_a_forced_tactic_is_shown_among_the_others() -> None:
    tensors, keywords = operands(16)
    free = qcutlass.explain(qcutlass.gemm, *tensors, device="h200", **keywords)
    worst = free.candidates[-1].plan.tactic
    why = qcutlass.explain(qcutlass.gemm, *tensors, device="h200", tactic=worst, split_k=3, **keywords)
    assert why.source == "forced"
    assert (why.plan.tactic, why.plan.split_k) == (worst, 3), "a split that selection would not consider"
    assert len(why.candidates) == len(free.candidates) + 1
    assert f"> {worst}" in str(why)
    assert "forced by the caller" in str(why)


def test_dense_plans_say_what_they_do() -> None:
    tensors, keywords = operands(256)
    name = qcutlass.tactics(qcutlass.gemm, *tensors, **keywords)[-1]
    assert name == "w4a16_f16_dequantize_dense"
    why = qcutlass.explain(qcutlass.gemm, *tensors, device="h200", tactic=name, **keywords)
    assert why.plan.dense
    assert why.plan.slice == 512
    assert why.plan.workspace_bytes == 512 * 1024 * 2
    assert "slices of 512 rows of the weights, dequantised and multiplied by torch.mm, 1.0 MiB workspace" in str(why)


def test_a_tuned_plan_is_shown_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, keywords = operands(16)
    free = qcutlass.explain(qcutlass.gemm, *tensors, device="h200", **keywords)
    other = free.candidates[3].plan
    monkeypatch.setattr(selection, "_target", lambda a, device: (0, H200, "some GPU"))
    monkeypatch.setattr(selection.tuned_plans, "lookup", lambda arguments, traits, index: other)
    why = qcutlass.explain(qcutlass.gemm, *tensors, **keywords)
    assert why.source == "tuned"
    assert why.plan.tactic == other.tactic
    assert "measured as the fastest by qcutlass.tune" in str(why)
    forced = qcutlass.explain(qcutlass.gemm, *tensors, split_k=1, **keywords)
    assert forced.source == "forced"


@pytest.mark.parametrize("m", [1, 500])
def test_meta_tensors_explain_as_real_ones_do(m: int) -> None:
    options: dict[str, Any] = {"bias": True, "perm": True, "act_scale": True, "activation": "relu"}
    real, real_keywords = operands(m, **options)
    meta, meta_keywords = operands(m, device="meta", **options)
    assert meta[0].is_meta
    assert str(qcutlass.explain(qcutlass.gemm, *meta, device="h200", **meta_keywords)) == str(
        qcutlass.explain(qcutlass.gemm, *real, device="h200", **real_keywords)
    )


def test_traits_stand_for_any_gpu() -> None:
    tensors, keywords = operands(16)
    why = qcutlass.explain(qcutlass.gemm, *tensors, device=_C.DeviceTraits(90, 66, 232448), **keywords)
    assert "compute capability 9.0, 66 SMs" in why.device
    with pytest.raises(qcutlass.UnsupportedError, match=r"compute capability 7\.5"):
        qcutlass.explain(qcutlass.gemm, *tensors, device=_C.DeviceTraits(75, 40, 1024), **keywords)


@pytest.mark.parametrize("name", ["H200", "h200", "RTX 4090", "rtx-4090"])
def test_names_are_forgiving(name: str) -> None:
    tensors, keywords = operands(1)
    assert (
        name.upper().replace(" ", "").replace("-", "")
        in qcutlass.explain(qcutlass.gemm, *tensors, device=name, **keywords).device
    )


def test_explanations_do_not_change() -> None:
    tensors, keywords = operands(1)
    why = qcutlass.explain(qcutlass.gemm, *tensors, device="h200", **keywords)
    with pytest.raises(dataclasses.FrozenInstanceError):
        why.source = "tuned"  # type: ignore[misc]


def test_wrong_requests_say_what_to_do() -> None:
    tensors, keywords = operands(1)
    with pytest.raises(ValueError, match=r"device: the tensors are on cpu, so name a GPU.*'h200'"):
        qcutlass.explain(qcutlass.gemm, *tensors, **keywords)
    with pytest.raises(ValueError, match=r"device: expected one of .*'h200'.*got 'tpu'"):
        qcutlass.explain(qcutlass.gemm, *tensors, device="tpu", **keywords)
    with pytest.raises(TypeError, match=r"device: .* got int"):
        qcutlass.explain(qcutlass.gemm, *tensors, device=0, **keywords)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tactic: 'no_such'"):
        qcutlass.explain(qcutlass.gemm, *tensors, device="h200", tactic="no_such", **keywords)
    with pytest.raises(ValueError, match="M = 0, N = 512 is empty"):
        qcutlass.explain(qcutlass.gemm, tensors[0][:0], *tensors[1:], device="h200", **keywords)
    with pytest.raises(qcutlass.UnsupportedError, match="float16 or bfloat16"):
        qcutlass.explain(qcutlass.gemm, tensors[0].float(), *tensors[1:], device="h200", **keywords)


@pytest.mark.gpu
def test_the_gpu_of_the_tensors_is_the_default() -> None:
    tensors, keywords = operands(16, device="cuda")
    why = qcutlass.explain(qcutlass.gemm, *tensors, **keywords)
    assert torch.cuda.get_device_name() in why.device
    assert why.plan.tactic == qcutlass.plan(qcutlass.gemm, *tensors, **keywords).tactic


def test_the_examples_of_the_documentation() -> None:
    result = doctest.testmod(selection)
    assert result.attempted > 5
    assert result.failed == 0
