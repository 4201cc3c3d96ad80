"""Calls that repeat an earlier one skip its checks; nothing else may differ, and nothing unchecked may slip through."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.python.running import in_threads
from torch import Tensor

import qcutlass
from qcutlass import _C, testing, tuning
from qcutlass.products import launching
from qcutlass.products.grouped import GROUPED, GroupedCall
from qcutlass.products.multiplying import multiply
from qcutlass.products.product import Product
from qcutlass.products.weight_only import WEIGHT_ONLY, GemmCall

M, N, K = 3, 48, 128


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    launching.forget()
    yield
    launching.forget()


def arguments(m: int = M, **options: Any) -> dict[str, Any]:
    p = testing.random_problem(m, N, K, group_size=32, seed=1, **options)
    packed = qcutlass.preprocess_weights(p.codes, bits=p.bits)
    return {"a": p.a, "w_packed": packed, "scales": p.scales, "zeros": p.zeros, **p.keywords}


def fresh(values: dict[str, Any]) -> Tensor:
    """The product, checked and planned anew; it is not remembered."""

    def run(product: Product, out: Tensor | None) -> None:
        launch = launching.launch_of(product)
        launch.run(launch.addresses, product.a, product.out)

    with mock.patch.object(launching, "run", run):
        return multiply(WEIGHT_ONLY, GemmCall(**values))


def moved(tensor: Tensor, choose: random.Random) -> Tensor:
    """The same values elsewhere: contiguous, at an odd address, or with other strides."""
    kind = choose.randrange(5)
    if kind == 0:
        return tensor.clone()
    if kind == 1:
        return torch.nn.Parameter(tensor.clone(), requires_grad=False)
    flat = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)
    if kind == 2:
        offset = choose.randrange(9)
        return flat[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype)
    if kind == 3:
        return wide[..., 1 : 1 + tensor.shape[-1]].copy_(tensor)
    return wide[..., : 2 * tensor.shape[-1] : 2].copy_(tensor)


def test_a_repeated_call_is_remembered_and_reads_its_own_operands() -> None:
    values = arguments(bias=True, activation="silu")
    qcutlass.gemm(**values)
    assert len(WEIGHT_ONLY.launches) == 1
    for _ in range(3):
        values |= {"a": values["a"] * 2, "bias": values["bias"] + 1, "w_packed": values["w_packed"].flip(0).clone()}
        testing.assert_equal(qcutlass.gemm(**values), fresh(values))
    assert len(WEIGHT_ONLY.launches) == 1


def test_calls_of_many_kinds_in_any_order(seed: int) -> None:
    choose = random.Random(seed)
    cases: list[dict[str, Any]] = []
    for dtype in (torch.float16, torch.float32):
        for bits in (4, 8):
            for zeros in ("none", "int", "real"):
                for m in (1, 5, 5):
                    epilogue = {name: choose.random() < 0.4 for name in ("bias", "act_scale", "perm")}
                    activation = choose.choice([None, "relu", "gelu"])
                    case = testing.Case(m, N, K, bits, 32, zeros, dtype, activation=activation, **epilogue)
                    p = case.random(seed=choose.randrange(2**31))
                    packed = qcutlass.preprocess_weights(p.codes, bits=bits)
                    cases.append({"a": p.a, "w_packed": packed, "scales": p.scales, "zeros": p.zeros, **p.keywords})
    for _ in range(400):
        values = dict(choose.choice(cases))
        for name in ("a", "scales", "zeros", "bias", "act_scale", "perm"):
            if isinstance(values.get(name), Tensor) and choose.random() < 0.5:
                values[name] = moved(values[name], choose)
        if choose.random() < 0.2:
            values["a"] = values["a"].expand(2, *values["a"].shape)
        values |= choose.choice([{}, {}, {"bits": 4 if values["w_packed"].shape[1] == 2 else 8}, {"group_size": 32}])
        expected = fresh(values)
        if choose.random() < 0.5:
            out = moved(torch.full_like(expected, torch.nan), choose)
            assert qcutlass.gemm(**values, out=out) is out
            testing.assert_equal(out.detach(), expected)
        testing.assert_equal(qcutlass.gemm(**values), expected)
    assert len(WEIGHT_ONLY.launches) > 50


@pytest.mark.parametrize(("name", "good", "bad"), [("split_k", 0, False), ("bits", 4, 4.0), ("group_size", 32, 32.0)])
def test_equal_values_of_other_types_are_still_refused(name: str, good: object, bad: object) -> None:
    values = arguments()
    qcutlass.gemm(**values, **{name: good})
    assert len(WEIGHT_ONLY.launches) == 1
    with pytest.raises(TypeError, match=name):
        qcutlass.gemm(**values, **{name: bad})


def test_what_an_operator_remembered_does_not_hide_gradients() -> None:
    values = arguments()
    a = values.pop("a").requires_grad_()
    call = GemmCall(a, **values)
    torch.ops.qcutlass.gemm(*call)
    with pytest.raises(RuntimeError, match="a requires grad"):
        qcutlass.gemm(a, **values)


def test_outputs_that_require_grad_are_refused() -> None:
    values = arguments()
    out = torch.zeros(M, N, dtype=values["a"].dtype, requires_grad=True)
    for target in (out, out * 2):
        with pytest.raises(RuntimeError, match="out requires grad"):
            qcutlass.gemm(**values, out=target)
    assert not out.detach().any()


def test_forward_mode_tangents_are_refused() -> None:
    values = arguments()
    qcutlass.gemm(**values)
    a = values.pop("a")
    with (
        torch.autograd.forward_ad.dual_level(),
        torch.no_grad(),
        pytest.raises(RuntimeError, match="a has a forward-mode tangent"),
    ):
        qcutlass.gemm(torch.autograd.forward_ad.make_dual(a, torch.ones_like(a)), **values)
    with pytest.raises(RuntimeError, match="tangent"):
        torch.func.jvp(lambda x: qcutlass.gemm(x, **values), (a,), (torch.ones_like(a),))


def test_lazily_negated_operands() -> None:
    values = arguments()
    expected = qcutlass.gemm(**values)
    testing.assert_equal(qcutlass.gemm(**values | {"a": torch._neg_view(values["a"])}), -expected)
    testing.assert_equal(qcutlass.gemm(**values | {"scales": torch._neg_view(values["scales"])}), -expected)


def test_operands_whose_storage_was_freed_are_refused() -> None:
    values = arguments() | {"perm": torch.randperm(K, dtype=torch.int32)}
    qcutlass.gemm(**values)
    values["perm"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"perm: its 128 elements have no storage"):
        qcutlass.gemm(**values)


def test_sparse_operands_are_refused() -> None:
    values = arguments()
    with pytest.raises(ValueError, match=r"a: expected a dense tensor, got layout torch.sparse_coo"):
        qcutlass.gemm(**values | {"a": values["a"].to_sparse()})


def test_nested_operands_are_refused() -> None:
    values = arguments()
    nested = torch.nested.nested_tensor([values["a"], values["a"]])
    with pytest.raises(qcutlass.UnsupportedError, match=r"a: expected a dense tensor, got a nested one"):
        qcutlass.gemm(**values | {"a": nested})


def test_a_plan_made_before_tuning_is_not_remembered_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = launching.launch_of

    def plan_while_another_thread_tunes(product: Product) -> _C.Launch:
        launch = plan(product)
        launching.forget()
        return launch

    monkeypatch.setattr(launching, "launch_of", plan_while_another_thread_tunes)
    qcutlass.gemm(**arguments())
    assert not WEIGHT_ONLY.launches


@pytest.mark.parametrize("activation", [["relu"], {}, 3])
def test_activations_of_odd_types_are_refused(activation: Any) -> None:
    values = arguments()
    qcutlass.gemm(**values)
    with pytest.raises((TypeError, ValueError)):
        qcutlass.gemm(**values, activation=activation)


@pytest.mark.parametrize("name", ["a", "scales", "bias", "act_scale"])
def test_gradients_are_refused_after_calls_without(name: str) -> None:
    values = arguments(bias=True, act_scale=True)
    expected = qcutlass.gemm(**values)
    values[name] = values[name].clone().requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            testing.assert_equal(qcutlass.gemm(**values), expected)
        with torch.inference_mode():
            assert qcutlass.gemm(**values).is_inference()
        with pytest.raises(RuntimeError, match=rf"{name} requires grad"):
            qcutlass.gemm(**values)


def test_out_must_not_overlap_after_calls_where_it_did_not() -> None:
    values = arguments(m=N)
    storage = torch.zeros(N * K + N * N, dtype=torch.float16)
    values["a"] = storage[: N * K].view(N, K).copy_(values["a"])
    expected = qcutlass.gemm(**values)
    for _ in range(2):
        out = storage[N * K :].view(N, N)
        assert qcutlass.gemm(**values, out=out) is out
        testing.assert_equal(out, expected)
    before = storage.clone()
    with pytest.raises(ValueError, match="out overlaps a"):
        qcutlass.gemm(**values, out=storage[N * K - 64 : -64].view(N, N))
    assert torch.equal(storage, before)


def test_out_may_lie_between_the_rows_of_an_operand() -> None:
    values = arguments()
    storage = torch.zeros(M, K + N, dtype=torch.float16)
    values["a"] = storage[:, :K].copy_(values["a"])
    expected = fresh(values)
    for _ in range(3):
        testing.assert_equal(qcutlass.gemm(**values, out=storage[:, K:]), expected)


def test_writing_a_repeated_out_is_seen_by_autograd() -> None:
    values = arguments()
    out = torch.empty(M, N, dtype=torch.float16)
    versions = []
    for _ in range(3):
        qcutlass.gemm(**values, out=out)
        versions.append(out._version)
    assert versions[0] < versions[1] < versions[2]


def test_a_parameter_with_new_data_is_a_new_operand() -> None:
    values = arguments()
    weight, scales = (torch.nn.Parameter(values[name], requires_grad=False) for name in ("w_packed", "scales"))
    values |= {"w_packed": weight, "scales": scales}
    qcutlass.gemm(**values)
    scales.data = (scales.data * 2).float()
    testing.assert_equal(qcutlass.gemm(**values), fresh(values))
    weight.data = weight.data[:2].clone()
    with pytest.raises(ValueError, match="w_packed"):
        qcutlass.gemm(**values)


def test_operands_are_not_kept() -> None:
    values = arguments(bias=True, act_scale=True, perm=True)
    qcutlass.gemm(**values)
    assert len(WEIGHT_ONLY.launches) == 1
    references = [weakref.ref(value) for value in values.values() if isinstance(value, Tensor)]
    assert len(references) == 7
    values.clear()
    assert [reference() for reference in references] == [None] * 7


def test_a_remembered_plan_fits_its_operands() -> None:
    """The workspace of a plan must be what the operands need, wherever these lie in memory."""
    traits = _C.DeviceTraits(90, 132, 227 * 1024)
    problem = testing.random_problem(1, 64, 64, group_size=64, zeros="int")
    weights = qcutlass.preprocess_weights(problem.codes, bits=4)
    buffers = {name: torch.zeros(4096, dtype=getattr(problem, name).dtype) for name in ("a", "scales", "zeros")}
    remembered: dict[object, tuple[_C.GemmArguments, int]] = {}
    hits = 0
    for name, buffer in buffers.items():
        for offset in (0, 8 // buffer.element_size(), 1024):  # 8 bytes past an aligned address
            for stride in (64, 64 + 8 // buffer.element_size(), 1024):
                view = buffer.as_strided((1, 64), (stride, 1), offset)
                operands = {"a": problem.a, "scales": problem.scales, "zeros": problem.zeros, name: view}
                call = GemmCall(operands["a"], weights, operands["scales"], operands["zeros"])
                product = Product(WEIGHT_ONLY, call, call.check(None), torch.empty(1, 64, dtype=torch.float16))
                found = WEIGHT_ONLY.launches.signature(call, None)
                assert found is not None
                signature, addresses = found
                rebinding = product.rebinding()
                assert addresses == [*rebinding.addresses, 0]
                needed = _C.select(product.arguments, traits).workspace_bytes
                arguments, planned = remembered.setdefault(signature, (product.arguments, needed))
                moved = rebinding(rebinding.addresses, product.out.data_ptr())
                assert _C.select(moved, traits).workspace_bytes == planned, f"{name}, offset {offset}, stride {stride}"
                hits += moved.a != arguments.a or moved.weights.scales != arguments.weights.scales
    assert hits > 0, "no call was like an earlier one"
    assert len({planned for _, planned in remembered.values()}) > 1, "no view was misaligned"


WAITS, STARTS_AT_ONCE = True, False  # a kernel lets its successor start when all before it have ended, or at once


def test_weights_are_settled_unless_the_products_just_before_wrote_them() -> None:
    values = arguments(bias=True, act_scale=True, perm=True)
    product = Product(WEIGHT_ONLY, call := GemmCall(**values), call.check(None), torch.empty(M, N).half())
    launch = launching.launch_of(product)
    given = [address for address in launch.addresses if address]  # neither a global scale nor minimums
    addresses = dict(zip((name for name in values if isinstance(values[name], Tensor)), given, strict=True))
    assert launch.is_settled(launch.addresses, _C.LastOutputs())
    unsettled = set()
    for name, address in addresses.items():
        last = _C.LastOutputs()
        last.add(address - 64, address, WAITS)
        last.add(address + values[name].nbytes, address + values[name].nbytes + 64, WAITS)
        assert launch.is_settled(launch.addresses, last), f"{name}: its neighbours in memory"
        last.add(address + values[name].nbytes - 1, address + values[name].nbytes + 64, WAITS)
        for _ in range(7):  # as many threads may launch into one stream
            last.add(1, 2, WAITS)
        if not launch.is_settled(launch.addresses, last):
            unsettled.add(name)
        last.add(1, 2, WAITS)
        assert launch.is_settled(launch.addresses, last)
    assert unsettled == {"w_packed", "scales", "zeros"}


def test_nothing_is_settled_behind_more_kernels_that_start_at_once_than_are_known() -> None:
    values = arguments()
    product = Product(WEIGHT_ONLY, call := GemmCall(**values), call.check(None), torch.empty(M, N).half())
    launch = launching.launch_of(product)
    last = _C.LastOutputs()
    address = values["scales"].data_ptr()
    last.add(address, address + 1, WAITS)
    for _ in range(20):
        assert not launch.is_settled(launch.addresses, last)
        last.add(1, 2, STARTS_AT_ONCE)
    for _ in range(8):
        last.add(1, 2, WAITS)
    assert launch.is_settled(launch.addresses, last)


def test_rows_of_experts_are_settled_where_a_product_before_has_read_them() -> None:
    one = arguments()
    weights = {name: torch.stack([one[name]] * 3) for name in ("w_packed", "scales", "zeros")}
    offsets, rows = torch.tensor([0, 1, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    call = GroupedCall(one["a"], **weights, offsets=offsets, rows=rows, group_size=32)
    product = Product(GROUPED, call, call.check(None), torch.empty(2, N).half())
    launch = launching.launch_of(product)
    last = _C.LastOutputs()
    of_offsets, of_rows = ((part.data_ptr(), part.data_ptr() + part.nbytes) for part in (offsets, rows))
    last.read(*of_offsets)
    last.read(*of_rows)
    assert not launch.is_settled(launch.addresses, last), "they are another's, who may write them anew"
    last.begin_experts(of_offsets, of_rows)
    assert not launch.is_settled(launch.addresses, last), "nobody has read them"
    last.read(*of_offsets)
    assert not launch.is_settled(launch.addresses, last), "nobody has read the rows"
    last.read(*of_rows)
    for _ in range(3):
        last.add(1, 2, STARTS_AT_ONCE)
    assert launch.is_settled(launch.addresses, last)
    for begin, _ in of_offsets, of_rows:
        last.add(begin + 4, begin + 8, WAITS)
        last.add(1, 2, WAITS)
        assert not launch.is_settled(launch.addresses, last), "one has been written since"
        last.begin_experts(of_offsets, of_rows)
        last.read(*of_offsets)
        last.read(*of_rows)
        assert launch.is_settled(launch.addresses, last)
    last.end_experts()
    assert not launch.is_settled(launch.addresses, last), "the block has ended"


def test_the_number_of_remembered_calls_is_bounded() -> None:
    launches = _C.Launches(*WEIGHT_ONLY.places, 4)
    for m in range(1, 12):
        call = GemmCall(**arguments(m=m))
        launch = launching.launch_of(Product(WEIGHT_ONLY, call, call.check(None), torch.empty(m, N).half()))
        launches.remember(call, None, launch, _C.launch_generation(), 0)
        assert 1 <= len(launches) <= 4
        testing.assert_equal(launches.repeat(call, None), fresh(call._asdict()))


def test_new_tuned_plans_have_everything_planned_anew() -> None:
    qcutlass.gemm(**arguments())
    assert len(WEIGHT_ONLY.launches) == 1
    tuning.forget()
    assert len(WEIGHT_ONLY.launches) == 0


def test_threads_share_what_is_remembered() -> None:
    work = [arguments(m=m) | {"a": torch.randn(m, K).half()} for m in (1, 1, 4, 4)]
    expected = [fresh(values) for values in work]

    def loop(index: int) -> None:
        for step in range(300):
            if step % 100 == index * 10:
                launching.forget()
            testing.assert_equal(qcutlass.gemm(**work[index]), expected[index])

    in_threads(loop, [(index,) for index in range(len(work))])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_goes_through_the_operator() -> None:
    values = arguments(m=4)
    a = values.pop("a")
    expected = torch.stack([qcutlass.gemm(row, **values) for row in a])
    out = torch.func.vmap(lambda row: qcutlass.gemm(row, **values))(a)
    testing.assert_equal(out, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_function_computes_with_its_own_arguments() -> None:
    values = arguments()
    qcutlass.gemm(**values)
    a = values.pop("a")
    traced = torch.jit.trace(lambda a: qcutlass.gemm(a, **values), (a,), check_trace=False)
    testing.assert_equal(traced(a * 2), qcutlass.gemm(a * 2, **values))
