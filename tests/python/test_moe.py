"""The block of a mixture of experts: its bound, faults that it rejects, tokens that do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from tests.python.running import captured
from tests.python.test_grouped import checks_of
from torch import Tensor

import qcutlass
from qcutlass import moe, testing
from qcutlass.products import expert_block, moe_operators
from qcutlass.products.checks import E8M0
from qcutlass.testing.decoder import answer_ratio
from qcutlass.testing.moe import ExpertCodes, MoeCase, MoeProblem, experts_answer

POWERS: Final = E8M0[0] if E8M0 else torch.float32
CPU_AND_CUDA = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_both = pytest.mark.parametrize("device", CPU_AND_CUDA)


def packed(weights: ExpertCodes, interleaved: bool = False) -> moe.ExpertWeights:
    w_packed = qcutlass.preprocess_weights(weights.codes, bits=weights.bits)
    names = "scales", "zeros", "bias", "weight_dtype", "global_scale", "minimums"
    parts: dict[str, Any] = {name: getattr(weights, name) for name in names}
    return moe.ExpertWeights(w_packed, **parts, **weights.ambiguous, interleaved=interleaved)


def arguments(problem: MoeProblem) -> tuple[Any, ...]:
    gate_up = packed(problem.gate_up, problem.case.interleaved)
    return problem.x, gate_up, packed(problem.down), problem.topk_ids, problem.topk_weights


def options(case: MoeCase) -> dict[str, Any]:
    return {"activation": case.activation, "limit": case.limit}


def computed(problem: MoeProblem, **others: Any) -> Tensor:
    return moe.experts(*arguments(problem), **options(problem.case), **others)


def assert_right(out: Tensor, problem: MoeProblem) -> None:
    assert (out.dtype, out.shape) == (problem.x.dtype, problem.x.shape)
    ratio = answer_ratio(out, experts_answer(problem, rounds_weights=out.is_cuda))
    assert ratio <= 1, f"{problem}: {ratio:.3g} times the bound"


CODES: Final = {
    "minimums": MoeCase(20, 64, 64, 4, 2, zeros="minimum", bias=True),
    "minimums, 8 bits": MoeCase(20, 75, 37, 4, 2, bits=8, zeros="minimum", group_size=16),
    "MXFP4, gpt-oss": MoeCase(
        20, 96, 64, 4, 4, activation="swigluoai", interleaved=True, bias=True, weight_dtype="e2m1", scale_dtype=POWERS
    ),
    "NVFP4": MoeCase(20, 64, 64, 4, 2, weight_dtype="e2m1", scale_dtype=torch.float8_e4m3fn, group_size=16),
    "fp8": MoeCase(20, 192, 64, 4, 2, bits=8, weight_dtype="e4m3", scale_dtype=torch.float32, group_size=128),
}
"""Floating codes, and codes with minimums."""
CASES: Final = {
    "one token": MoeCase(1, 128, 64, 8, 2),
    "top 8 of 128": MoeCase(5, 64, 32, 128, 8),
    "top 1": MoeCase(9, 64, 96, 4, 1),
    "more slots than experts": MoeCase(6, 64, 32, 2, 5),
    "odd sizes": MoeCase(13, 75, 37, 5, 3, group_size=75),
    "ragged groups": MoeCase(7, 80, 48, 3, 2, group_size=32),
    "one expert gets all": MoeCase(40, 64, 64, 6, 1, used=(4,)),
    "empty experts": MoeCase(30, 64, 64, 16, 2, used=(1, 2, 9, 15)),
    "ids of others": MoeCase(33, 64, 64, 6, 3, invalid=0.4),
    "ids of others alone": MoeCase(4, 64, 64, 6, 3, invalid=1.0),
    "bias and zeros": MoeCase(20, 64, 64, 4, 2, zeros="int", bias=True),
    "real zeros": MoeCase(20, 64, 64, 4, 2, zeros="real"),
    "8 bits": MoeCase(20, 96, 64, 4, 2, bits=8, zeros="int"),
    "GeGLU": MoeCase(20, 64, 64, 4, 2, activation="gelu_tanh"),
    "gpt-oss": MoeCase(20, 96, 64, 4, 4, activation="swigluoai", interleaved=True, bias=True),
    "a limit": MoeCase(20, 64, 64, 4, 2, limit=0.5),
    "int32": MoeCase(20, 64, 64, 4, 2, id_dtype=torch.int32),
    **CODES,
    "many rows": MoeCase(300, 256, 128, 4, 2, group_size=64),
}


def case_on(name: str, device: str) -> MoeCase:
    """The kernels for CUDA have groups of multiples of 16."""
    case = CASES[name]
    return replace(case, group_size=128) if device == "cuda" and case.group_size % 16 else case


@on_both
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_within_their_bound(name: str, device: str, seed: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32)[: 3 if device == "cpu" else 2]:
        problem = replace(case_on(name, device), dtype=dtype).random(device=device, seed=seed)
        assert_right(computed(problem), problem)


@on_both
def test_tokens_of_nobody_are_zeros(device: str, seed: int) -> None:
    out = computed(case_on("ids of others alone", device).random(device=device, seed=seed))
    testing.assert_equal(out, torch.zeros_like(out))


@on_both
@pytest.mark.parametrize(
    "name", ["top 8 of 128", "one expert gets all", "ids of others", "gpt-oss", "many rows", *CODES]
)
def test_a_token_does_not_depend_on_the_others(name: str, device: str, seed: int) -> None:
    """Bit for bit: in any order of tokens, among other ones; on the CPU alone and in any number, too."""
    problem = case_on(name, device).random(device=device, seed=seed)
    out = computed(problem)
    testing.assert_equal(computed(problem), out)
    order = torch.randperm(len(out), generator=torch.Generator().manual_seed(seed)).to(device)
    testing.assert_equal(computed(problem.tokens(order)), out[order])
    other = replace(problem.case).random(device=device, seed=seed + 99)
    kept = slice(0, len(out), 3)
    x, ids, weights = (tensor.clone() for tensor in (other.x, other.topk_ids.flip(0), other.topk_weights))
    x[kept], ids[kept], weights[kept] = problem.x[kept], problem.topk_ids[kept], problem.topk_weights[kept]
    mixed = replace(problem, x=x, topk_ids=ids, topk_weights=weights)
    testing.assert_equal(computed(mixed)[kept], out[kept])
    if device == "cpu":
        for part in (slice(0, 1), slice(2, 5), slice(len(out) // 2, len(out))):
            testing.assert_equal(computed(problem.tokens(part)), out[part])


@on_both
def test_tokens_are_computed_in_parts(device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results with memory for a few tokens alone."""
    problem = case_on("ids of others", device).random(device=device, seed=seed)
    whole = computed(problem)
    row = 12 + problem.x.element_size() * (64 + 64)  # of the routing, [R, I] and [R, H]
    for tokens, parts in ((33, [33]), (32, [17, 16]), (10, [9, 9, 9, 6]), (0, [1] * 33)):
        monkeypatch.setattr(expert_block, "MOST_BYTES", row * 3 * tokens)
        called: list[int] = []
        monkeypatch.setattr(expert_block, "route", recording(moe_operators.route, called))
        out = computed(problem)
        assert called == parts
        assert_right(out, problem)
        if device == "cpu":
            testing.assert_equal(out, whole)


def recording(function: Callable[..., Any], called: list[int]) -> Callable[..., Any]:
    def record(topk_ids: Tensor, *others: Any) -> Any:
        called.append(len(topk_ids))
        return function(topk_ids, *others)

    return record


class Model:
    """The block as a composition of float64, one slot at a time, rounded to float32 at the end."""

    def __init__(self, problem: MoeProblem) -> None:
        self.problem = problem
        self.ids = problem.topk_ids.clone()
        self.weights = problem.topk_weights.double()

    def x(self, token: int, slot: int) -> Tensor:
        return self.problem.x[token].double()

    def parts(self, both: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = both.chunk(2)
        return gate, up

    def total(self, token: int, terms: list[Tensor]) -> Tensor:
        return torch.stack(terms).sum(0) if terms else torch.zeros(self.problem.case.hidden, dtype=torch.float64)

    def run(self) -> Tensor:
        return torch.stack([self.total(token, self.terms(token)) for token in range(len(self.ids))]).float()

    def terms(self, token: int) -> list[Tensor]:
        found = []
        for slot, expert in enumerate(self.ids[token].tolist()):
            if not 0 <= expert < self.problem.case.experts:
                continue
            gate, up = self.parts(self.problem.gate_up.weight(expert).double() @ self.x(token, slot))
            y = self.problem.down.weight(expert).double() @ (testing.activate(gate, "silu") * up)
            found.append(self.weights[token, slot] * y)
        return found


class WrongExpert(Model):
    def __init__(self, problem: MoeProblem) -> None:
        super().__init__(problem)
        self.ids[3, 1] = (self.ids[3, 1] + 1) % problem.case.experts


class OffsetsOfAnotherRouting(Model):
    """Rows from the end of one expert on belong to the next."""

    def __init__(self, problem: MoeProblem) -> None:
        super().__init__(problem)
        expert = int(self.ids[0, 0])
        token, slot = (self.ids == expert).nonzero()[-1].tolist()
        self.ids[token, slot] = (expert + 1) % problem.case.experts


class DroppedSlot(Model):
    def __init__(self, problem: MoeProblem) -> None:
        super().__init__(problem)
        self.ids[5, 2] = -1


class DroppedToken(Model):
    def total(self, token: int, terms: list[Tensor]) -> Tensor:
        return super().total(token, terms if token != 4 else [])


class CountedTwice(Model):
    def total(self, token: int, terms: list[Tensor]) -> Tensor:
        return super().total(token, [*terms, terms[0]] if token == 1 else terms)


class WeightOfAnotherSlot(Model):
    def __init__(self, problem: MoeProblem) -> None:
        super().__init__(problem)
        self.weights[6] = self.weights[6].roll(1)


class WeightOfAnotherToken(Model):
    def __init__(self, problem: MoeProblem) -> None:
        super().__init__(problem)
        self.weights[0, 1] = self.weights[1, 1]


class RowOfAnotherToken(Model):
    def x(self, token: int, slot: int) -> Tensor:
        return super().x(token + 1 if (token, slot) == (2, 0) else token, slot)


class GateAndUpSwapped(Model):
    def parts(self, both: Tensor) -> tuple[Tensor, Tensor]:
        up, gate = both.chunk(2)
        return gate, up


class GateAndUpInTurns(Model):
    def parts(self, both: Tensor) -> tuple[Tensor, Tensor]:
        return both[::2], both[1::2]


class WithoutRouterWeights(Model):
    def __init__(self, problem: MoeProblem) -> None:
        super().__init__(problem)
        self.weights = torch.ones_like(self.weights)


FAULTS: Final = [
    WrongExpert,
    OffsetsOfAnotherRouting,
    DroppedSlot,
    DroppedToken,
    CountedTwice,
    WeightOfAnotherSlot,
    WeightOfAnotherToken,
    RowOfAnotherToken,
    GateAndUpSwapped,
    GateAndUpInTurns,
    WithoutRouterWeights,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_bound_rejects_faults(dtype: torch.dtype, seed: int) -> None:
    """Of one slot of one token, too; the sound model passes. In bfloat16 the worst case is as large as one slot.

    Router weights are chosen: random ones of two tokens may be as good as equal, and then swapping them is no fault.
    """
    problem = MoeCase(8, 96, 64, 5, 3, dtype=dtype).random(seed=seed)
    shares = torch.tensor([0.5, 0.3, 0.2])
    problem = replace(problem, topk_weights=torch.stack([shares.roll(token) for token in range(8)]))
    answer = experts_answer(problem, rounds_weights=True)
    assert answer_ratio(Model(problem).run().to(dtype), answer) <= 1
    for fault in FAULTS:
        assert answer_ratio(fault(problem).run().to(dtype), answer) > 1, fault.__name__


@on_both
def test_out_is_written(device: str, seed: int) -> None:
    problem = case_on("bias and zeros", device).random(device=device, seed=seed)
    expected = computed(problem)
    box = testing.Poisoned(tuple(problem.x.shape), problem.x.dtype, device=device)
    assert computed(problem, out=box.tensor) is box.tensor
    testing.assert_equal(box.tensor, expected)
    for out in (torch.zeros_like(expected).T.contiguous().T, expected.new_empty(20, 100)[:, 3:67]):
        assert computed(problem, out=out) is out
        testing.assert_equal(out, expected)


@on_both
def test_there_may_be_no_tokens(device: str, seed: int) -> None:
    problem = replace(case_on("gpt-oss", device), tokens=0).random(device=device, seed=seed)
    assert computed(problem).shape == (0, 96)
    assert computed(problem, out=problem.x.new_empty(0, 96)).shape == (0, 96)


@on_both
def test_the_block_reads_views(device: str, seed: int) -> None:
    problem = case_on("bias and zeros", device).random(device=device, seed=seed)
    expected = computed(problem)
    wide = torch.cat([problem.x, problem.x], dim=1)
    x, gate_up, down, ids, weights = arguments(problem)
    for view in (wide[:, 64:], problem.x.T.contiguous().T):
        testing.assert_equal(moe.experts(view, gate_up, down, ids, weights), expected)
    turned = ids.T.contiguous().T, weights.T.contiguous().T
    testing.assert_equal(moe.experts(x, gate_up, down, *turned), expected)


def operator_arguments(problem: MoeProblem) -> tuple[Any, ...]:
    x, gate_up, down, ids, weights = arguments(problem)
    return x, *gate_up, *down, ids, weights, problem.case.activation, problem.case.limit, None


@pytest.mark.parametrize("name", ["gpt-oss", *CODES])
def test_the_block_is_a_torch_operator(name: str, seed: int) -> None:
    given = operator_arguments(CASES[name].random(seed=seed))
    checks, out = checks_of(given), {"out": torch.empty_like(given[0])}
    torch.library.opcheck(torch.ops.qcutlass.moe_experts.default, given, test_utils=checks)
    torch.library.opcheck(torch.ops.qcutlass.moe_experts_out.default, given, out, test_utils=checks)


@on_both
def test_a_block_of_columns_in_another_order_is_that_of_reordered_tokens(device: str, seed: int) -> None:
    """Bit for bit where all experts have one order; those of `down` are of the gated rows."""
    problem = case_on("bias and zeros", device).random(device=device, seed=seed)
    x, gate_up, down, *routing = arguments(problem)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(x.shape[1], generator=g).int().to(device)
    ordered = gate_up._replace(perm=order.repeat(len(gate_up.w_packed), 1))
    found = moe.experts(x, ordered, down, *routing)
    testing.assert_equal(found, moe.experts(x[:, order.long()], gate_up, down, *routing))
    assert not torch.equal(found, moe.experts(x, gate_up, down, *routing))
    assert ordered.perm is not None
    with pytest.raises(ValueError, match=r"gate_up: perm: expected shape \[E, K\]"):
        moe.experts(x, gate_up._replace(perm=ordered.perm[:, 1:]), down, *routing)
    with pytest.raises(ValueError, match=r"down: perm: expected shape \[E, K\]"):
        moe.experts(x, gate_up, down._replace(perm=ordered.perm[1:]), *routing)
    given = (x, *ordered, *down, *routing, "silu", None, None)
    torch.library.opcheck(torch.ops.qcutlass.moe_experts.default, given, test_utils=checks_of(given))


NAMES: Final = ("x", "gate_up", "down", "topk_ids", "topk_weights")


def wrong(given: tuple[Any, ...]) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """Arguments that replace some of a right call's, and what they raise."""
    x, gate_up, down, ids, weights = given
    return {
        "x's type": ({"x": x.double()}, TypeError, "x: expected a tensor of float16, bfloat16, float32"),
        "x's shape": ({"x": x[None]}, ValueError, "x: expected a matrix"),
        "x's columns": ({"x": x[:, :32]}, ValueError, "gate_up: "),
        "gate_up": ({"gate_up": down}, ValueError, "down: "),
        "down": ({"down": gate_up}, ValueError, "down: expected N = H = 64"),
        "no weights": (
            {"gate_up": None},
            TypeError,
            "gate_up: expected qcutlass.moe.ExpertWeights, .* got NoneType; make",
        ),
        "one part": (
            {"down": (down.w_packed,)},
            TypeError,
            "down: expected .*ExpertWeights, .* got tuple of 1; make it",
        ),
        "too many parts": (
            {"down": (*down, None)},
            TypeError,
            "down: expected .*ExpertWeights, .* got tuple of 14; make",
        ),
        "a tensor": (
            {"gate_up": down.w_packed},
            TypeError,
            "gate_up: expected .*ExpertWeights, .* got Tensor; make it",
        ),
        "down in turns": (
            {"down": down._replace(interleaved=True)},
            ValueError,
            "down: interleaved: expected False, .*",
        ),
        "no flag": ({"gate_up": gate_up._replace(interleaved=2)}, TypeError, "gate_up: interleaved: expected True or"),
        "no packed weights": ({"gate_up": gate_up._replace(w_packed=None)}, TypeError, "gate_up: expected packed"),
        "no scales": ({"down": down._replace(scales=None)}, TypeError, "down: scales: expected a torch.Tensor"),
        "bias": ({"down": down._replace(bias=down.bias[:2])}, ValueError, "down: bias: expected shape"),
        "experts": (
            {"down": moe.ExpertWeights(*(tensor[:3] for tensor in down[:4]))},
            ValueError,
            "down: expected E = 4 experts",
        ),
        "minimums": ({"down": down._replace(minimums=down.scales)}, ValueError, "down: minimums: expected zeros or"),
        "weight_dtype": ({"gate_up": gate_up._replace(weight_dtype="e2m1")}, ValueError, "gate_up: zeros: e2m1 codes"),
        "ids": ({"topk_ids": ids.float()}, TypeError, "topk_ids: expected a tensor of int32, int64"),
        "ids of other tokens": (
            {"topk_ids": ids[1:], "topk_weights": weights[1:]},
            ValueError,
            "topk_ids: .* T = 20",
        ),
        "weights": ({"topk_weights": weights.half()}, TypeError, "topk_weights: expected a tensor of float32"),
        "no router's weights": (
            {"topk_weights": None},
            TypeError,
            "topk_weights: expected a torch.Tensor, got NoneType",
        ),
        "weights' shape": ({"topk_weights": weights[:, :1]}, ValueError, "topk_weights: expected the shape of"),
        "ids' device": ({"topk_ids": ids.to("meta")}, ValueError, "topk_ids is on meta, x is on cpu"),
        "activation": ({"activation": "relu"}, ValueError, "activation: expected one of"),
        "limit": ({"limit": -1.0}, ValueError, "limit: expected a positive number"),
        "a word as limit": ({"limit": "a"}, TypeError, "limit: expected a number, got str"),
        "a tensor as limit": ({"limit": x[0, 0]}, TypeError, "limit: expected a number, got Tensor"),
        "a flag as alpha": ({"alpha": True}, TypeError, "alpha: expected a number, got bool"),
        "alpha": ({"activation": "gelu_tanh", "alpha": 2.0}, ValueError, "alpha: 'gelu_tanh' has none"),
        "out's shape": ({"out": x.new_empty(20, 63)}, ValueError, "out: expected shape"),
        "out's type": ({"out": x.float()}, TypeError, "out: expected a tensor of float16"),
        "out in x": ({"out": x}, ValueError, "out overlaps x in memory"),
        "gradients": ({"x": x.clone().requires_grad_()}, RuntimeError, "x requires grad"),
    }


RIGHT: Final = arguments(CASES["bias and zeros"].random())
WRONG: Final = wrong(RIGHT)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    changed, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        moe.experts(**(dict(zip(NAMES, RIGHT, strict=True)) | changed))


CAPTURED: Final = {
    **{name: CASES[name] for name in ("gpt-oss", "many rows", "bias and zeros", *CODES)},
    "one token": replace(CASES["top 8 of 128"], tokens=1),
}


def in_other_orders(given: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """The arguments of a block whose experts have their columns in an order of their own each."""
    x, gate_up, down, *routing = given
    g = torch.Generator().manual_seed(seed)

    def ordered(weights: moe.ExpertWeights, columns: int) -> moe.ExpertWeights:
        perm = torch.stack([torch.randperm(columns, generator=g) for _ in weights.w_packed])
        return weights._replace(perm=perm.int().to(x.device))

    return x, ordered(gate_up, x.shape[1]), ordered(down, gate_up.scales.shape[-1] // 2), *routing


@pytest.mark.gpu
@pytest.mark.parametrize("ordered", [False, True], ids=["in order", "in other orders"])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_block_reads_what_is_in_memory_then(name: str, ordered: bool, seed: int) -> None:
    case = CAPTURED[name]
    problem = case.random(device="cuda", seed=seed)
    given = in_other_orders(arguments(problem), seed) if ordered else arguments(problem)
    moe.experts(*given, **options(case))
    torch.cuda.synchronize()
    out, replay = captured(lambda: moe.experts(*given, **options(case)))
    for number in range(3):
        other = replace(case, invalid=0.2 * number).random(device="cuda", seed=seed + 5 + number)
        problem.x.copy_(other.x)
        problem.topk_ids.copy_(other.topk_ids)
        problem.topk_weights.copy_(other.topk_weights)
        replay()
        testing.assert_equal(out, moe.experts(*given, **options(case)))
        if not ordered:
            assert_right(out, problem)


@pytest.mark.gpu
def test_blocks_in_several_streams(seed: int) -> None:
    problems = [CASES["bias and zeros"].random(device="cuda", seed=seed + number) for number in range(4)]
    expected = [computed(problem) for problem in problems]
    given = [arguments(problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[] for _ in problems]
    for _ in range(20):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[number].append(moe.experts(*given[number]))
    torch.cuda.synchronize()
    for outs, right in zip(found, expected, strict=True):
        for out in outs:
            testing.assert_equal(out, right)


@pytest.mark.gpu
def test_blocks_of_real_sizes(seed: int) -> None:
    """Experts of Qwen3-30B-A3B, few of them, and all of its slots; every main loop."""
    for tokens in (1, 17, 200, 1500):
        case = MoeCase(tokens, 2048, 768, 12, 8, group_size=128, dtype=torch.bfloat16)
        problem = case.random(device="cuda", seed=seed)
        assert_right(computed(problem), problem)
