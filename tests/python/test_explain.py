"""qcutlass.explain: the chosen kernel, the reason and the predictions, without a GPU."""

from __future__ import annotations

import dataclasses
import doctest
from typing import Any

import pytest
import torch
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import Description, Product
from torch import Tensor

import qcutlass
from qcutlass import _C, testing
from qcutlass.products import selection
from qcutlass.products.kind import FUNCTIONS

H200 = selection.GPUS["h200"]
kinds = pytest.mark.parametrize("kind", DESCRIPTIONS.values(), ids=list(DESCRIPTIONS))


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


def product_of(kind: Description, m: int = 16, **options: Any) -> Product:
    return kind.random(kind.case(m, 512, 1024, **options), seed=1)


@pytest.mark.parametrize(
    ("gpu", "dtype"),
    [(gpu, dtype) for gpu in ("rtx4090", "b200", "h200") for dtype in (torch.int8, torch.float8_e4m3fn)]
    + [("a100", torch.int8)],
    ids=str,
)
@pytest.mark.parametrize("m", [1, 16, 300, 4096])
def test_products_of_4_by_8_bits_have_kernels_beside_those_of_wgmma(gpu: str, dtype: torch.dtype, m: int) -> None:
    """Which are the choice where they are."""
    product = product_of(DESCRIPTIONS["gemm_w4a8"], m, dtype=dtype)
    assert ("_sm90a_" in product.explain(device=gpu).plan.tactic) == (gpu == "h200")
    architecture = "sm80" if dtype == torch.int8 else "sm89"
    others = [name for name in product.tactics() if f"_group_{architecture}_" in name]
    assert len(others) == 3
    for name in others:
        assert product.explain(device=gpu, tactic=name).plan.tactic == name


def test_products_of_4_bits_by_fp8_need_its_instructions() -> None:
    product = product_of(DESCRIPTIONS["gemm_w4a8"], dtype=torch.float8_e4m3fn)
    with pytest.raises(qcutlass.UnsupportedError, match=r"float8 need .* 8\.9 .*Use int8 activations"):
        product.explain(device="a100")


@kinds
@pytest.mark.parametrize("gpu", selection.GPUS)
def test_the_choice_is_the_first_candidate(kind: Description, gpu: str) -> None:
    traits_of_gpu = selection.GPUS[gpu]
    for m in (1, 16, 300):
        product = product_of(kind, m)
        if not kind.serves(traits_of_gpu, kind.case(m, 512, 1024)):
            with pytest.raises(qcutlass.UnsupportedError, match=rf"{traits_of_gpu.compute_capability / 10}"):
                product.explain(device=gpu)
            continue
        why = product.explain(device=gpu)
        assert why.source == "cost model"
        assert (why.plan.tactic, why.plan.split_k) == (why.candidates[0].plan.tactic, why.candidates[0].plan.split_k)
        totals = [candidate.cost.total for candidate in why.candidates]
        assert totals == sorted(totals)
        assert why.cost.total == totals[0]
        traits = {t.name: t for t in kind.traits(kind.case(m, 512, 1024))}
        for candidate in why.candidates:
            cost = candidate.cost
            assert min(cost.load, cost.compute, cost.fixed) > 0
            assert cost.total <= (cost.load + cost.compute + cost.fixed) * (1 + 1e-12)
            if not candidate.plan.dense:
                assert traits[candidate.plan.tactic].shared_memory <= traits_of_gpu.shared_memory_per_block


@kinds
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_gpus_with_wgmma_do_without_what_it_supersedes(kind: Description, batch_invariant: bool) -> None:
    """And other GPUs have it."""
    for m in (1, 17, 100, 3000):
        product = kind.random(kind.case(m, 512, 1024), seed=1)
        traits = kind.traits(kind.case(m, 512, 1024))
        superseded = {t.name for t in traits if t.superseded}
        assert not superseded or any(t.wgmma for t in traits)
        chosen = {one.plan.tactic for one in product.explain(device="h200", batch_invariant=batch_invariant).candidates}
        assert chosen
        assert chosen.isdisjoint(superseded)
        if superseded and kind.serves(selection.GPUS["l40s"]):
            assert not superseded.isdisjoint(one.plan.tactic for one in product.explain(device="l40s").candidates)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        pytest.param(kind, *explained, id=f"{kind.name}-{name}")
        for kind in DESCRIPTIONS.values()
        for name, explained in kind.explained.items()
    ],
)
def test_products_are_described(kind: Description, options: dict[str, Any], words: str) -> None:
    product = product_of(kind, **options)
    why = product.explain(device="h200")
    assert why.problem == "16 x 1024 " + words.format(n=512, k=1024)
    assert why.plan.tactic in product.tactics()
    assert why.plan.tactic in str(why)


@kinds
def test_a_forced_tactic_is_told(kind: Description) -> None:
    product = product_of(kind)
    names = product.tactics()
    assert len(set(names)) == len(names)
    candidates = [one.plan for one in product.explain(device="h200").candidates if not one.plan.dense]
    worst = candidates[-1]
    why = product.explain(device="h200", tactic=worst.tactic, split_k=worst.split_k)
    assert (why.source, why.plan.tactic, why.plan.split_k) == ("forced", worst.tactic, worst.split_k)
    others = {name for other in DESCRIPTIONS.values() for name in product_of(other).tactics()} - set(names)
    for name in ("no_such", *sorted(others)[:1]):
        with pytest.raises(ValueError, match=f"tactic: '{name}'"):
            product.explain(device="h200", tactic=name)


@kinds
@pytest.mark.parametrize("m", [1, 500])
def test_meta_tensors_explain_as_real_ones_do(kind: Description, m: int) -> None:
    real = kind.random(kind.full(m, 512, 1024, activation="relu"), seed=1)
    meta = real.mapped(lambda t: t.to("meta"))
    assert meta.a.is_meta
    assert str(meta.explain(device="h200")) == str(real.explain(device="h200"))


@kinds
def test_more_rows_take_more_time(kind: Description) -> None:
    products = [kind.random(kind.case(m, 4096, 512), seed=1) for m in (16, 256, 2048)]
    totals = [product.explain(device="h200").cost.total for product in products]
    assert totals == sorted(totals)


@kinds
def test_plans_need_a_gpu(kind: Description) -> None:
    product = product_of(kind)
    with pytest.raises(ValueError, match="GPU"):
        qcutlass.plan(kind.function, **product.values)
    with pytest.raises(ValueError, match=r"device: the tensors are on cpu, so name a GPU.*'h200'"):
        product.explain()


@kinds
def test_arguments_are_those_of_the_product(kind: Description) -> None:
    product, name = product_of(kind), FUNCTIONS[kind.function].name
    few = list(product.operands.values())[:2]
    with pytest.raises(TypeError, match=rf"{name} but out: missing a required argument"):
        qcutlass.explain(kind.function, *few, device="h200")
    with pytest.raises(TypeError, match=rf"{name} but out: missing"):
        qcutlass.tactics(kind.function, *few)
    with pytest.raises(TypeError, match=rf"{name} but out: .*'no_such'"):
        product.explain(no_such=4, device="h200")


@kinds
def test_empty_products_have_no_kernel(kind: Description) -> None:
    product = product_of(kind)
    with pytest.raises(ValueError, match="M = 0, N = 512 is empty"):
        product.explain(device="h200", **product.rows(product.a[:0]))


@pytest.mark.gpu
@kinds
def test_the_gpu_of_the_tensors_is_the_default(kind: Description) -> None:
    kind.skip_without_instructions()
    product = kind.random(kind.case(16, 512, 1024), "cuda", seed=1)
    why = product.explain()
    assert torch.cuda.get_device_name() in why.device
    assert why.plan.tactic == qcutlass.plan(kind.function, **product.values).tactic


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
    why = qcutlass.explain(qcutlass.gemm, *tensors, device="h200", tactic=worst, split_k=7, **keywords)
    assert why.source == "forced"
    assert (why.plan.tactic, why.plan.split_k) == (worst, 7), "a split that selection would not consider"
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


@pytest.mark.parametrize(
    ("gpu", "fitted"),
    [
        ("h200", True),
        ("h100", True),
        ("l40s", False),
        ("rtx5090", False),
        pytest.param(_C.DeviceTraits(90, 114, 232448, wgmma=True), False, id="h100-pcie"),
    ],
)
def test_rates_that_are_not_fitted_are_told(gpu: str | _C.DeviceTraits, fitted: bool) -> None:
    tensors, keywords = operands(16)
    why = qcutlass.explain(qcutlass.gemm, *tensors, device=gpu, **keywords)
    told = "\nthe rates of this GPU are not fitted to measured times: qcutlass.tune measures on it\n"
    assert why.fitted == fitted
    assert (told in str(why)) != fitted
    forced = qcutlass.explain(qcutlass.gemm, *tensors, device=gpu, tactic=why.plan.tactic, **keywords)
    assert told not in str(forced)


def test_gpus_of_one_capability_have_rates_of_their_own() -> None:
    """GeForce cards add in fp32 at half the rate: what is bound by that takes longer on them."""
    tensors, keywords = operands(4096)
    for card, other in (("rtx4090", "l40s"), ("rtx3090", "a10")):
        slow, fast = (
            qcutlass.explain(qcutlass.gemm, *tensors, device=gpu, **keywords).cost.compute for gpu in (card, other)
        )
        assert slow > 1.3 * fast


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


def test_the_examples_of_the_documentation() -> None:
    result = doctest.testmod(selection)
    assert result.attempted > 5
    assert result.failed == 0


@pytest.mark.parametrize(
    ("dtype", "prefix"), [(torch.float8_e4m3fn, "w8a8_e4m3_sm89_"), (torch.float8_e5m2, "w8a8_e5m2_sm89_")]
)
def test_names_of_float8_tactics(dtype: torch.dtype, prefix: str) -> None:
    product = product_of(DESCRIPTIONS["gemm_fp8"], 8, dtype=dtype)
    assert product.explain(device="l40s").plan.tactic.startswith(prefix)


def test_int8_products_on_sm_90_cost_less_than_float8_ones() -> None:
    int8, float8 = (
        kind.random(kind.case(2048, 4096, 512, azp="none"), seed=1).explain(device="h200").cost
        for kind in (DESCRIPTIONS["gemm_w8a8"], DESCRIPTIONS["gemm_fp8"])
    )
    assert float8.compute > 1.05 * int8.compute  # sums leave the MMAs every 128 columns


def test_int8_tactics_by_name() -> None:
    product = product_of(DESCRIPTIONS["gemm_w8a8"], 64)
    assert all(name.startswith("w8a8_s8_") for name in product.tactics())
    few = product_of(DESCRIPTIONS["gemm_w8a8"], azp="none").explain(device="h200")
    assert few.plan.tactic.startswith("w8a8_s8_sm80_")
    assert not any(candidate.plan.dense for candidate in few.candidates)
    forced = {"tactic": "w8a8_s8_sm80_n64m64k128_s3", "split_k": 2}
    plan = product.explain(device="a100", **forced).plan
    assert (plan.tactic, plan.split_k) == (forced["tactic"], 2)
    with pytest.raises(qcutlass.UnsupportedError, match=r"not there on GPUs of compute capability 9\.0"):
        product.explain(device="h200", **forced)
