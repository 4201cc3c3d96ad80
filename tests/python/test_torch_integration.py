"""Every kind as torch sees it: opcheck, fake and meta tensors, compilation, inference mode; calls that repeat."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.kinds import DESCRIPTIONS, OUTLINES
from tests.python.kinds.description import FLOATS, Description, Product
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from qcutlass import testing
from qcutlass.products import launching
from qcutlass.products.kinds import KINDS

OPERATORS = torch.ops.qcutlass
CHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
AROUND = {"pack", "unpack", "dequantize", "quantize_8bit", "quantize_blocks", "dequantize_blocks", "gelu_blocks"}
AROUND |= {"add_rms_norm", "rms_norm", "rotary", "rotary_append", "silu_mul", "gelu_tanh_mul"}
AROUND |= {"add_rms_norm_quantized", "rms_norm_quantized"}
AROUND |= {"moe_route", "moe_gate", "moe_sum", "moe_experts", "moe_experts_out"}

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
kinds = pytest.mark.parametrize("kind", DESCRIPTIONS.values(), ids=list(DESCRIPTIONS))
with_out = pytest.mark.parametrize("kind", [pytest.param(k, id=k.name) for k in DESCRIPTIONS.values() if k.has_out])


def each_case(*, compiled: bool = False) -> list[Any]:
    """(kind, case), for all cases or those that are compiled to the end."""
    return [
        pytest.param(kind, case, id=f"{kind.name}-{key}")
        for kind in DESCRIPTIONS.values()
        for key, case in kind.cases.items()
        if key in kind.inductor or not compiled
    ]


cases = pytest.mark.parametrize(("kind", "case"), each_case())


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    launching.forget()
    yield
    launching.forget()


def remembered() -> int:
    return sum(len(kind.launches) for kind in KINDS.values())


def operator_of(kind: Description, suffix: str = "") -> Any:
    return getattr(OPERATORS, kind.operator + suffix)


def assert_equal(outs: tuple[Tensor, ...], expected: tuple[Tensor, ...], label: object = "") -> None:
    for out, wanted in zip(outs, expected, strict=True):
        testing.assert_equal(out, wanted, label=label)


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def empty_out(product: Product) -> dict[str, Tensor]:
    kind, (m, n, _) = product.description, product.problem.shape
    return {"out": product.a.new_empty((m, n), dtype=kind.out_dtype(product.problem))}


def test_every_registered_operator_is_checked_here() -> None:
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name[:10] == "qcutlass::"
    }
    products = {kind.operator for kind in DESCRIPTIONS.values()}
    products |= {f"{kind.operator}_out" for kind in DESCRIPTIONS.values() if kind.has_out}
    products |= {name + suffix for name in OUTLINES for suffix in ("", "_out")}
    assert names == products | AROUND  # these in the files of their kinds


@devices
@cases
def test_opcheck(kind: Description, case: Any, device: str) -> None:
    if device == "cuda":
        kind.skip_without_instructions()
    product = kind.random(kind.on(device, case), device, seed=1)
    is_fp8 = product.a.dtype.itemsize == 1 and product.a.dtype.is_floating_point
    names = CHECKS[1:] if is_fp8 else CHECKS  # torch cannot compare fp8 inputs; the next test does
    torch.library.opcheck(operator_of(kind).default, product.arguments(), test_utils=names)
    if kind.has_out:
        out = empty_out(product)
        torch.library.opcheck(operator_of(kind, "_out").default, product.arguments(), out, test_utils=names)


@cases
def test_operands_are_left_alone(kind: Description, case: Any) -> None:
    product = kind.random(case, seed=1)
    before = {name: tensor.view(torch.uint8).clone() for name, tensor in product.operands.items()}
    outs = as_tuple(operator_of(kind)(*product.arguments()))
    for name, tensor in product.operands.items():
        assert torch.equal(tensor.view(torch.uint8), before[name]), name
        pointers = {out.untyped_storage().data_ptr() for out in outs}
        assert tensor.untyped_storage().data_ptr() not in pointers, name


@cases
def test_the_operator_and_the_function_agree(kind: Description, case: Any) -> None:
    product = kind.random(case, seed=1)
    expected = product.outs()
    kind.assert_correct(expected, product.problem)
    assert_equal(as_tuple(operator_of(kind)(*product.arguments())), expected)
    if kind.has_out:
        out = torch.empty_like(expected[0])
        assert operator_of(kind, "_out")(*product.arguments(), out=out) is None
        testing.assert_equal(out, expected[0])


@cases
def test_fake_and_meta_tensors_get_the_right_shapes(kind: Description, case: Any) -> None:
    product = kind.random(case, seed=1)

    def check(outs: tuple[Tensor, ...], leading: tuple[int, ...], device: str) -> None:
        for out, real in zip(outs, product.outs(), strict=True):
            assert (out.shape, out.dtype, out.device.type) == ((*leading, real.shape[-1]), real.dtype, device)

    check(product.mapped(lambda t: t.to("meta")).outs(), (case.m,), "meta")
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    fake = product.mapped(mode.from_tensor)
    with mode:
        batched = {fake.activations: fake.a.expand(1, case.m, case.k)}
        if "residual" in fake.operands:  # which has the output's shape
            batched["residual"] = fake.operands["residual"][None]
        outs, batch = fake.outs(), fake.outs(**batched)
    check(outs, (case.m,), "cpu")
    check(batch, (1, case.m), "cpu")


def assert_compiles(product: Product, backend: str) -> None:
    product = product.without_computed()  # which the operator then computes

    def layer(a: Tensor) -> tuple[Tensor, ...]:
        a = a * 2 if a.dtype in FLOATS else a
        return tuple(out + 1 for out in product.outs(**{product.activations: a}))

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert_equal(compiled(product.a), layer(product.a), product.problem)


@cases
def test_compiles_in_one_graph(kind: Description, case: Any) -> None:
    assert_compiles(kind.random(case, seed=1), "aot_eager")


@devices
@pytest.mark.parametrize(("kind", "case"), each_case(compiled=True))
def test_compiles_to_the_end(kind: Description, case: Any, device: str) -> None:
    if device == "cuda":
        kind.skip_without_instructions()
    assert_compiles(kind.random(kind.on(device, case), device, seed=1), "inductor")


@kinds
def test_compiles_once_for_any_number_of_rows(kind: Description) -> None:
    product = kind.random(kind.case(41, 40, 128), seed=1)
    graphs = CompileCounter()

    def layer(rows: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return product.outs(**rows)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for m in (5, 9, 17, 41):  # sizes that no other dimension has: equal ones make torch specialise
        rows = product.rows(product.a[:m])
        assert_equal(compiled(rows), layer(rows), product.problem)
    assert graphs.frame_count == 1


@cases
def test_inference_mode_and_parameters(kind: Description, case: Any) -> None:
    product = kind.random(case, seed=1)
    expected = product.outs()
    with torch.inference_mode():
        inside = product.outs()
        if kind.has_out:
            out = torch.empty_like(inside[0])
            product(out=out)
    assert all(one.is_inference() for one in inside)
    assert_equal(tuple(one.clone() for one in inside), expected)
    if kind.has_out:
        testing.assert_equal(out.clone(), expected[0])
    parameters = product.mapped(lambda t: torch.nn.Parameter(t, requires_grad=False))
    assert_equal(parameters.outs(), expected)


@with_out
def test_writing_out_is_seen_by_autograd(kind: Description) -> None:
    product = kind.random(kind.case(4, 32, 64), seed=1)
    out = torch.ones(4, 32, dtype=kind.out_dtype(product.problem))
    loss = (torch.ones_like(out, requires_grad=True) * out).sum()
    product(out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def moved(tensor: Tensor, choose: random.Random) -> Tensor:
    """The same values elsewhere: contiguous, at an odd address, or with other strides."""
    form = choose.randrange(3)
    if form == 0:
        return tensor.clone()
    flat = torch.zeros(2 * tensor.numel() + 8, device=tensor.device).to(tensor.dtype)
    if form == 1:
        offset = choose.randrange(9)
        view = flat[offset : offset + tensor.numel()].view(tensor.shape)
    else:
        view = flat[: 2 * tensor.numel()].view(*tensor.shape[:-1], -1)[..., ::2]
    view.copy_(tensor)
    return view


@devices
def test_repeated_calls_of_all_kinds_in_any_order(device: str, seed: int) -> None:
    """Calls of the same operands, of others in the same form, and of every form that operands may have."""
    choose = random.Random(seed)
    there = [kind for kind in DESCRIPTIONS.values() if device == "cpu" or kind.has_instructions()]
    products = [
        kind.random(kind.on(device, case), device, seed=seed + again)
        for again in range(2)
        for kind in there
        for base in kind.cases.values()
        for case in (base, replace(base, m=5))
    ]
    for _ in range(450):
        product = choose.choice(products)
        kind = product.description
        movable = [name for name in product.operands if name in {*kind.boxed, *kind.computed}]
        changes: dict[str, Any] = {
            name: moved(product.operands[name], choose) for name in movable if choose.random() < 0.4
        }
        if kind.has_out and choose.random() < 0.5:
            out = moved(torch.zeros_like(empty_out(product)["out"]), choose)
            assert product(**changes, out=out) is out
            kind.assert_correct((out,), product.problem)
        kind.assert_correct(product.outs(**changes), product.problem)
    assert remembered() > 40


@kinds
def test_a_repeated_call_is_remembered_and_reads_its_own_operands(kind: Description) -> None:
    case = kind.full(4, 48, 96)
    product = kind.random(case, seed=1)
    product()
    assert remembered() == 1
    for seed in range(2, 5):
        other = kind.random(case, seed=seed)
        kind.assert_correct(other.outs(), other.problem)
    assert remembered() == 1
    references = [weakref.ref(tensor) for tensor in product.operands.values()]
    del product
    assert [reference() for reference in references] == [None] * len(references)


@kinds
def test_calls_that_differ_in_an_option_are_told_apart(kind: Description) -> None:
    product = kind.random(kind.case(4, 48, 96, bias=True), seed=1)
    forms = kind.forms(product.problem)
    assert len(forms) > 2
    for changes, problem in forms:
        for _ in range(2):
            kind.assert_correct(product.outs(**changes), problem, changes)


@kinds
def test_forward_mode_tangents_and_lazy_signs(kind: Description) -> None:
    product = kind.random(kind.cases["plain"], seed=1)
    scale = product.operands[kind.scale]
    expected = product.outs()
    codes = product.outs(**{kind.scale: torch._neg_view(scale)})
    assert_equal(codes, (-expected[0], *expected[1:]))
    with (
        torch.autograd.forward_ad.dual_level(),
        torch.no_grad(),
        pytest.raises(RuntimeError, match=f"{kind.scale} has a forward-mode tangent"),
    ):
        product(**{kind.scale: torch.autograd.forward_ad.make_dual(scale, torch.ones_like(scale))})


@kinds
def test_freed_operands_are_refused(kind: Description) -> None:
    names = list(kind.random(kind.full(4, 48, 96), seed=1).operands)
    for name in names:
        product = kind.random(kind.full(4, 48, 96), seed=1)
        product()
        tensor = product.operands[name]
        tensor.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=rf"^{name}: its {tensor.numel()} elements have no storage"):
            product()
