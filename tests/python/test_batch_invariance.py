"""Batch invariance: a row of a product is the same bits whatever M is, and whatever the other rows are."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import Description, Product
from tests.python.test_cuda_cases import devices, variants
from torch import Tensor

import qcutlass
from qcutlass import testing
from qcutlass.products import invariance, selection

ROWS = range(1, 71)
MANY = 333
ON_GPU = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 200, 257, 500, 1000, 2047)


def rows_of(product: Product, first: int, count: int, **options: Any) -> tuple[Tensor, ...]:
    """The product of some of the rows."""
    names = [name for name in product.description.of_rows if name in product.operands] + [product.activations]
    parts = {name: product.operands[name][first : first + count] for name in names if len(product.operands[name]) > 1}
    return product.outs(**parts, **options)


def rows_that_differ(product: Product, counts: Any, choose: random.Random, **options: Any) -> list[int]:
    """The numbers of rows with which one of them has other bits than among all."""
    whole = product.outs(**options)
    found = []
    for count in counts:
        first = choose.randrange(len(product.a) - count + 1)
        parts = rows_of(product, first, count, **options)
        if any(not torch.equal(part, out[first : first + count]) for part, out in zip(parts, whole, strict=True)):
            found.append(count)
    return found


def case_of(kind: Description, variant: str, m: int, n: int, k: int) -> Any:
    return kind.full(m, n, k, **kind.variants[variant])


@variants
def test_rows_do_not_depend_on_their_number_on_the_cpu(kind: Description, variant: str, seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    for n, k in ((40, 320), (17, choose.randrange(65, 500))):
        product = kind.random(case_of(kind, variant, MANY, n, k), seed=next(seeds))
        assert rows_that_differ(product, ROWS, choose, batch_invariant=True) == [], product.problem


@pytest.mark.parametrize("group_size", [7, 16, 32, 48, 64, 128, 10**6])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["int", "real"])
def test_groups_of_any_size_on_the_cpu(bits: int, group_size: int, zeros: Any, seeds: Iterator[int]) -> None:
    choose, kind = random.Random(next(seeds)), DESCRIPTIONS["gemm"]
    for dtype in (torch.float16, torch.float32):
        case = testing.Case(80, 33, 700, bits, group_size=group_size, zeros=zeros, dtype=dtype)
        product = kind.random(case, seed=next(seeds))
        assert rows_that_differ(product, range(1, 21), choose, batch_invariant=True) == [], product.problem
        assert_right(product)


def assert_right(product: Product) -> None:
    """Oracle T."""
    product.description.assert_correct(product.outs(batch_invariant=True), product.problem)


@variants
def test_results_are_within_the_bound(kind: Description, variant: str, seeds: Iterator[int]) -> None:
    for m in (1, 5, 70):
        product = kind.random(case_of(kind, variant, m, 40, 320), seed=next(seeds))
        assert_right(product)
        exact, expected = kind.products(kind.case(m, 40, 320, **kind.variants[variant]), "cpu", next(seeds))
        kind.assert_exact(exact.outs(batch_invariant=True), expected, exact, "batch-invariant")


@pytest.mark.parametrize("activations", [None, "int8"])
def test_activations_that_the_product_quantises(activations: str | None, seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    for bits in (4, 8):
        for group_size in (16, 48, 128):
            case = testing.Case(80, 33, 480, bits, group_size=group_size, dtype=torch.float32)
            product = DESCRIPTIONS["gemm"].random(case, seed=next(seeds))
            options: dict[str, Any] = {"batch_invariant": True, "activations": activations}
            assert rows_that_differ(product, range(1, 41), choose, **options) == [], product.problem


@pytest.mark.parametrize("weight_dtype", ["e2m1", "e4m3"])
def test_floating_codes(weight_dtype: str, seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    bits = 4 if weight_dtype == "e2m1" else 8
    codes = torch.randint(0, 2**bits if bits == 4 else 120, (40, 320), dtype=torch.uint8)
    w_packed, scales = qcutlass.preprocess_weights(codes, bits=bits), torch.rand(10, 40)
    a = torch.randn(80, 320)

    def multiply(rows: Tensor) -> Tensor:
        options: dict[str, Any] = {"weight_dtype": weight_dtype, "group_size": 32, "batch_invariant": True}
        return qcutlass.gemm(rows, w_packed, scales, **options)

    whole = multiply(a)
    for count in range(1, 41):
        first = choose.randrange(80 - count)
        assert torch.equal(multiply(a[first : first + count]), whole[first : first + count]), count


def test_rows_differ_otherwise(seeds: Iterator[int]) -> None:
    """The comparison above can fail: products of few rows and of many add in other orders without the option."""
    choose = random.Random(next(seeds))
    gemm, fp8 = DESCRIPTIONS["gemm"], DESCRIPTIONS["gemm_fp8"]
    product = gemm.random(testing.Case(MANY, 256, 2048, dtype=torch.float32), seed=next(seeds))
    assert rows_that_differ(product, range(1, 20), choose) != []
    product = fp8.random(fp8.case(MANY, 256, 2048, **next(iter(fp8.variants.values()))), seed=next(seeds))
    assert rows_that_differ(product, range(1, 20), choose, out_dtype=torch.float32) != []


def test_threads_change_no_bit(seeds: Iterator[int]) -> None:
    product = DESCRIPTIONS["gemm"].random(testing.Case(9, 512, 512), seed=next(seeds))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (alone,) = product.outs(batch_invariant=True)
        torch.set_num_threads(2)
        assert torch.equal(alone, product.outs(batch_invariant=True)[0])
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def everything_invariant() -> Iterator[None]:
    invariance.switch(True)
    yield
    invariance.switch(None)


def test_the_switch_reaches_calls_that_ran_before(seeds: Iterator[int]) -> None:
    """And operators and layers, which have no option of it."""
    product = DESCRIPTIONS["gemm"].random(testing.Case(3, 512, 2048, dtype=torch.float32), seed=next(seeds))
    layer = qcutlass.QuantLinear.from_linear(torch.nn.Linear(2048, 64), qcutlass.WeightOnly(bits=4))
    x = torch.randn(3, 2048)
    for _ in range(2):
        product.outs(), layer(x)
    try:
        invariance.switch(True)
        (wanted,) = product.outs(batch_invariant=True)
        assert torch.equal(product.outs()[0], wanted)
        assert torch.equal(torch.ops.qcutlass.gemm(*product.arguments()), wanted)
        assert torch.equal(layer(x)[:1], layer(x[:1]))
    finally:
        invariance.switch(None)


@pytest.mark.usefixtures("everything_invariant")
def test_layers_follow_the_switch(seed: int) -> None:
    torch.manual_seed(seed)
    linear, x = torch.nn.Linear(512, 96), torch.randn(70, 512)
    for scheme in (qcutlass.WeightOnly(bits=4), qcutlass.WeightOnly(bits=8), qcutlass.W8A8(), qcutlass.FP8(),
                   qcutlass.Blockwise()):  # fmt: skip
        layer = qcutlass.QuantLinear.from_linear(linear, scheme)
        whole = layer(x)
        for count in (1, 2, 5, 8, 9, 33):
            assert torch.equal(layer(x[:count]), whole[:count]), (scheme, count)


@pytest.mark.parametrize(("written", "wanted"), [("1", "True"), ("0", "False"), ("", "False")])
def test_the_environment_switches_all_of_them(written: str, wanted: str) -> None:
    code = "import torch, qcutlass; from qcutlass.products import invariance; print(invariance.is_on())"
    environment = os.environ | {invariance.VARIABLE: written}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == wanted


def test_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(invariance.VARIABLE, "yes")
    invariance.switch(None)
    try:
        with pytest.raises(ValueError, match="QCUTLASS_BATCH_INVARIANT: expected 0 or 1 in the environment, got 'yes'"):
            invariance.is_on()
    finally:
        monkeypatch.delenv(invariance.VARIABLE)
        invariance.switch(None)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_the_option_is_checked(value: Any) -> None:
    product = DESCRIPTIONS["gemm"].random(testing.Case(2, 32, 64), seed=1)
    with pytest.raises(TypeError, match="batch_invariant: expected True or False"):
        product(batch_invariant=value)


@devices
def test_rows_of_experts(device: str, seed: int) -> None:
    """The block of experts: a token's result does not depend on the others, nor on how many there are.

    On GPUs with `wgmma` a free choice is of the streaming loop for some of these numbers, of `wgmma` for others.
    """
    torch.manual_seed(seed)

    def weights(n: int, k: int) -> qcutlass.moe.ExpertWeights:
        each = [qcutlass.quantize(torch.randn(n, k).half(), bits=4, group_size=64) for _ in range(4)]
        w_packed = qcutlass.preprocess_weights(torch.stack([q.codes for q in each]), bits=4)
        return qcutlass.moe.ExpertWeights(w_packed.to(device), torch.stack([q.scales for q in each]).to(device))

    both, down = weights(1024, 512), weights(512, 512)
    x = torch.randn(500, 512, device=device).half()
    topk_weights, topk_ids = torch.randn(500, 4, device=device).softmax(-1).topk(2)
    whole = qcutlass.moe.experts(x, both, down, topk_ids, topk_weights, batch_invariant=True)
    free = set()
    for count in (1, 2, 9, 33, 128, 200, 333):
        given = topk_ids[:count], topk_weights[:count]
        part = qcutlass.moe.experts(x[:count], both, down, *given, batch_invariant=True)
        assert torch.equal(part, whole[:count]), count
        routing = qcutlass.moe.route(topk_ids[:count], 4)
        operands = x[:count], both.w_packed, both.scales
        rows: dict[str, Any] = {"offsets": routing.offsets, "rows": routing.rows}
        why = qcutlass.explain(qcutlass.gemm_grouped, *operands, **rows, device="h200")
        free.add("_stream_" in why.plan.tactic)
    assert free == {True, False}


@pytest.mark.parametrize("kind", [DESCRIPTIONS[name] for name in ("gemm", "gemm_w8a8", "gemm_fp8", "blockwise")])
@pytest.mark.parametrize("gpu", ["a100", "l40s", "h200"])
def test_explain_says_so(kind: Description, gpu: str) -> None:
    if not kind.serves(selection.GPUS[gpu]):
        pytest.skip("no such instructions")
    few, many = (kind.random(kind.case(m, 512, 1024), seed=1) for m in (1, 500))
    free, first, last = few.explain(device=gpu), *(p.explain(device=gpu, batch_invariant=True) for p in (few, many))
    assert not free.batch_invariant
    assert "batch-invariant" not in str(free)
    assert first.batch_invariant
    assert "batch-invariant, one order of sums whatever M is" in str(first)
    exact = kind.name == "gemm_w8a8"  # integers: any order is that one
    assert exact or {c.plan.split_k for c in first.candidates} == {c.plan.split_k for c in last.candidates}
    assert exact or {c.plan.tactic for c in first.candidates} == {c.plan.tactic for c in last.candidates}
    assert not any(candidate.plan.dense for candidate in last.candidates) or exact


def test_tiles_of_wgmma_share_k_whatever_their_number() -> None:
    """In clusters, which add in the order of their blocks; otherwise those of the last wave alone do."""
    plans, tactics = set(), set()
    for m in ON_GPU:
        product = DESCRIPTIONS["gemm"].random(testing.Case(m, 4096, 4096), seed=1)
        plan = product.explain(device="h200", batch_invariant=True).plan
        plans.add((plan.split_k, plan.cluster, plan.shared_channel, plan.shared_token))
        tactics.add(plan.tactic)
    ((split_k, *rest),) = plans
    assert all("_sm90a_" in tactic for tactic in tactics)
    assert len(tactics) > 1, "tiles follow the rows"
    assert split_k > 1
    assert rest == [True, 0, 0]
    forced = product.explain(device="h200", tactic=plan.tactic, split_k=split_k).plan
    assert forced.shared_channel + forced.shared_token > 0


def test_a_dense_tactic_is_refused() -> None:
    product = DESCRIPTIONS["gemm"].random(testing.Case(256, 512, 512), seed=1)
    name = product.tactics()[-1]
    assert name.endswith("_dense")
    with pytest.raises(qcutlass.UnsupportedError, match=r"tactic: .* may depend on the number of rows"):
        product.explain(device="h200", tactic=name, batch_invariant=True)


@pytest.mark.gpu
@variants
def test_rows_do_not_depend_on_their_number_on_a_gpu(
    kind: Description, variant: str, seeds: Iterator[int], ledger: Any
) -> None:
    """Every order of sums that shapes lead to, by all tactics that share it: forced one after the other."""
    kind.skip_without_instructions()
    choose = random.Random(next(seeds))
    for n, k in ((4096, 4096), (512, 8192), (28672, 1024), (97, 1000)):
        product = kind.random(case_of(kind, variant, 2048, n, k), "cuda", next(seeds))
        whole = product.outs(batch_invariant=True)
        for tactic in {c.plan.tactic for c in product.explain(batch_invariant=True).candidates}:
            split = product.explain(batch_invariant=True).plan.split_k
            forced = {"tactic": tactic, "split_k": split, "batch_invariant": True}
            if kind.name != "gemm_w8a8":
                for out, expected in zip(product.outs(**forced), whole, strict=True):
                    ledger.equal(out, expected, f"{tactic} of one order with the others: {product.problem}")
        assert rows_that_differ(product, ON_GPU, choose, batch_invariant=True) == [], product.problem
        ledger.cases += len(ON_GPU)


@devices
def test_other_rows_change_nothing(device: str, seed: int, ledger_of_the_cpu: Any) -> None:
    product = DESCRIPTIONS["gemm"].random(testing.Case(40, 256, 512, dtype=torch.float16), device, seed)
    (whole,) = product.outs(batch_invariant=True)
    changed = product.a.clone()
    changed[1:] = torch.nan
    (out,) = product.outs(**{product.activations: changed, "batch_invariant": True})
    ledger_of_the_cpu.equal(out[:1], whole[:1], product.problem)
