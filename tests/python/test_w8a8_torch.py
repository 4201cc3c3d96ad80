"""8-by-8-bit products as torch sees them, and calls that repeat an earlier one."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.eight_bit import assert_correct, multiply, pack
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import qcutlass
from qcutlass import testing
from qcutlass.products import launching
from qcutlass.products.float8 import Float8Call
from qcutlass.products.int8 import Int8Call
from qcutlass.testing import EightBitCase, EightBitProblem

OPERATORS = torch.ops.qcutlass
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FP8 = torch.float8_e4m3fn
CASES = {
    "int8": EightBitCase(3, 40, 128),
    "int8, everything": EightBitCase(
        9, 33, 100, torch.int8, torch.bfloat16, "one", azp="each", bias=True, activation="silu"
    ),
    "sums": EightBitCase(5, 40, 64, torch.int8, torch.int32),
    "fp8": EightBitCase(3, 40, 128, FP8, torch.bfloat16),
    "fp8, everything": EightBitCase(
        9, 33, 100, torch.float8_e5m2, torch.float32, w_scale="one", bias=True, activation="gelu"
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def call_of(p: EightBitProblem, w_sums: bool = True) -> Int8Call | Float8Call:
    """The operator's arguments."""
    packed, n = pack(p), p.shape[1]
    if p.w.dtype == torch.int8:
        sums = qcutlass.weight_sums(p.w) if w_sums and p.azp is not None else None
        return Int8Call(p.a, packed, p.a_scale, p.w_scale, p.bias, p.azp, p.activation, p.out_dtype, n, sums)
    assert p.a_scale is not None
    assert p.w_scale is not None
    return Float8Call(p.a, packed, p.a_scale, p.w_scale, p.bias, p.activation, p.out_dtype, n)


def operator_of(call: Int8Call | Float8Call, suffix: str = "") -> Any:
    return getattr(OPERATORS, ("gemm_w8a8" if isinstance(call, Int8Call) else "gemm_fp8") + suffix)


def run(call: Int8Call | Float8Call, **changes: Any) -> Tensor:
    """The package's function with the call's arguments by name."""
    arguments = call._asdict() | changes
    return (qcutlass.gemm_w8a8 if isinstance(call, Int8Call) else qcutlass.gemm_fp8)(**arguments)


def map_tensors(call: Int8Call | Float8Call, change: Any) -> Int8Call | Float8Call:
    return call._replace(**{name: change(v) for name, v in call._asdict().items() if isinstance(v, Tensor)})


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    launching.forget()
    yield
    launching.forget()


@pytest.mark.parametrize("device", DEVICES)
@cases
def test_opcheck(case: EightBitCase, device: str) -> None:
    if case.dtype != torch.int8 and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8 instructions")
    call = call_of(case.random(device=device, seed=1))
    names = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if case.dtype != torch.int8:
        del names[0]  # torch cannot compare fp8 inputs; the next test does
    torch.library.opcheck(operator_of(call).default, tuple(call), test_utils=names)
    out = torch.empty(case.m, case.n, dtype=case.out_dtype, device=device)
    torch.library.opcheck(operator_of(call, "_out").default, tuple(call), {"out": out}, test_utils=names)


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_fp8_operands_are_left_alone(dtype: torch.dtype) -> None:
    call = call_of(EightBitCase(3, 40, 128, dtype, bias=True).random(seed=1))
    assert isinstance(call, Float8Call)
    before = [t.view(torch.uint8).clone() for t in call if isinstance(t, Tensor)]
    out = operator_of(call)(*call)
    after = [t for t in call if isinstance(t, Tensor)]
    assert all(torch.equal(t.view(torch.uint8), b) for t, b in zip(after, before, strict=True))
    assert all(t.untyped_storage().data_ptr() != out.untyped_storage().data_ptr() for t in after)


@cases
def test_the_operator_and_the_function_agree(case: EightBitCase) -> None:
    p = case.random(seed=1)
    call, expected = call_of(p), multiply(p)
    testing.assert_equal(operator_of(call)(*call), expected)
    out = torch.empty_like(expected)
    assert operator_of(call, "_out")(*call, out=out) is None
    testing.assert_equal(out, expected)


@cases
def test_fake_and_meta_tensors_get_the_right_shapes(case: EightBitCase) -> None:
    call = call_of(case.random(seed=1))
    out = run(map_tensors(call, lambda t: t.to("meta")))
    assert (out.shape, out.dtype, out.device.type) == ((case.m, case.n), case.out_dtype, "meta")
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = map_tensors(call, mode.from_tensor)
        name = call._fields[0]
        out = run(fake._replace(**{name: fake.a.expand(1, case.m, case.k)}))
        assert (out.shape, out.dtype, out.device.type) == ((1, case.m, case.n), case.out_dtype, "cpu")
        with pytest.raises(ValueError, match="n: 70"):
            run(fake, n=70)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in CASES), ("int8, everything", "inductor"), ("fp8, everything", "inductor")],
)
def test_compiles_in_one_graph(name: str, backend: str) -> None:
    call = call_of(CASES[name].random(seed=1), w_sums=False)  # which the operator then computes
    activations = call._fields[0]

    def layer(a: Tensor) -> Tensor:
        return run(call, **{activations: a}) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        testing.assert_equal(compiled(call.a), layer(call.a))


def test_everything_around_a_product_compiles_in_one_graph() -> None:
    p = EightBitCase(4, 33, 100, torch.int8, azp="each").random(seed=1)
    plain = EightBitCase(4, 33, 100, FP8).random(seed=1)
    assert plain.a_scale is not None
    assert plain.w_scale is not None
    plain_scales = plain.a_scale, plain.w_scale

    def everything(w: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        packed = qcutlass.preprocess_weights(w, 8, activations="int8")
        sums = qcutlass.weight_sums(packed, 33)
        qcutlass.gemm_w8a8(p.a, packed, p.a_scale, p.w_scale, azp=p.azp, w_sums=sums, out=out)
        return sums, qcutlass.gemm_fp8(plain.a, plain.w, *plain_scales)

    torch._dynamo.reset()
    out = torch.full((4, 33), torch.nan, dtype=torch.float16)
    sums, of_fp8 = torch.compile(everything, fullgraph=True, backend="aot_eager")(p.w, out)
    testing.assert_equal(sums, p.w.sum(1, dtype=torch.int32))
    testing.assert_equal(out, multiply(p))
    testing.assert_equal(of_fp8, multiply(replace(plain, out_dtype=torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_compiles_once_for_any_number_of_rows(dtype: torch.dtype) -> None:
    p = EightBitCase(41, 40, 128, dtype).random(seed=1)
    call = call_of(p)
    assert p.a_scale is not None
    graphs, name = CompileCounter(), call._fields[0]

    def layer(a: Tensor, a_scale: Tensor) -> Tensor:
        return run(call, **{name: a, "a_scale": a_scale})

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for m in (5, 9, 17, 41):  # sizes that no other dimension has: equal ones make torch specialise
        testing.assert_equal(compiled(p.a[:m], p.a_scale[:m]), layer(p.a[:m], p.a_scale[:m]))
    assert graphs.frame_count == 1


@cases
def test_inference_mode_and_parameters(case: EightBitCase) -> None:
    p = case.random(seed=1)
    call, expected = call_of(p), multiply(p)
    with torch.inference_mode():
        inside = run(call)
        out = torch.empty_like(inside)
        run(call, out=out)
    assert inside.is_inference()
    testing.assert_equal(inside.clone(), expected)
    testing.assert_equal(out.clone(), expected)
    testing.assert_equal(run(map_tensors(call, lambda t: torch.nn.Parameter(t, requires_grad=False))), expected)


def test_writing_out_is_seen_by_autograd() -> None:
    call = call_of(EightBitCase(4, 32, 64, out_dtype=torch.float32).random(seed=1))
    out = torch.ones(4, 32)
    product = (torch.ones(4, 32, requires_grad=True) * out).sum()
    run(call, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def moved(tensor: Tensor, choose: random.Random) -> Tensor:
    """The same values elsewhere: contiguous, at an odd address, or with other strides."""
    kind = choose.randrange(3)
    if kind == 0:
        return tensor.clone()
    flat = torch.zeros(2 * tensor.numel() + 8).to(tensor.dtype)
    if kind == 1:
        offset = choose.randrange(9)
        view = flat[offset : offset + tensor.numel()].view(tensor.shape)
    else:
        view = flat[: 2 * tensor.numel()].view(*tensor.shape[:-1], -1)[..., ::2]
    view.copy_(tensor)
    return view


def test_repeated_calls_of_many_kinds_in_any_order(seed: int) -> None:
    choose = random.Random(seed)
    problems = [
        case.random(seed=seed + i) for i in range(2) for base in CASES.values() for case in (base, replace(base, m=5))
    ]
    calls = [call_of(p) for p in problems]
    for _ in range(300):
        index = choose.randrange(len(calls))
        call, p = calls[index], problems[index]
        names = [f for f in ("a_scale", "w_scale", "bias", "azp", "w_sums") if getattr(call, f, None) is not None]
        changes = {name: moved(getattr(call, name), choose) for name in names if choose.random() < 0.4}
        if choose.random() < 0.3:
            changes[call._fields[0]] = moved(call.a, choose)
        if choose.random() < 0.5:
            out = moved(torch.zeros(p.shape[:2], dtype=p.out_dtype), choose)
            assert run(call, **changes, out=out) is out
            assert_correct(out, p)
        assert_correct(run(call, **changes), p)
    assert len(launching._launches) > 20


def test_a_repeated_call_is_remembered_and_reads_its_own_operands() -> None:
    p = EightBitCase(4, 48, 96, azp="each", bias=True).random(seed=1)
    call = call_of(p)
    run(call)
    assert len(launching._launches) == 1
    for seed in range(2, 5):
        other = call_of(EightBitCase(4, 48, 96, azp="each", bias=True).random(seed=seed))
        assert_correct(run(other), EightBitCase(4, 48, 96, azp="each", bias=True).random(seed=seed))
    assert len(launching._launches) == 1
    references = [weakref.ref(value) for value in call if isinstance(value, Tensor)]
    del call, p
    assert [reference() for reference in references] == [None] * 7


def test_calls_that_differ_in_an_option_are_told_apart() -> None:
    p = EightBitCase(4, 48, 96, bias=True).random(seed=1)
    call = call_of(p)
    for changes in ({}, {"activation": "relu"}, {"out_dtype": torch.bfloat16}, {"bias": None}, {"n": 47}):
        for _ in range(2):
            if "n" in changes:
                part = replace(p, w=p.w[:47], w_scale=p.w_scale[:47], bias=p.bias[:47])  # type: ignore[index]
                assert_correct(run(call, n=47, w_scale=part.w_scale, bias=part.bias), part)
            else:
                assert_correct(run(call, **changes), replace(p, **changes))
    with pytest.raises(TypeError, match="n: expected an int"):
        run(call, n=48.0)


def test_int8_and_fp8_calls_of_equal_options_are_told_apart() -> None:
    for seed in (1, 2):
        for dtype in (torch.int8, FP8, torch.float8_e5m2):
            p = EightBitCase(4, 48, 96, dtype, torch.bfloat16).random(seed=seed)
            assert_correct(run(call_of(p)), p)
    assert len(launching._launches) == 3


def test_forward_mode_tangents_and_lazy_signs() -> None:
    p = EightBitCase(4, 48, 96).random(seed=1)
    call, expected = call_of(p), multiply(p)
    assert call.a_scale is not None
    testing.assert_equal(run(call, a_scale=torch._neg_view(call.a_scale)), -expected)
    with (
        torch.autograd.forward_ad.dual_level(),
        torch.no_grad(),
        pytest.raises(RuntimeError, match="a_scale has a forward-mode tangent"),
    ):
        run(call, a_scale=torch.autograd.forward_ad.make_dual(call.a_scale, torch.ones_like(call.a_scale)))


def test_freed_operands_are_refused() -> None:
    call = call_of(EightBitCase(4, 48, 96, azp="each").random(seed=1))
    run(call)
    assert isinstance(call, Int8Call)
    assert call.azp is not None
    call.azp.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"azp: its 4 elements have no storage"):
        run(call)
