"""Whatever changes of a layer, behind a call or during one, is seen by its next call."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from tests.python.called_layers import SCHEMES, K, N, Own, fresh, layer_of, remembered, schemes
from tests.python.modules import randn
from torch import Tensor

import qcutlass
from qcutlass import W8A8, WeightOnly, testing
from qcutlass.layers import base
from qcutlass.products import launching
from qcutlass.products.layer_calls import CALLS
from qcutlass.schemes import Scheme


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    launching.forget()
    yield
    launching.forget()


CHANGES: Final[dict[str, Callable[[Any], object]]] = {
    "another tensor": lambda layer: setattr(layer, "bias", layer.bias + 1),
    "another type": lambda layer: setattr(layer, "bias", layer.bias.half() + 1),
    "none": lambda layer: setattr(layer, "bias", None),
    "in place": lambda layer: layer.bias.add_(1),
    "through data": lambda layer: setattr(layer.bias, "data", layer.bias.half() + 1),
    "another dictionary": lambda layer: setattr(layer, "_buffers", layer._buffers | {"bias": layer.bias + 1}),
    "state": lambda layer: layer.load_state_dict({**layer.state_dict(), "bias": layer.bias + 1}),
    "assigned state": lambda layer: layer.load_state_dict({**layer.state_dict(), "bias": layer.bias + 1}, assign=True),
    "activation": lambda layer: setattr(layer, "activation", "relu"),
    "moved": lambda layer: layer._apply(torch.clone),
    "fewer channels": lambda layer: layer.bias.set_(layer.bias[: N // 2].clone()),
    "another type of the same memory": lambda layer: setattr(layer.bias, "data", layer.bias.view(torch.bfloat16)[:N]),
    "fewer channels of the same memory": lambda layer: setattr(layer.bias, "data", layer.bias[: N // 2]),
    "one channel for all": lambda layer: setattr(layer.bias, "data", layer.bias[:1].expand(N)),
    "resized": lambda layer: layer.bias.resize_(N // 2),
    "swapped": lambda layer: torch.utils.swap_tensors(layer.bias, layer.bias + 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@schemes
def test_changes_of_a_layer_are_seen(scheme: Scheme, change: Callable[[Any], object], seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    with torch.no_grad():
        for _ in range(2):
            layer(a)
            assert remembered(layer) == 1
        change(layer)
        for _ in range(2):
            try:
                expected = fresh(layer, a)
            except (TypeError, ValueError) as error:
                with pytest.raises(type(error), match=re.escape(error.args[0])):
                    layer(a)
            else:
                testing.assert_equal(layer(a), expected)


DURING: Final[dict[str, Callable[[Any], object]]] = {
    "bias": lambda layer: layer._buffers.update(bias=torch.full((N,), 1000.0)),
    "no bias": lambda layer: layer._buffers.update(bias=None),
    "data": lambda layer: setattr(layer.bias, "data", torch.full((N,), 1000.0)),
    "setting": lambda layer: setattr(layer, "symmetric", True),
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("change", DURING.values(), ids=DURING)
def test_changes_during_a_first_call_are_seen(
    change: Callable[[Any], object], has_bias: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread makes them, while the product runs without Python's lock."""
    layer, a = layer_of(W8A8(symmetric=False), seed), randn(3, K, seed=seed)
    if not has_bias:
        layer.bias = None
        change = DURING["bias"] if change is DURING["data"] else change

    def interrupted(*arguments: Any) -> Tensor:
        out = compute(*arguments)
        change(layer)
        return out

    compute = base.compute
    with monkeypatch.context() as patch:
        patch.setattr(base, "compute", interrupted)
        layer(a)
    for _ in range(2):
        testing.assert_equal(layer(a), fresh(layer, a))
    assert remembered(layer) == 1


@schemes
def test_layers_can_be_loaded_by_swapping(scheme: Scheme, seed: int) -> None:
    layer, other, a = layer_of(scheme, seed), layer_of(scheme, seed + 1), randn(3, K, seed=seed)
    layer(a)
    assert remembered(layer) == 1
    for part, new in zip(layer.buffers(), other.buffers(), strict=True):
        torch.utils.swap_tensors(part, new.clone())
    testing.assert_equal(layer(a), other(a))
    layer = layer_of(scheme, seed)
    layer(a)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(other.state_dict())
        layer._apply(torch.clone)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    testing.assert_equal(layer(a), other(a))


@pytest.mark.parametrize("extra", [torch.eye(3).to_sparse(), "text", torch.empty(0), torch.ones(2).as_subclass(Own)])
@pytest.mark.filterwarnings("ignore:Sparse")
@schemes
def test_buffers_that_are_not_the_layer_s_own(scheme: Scheme, extra: Any, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    expected = layer(a)
    layer._buffers["extra"] = extra
    for _ in range(3):
        testing.assert_equal(layer(a), expected)
    del layer._buffers["extra"]
    testing.assert_equal(layer(a), expected)
    assert remembered(layer) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@schemes
def test_nested_inputs_are_refused(scheme: Scheme, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([a, a[:2]], layout=layout)
        for _ in range(2):
            with pytest.raises(qcutlass.UnsupportedError, match=r"[ax]: expected a dense tensor, got a nested one"):
                layer(nested)
            layer(a)
    assert remembered(layer) == 1


@schemes
def test_another_activation_than_the_layer_s_own(scheme: Scheme, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    plain = layer(a)
    launching.forget()
    layer.activation = "relu"
    for _ in range(2):
        testing.assert_equal(layer(a), plain.relu())
        testing.assert_equal(layer.multiply(a, None), plain)
    assert remembered(layer) == 2


SIZES: Final = {
    "in_features": K // 2,
    "out_features": N - 1,
    "bits": 3,
    "group_size": 48,
    "weight_dtype": "e2m1",
}


@pytest.mark.parametrize("name", SIZES)
@schemes
def test_sizes_are_part_of_a_call(scheme: Scheme, name: str, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    before, expected = getattr(layer, name), layer(a)
    setattr(layer, name, SIZES[name])
    vars(layer).pop(CALLS)
    checked = outcome(layer, a)
    vars(layer).pop(CALLS, None)
    setattr(layer, name, before)
    layer(a)
    setattr(layer, name, SIZES[name])
    assert outcome(layer, a) == checked
    setattr(layer, name, before)
    testing.assert_equal(layer(a), expected)


def outcome(layer: Any, a: Tensor) -> tuple[type, object]:
    """What a call returns or raises, as something to compare."""
    try:
        return Tensor, layer(a).tolist()
    except (TypeError, ValueError) as error:
        return type(error), error.args


def test_settings_are_part_of_a_call(seed: int) -> None:
    a = randn(3, K, seed=seed)
    for layer, name, values in (
        (layer_of(SCHEMES["w8a8-zeros"], seed), "symmetric", [False, True]),
        (layer_of(WeightOnly(4, 32), seed), "activations", [None, "int8"]),
    ):
        outputs = []
        for value in values * 2:
            setattr(layer, name, value)
            outputs.append(layer(a))
            testing.assert_equal(outputs[-1], fresh(layer, a))
        assert not torch.equal(outputs[0], outputs[1])
        assert remembered(layer) == 2


OF_OLD: Final = """
import torch
del torch.Tensor.__dlpack_c_exchange_api__
import qcutlass
torch.manual_seed(0)  # halves of floats may be NaN
layer = qcutlass.QuantLinear.from_linear(torch.nn.Linear(64, 32), bits=4, group_size=32)
a, bias = torch.randn(3, 64), layer.bias
expected = layer(a)
assert torch.equal(layer(a), expected) and len(layer._calls) == 1
layer(a[:, ::2].repeat(1, 2)[::2])
for data in (bias[:1].expand(32), bias.view(torch.bfloat16)[:32], bias.clone() + 1):
    layer.bias.data = data
    out = layer(a)
    vars(layer).pop("_calls", None)
    assert torch.equal(out, layer(a)) and not torch.equal(out, expected)
    layer.bias.data = bias
"""


@pytest.mark.skipif(not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="all other tests run without it")
def test_torch_without_a_c_interface_for_tensors() -> None:
    result = subprocess.run([sys.executable, "-c", OF_OLD], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
