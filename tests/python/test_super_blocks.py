"""Scales and minimums of two levels: products, dequantisation, layers and descriptions, against those of one level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product as pairs
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import qcutlass
from qcutlass import CheckpointError, QuantizedTensor, UnsupportedError, testing
from qcutlass.formats.specs import LayerSpec
from qcutlass.layers import QuantEmbedding, QuantLinear, WeightOnlyLinear, packed, shard
from qcutlass.layers.base import empty_layer
from qcutlass.layers.expert_stack import ExpertStack
from qcutlass.products.packing import one_level
from qcutlass.products.rows import dequantize_rows
from qcutlass.products.selection import weight_dtype
from qcutlass.testing import Case, Problem

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = ("scales", "minimums", "super_scales", "super_minimums")
CASES = {
    "Q4_K": Case(1, 80, 512, 4, 32, "minimum", F16, super_groups=8),
    "Q5_K": Case(2, 40, 512, 8, 32, "minimum", BF16, super_groups=8, bias=True),
    "Q6_K": Case(5, 48, 512, 8, 16, "none", F16, super_groups=16),
    "Q3_K": Case(1, 37, 256, 4, 16, "none", F32, super_groups=16, act_scale=True),
    "Q2_K": Case(9, 64, 768, 4, 16, "minimum", F32, super_groups=16, perm=True),
    "groups of 64": Case(3, 33, 512, 4, 64, "minimum", F16, super_groups=2),
    "groups of 40": Case(3, 33, 200, 4, 40, "minimum", BF16, super_groups=5),
    "a block a group": Case(2, 21, 256, 8, 64, "none", F16, super_groups=1),
    "one group": Case(4, 16, 96, 4, 96, "minimum", F32, super_groups=1),
}
cases = pytest.mark.parametrize("name", CASES)


def product(problem: Problem, **changes: Any) -> Tensor:
    w_packed = qcutlass.preprocess_weights(problem.codes, problem.bits)
    return qcutlass.gemm(problem.a, w_packed, problem.scales, problem.zeros, **problem.keywords | changes)


def of_one_level(problem: Problem) -> Problem:
    levels: dict[str, Any] = one_level({name: getattr(problem, name) for name in LEVELS})
    return replace(problem, **levels)


def on_gpu(name: str) -> Case:
    """Of activations, and groups, that GPUs take."""
    case = CASES[name]
    group_size = case.group_size if case.group_size % 16 == 0 else 48
    return replace(case, dtype=F16 if case.dtype == F32 else case.dtype, group_size=group_size)


def quantized(problem: Problem) -> QuantizedTensor:
    levels: dict[str, Any] = {name: getattr(problem, name) for name in LEVELS}
    return QuantizedTensor(problem.codes, zeros=None, bits=problem.bits, group_size=problem.group_size, **levels)


def any_weights(seed: int, n: int = 48, k: int = 512, minimums: bool = True) -> QuantizedTensor:
    return quantized(Case(1, n, k, 4, 32, "minimum" if minimums else "none", super_groups=8).random(seed=seed))


@cases
def test_both_oracles(name: str, seed: int) -> None:
    case = CASES[name]
    exact, expected = case.exact(seed=seed)
    testing.assert_equal(product(exact), expected, label=exact)
    problem = case.random(seed=seed)
    testing.assert_close(product(problem), problem.reference(), label=problem)


@cases
@pytest.mark.parametrize("m", [1, 8, 33])
def test_the_bits_are_those_of_one_level(name: str, m: int, seed: int) -> None:
    problem = replace(CASES[name], m=m).random(seed=seed)
    other = of_one_level(problem)
    for options in ({}, {"batch_invariant": True}):
        assert torch.equal(product(problem, **options), product(other, **options))
    if problem.minimums is None:
        assert torch.equal(product(problem, activations="int8"), product(other, activations="int8"))


@cases
def test_dequantised(name: str, seed: int) -> None:
    problem = CASES[name].random(seed=seed)
    w_packed, expected = qcutlass.preprocess_weights(problem.codes, problem.bits), problem.weight()
    levels = {part: getattr(problem, part) for part in LEVELS}
    options = {"k": problem.codes.shape[1], "bits": problem.bits, "group_size": problem.group_size, "dtype": F32}
    assert torch.equal(qcutlass.dequantize(w_packed, **levels, **options), expected)
    rows = torch.tensor([3, 15, 3])
    assert torch.equal(dequantize_rows(w_packed, zeros=None, rows=rows, **levels, **options), expected[rows])
    weight = quantized(problem)
    assert torch.equal(weight.dequantize(), expected)
    one = weight.expanded()
    assert one.super_scales is None
    assert torch.equal(one.dequantize(), expected)
    assert weight.bits_per_weight < one.bits_per_weight
    assert one.expanded() is one
    assert torch.equal(weight.rows(rows).dequantize(), expected[rows])


@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("world_size", [2, 4])  # of 512 columns: a super-block each, and half of one
def test_parts_of_layers(axis: Any, world_size: int, seed: int) -> None:
    layer = WeightOnlyLinear(any_weights(seed, n=64))
    parts = [shard(layer, rank, world_size, axis) for rank in range(world_size)]
    assert torch.equal(torch.cat([part.weights() for part in parts], 0 if axis == "out" else 1), layer.weights())
    assert all(part.super_scales is not None for part in parts)  # type: ignore[attr-defined]


def test_grouped(seed: int) -> None:
    experts = [CASES["Q4_K"].random(seed=seed + index) for index in range(3)]
    w_packed = qcutlass.preprocess_weights(torch.stack([each.codes for each in experts]), 4)
    stacked = {name: torch.stack([getattr(each, name) for each in experts]) for name in LEVELS}
    a = torch.cat([each.a for each in experts])
    offsets = torch.arange(4, dtype=torch.int32)
    out = qcutlass.gemm_grouped(a, w_packed, offsets=offsets, **stacked)
    for row, each in enumerate(experts):
        testing.assert_close(out[row : row + 1], each.reference(), label=each)
    stack = ExpertStack.of_layers((WeightOnlyLinear(quantized(each)) for each in experts), 3)
    assert torch.equal(qcutlass.gemm_grouped(a, offsets=offsets, **one_expert_layer(stack)), out)
    assert torch.equal(stack.layer(1).weights(), experts[1].weight())
    mixed = [WeightOnlyLinear(quantized(experts[0])), WeightOnlyLinear(quantized(experts[1]).expanded())]
    found = ExpertStack.of_layers(mixed, 2)
    assert found.super_scales is None
    assert all(torch.equal(found.layer(i).weights(), mixed[i].weights()) for i in range(2))


def one_expert_layer(stack: ExpertStack) -> dict[str, Any]:
    names = "w_packed", "scales", "zeros", "minimums", "super_scales", "super_minimums", "bits", "group_size"
    return {name: getattr(stack, name) for name in names}


@pytest.mark.parametrize("minimums", [True, False])
def test_states_and_specs(minimums: bool, seed: int) -> None:
    layer = WeightOnlyLinear(any_weights(seed, minimums=minimums))
    described = layer.spec.to_dict()
    assert described["super_size"] == 256
    spec = LayerSpec.from_dict(described, "layer")
    assert spec == layer.spec
    assert spec.words == f"w4 g32 {'minimums' if minimums else 'sym'}"
    empty = WeightOnlyLinear._empty(spec, 48, 512)
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty.weights(), layer.weights())
    other = WeightOnlyLinear(any_weights(seed + 1, minimums=minimums).expanded())
    other.load_state_dict(layer.state_dict())
    a = torch.randn(3, 512)
    assert torch.equal(other(a), layer(a))
    one = WeightOnlyLinear(layer.canonical().weight.expanded())
    layer.load_state_dict(one.state_dict())
    assert layer.super_scales is None
    assert torch.equal(layer(a), other(a))
    embedding = QuantEmbedding(other)
    assert torch.equal(embedding(torch.tensor([5])), other.weights()[5:6])


BAD_SPECS: dict[str, dict[str, Any]] = {
    "super_scales": {"super_scales": None},
    "super_minimums": {"super_minimums": None},
    "integer scales": {"scales": "float32"},
    "super_size": {"super_size": 48},
    "no super_size": {"super_size": None},
    "zeros": {"zeros": "uint8", "minimums": None, "super_minimums": None},
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_descriptions_that_contradict_themselves(name: str, seed: int) -> None:
    values = WeightOnlyLinear(any_weights(seed)).spec.to_dict() | BAD_SPECS[name]
    with pytest.raises(CheckpointError, match=r"layer: .*super_"):
        LayerSpec.from_dict({key: value for key, value in values.items() if value is not None}, "layer")


def test_descriptions_that_do_not_fit_the_layer(seed: int) -> None:
    """Groups of 24 columns, 22 of them, in super-blocks of three."""
    spec = replace(WeightOnlyLinear(any_weights(seed)).spec, group_size=24, super_size=72)
    packed: Any = SimpleNamespace(spec=spec, shape=(48, 512), where="layer of a folder")
    with pytest.raises(CheckpointError, match=r"layer of a folder: super_scales: .*B a divisor of G, got \[8, 48\]"):
        empty_layer(packed)


def test_gpus_take_super_blocks_of_128_columns(seed: int) -> None:
    weight = quantized(Case(1, 48, 512, 4, 32, "minimum", super_groups=2).random(seed=seed))
    kinds = {name: (getattr(weight, name).shape, getattr(weight, name).dtype) for name in LEVELS}
    with FakeTensorMode():
        parts = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in kinds.items()}
        w_packed = torch.empty(3, 8, 32, 16, dtype=torch.uint8, device="cuda")
        message = r"super_scales: on CUDA .*multiple of 128 columns, got \[8, 48\] .* groups of 32: .*expand_scales"
        with pytest.raises(UnsupportedError, match=message):
            qcutlass.gemm(torch.empty(1, 512, dtype=F16, device="cuda"), w_packed, **parts)
        with pytest.raises(UnsupportedError, match=message):
            qcutlass.dequantize(w_packed, k=512, **parts)
    a, packed_codes = torch.ones(1, 512, dtype=F16), qcutlass.preprocess_weights(weight.codes, 4)
    levels: dict[str, Any] = {name: getattr(weight, name) for name in LEVELS}
    with pytest.raises(UnsupportedError, match=r"super_scales: .*multiples of 128 columns, got 64;"):
        qcutlass.explain(qcutlass.gemm, a, packed_codes, **levels, device="h200")


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"a block a group"}))  # whose super-blocks have 64 columns
def test_on_gpus(name: str, seed: int) -> None:
    """By every tactic; the bits are those of one level where the kernel is the same, and after dequantising."""
    for m in (1, 9, 33, 130):
        case = replace(on_gpu(name), m=m)
        exact, expected = case.exact(device="cuda", seed=seed)
        problem = case.random(device="cuda", seed=seed)
        other = of_one_level(problem)
        w_packed = qcutlass.preprocess_weights(problem.codes, problem.bits)
        operands = problem.a, w_packed, problem.scales
        for tactic, split_k in pairs(qcutlass.tactics(qcutlass.gemm, *operands, **problem.keywords), (1, 2)):
            forced: dict[str, Any] = {"tactic": tactic, "split_k": split_k}
            try:
                testing.assert_equal(product(exact, **forced), expected, label=tactic)
            except UnsupportedError:  # more shared memory than there is, or too short a K
                continue
            out = product(problem, **forced)
            rounded = weight_dtype(*operands, **problem.keywords, **forced)
            testing.assert_close(out, problem.reference(rounded), label=(tactic, problem))
            if problem.minimums is not None:
                assert torch.equal(out, product(other, **forced)), tactic
        levels = {part: getattr(problem, part) for part in LEVELS}
        options = {"k": case.k, "bits": problem.bits, "group_size": problem.group_size, "dtype": F32}
        assert torch.equal(qcutlass.dequantize(w_packed, **levels, **options), problem.weight())


def with_odd_rows(problem: Problem, odd: list[tuple[int, float]]) -> Problem:
    """One activation of each of the first rows is `(k, value)`, and nothing else."""
    a = problem.a.clone()
    for row, (k, value) in enumerate(odd):
        a[row] = 0
        a[row, k] = value
    return replace(problem, a=a)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "group_size", "split_k"), [(512, 32, 1), (4608, 32, 1), (4608, 16, 2)])
@pytest.mark.parametrize("minimums", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_codes_that_overflow(
    bits: int, minimums: bool, k: int, group_size: int, split_k: int, seed: int
) -> None:
    """Though sums of weights do not: activations near the end of bfloat16, small scales; and infinite ones."""
    kind = "minimum" if minimums else "none"
    case = Case(3, 48, k, bits, group_size, kind, BF16, super_groups=256 // group_size)
    problem = case.random(device="cuda", seed=seed)
    problem = replace(problem, super_scales=problem.super_scales / 8)  # type: ignore[operator]
    large, infinite = 40, k - 212
    problem = with_odd_rows(problem, [(large, 2.0**127), (infinite, torch.inf)])
    weight, a = problem.weight(), problem.a
    w_packed = qcutlass.preprocess_weights(problem.codes, problem.bits)
    tried = set()
    for tactic in qcutlass.tactics(qcutlass.gemm, a, w_packed, problem.scales, **problem.keywords):
        try:
            out = product(problem, tactic=tactic, split_k=split_k)
        except UnsupportedError:
            continue
        tried.add(tactic.partition("_stream_")[2][3:5])
        testing.assert_equal(out[0], weight[:, large].bfloat16() * a[0, large], label=tactic)
        testing.assert_equal(out[1], (weight[:, infinite] * torch.inf).bfloat16(), label=tactic)
        rounded = weight_dtype(a, w_packed, problem.scales, **problem.keywords, tactic=tactic)
        testing.assert_close(out[2:], replace(problem, a=a[2:]).reference(rounded), label=tactic)
    assert "m8" in tried  # which scales sums


@pytest.mark.gpu
@pytest.mark.parametrize("n", [48, 41])  # the last tile has channels that there are not
def test_activations_of_fp16_that_are_not_finite(n: int, seed: int) -> None:
    case = Case(4, n, 2048, 4, 32, "minimum", F16, super_groups=8)
    problem = with_odd_rows(
        case.random(device="cuda", seed=seed), [(40, -torch.inf), (1300, torch.inf), (7, torch.nan)]
    )
    weight, w_packed = problem.weight(), qcutlass.preprocess_weights(problem.codes, 4)
    for tactic in qcutlass.tactics(qcutlass.gemm, problem.a, w_packed, problem.scales, **problem.keywords):
        try:
            out = product(problem, tactic=tactic)
        except UnsupportedError:
            continue
        testing.assert_equal(out[0], (weight[:, 40] * -torch.inf).half(), label=tactic)
        testing.assert_equal(out[1], (weight[:, 1300] * torch.inf).half(), label=tactic)
        assert bool(out[2].isnan().all()), tactic
        rounded = weight_dtype(problem.a, w_packed, problem.scales, **problem.keywords, tactic=tactic)
        testing.assert_close(out[3:], replace(problem, a=problem.a[3:]).reference(rounded), label=tactic)


@pytest.mark.gpu
def test_layers_on_gpus_keep_two_levels(seed: int) -> None:
    problem = Case(5, 48, 512, 4, 32, "minimum", F16, super_groups=8).random(device="cuda", seed=seed)
    layer = WeightOnlyLinear(quantized(problem))
    assert layer.super_scales is not None
    assert layer.scales.dtype == torch.int8
    assert torch.equal(layer(problem.a), product(problem))
    embedding = QuantEmbedding(layer)
    assert torch.equal(embedding(torch.tensor([5], device="cuda")), layer.weights()[5:6])


def test_layers_on_gpus_have_what_these_take(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a GPU: what layers do on one follows from the table of devices."""
    weight = quantized(Case(1, 48, 512, 4, 32, "minimum", super_groups=2).random(seed=seed))
    layer, stack = WeightOnlyLinear(weight), ExpertStack.of_layers([WeightOnlyLinear(weight)], 1)
    state, expected = layer.state_dict(), layer.weights()
    monkeypatch.setattr(packed, "_ASKING", ("cpu",))
    assert WeightOnlyLinear(any_weights(seed)).to("cpu").super_scales is not None  # super-blocks of 256 columns
    loaded = WeightOnlyLinear(any_weights(seed + 1))
    loaded.load_state_dict(state)
    assigned = WeightOnlyLinear._empty(layer.spec, 48, 512)
    assert assigned.super_scales is not None  # on the meta device
    assigned.load_state_dict(state, assign=True)
    awaited = WeightOnlyLinear._empty(layer.spec, 48, 512)
    awaited._buffers.update(state)
    awaited.end_loading()
    for found in (WeightOnlyLinear(weight), layer.to("cpu"), loaded, assigned, awaited, stack.to("cpu").layer(0)):
        assert found.super_scales is None
        assert found.super_minimums is None
        assert found.scales.dtype == found.minimums.dtype == F32  # type: ignore[union-attr]
        assert torch.equal(found.weights(), expected)
        assert "super_scales" not in found.state_dict()


ROWS: list[tuple[dict[str, Callable[[Mapping[str, Any]], Any]], type[Exception], str]] = [
    ({"super_scales": lambda v: None}, TypeError, "scales: expected a tensor of float16.* got int8"),
    ({"super_minimums": lambda v: None}, ValueError, "super_minimums: expected super_scales, and super_minimums just"),
    ({"super_scales": lambda v: v["super_scales"].float()}, TypeError, "super_scales: expected .*float16, got float32"),
    ({"super_scales": lambda v: v["super_scales"][:, 1:]}, ValueError, r"super_scales: expected shape \[B, N\]"),
    ({"super_scales": lambda v: v["super_scales"][[0, 1, 0]]}, ValueError, r"B a divisor of G, got \[3, 48\]"),
    ({"super_scales": lambda v: v["super_scales"].flatten()}, ValueError, r"super_scales: expected shape \[B, N\]"),
    ({"super_minimums": lambda v: v["super_minimums"][:1]}, ValueError, "super_minimums: expected the shape of"),
    ({"minimums": lambda v: v["minimums"].float()}, TypeError, "minimums: expected .*uint8, int8, got float32"),
    ({"scales": lambda v: v["scales"].float()}, TypeError, "scales: expected .*uint8, int8, got float32"),
    (
        {"minimums": lambda v: None, "super_minimums": lambda v: None, "zeros": lambda v: torch.ones(16, 48).byte()},
        ValueError,
        "super_scales: stand beside integer codes without zeros",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2][:40])
def test_wrong_arguments(row: Any, seed: int) -> None:
    changes, error, message = row
    weight = any_weights(seed)
    values: dict[str, Any] = {name: getattr(weight, name) for name in LEVELS}
    changed = values | {name: change(values) for name, change in changes.items()}
    w_packed = qcutlass.preprocess_weights(weight.codes, 4)
    with pytest.raises(error, match=message):
        qcutlass.gemm(torch.ones(1, 512), w_packed, **changed)
    with pytest.raises(error, match=message):
        qcutlass.dequantize(w_packed, k=512, **changed)
    if error is ValueError:
        with pytest.raises(ValueError, match=message):
            QuantizedTensor(weight.codes, bits=4, group_size=32, **{"zeros": None} | changed)


# Faults of a loader: each changes what one of the levels says, and the oracle must see it.


def rolled(name: str, shift: int, dimension: int) -> Callable[[Problem], Problem]:
    return lambda p: replace(p, **{name: getattr(p, name).roll(shift, dimension)})  # type: ignore[arg-type]


def in_one_place(name: str) -> Callable[[Problem], Problem]:
    """The value of a neighbouring group that differs, in one channel."""

    def change(problem: Problem) -> Problem:
        values = getattr(problem, name).clone()
        column = values[:, 20].double()
        values[0, 20] = values[int((column - column[0]).abs().argmax()), 20]
        return replace(problem, **{name: values})  # type: ignore[arg-type]

    return change


def without_sign(problem: Problem) -> Problem:
    return replace(problem, scales=problem.scales.view(torch.uint8))


FAULTS: dict[str, Callable[[Problem], Problem]] = {
    "super-block of the next columns": rolled("super_scales", 1, 0),
    "super-block of another row": rolled("super_scales", 2, 1),
    "scale of the neighbouring group": rolled("scales", 1, 0),
    "scale of the neighbouring group in one place": in_one_place("scales"),
    "minimum of another row": rolled("minimums", 1, 1),
    "minimum of the neighbouring group": rolled("minimums", 1, 0),
    "minimum of the neighbouring group in one place": in_one_place("minimums"),
    "super-block of minimums of the next columns": rolled("super_minimums", 1, 0),
    "integers without sign": without_sign,
    "levels exchanged": lambda p: replace(p, super_scales=p.super_minimums, super_minimums=p.super_scales),
    "the sign of a super-block": lambda p: replace(p, super_scales=p.super_scales.abs()),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, seed: int) -> None:
    problem = Case(4, 64, 1024, 4, 32, "minimum", F16, super_groups=8).random(seed=seed)
    assert testing.error_ratio(product(problem), problem.reference()) <= 1
    wrong = product(FAULTS[fault](problem))
    for scaled_sums in (False, True):  # the bound of kernels that scale sums of codes is wider
        assert testing.error_ratio(wrong, problem.reference(scaled_sums=scaled_sums)) > 1


def test_layers_multiply(seed: int) -> None:
    problem = CASES["Q6_K"].random(seed=seed)
    layer = QuantLinear.from_quantized(quantized(problem))
    assert "super" not in repr(layer)
    out = layer(problem.a)
    testing.assert_close(out, problem.reference(), label=problem)
    assert torch.equal(layer.to("cpu")(problem.a), out)
    layer.activations = "int8"  # type: ignore[assignment]
    assert layer(problem.a).shape == out.shape
