"""Kinds of layers: their registration, their canonical form, their description in converted folders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.python.modules import assert_same_state

import qcutlass
from qcutlass import QuantLinear, WeightOnly
from qcutlass.formats.layers import LAYERS
from qcutlass.formats.specs import LAYER_KINDS, LayerSpec
from qcutlass.layers import QuantEmbedding, Scheme, TiedLinear, WeightOnlyLinear
from qcutlass.layers.base import from_layer, from_spec

HELD = [
    WeightOnly(4, 32),
    WeightOnly(8, None, symmetric=True),
    qcutlass.W4A8(32),
    qcutlass.W4A8(None, "int8", symmetric=True),
    qcutlass.W8A8(),
    qcutlass.FP8(),
    qcutlass.Blockwise(),
    qcutlass.Blockwise(32),
    qcutlass.Blockwise(64, "fp8"),
]


@dataclass(frozen=True)
class OwnScheme(Scheme):
    """A scheme that the package does not know."""


class OwnLinear(WeightOnlyLinear, scheme=OwnScheme):
    """Its layers."""

    @classmethod
    def _of_linear(cls, linear: torch.nn.Linear, scheme: Any, statistics: Any, activation: Any) -> OwnLinear:
        return cls(qcutlass.quantize(linear.weight.detach()), activation=activation)


def test_a_class_is_the_layer_of_the_scheme_it_names() -> None:
    assert type(QuantLinear.from_linear(torch.nn.Linear(64, 16), OwnScheme())) is OwnLinear
    model = torch.nn.Sequential(torch.nn.Linear(64, 16))
    assert qcutlass.replace_linear(model, OwnScheme()) == ["0"]
    assert type(QuantLinear.from_linear(torch.nn.Linear(64, 16))) is WeightOnlyLinear
    with pytest.raises(
        TypeError, match=r"scheme: expected qcutlass\.WeightOnly, W4A8, W8A8, FP8 or Blockwise, got Scheme"
    ):
        QuantLinear.from_linear(torch.nn.Linear(64, 16), Scheme())


@pytest.mark.parametrize("scheme", HELD, ids=str)
def test_layers_come_back_from_their_canonical_form(scheme: Scheme, seed: int) -> None:
    torch.manual_seed(seed)
    layer = QuantLinear.from_linear(torch.nn.Linear(96, 48), scheme)
    stored = layer.canonical()
    assert stored.spec == layer.spec
    assert_same_state(from_layer(stored, "up"), layer.state_dict())
    assert_same_state(from_layer(LAYERS[stored.kind].of(stored.tensors, **stored.options), "up"), layer.state_dict())
    assert torch.equal(stored.dequantize(torch.float32), layer.weights())
    empty = from_spec(layer.spec, 48, 96)
    assert type(empty) is type(layer)
    assert [*empty.state_dict()] == [*layer.state_dict()]


FLOATING = [
    WeightOnly(4, 16, weight_dtype="e2m1"),
    WeightOnly(4, 32, weight_dtype="e2m1"),
    WeightOnly(8, 32, weight_dtype="e4m3"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", [*HELD, *FLOATING], ids=str)
def test_the_default_type_of_torch_changes_nothing(scheme: Scheme, dtype: torch.dtype, seed: int) -> None:
    """Programs that make models of 16 bits set it, transformers and vLLM among them."""
    torch.manual_seed(seed)
    linear, a = torch.nn.Linear(96, 48), torch.randn(3, 96)
    expected = QuantLinear.from_linear(linear, scheme)
    weights, product = expected.weights(), expected(a)
    torch.set_default_dtype(dtype)
    try:
        layer = QuantLinear.from_linear(linear, scheme)
        found = [layer.weights(), layer.canonical().dequantize(torch.float32), layer(a)]
        from_spec(expected.spec, 48, 96).load_state_dict(layer.state_dict(), assign=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_state(layer, expected.state_dict())
    for one, other in zip(found, [weights, weights, product], strict=True):
        assert torch.equal(one, other)


def test_each_kind_in_folders_has_its_layers() -> None:
    assert {QuantLinear.from_linear(torch.nn.Linear(64, 16), scheme).spec.kind for scheme in HELD} == set(LAYER_KINDS)
    assert set(LAYER_KINDS) < set(LAYERS)


def test_zero_points_of_activations_are_not_dropped() -> None:
    layer = QuantLinear.from_linear(torch.nn.Linear(96, 48), qcutlass.W8A8(symmetric=False))
    with pytest.raises(qcutlass.UnsupportedError, match="Int8Linear with zero points"):
        _ = layer.spec
    with pytest.raises(qcutlass.UnsupportedError, match="Int8Linear with zero points"):
        layer.canonical()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("scheme", [*HELD, qcutlass.W8A8(symmetric=False)], ids=str)
def test_layers_are_called_and_traced_as_linears_are(scheme: Scheme, seed: int) -> None:
    """torch.jit asks a module for all names that it has; those with zero points refused to say their `spec`."""
    torch.manual_seed(seed)
    layer, a = QuantLinear.from_linear(torch.nn.Linear(96, 48), scheme), torch.randn(3, 96)
    assert torch.equal(layer(input=a), layer(a))
    assert all(hasattr(layer, name) for name in dir(layer))
    assert ("spec" in dir(layer)) == (scheme in HELD)
    with torch.no_grad():
        traced = torch.jit.trace(layer, torch.randn(5, 96))
        assert torch.equal(traced(a), layer(a))


def test_embeddings_and_tied_heads_are_called_as_torchs_are() -> None:
    embedding = QuantEmbedding(WeightOnlyLinear(qcutlass.quantize(torch.randn(48, 64), 4, 32)))
    ids, a = torch.tensor([3, 5]), torch.randn(2, 64)
    assert torch.equal(embedding(input=ids), embedding(ids))
    assert torch.equal(TiedLinear(embedding)(input=a), TiedLinear(embedding)(a))


def test_a_kind_that_no_folder_holds_says_so() -> None:
    layer = QuantLinear.from_linear(torch.nn.Linear(64, 16))
    layer.__class__ = type("OtherLinear", (WeightOnlyLinear,), {"_stored": None, "spec": QuantLinear.spec})
    with pytest.raises(qcutlass.UnsupportedError, match="converted folders hold no OtherLinear"):
        _ = layer.spec


def test_the_size_of_blocks_is_kept_where_a_layer_is_smaller() -> None:
    layer = QuantLinear.from_linear(torch.nn.Linear(64, 16), qcutlass.Blockwise(128))
    assert (layer.spec.group_size, layer.canonical().spec) == (128, layer.spec)
    assert from_spec(layer.spec, 16, 64).group_size == 128


@pytest.mark.parametrize(("kind", "size"), [("int8", 64), ("fp8", 128), ("blockwise", -1), ("blockwise", 100)])
def test_group_sizes_that_a_kind_does_not_have(kind: str, size: int) -> None:
    with pytest.raises(qcutlass.CheckpointError, match=f"here: expected group_size .* of kind {kind}, got {size}"):
        LayerSpec.from_dict({"kind": kind, "bits": 8, "group_size": size}, "here")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", HELD, ids=str)
def test_a_layer_alone_is_exported(scheme: Scheme, bias: bool, seed: int) -> None:
    """Not inside another module, and not traced from bytecode: torch counts buffers that are None there."""
    torch.manual_seed(seed)
    layer = QuantLinear.from_linear(torch.nn.Linear(64, 16, bias=bias), scheme).eval()
    a = torch.randn(3, 64)
    assert torch.equal(torch.export.export(layer, (a,), strict=False).module()(a), layer(a))


def test_a_layer_whose_zero_points_a_state_took_is_exported(seed: int) -> None:
    torch.manual_seed(seed)
    layer, other = (
        QuantLinear.from_linear(torch.nn.Linear(64, 16), WeightOnly(4, 32, symmetric)).eval()
        for symmetric in (False, True)
    )
    layer.load_state_dict(other.state_dict())
    a = torch.randn(3, 64)
    assert torch.equal(torch.export.export(layer, (a,), strict=False).module()(a), other(a))
