"""qcutlass.gemm(..., activations="int8"): both oracles, faults that they reject, errors, torch, layers."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import QuantLinear, UnsupportedError, layers, testing
from qcutlass.products.weight_only import check_quantized_activations
from qcutlass.testing import Case, Problem

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ROWS = [*range(10), 15, 16, 17, 40, 257]
_UNIT = 2.0**-4  # of sums in exact problems: the smallest scales' product
GROUPS = [16, 32, 48, 64, 80, 128, 10**6]  # the last: one a channel


def arguments(problem: Problem) -> dict[str, Any]:
    packed = qcutlass.preprocess_weights(problem.codes, bits=problem.bits)
    given = {"a": problem.a, "w_packed": packed, "scales": problem.scales, "zeros": problem.zeros}
    return given | problem.keywords | {"activations": "int8"}


def multiply(problem: Problem) -> Tensor:
    return qcutlass.gemm(**arguments(problem))


def exact(m: int, n: int, k: int, group_size: int, bits: int, dtype: torch.dtype, seed: int) -> Problem:
    """Activations that are codes already, their scale a power of two in each block: every sum is exact in fp32."""
    g = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:  # both ends included
        return torch.randint(low, high + 1, shape, generator=g)

    groups, span = -(-k // group_size), 2**bits
    a = integers(-126, 126, m, k)
    terms = testing.bounds.EXACT_LIMIT * _UNIT / (127 * span)  # so many may be as large as they come
    a *= torch.rand(m, k, generator=g) < terms / k - 1 / 32
    blocks = -(-k // 32)
    filled = torch.rand(m, blocks, generator=g) < terms / blocks  # all, unless k is large: the others are zeros
    for begin in range(0, k, 32):
        rows, columns = torch.arange(m), begin + integers(0, min(32, k - begin) - 1, m)
        a[rows, columns] = 127 * (2 * integers(0, 1, m) - 1)
        a[~filled[:, begin // 32], begin : begin + 32] = 0
    scales = torch.exp2(-integers(0, 2, groups, n).double())
    zeros = integers(0, span - 1, groups, n).to(torch.uint8)
    codes = integers(0, span - 1, n, k).to(torch.uint8)
    a[::3] = a[::3].abs()  # sums grow past what 16 bits hold
    a_scales = torch.exp2(-integers(0, 2, m, -(-k // 32)).double()).repeat_interleave(32, 1)[:, :k]
    problem = Problem((a * a_scales).to(dtype), codes, scales.to(dtype), zeros, bits, group_size, seed=seed)
    largest = (problem.a.double().abs() @ problem.weight().double().abs().T).max() if m else torch.zeros(())
    assert float(largest) < testing.bounds.EXACT_LIMIT * _UNIT, f"the generator is wrong: {problem}"
    return problem


def test_the_oracle_quantises_as_the_blockwise_quantiser(seed: int) -> None:
    x = torch.randn(7, 150, generator=torch.Generator().manual_seed(seed))
    x[2, 32:64] = 0
    codes, scales = testing.int8_activations(x)
    for one, other in zip(qcutlass.blockwise.act_quant(x, 32), (codes, scales), strict=True):
        testing.assert_equal(one, other)


@pytest.mark.parametrize("bits", [4, 8])
def test_exact_sums(bits: int, seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    for dtype in DTYPES:
        for m in ROWS:
            problem = exact(m, 37, choose.randrange(1, 500), choose.choice(GROUPS), bits, dtype, next(seeds))
            testing.assert_equal(multiply(problem), problem.reference().value.to(dtype), label=problem)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["none", "int", "real", "minimum"])
@pytest.mark.parametrize("group_size", GROUPS)
def test_schemes(group_size: int, zeros: testing.Zeros, bits: int, seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    for dtype in DTYPES:
        types = {"dtype": dtype, "scale_dtype": choose.choice(DTYPES)}
        types["zero_dtype"] = choose.choice([torch.uint8, torch.int32] if zeros == "int" else DTYPES)
        m, k = choose.choice(ROWS), choose.choice([64, 333, 448, 1100])
        problem = Case(m, 50, k, bits, group_size, zeros, **types).random(seed=next(seeds))
        testing.assert_close(multiply(problem), testing.int8_activations_reference(problem), label=problem)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["none", "minimum"])
@pytest.mark.parametrize(("group_size", "super_groups"), [(16, 16), (32, 8), (32, 3)])
def test_scales_of_two_levels(
    group_size: int, super_groups: int, zeros: testing.Zeros, bits: int, seeds: Iterator[int]
) -> None:
    choose = random.Random(next(seeds))
    k = 2 * group_size * super_groups
    for m in ROWS:
        case = Case(m, 50, k, bits, group_size, zeros, dtype=choose.choice(DTYPES), super_groups=super_groups)
        problem = case.random(seed=next(seeds))
        testing.assert_close(multiply(problem), testing.int8_activations_reference(problem), label=problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_epilogues(activation: str | None, dtype: torch.dtype, seeds: Iterator[int]) -> None:
    for m in (1, 11):
        for bits in (4, 8):
            for bias, act_scale, perm in [(True, False, True), (False, True, True), (True, True, False)]:
                case = Case(
                    m, 70, 250, bits=bits, group_size=64, dtype=dtype, activation=activation,
                    bias=bias, act_scale=act_scale, perm=perm,
                )  # fmt: skip
                problem = case.random(seed=next(seeds))
                testing.assert_close(multiply(problem), testing.int8_activations_reference(problem), label=problem)


@pytest.mark.parametrize("span", [4096, 2**20])
def test_large_zero_points(span: int, seed: int) -> None:
    problem = Case(5, 40, 250, group_size=64, zero_dtype=torch.int32, dtype=torch.float32).random(seed=seed)
    assert problem.zeros is not None
    far = replace(problem, zeros=torch.randint_like(problem.zeros, -span, span))
    testing.assert_close(multiply(far), testing.int8_activations_reference(far), label=far)


def test_residues_of_channels_and_columns(seeds: Iterator[int]) -> None:
    choose = random.Random(next(seeds))
    for n, k in [(n, choose.randrange(1, 200)) for n in range(1, 34)] + [(5, k) for k in range(1, 131)]:
        problem = exact(choose.choice([1, 2, 9]), n, k, choose.choice(GROUPS), choose.choice([4, 8]), DTYPES[2], k)
        testing.assert_equal(multiply(problem), problem.reference().value.float(), label=problem)


def test_nothing_else_is_written_or_read(seed: int) -> None:
    problem = Case(5, 37, 150, group_size=48, bias=True).random(seed=seed)
    values = arguments(problem)
    boxes = {name: testing.Poisoned.around(values[name], offset=3, padding=5) for name in ("a", "scales")}
    values |= {name: box.tensor for name, box in boxes.items()}
    out = testing.Poisoned((5, 37), torch.float16, offset=1, padding=3)
    qcutlass.gemm(**values, out=out.tensor)
    out.check()
    testing.assert_close(out.tensor, testing.int8_activations_reference(problem), label=problem)


def test_the_error_of_quantising_is_that_of_seven_bits(seed: int) -> None:
    """Each activation moves by up to half a step, 1/254 of its block's largest: 0.3 % of it in the mean."""
    problem = Case(16, 256, 4096, group_size=128, dtype=torch.float32).random(seed=seed)
    value = problem.reference().value
    error = float((multiply(problem).double() - value).norm() / value.norm())
    assert 0.001 < error < 0.02


class Model:
    """The product in fp32, each station of which a fault may replace."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem
        x = testing.scaled_activations(problem.a, problem.act_scale, problem.perm)
        self.codes, self.scales = testing.int8_activations(x)

    def activations(self) -> Tensor:
        """`[M, K]`, dequantised."""
        return self.codes.float() * self.scales.repeat_interleave(32, 1)[:, : self.codes.shape[1]]

    def weight(self) -> Tensor:
        return self.p.weight()

    def run(self) -> Tensor:
        return (self.activations().double() @ self.weight().double().T).to(self.p.a.dtype)


class LastKDropped(Model):
    def activations(self) -> Tensor:
        a = super().activations()
        a[:, -1] = 0
        return a


class ScaleOfTheNextBlock(Model):
    def activations(self) -> Tensor:
        self.scales[:, 3] = self.scales[:, 4]
        return super().activations()


class ScaleOfTheNextGroup(Model):
    def weight(self) -> Tensor:
        scales = self.p.scales.clone()
        scales[2] = scales[3]
        return replace(self.p, scales=scales).weight()


class ZeroOfTheNextGroup(Model):
    def weight(self) -> Tensor:
        assert self.p.zeros is not None
        zeros = self.p.zeros.clone()
        zeros[2] = zeros[3]
        return replace(self.p, zeros=zeros).weight()


class MinimumOfTheNextGroup(Model):
    def weight(self) -> Tensor:
        assert self.p.minimums is not None
        minimums = self.p.minimums.clone()
        minimums[2] = minimums[3]
        return replace(self.p, minimums=minimums).weight()


class MinimumsAsZeros(Model):
    def weight(self) -> Tensor:
        return replace(self.p, zeros=self.p.minimums, minimums=None).weight()


class NoZeros(Model):
    def weight(self) -> Tensor:
        assert self.p.zeros is not None
        return replace(self.p, zeros=torch.zeros_like(self.p.zeros)).weight()


class ScaleOf128(Model):
    def activations(self) -> Tensor:
        self.scales = self.scales * (127 / 128)
        return super().activations()


class CodesTruncated(Model):
    def activations(self) -> Tensor:
        x = testing.scaled_activations(self.p.a, self.p.act_scale, self.p.perm)
        scales = self.scales.repeat_interleave(32, 1)[:, : x.shape[1]]
        self.codes = (x.float() / scales).trunc().to(torch.int8)
        return super().activations()


class NotQuantized(Model):
    def activations(self) -> Tensor:
        return testing.scaled_activations(self.p.a, self.p.act_scale, self.p.perm).float()


class BlocksBeforeThePermutation(Model):
    def activations(self) -> Tensor:
        assert self.p.perm is not None
        codes, scales = testing.int8_activations(testing.scaled_activations(self.p.a, self.p.act_scale, None))
        return (codes.float() * scales.repeat_interleave(32, 1)[:, : codes.shape[1]])[:, self.p.perm.long()]


FAULTS = [
    LastKDropped,
    ScaleOfTheNextBlock,
    ScaleOfTheNextGroup,
    ZeroOfTheNextGroup,
    NoZeros,
    ScaleOf128,
    CodesTruncated,
    NotQuantized,
    BlocksBeforeThePermutation,
]


def with_minimums(problem: Problem) -> Problem:
    """The same weights but for rounding, with minimums."""
    assert problem.zeros is not None
    return replace(problem, zeros=None, minimums=problem.zeros.float() * problem.scales.float())


@pytest.mark.parametrize("fault", [Model, LastKDropped, ScaleOfTheNextGroup, MinimumOfTheNextGroup, MinimumsAsZeros])
def test_the_oracle_rejects_faults_of_minimums(fault: type[Model], seed: int) -> None:
    problem = with_minimums(Case(8, 64, 1000, group_size=64, dtype=torch.float32).random(seed=seed))
    ratio = testing.error_ratio(fault(problem).run(), testing.int8_activations_reference(problem))
    assert (ratio <= 1) == (fault is Model), ratio


@pytest.mark.parametrize("fault", [Model, *FAULTS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_oracle_rejects_faults_alone(fault: type[Model], dtype: torch.dtype, seed: int) -> None:
    problem = Case(8, 64, 1000, group_size=64, dtype=dtype, act_scale=True, perm=True).random(seed=seed)
    ratio = testing.error_ratio(fault(problem).run(), testing.int8_activations_reference(problem))
    assert (ratio <= 1) == (fault is Model), ratio


def test_refusals() -> None:
    problem = Case(3, 48, 128, group_size=32).random(seed=0)
    values = arguments(problem)
    for wrong, error, words in [
        (8, TypeError, "activations: expected 'int8' or None, got int"),
        ("fp8", ValueError, "activations: expected 'int8' or None, got 'fp8'"),
    ]:
        with pytest.raises(error, match=words):
            qcutlass.gemm(**values | {"activations": wrong})
    with pytest.raises(UnsupportedError, match=r"group_size: .*multiples of 16 columns.*got 24.*Leave activations out"):
        multiply(Case(3, 48, 120, group_size=24).random(seed=0))
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in values.items()}
    assert qcutlass.gemm(**meta).shape == (3, 48)
    with pytest.raises(UnsupportedError, match=r"activations: 'int8' is for CPU tensors.*gemm_w8a8"):
        check_quantized_activations("int8", torch.device("cuda"))


def test_operator_and_compilation(seed: int) -> None:
    problem = Case(3, 40, 128, group_size=32, bias=True).random(seed=seed)
    values = arguments(problem)
    operands = [values[name] for name in ("a", "w_packed", "scales", "zeros")]
    torch.library.opcheck(torch.ops.qcutlass.gemm.default, operands, {"activations": "int8"})
    compiled = torch.compile(lambda a: qcutlass.gemm(**values | {"a": a}) + 1, fullgraph=True)
    testing.assert_equal(compiled(problem.a), multiply(problem) + 1)


def test_a_remembered_call_is_not_taken_for_one_without(seed: int) -> None:
    values = arguments(Case(3, 40, 128, group_size=32).random(seed=seed))
    exactly = {**values, "activations": None}
    outs = [qcutlass.gemm(**chosen) for _ in range(3) for chosen in (values, exactly)]
    for out in outs[2:]:
        assert any(torch.equal(out, other) for other in outs[:2])
    assert not torch.equal(outs[0], outs[1])


def test_threads_do_not_change_a_bit(seed: int) -> None:
    problem = Case(9, 300, 512, group_size=32, dtype=torch.float32).random(seed=seed)
    threads, outs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outs.append(multiply(problem))
    finally:
        torch.set_num_threads(threads)
    testing.assert_equal(outs[1], outs[0])
    testing.assert_equal(outs[2], outs[0])


def a_model() -> torch.nn.Module:
    torch.manual_seed(0)
    names = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "other": 48}
    model = torch.nn.ModuleDict({name: torch.nn.Linear(96, n) for name, n in names.items()})
    qcutlass.replace_linear(model, qcutlass.WeightOnly(4, 32))
    return model


def test_models_are_switched_and_back() -> None:
    model, x = a_model(), torch.randn(3, 96)
    before = {name: layer(x) for name, layer in model.items()}
    assert layers.use_activations(model, "int8") == list(model)
    assert "activations='int8'" in repr(model["other"])
    quantized = {name: layer(x) for name, layer in model.items()}
    for name, out in quantized.items():
        layer = model[name]
        out_of_gemm = qcutlass.gemm(x, layer.w_packed, layer.scales, layer.zeros, bias=layer.bias, activations="int8")
        testing.assert_equal(out, out_of_gemm)
        assert not torch.equal(out, before[name])
    copied = copy.deepcopy(model)
    assert copied["other"].activations == "int8"
    assert layers.shard(model["other"], 0, 3, axis="in").activations == "int8"
    qcutlass.fuse_projections(model)
    for name, out in quantized.items():
        testing.assert_equal(model[name](x), out)
    assert model["q_proj"].separate().activations == "int8"
    assert len(layers.use_activations(model, None)) == 2
    for name, out in before.items():
        testing.assert_equal(model[name](x), out)


def test_layers_that_differ_are_not_fused() -> None:
    model = a_model()
    model["k_proj"].activations = "int8"
    assert "activations differs" in qcutlass.fuse_projections(model).skipped["q_proj", "k_proj", "v_proj"]


def test_switching_refuses_what_cannot_be() -> None:
    model = a_model()
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module"):
        layers.use_activations(None, "int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activations: expected 'int8', 'fp8', 'none' or None, got 'int4'"):
        layers.use_activations(model, "int4")
    with pytest.raises(ValueError, match="model: expected layers with integer codes whose groups"):
        layers.use_activations(torch.nn.Linear(4, 4), "int8")
    odd = QuantLinear.from_linear(torch.nn.Linear(96, 16), bits=4, group_size=24)
    both = torch.nn.ModuleList([model["other"], odd])
    assert layers.use_activations(both, "int8") == ["0"]
    assert odd.activations is None
