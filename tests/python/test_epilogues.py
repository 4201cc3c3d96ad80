"""Gates and residuals behind the sums of products: both oracles, faults that they reject, wrong arguments, torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.kinds.description import half
from torch import Tensor

import qcutlass
from qcutlass import _C, blockwise, testing
from qcutlass.products import launching
from qcutlass.products.product import Product
from qcutlass.products.weight_only import WEIGHT_ONLY, GemmCall
from qcutlass.testing import (
    BlockwiseCase,
    BlockwiseProblem,
    Case,
    EightBitCase,
    EightBitProblem,
    Int4Case,
    Int4Problem,
    Problem,
    Reference,
    bounds,
)
from qcutlass.testing.blockwise import options_of
from qcutlass.testing.int8_activations import int8_activations_reference

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
GATES = tuple(bounds.GATES)
ROWS = (1, 2, 5, 9, 33, 70)  # few rows, whose products have loops of their own, and many
CODES: dict[str, dict[str, Any]] = {
    "int4": {"zeros": "int"},
    "int8": {"zeros": "none", "bits": 8},
    "real zeros": {"zeros": "real"},
    "minimums": {"zeros": "minimum", "bits": 8},
    "e2m1": {"zeros": "none", "weight_dtype": "e2m1"},
    "e4m3": {"zeros": "none", "weight_dtype": "e4m3", "bits": 8},
    "ragged groups": {"zeros": "int", "group_size": 48},
}
EIGHT = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
BLOCKS = ((torch.int8, 128), (torch.int8, 64), (torch.int8, 32), (torch.float8_e4m3fn, 128))
"""Types of blockwise products, and the sizes of blocks that kernels take of them."""

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def multiply(p: Problem, **options: Any) -> Tensor:
    packed = qcutlass.preprocess_weights(p.codes, bits=p.bits)
    return qcutlass.gemm(p.a, packed, p.scales, p.zeros, **p.keywords | options)


def multiply_eight(p: EightBitProblem, **options: Any) -> Tensor:
    is_int8 = p.w.dtype == torch.int8
    packed = qcutlass.preprocess_weights(p.w, 8, "int8" if is_int8 else "fp8")
    function: Any = qcutlass.gemm_w8a8 if is_int8 else qcutlass.gemm_fp8
    out: Tensor = function(p.a, packed, p.a_scale, p.w_scale, n=p.shape[1], **p.keywords | options)
    return out


def multiply_four(p: Int4Problem, **options: Any) -> Tensor:
    packed = qcutlass.preprocess_weights(p.codes, 4, "int8" if p.a.dtype == torch.int8 else "fp8")
    names = ("bias", "activation", "out_dtype", "group_size", "residual")
    given: dict[str, Any] = {name: getattr(p, name) for name in names} | options
    return qcutlass.gemm_w4a8(p.a, packed, p.a_scale, p.scales, p.zeros, **given)


def multiply_blocks(p: BlockwiseProblem, **options: Any) -> Tensor:
    is_int8 = p.b.dtype == torch.int8
    packed = qcutlass.preprocess_weights(p.b, 8, "int8" if is_int8 else "fp8")
    function: Any = blockwise.int8_addmm if is_int8 else blockwise.fp8_gemm
    out: Tensor = function(p.a, p.a_s, packed, p.b_s, n=p.shape[1], **options_of(p) | options)
    return out


@pytest.mark.parametrize("codes", CODES)
def test_gates_and_residuals_of_every_type_of_codes(codes: str, seeds: Iterator[int]) -> None:
    for index, m in enumerate(ROWS):
        for activation in (*GATES, "silu"):
            case = Case(m, 96, 200, dtype=FLOATS[index % 3], **{"group_size": 64} | CODES[codes])
            options = {"bias": bool(index % 2), "act_scale": m == 5, "perm": m == 9, "residual": m != 2}
            problem = replace(case, activation=activation, **options).random(seed=next(seeds))
            testing.assert_close(multiply(problem), problem.reference(), label=problem)


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_gates_and_residuals_of_eight_bits(dtype: torch.dtype, seeds: Iterator[int]) -> None:
    for m in (1, 3, 40):
        for out_dtype in FLOATS:
            for activation in (*GATES, "gelu", None):
                azp = "each" if dtype == torch.int8 and m > 1 else "none"
                case = EightBitCase(m, 96, 200, dtype, out_dtype, azp=azp, bias=True, activation=activation)  # type: ignore[arg-type]
                problem = replace(case, residual=m != 3).random(seed=next(seeds))
                testing.assert_close(multiply_eight(problem), problem.reference(), label=problem)


@pytest.mark.parametrize("dtype", EIGHT[:2], ids=str)
def test_gates_and_residuals_of_four_by_eight_bits(dtype: torch.dtype, seeds: Iterator[int]) -> None:
    for index, m in enumerate(ROWS):
        for activation in (*GATES, "silu", None):
            case = Int4Case(m, 96, 200, dtype, FLOATS[index % 3], (64, 48)[index % 2], bias=m != 5)
            problem = replace(case, activation=activation, residual=m != 2).random(seed=next(seeds))
            testing.assert_close(multiply_four(problem), problem.reference(), label=problem)


@pytest.mark.parametrize(("dtype", "size"), [*BLOCKS, (torch.float8_e4m3fn, 32)], ids=str)
def test_gates_and_residuals_of_blocks(dtype: torch.dtype, size: int, seeds: Iterator[int]) -> None:
    for index, m in enumerate(ROWS):
        for activation in (*GATES, "gelu", None):
            case = BlockwiseCase(m, 224, 200, size, FLOATS[index % 3], bias=m != 5, dtype=dtype)
            problem = replace(case, activation=activation, residual=m != 2).random(seed=next(seeds))
            testing.assert_close(multiply_blocks(problem), problem.reference(), label=problem)


def test_activations_quantised_on_the_way(seeds: Iterator[int]) -> None:
    for m in (1, 7, 33):
        for activation in (*GATES, "relu"):
            problem = Case(m, 64, 320, group_size=64, activation=activation, residual=True).random(seed=next(seeds))
            out = multiply(problem, activations="int8")
            testing.assert_close(out, int8_activations_reference(problem), label=problem)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_residuals_are_added_behind_the_activation(activation: str | None, seeds: Iterator[int]) -> None:
    for m in ROWS:
        for dtype in FLOATS:
            case = Case(m, 40, 256, dtype=dtype, activation=activation, bias=True, residual=True)
            problem, expected = case.exact(seed=next(seeds))
            testing.assert_equal(multiply(problem), expected, label=problem)


def test_blocks_of_rows_have_their_own_residuals(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(launching, "_CPU_BLOCK", 16 * 200)
    problem = Case(50, 64, 200, group_size=200, activation="silu_mul", residual=True).random(seed=seed)
    testing.assert_close(multiply(problem), problem.reference(), label=problem)


def test_rows_are_the_same_bits_whatever_their_number(seed: int) -> None:
    problem = Case(70, 96, 320, group_size=64, activation="silu_mul", bias=True, residual=True).random(seed=seed)
    whole = multiply(problem, batch_invariant=True)
    assert problem.residual is not None
    for begin, end in ((0, 1), (3, 8), (7, 40)):
        part = replace(problem, a=problem.a[begin:end], residual=problem.residual[begin:end])
        assert torch.equal(multiply(part, batch_invariant=True), whole[begin:end])


def test_what_the_extension_refuses() -> None:
    problem = Case(2, 64, 64, group_size=64, activation="silu_mul").random()
    packed = qcutlass.preprocess_weights(problem.codes, bits=4)
    call = GemmCall(problem.a, packed, problem.scales, problem.zeros, activation="silu_mul")
    arguments = Product(WEIGHT_ONLY, call, call.check(None), half(2, 32)).arguments
    arguments.activation = _C.Activation.RELU
    for refuse in (lambda: _C.gemm_host(arguments, 1), lambda: _C.tactics(arguments)):
        with pytest.raises(ValueError, match="silu or gelu_tanh"):
            refuse()
    arguments.activation, arguments.weights.n = _C.Activation.SILU, 48
    for refuse in (lambda: _C.gemm_host(arguments, 1), lambda: _C.tactics(arguments)):
        with pytest.raises(ValueError, match="multiple of 32"):
            refuse()
    arguments.weights.n, arguments.out_type = 64, _C.DType.INT8
    for refuse in (lambda: _C.gemm_host(arguments, 1), lambda: _C.tactics(arguments)):
        with pytest.raises(ValueError, match="gate, residual: expected an output of float16, bfloat16 or float32"):
            refuse()


@devices
def test_nothing_is_written_elsewhere(device: str, seed: int) -> None:
    problem = Case(7, 96, 128, activation="silu_mul", residual=True).random(seed=seed, device=device)
    box = testing.Poisoned((7, 48), torch.float16, device=device)
    for _ in range(2):  # the second one is remembered
        assert multiply(problem, out=box.tensor) is box.tensor
        box.check()
        testing.assert_close(box.tensor, problem.reference(), label=problem)


@devices
def test_residuals_of_any_strides(device: str, seed: int) -> None:
    problem = Case(6, 64, 128, activation="gelu_tanh_mul", residual=True).random(seed=seed, device=device)
    residual = problem.residual
    assert residual is not None
    expected = multiply(problem)
    wide = torch.cat([residual, residual], 1)[:, :32]
    for view in (wide, residual.T.contiguous().T, residual[:1].expand(6, 32)):
        same = replace(problem, residual=view)
        testing.assert_close(multiply(same), same.reference(), label=problem)
    assert torch.equal(multiply(replace(problem, residual=wide)), expected)
    leading = replace(problem, a=problem.a.view(2, 3, -1), residual=residual.view(2, 3, -1))
    assert torch.equal(multiply(leading), expected.view(2, 3, -1))
    empty = replace(problem, a=problem.a[:0], residual=residual[:0])
    assert multiply(empty).shape == (0, 32)


def fp32_sums(p: Any) -> Tensor:
    """Those of any problem, scaled, before its bias."""
    if isinstance(p, BlockwiseProblem):
        return torch.stack([term.float() for term in p.terms()]).sum(0)
    if isinstance(p, Int4Problem):
        return p.sums().float() * p.row_scale().float()
    return p.a.float() @ p.weight().T  # type: ignore[no-any-return]


class Model:
    """The sound product in fp32, stations of which a fault may replace."""

    def __init__(self, problem: Any) -> None:
        self.problem = problem
        self.dtype = problem.residual.dtype

    def sums(self) -> Tensor:
        return fp32_sums(self.problem) + self.problem.bias.float()  # type: ignore[no-any-return]

    def halves(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        return bounds.gate_and_up(sums)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        assert self.problem.activation is not None
        return testing.activate(gate, bounds.GATES[self.problem.activation]) * up

    def residual(self) -> Tensor:
        return self.problem.residual.float()  # type: ignore[no-any-return]

    def run(self) -> Tensor:
        return (self.gated(*self.halves(self.sums())) + self.residual()).to(self.dtype)


class GateAndUpSwapped(Model):
    def halves(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = super().halves(sums)
        return up, gate


class HalvesForTurns(Model):
    def halves(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = sums.chunk(2, dim=1)
        return gate, up


class TurnsOfOne(Model):
    def halves(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        return sums[:, ::2], sums[:, 1::2]


class TurnsOfEight(Model):
    def halves(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = sums.view(len(sums), -1, 2, 8).unbind(2)
        return gate.flatten(1), up.flatten(1)


class BothActivated(Model):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate, up.relu())


class ActivatedAfterTheProduct(Model):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate * up, torch.ones_like(up))


class OtherActivation(Model):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        other = {"silu_mul": "gelu_tanh", "gelu_tanh_mul": "silu"}
        return testing.activate(gate, other[self.problem.activation or ""]) * up


class ResidualOfAnotherRow(Model):
    def residual(self) -> Tensor:
        return super().residual().roll(1, 0)


class ResidualOfTheNextTurn(Model):
    def residual(self) -> Tensor:
        return super().residual().roll(16, 1)


class ResidualLeftOut(Model):
    def residual(self) -> Tensor:
        return torch.zeros(())


class ResidualBeforeTheGate(Model):
    def run(self) -> Tensor:
        gate, up = self.halves(self.sums())
        return self.gated(gate + self.residual(), up).to(self.dtype)


class RoundedBeforeTheGate(Model):
    def sums(self) -> Tensor:
        return super().sums().to(self.dtype).float()


class RoundedBeforeTheResidual(Model):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate, up).to(self.dtype).float()


class RoundedAsOnGpus(RoundedBeforeTheResidual, RoundedBeforeTheGate):
    pass


ALWAYS = (
    GateAndUpSwapped,
    HalvesForTurns,
    TurnsOfOne,
    TurnsOfEight,
    BothActivated,
    ActivatedAfterTheProduct,
    OtherActivation,
    ResidualOfAnotherRow,
    ResidualOfTheNextTurn,
    ResidualLeftOut,
    ResidualBeforeTheGate,
)
ONCE = (RoundedBeforeTheGate, RoundedBeforeTheResidual)
"""Faults where one rounding is promised, and sound where the product is rounded before."""


KINDS: dict[str, Callable[[torch.dtype], Any]] = {
    "gemm": lambda dtype: Case(64, 256, 512, dtype=dtype),
    "gemm_w4a8": lambda dtype: Int4Case(64, 256, 512, out_dtype=dtype),
    "blockwise": lambda dtype: BlockwiseCase(64, 256, 512, out_dtype=dtype),
}


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_rejected(kind: str, activation: str, dtype: torch.dtype, seed: int) -> None:
    problem = replace(KINDS[kind](dtype), activation=activation, bias=True, residual=True).random(seed=seed)

    def judged(model: type[Model], **options: Any) -> float:
        return testing.error_ratio(model(problem).run(), replace(problem.reference(), **options))

    assert judged(Model) <= 1
    for fault in (*ALWAYS, *ONCE):
        assert judged(fault) > 1, fault.__name__
    for fault in ALWAYS:
        assert judged(fault, rounds_between=True) > 1, fault.__name__
    for sound in (RoundedBeforeTheGate, RoundedBeforeTheResidual, RoundedAsOnGpus):
        assert judged(sound, rounds_between=True) <= 1


def test_a_residual_before_the_activation_is_rejected(seed: int) -> None:
    problem = Case(64, 256, 512, activation="silu", residual=True).random(seed=seed)
    assert problem.residual is not None
    sums = problem.a.float() @ problem.weight().T
    wrong = testing.activate(sums + problem.residual.float(), "silu").half()
    twice = (testing.activate(sums, "silu").half() + problem.residual).half()
    once = (testing.activate(sums, "silu") + problem.residual.float()).half()
    ratios = [testing.error_ratio(out, problem.reference()) for out in (wrong, twice, once)]
    assert ratios[0] > 1
    assert ratios[1] > 1
    assert ratios[2] <= 1
    assert testing.error_ratio(twice, replace(problem.reference(), rounds_between=True)) <= 1


def test_the_bound_grows_with_what_the_error_is_multiplied_by() -> None:
    """Of silu(gate) * up the error of the gate is multiplied by up, that of up by silu(gate)."""
    ones = torch.ones(1, 32, dtype=torch.float64)
    flat = Reference(ones, ones, 64, None, "silu_mul", torch.float32)
    gate, up = ones.clone(), ones.clone()
    gate[:, :16], up[:, 16:] = 1000, 1000
    parts = [bounds.evaluation_error(replace(flat, sum=total)) for total in (ones, gate, up)]
    assert float(parts[2].min()) > 500 * float(parts[0].max())
    assert float(parts[1].min()) > 500 * float(parts[0].max())


@devices
def test_products_are_compiled_whole(device: str, seed: int) -> None:
    problem = Case(4, 64, 128, activation="silu_mul", residual=True).random(seed=seed, device=device)
    packed = qcutlass.preprocess_weights(problem.codes, bits=4)

    def run(a: Tensor, residual: Tensor) -> Tensor:
        return qcutlass.gemm(a, packed, problem.scales, problem.zeros, activation="silu_mul", residual=residual)

    assert problem.residual is not None
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    testing.assert_close(compiled(problem.a, problem.residual), problem.reference(), label=problem)


def test_operators_and_tensors_without_data(seed: int) -> None:
    problem = Case(4, 64, 128, activation="silu_mul", residual=True).random(seed=seed)
    packed = qcutlass.preprocess_weights(problem.codes, bits=4)
    arguments = (problem.a, packed, problem.scales, problem.zeros)
    torch.library.opcheck(torch.ops.qcutlass.gemm.default, arguments, problem.keywords)
    on_meta = [part.to("meta") for part in (*arguments, problem.residual) if part is not None]
    out = qcutlass.gemm(*on_meta[:4], activation="silu_mul", residual=on_meta[4])
    assert (out.shape, out.dtype) == ((4, 32), torch.float16)


def test_explain_says_what_follows_the_product() -> None:
    problem = Case(16, 4096, 1024, activation="silu_mul", residual=True).random()
    packed = qcutlass.preprocess_weights(problem.codes, bits=4)
    given = (qcutlass.gemm, problem.a, packed, problem.scales, problem.zeros)
    why = qcutlass.explain(*given, device="h200", **problem.keywords)
    assert why.problem.endswith("uint8 zeros, silu_mul, residual")
    bare = qcutlass.explain(*given, device="h200")
    assert why.plan.tactic == bare.plan.tactic
    assert qcutlass.tactics(*given, **problem.keywords) == qcutlass.tactics(*given)


def test_gates_take_tiles_of_whole_turns() -> None:
    problem = Case(8, 6144, 1024, activation="silu_mul").random()
    packed = qcutlass.preprocess_weights(problem.codes, bits=4)
    given = (qcutlass.gemm, problem.a, packed, problem.scales, problem.zeros)

    def widths(**options: Any) -> set[int]:
        found = qcutlass.explain(*given, device="h200", **options).candidates
        return {int(re.findall(r"_n(\d+)m", each.plan.tactic)[0]) for each in found if not each.plan.dense}

    assert {48, 80} <= widths()
    assert widths(**problem.keywords) == {width for width in widths() if width % 32 == 0}
    name = next(name for name in qcutlass.tactics(*given) if "_n48m" in name)
    with pytest.raises(qcutlass.UnsupportedError, match="_n48m"):
        qcutlass.explain(*given, device="h200", tactic=name, **problem.keywords)


def test_out_must_not_be_the_residual(seed: int) -> None:
    problem = Case(3, 64, 128, activation="silu_mul", residual=True).random(seed=seed)
    assert problem.residual is not None
    before = problem.residual.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="out overlaps residual"):
            multiply(problem, out=problem.residual)
        multiply(problem, out=half(3, 32))
    assert torch.equal(problem.residual, before)


def test_products_without_gates_refuse_them() -> None:
    with pytest.raises(ValueError, match="activation"):
        qcutlass.QuantLinear.from_linear(torch.nn.Linear(64, 64), activation="silu_mul")
    eight = EightBitCase(3, 32, 64, out_dtype=torch.int32).random()
    w = qcutlass.preprocess_weights(eight.w, 8, "int8")
    with pytest.raises(ValueError, match=r"residual: expected None with out_dtype=torch\.int32"):
        qcutlass.gemm_w8a8(eight.a, w, None, None, out_dtype=torch.int32, residual=torch.zeros(3, 32))


@pytest.mark.parametrize("zeros", ["none", "int", "real", "minimum"])
def test_gate_and_up_in_turns(zeros: testing.Zeros, seeds: Iterator[int]) -> None:
    """Of interleaved weights the product is that of both, however they were interleaved."""
    gate, up = (
        Case(5, 48, 128, group_size=64, zeros=zeros, dtype=torch.float32).random(seed=next(seeds)) for _ in "gu"
    )
    parts = [qcutlass.QuantizedTensor(p.codes, p.scales, p.zeros, 4, 64, minimums=p.minimums) for p in (gate, up)]
    both = qcutlass.interleave_gate_up(*parts)
    packed = qcutlass.preprocess_weights(both.codes, bits=4)
    of_packed = qcutlass.interleave_gate_up(*(qcutlass.preprocess_weights(p.codes, bits=4) for p in parts))
    assert torch.equal(packed, of_packed)
    weight = qcutlass.interleave_gate_up(gate.weight(), up.weight())
    assert torch.equal(both.dequantize(torch.float32), weight)
    bias = qcutlass.interleave_gate_up(torch.zeros(48), torch.ones(48))
    given = {"bias": bias, "minimums": both.minimums, "activation": "silu_mul"}
    out = qcutlass.gemm(gate.a, packed, both.scales, both.zeros, **given)  # type: ignore[arg-type]
    for half_of_it, one in zip(bounds.gate_and_up(weight.T), (gate, up), strict=True):
        assert torch.equal(half_of_it, one.weight().T)
    testing.assert_close(out, testing.reference(gate.a, weight, bias=bias, activation="silu_mul"))


def test_what_cannot_be_interleaved() -> None:
    parts = qcutlass.quantize(torch.randn(40, 64)), qcutlass.quantize(torch.randn(48, 64), bits=8)
    with pytest.raises(ValueError, match="up: expected the bits of gate, 4, got 8"):
        qcutlass.interleave_gate_up(*parts)
    with pytest.raises(ValueError, match=r"multiple of 16 channels along dim = 0, got \[40, 64\]; put"):
        qcutlass.interleave_gate_up(parts[0], parts[0])
    with pytest.raises(ValueError, match=r"up: expected the shape and device of gate, \[16, 4\].*got \[32, 4\]"):
        qcutlass.interleave_gate_up(torch.zeros(16, 4), torch.zeros(32, 4))
    with pytest.raises(TypeError, match=r"up: expected the type of gate, torch\.float32, got torch\.float16"):
        qcutlass.interleave_gate_up(torch.zeros(16, 4), half(16, 4))
    with pytest.raises(TypeError, match=r"up: .*got QuantizedTensor"):
        qcutlass.interleave_gate_up(torch.zeros(16, 4), parts[0])  # type: ignore[type-var]
    with pytest.raises(ValueError, match="dim: expected one of the 2 dimensions of gate, got 2"):
        qcutlass.interleave_gate_up(torch.zeros(16, 4), torch.zeros(16, 4), dim=2)
    symmetric = qcutlass.quantize(torch.randn(48, 64), symmetric=True)
    with pytest.raises(ValueError, match="zeros: expected those of both gate and up"):
        qcutlass.interleave_gate_up(qcutlass.quantize(torch.randn(48, 64)), symmetric)
