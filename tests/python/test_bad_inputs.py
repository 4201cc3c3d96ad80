"""Wrong arguments of every kind: the error's type, the argument's name, both values, and nothing written."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import FLOATS, Description, Refusal, Row, Values
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import qcutlass
from qcutlass import _C, FP8, W4A8, W8A8, Blockwise, UnsupportedError, WeightOnly, testing
from qcutlass.layers import QuantEmbedding, QuantExperts, TiedLinear, WeightOnlyLinear
from qcutlass.products import launching
from qcutlass.products.kinds import KINDS

kinds = pytest.mark.parametrize("kind", DESCRIPTIONS.values(), ids=list(DESCRIPTIONS))
WRONG = [
    pytest.param(kind, row, id=f"{kind.name}-{index}-{row[0]}")
    for kind in DESCRIPTIONS.values()
    for index, row in enumerate(kind.rows)
]
REFUSALS = [
    pytest.param(refusal, id=f"{kind.name}-{index}")
    for kind in DESCRIPTIONS.values()
    for index, refusal in enumerate(kind.refusals)
]


def valid(kind: Description) -> Values:
    """A call with every operand."""
    return kind.random(kind.whole, seed=1).values


def operands(*, floating: bool = False) -> list[Any]:
    """Each operand of each kind that takes `out`, or each floating one of all kinds."""
    found = []
    for kind in DESCRIPTIONS.values():
        for name, value in valid(kind).items():
            if isinstance(value, Tensor) and (value.dtype in FLOATS if floating else kind.has_out):
                found.append(pytest.param(kind, name, id=f"{kind.name}-{name}"))
    return found


def out_of(kind: Description) -> Values:
    """Memory for the output of `whole`, if the function takes such."""
    if not kind.has_out:
        return {}
    return {"out": torch.empty(kind.whole.m, kind.whole.n, dtype=torch.float16)}


@pytest.mark.parametrize("after", ["nothing", "a valid call"])
@pytest.mark.parametrize(("kind", "row"), WRONG)
def test_products_refuse(kind: Description, row: Row, after: str) -> None:
    name, change, error, parts = row
    values = valid(kind)
    launching.forget()
    if after == "a valid call":  # calls like it are not checked again: none of these is
        kind.function(**values, **out_of(kind))
        assert [len(each.launches) for each in KINDS.values() if len(each.launches)] == [1]
    box = testing.Poisoned((kind.whole.m, kind.whole.n), torch.float16)
    if kind.has_out:
        values["out"] = box.tensor
    values[name] = change(values)
    with pytest.raises(error) as caught:
        kind.function(**values)
    message = str(caught.value)
    assert name in message
    assert [part for part in parts if part not in message] == [], message
    assert box.is_untouched()


SCHEMES = [
    WeightOnly(4, 32), W4A8(32, "int8", symmetric=True), W8A8(), W8A8(symmetric=False), FP8(), Blockwise(128)
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_activations_are_refused_by_name(layout: torch.layout, mode: Any) -> None:
    """Jagged ones, of a type of their own, came to torch's dispatcher; layers asked strided ones for their size."""
    scheme = WeightOnly(4, 32)
    experts = QuantExperts.from_weights(torch.randn(2, 64, 128), torch.randn(2, 128, 32), scheme)
    quantized = qcutlass.quantize(torch.randn(48, 128), 4, 32)
    packed = qcutlass.preprocess_weights(quantized.codes, bits=4)
    embedding = QuantEmbedding(WeightOnlyLinear(quantized))
    layers = [qcutlass.QuantLinear.from_linear(nn.Linear(128, 48), scheme) for scheme in SCHEMES]
    with mode():
        a = torch.nested.nested_tensor([torch.randn(5, 128), torch.randn(2, 128)], layout=layout)
        ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=layout)
        calls: list[Any] = [
            lambda: qcutlass.gemm(a, packed, quantized.scales, quantized.zeros),
            lambda: qcutlass.gemm(a, packed, quantized.scales, quantized.zeros, activations="int8"),
            lambda: qcutlass.quantize_activations(a),
            lambda: qcutlass.blockwise.act_quant(a),
            lambda: TiedLinear(embedding)(a),
            *(partial(layer, a) for layer in layers),
        ]
        for call in calls:
            with pytest.raises(UnsupportedError, match=r"^[ax]: expected a dense tensor, got a nested one: pass "):
                call()
        with pytest.raises(UnsupportedError, match=r"^input: expected a dense tensor, got a nested one: pass "):
            embedding(ids)
        if layout is torch.jagged:
            ids_of, scores = torch.zeros(7, 1, dtype=torch.int32), torch.ones(7, 1)
            with pytest.raises(UnsupportedError, match=r"^x: expected a dense tensor, got a nested one: pass "):
                qcutlass.moe.experts(a, experts.gate_up.weights, experts.down.weights, ids_of, scores)


@pytest.mark.parametrize("change", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn])
def test_weights_that_are_not_dense_are_refused_by_name(change: Any) -> None:
    with pytest.raises(ValueError, match=r"^weight: expected a dense tensor, got layout .* pass weight\.to_dense\(\)"):
        qcutlass.quantize(change(torch.randn(4, 32)))


@pytest.mark.parametrize("without_data", ["meta", "fake"])
@kinds
def test_tensors_without_data_are_refused_too(kind: Description, without_data: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    for name, change, error, parts in kind.fake_rows:
        product = kind.random(kind.whole, seed=1)
        with mode if without_data == "fake" else contextlib.nullcontext():
            values = product.mapped(mode.from_tensor if without_data == "fake" else lambda t: t.to("meta")).values
            values[name] = change(values)
            with pytest.raises(error) as caught:
                kind.function(**values)
        assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@kinds
def test_the_arguments_of_the_table_are_valid_before_they_are_changed(kind: Description) -> None:
    product = kind.random(kind.whole, seed=1)
    assert len(product.operands) == kind.most_operands, "an operand is left out"
    if kind.has_out:
        box = testing.Poisoned((kind.whole.m, kind.whole.n), torch.float16)
        assert product(out=box.tensor) is box.tensor
        box.check()
    kind.assert_correct(product.outs(), product.problem)


@pytest.mark.parametrize(("kind", "name"), operands())
def test_out_must_not_alias_an_input(kind: Description, name: str) -> None:
    values, (m, n) = valid(kind), (kind.whole.m, kind.whole.n)
    dtype = torch.float16
    if "out_dtype" in values:
        dtype = values["out_dtype"] = torch.float32
        values |= {"residual": values["residual"].float()} if "residual" in values else {}
    shape = values[name].shape
    storage = torch.zeros(65536, dtype=torch.int8).view(values[name].dtype)
    values[name] = storage[: shape.numel()].view(shape).copy_(values[name])
    before = storage.view(torch.int8).clone()
    out = storage.view(dtype)[1 : 1 + m * n].view(m, n)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            kind.function(**values, out=out)
        kind.function(**values, out=torch.empty(m, n, dtype=dtype))  # remembered: the next one is still refused
    assert torch.equal(storage.view(torch.int8), before)


@pytest.mark.parametrize(("kind", "name"), operands(floating=True))
def test_gradients_are_refused_unless_disabled(kind: Description, name: str) -> None:
    product = kind.random(kind.whole, seed=1)
    product.operands[name] = product.operands[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*(inference|grad)"):
        product()
    with torch.no_grad():
        assert not any(out.requires_grad for out in product.outs())
    with torch.inference_mode():
        assert all(out.is_inference() for out in product.outs())


@pytest.mark.parametrize("refusal", REFUSALS)
def test_functions_around_products_refuse(refusal: Refusal) -> None:
    call, error, parts = refusal
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message


@kinds
def test_weights_of_other_kinds_are_refused(kind: Description) -> None:
    """Weights packed for other activations have another type, which names them."""
    product = kind.random(kind.whole, seed=1)
    own = product.operands[product.weights].dtype
    others = [other.random(other.whole, seed=1) for other in DESCRIPTIONS.values()]
    foreign = {packed.dtype: packed for other in others if (packed := other.operands[other.weights]).dtype != own}
    assert foreign
    for packed in foreign.values():
        with pytest.raises((TypeError, ValueError), match=rf"^{product.weights}"):
            product(**{product.weights: packed})


@pytest.mark.skipif(_C.cuda_is_built(), reason="this build has the CUDA backend")
def test_a_build_without_cuda_says_so() -> None:
    with pytest.raises(qcutlass.UnsupportedError, match="CUDA"):
        _C.device_traits(0)


def test_unsupported_is_a_not_implemented_error() -> None:
    assert issubclass(qcutlass.UnsupportedError, NotImplementedError)
    assert issubclass(qcutlass.CheckpointError, ValueError)
