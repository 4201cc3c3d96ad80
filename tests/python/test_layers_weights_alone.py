"""Layers of quantised input that take 16-bit activations: as they are asked to, or as the GPU has no product."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.python.modules import randn, randomized
from torch import Tensor, nn

import qcutlass
from qcutlass import FP8, W4A8, W8A8, Blockwise, UnsupportedError, testing
from qcutlass.layers import Fp8Linear, Int8Linear, WeightOnlyLinear, activations, use_activations
from qcutlass.schemes import Scheme

N, K = 200, 288
SCHEMES: list[Scheme] = [
    W8A8(), FP8(), Blockwise(), Blockwise(64), Blockwise(type="fp8"), Blockwise(32, "fp8"), W4A8(32), W4A8(32, "int8"),
]  # fmt: skip
MESSAGE = "a: products of float8 need a GPU of compute capability 8.9 or newer and code built for it; this one has 8.0"


def model_of(scheme: Scheme, seed: int) -> Any:
    model = nn.Sequential(randomized(nn.Linear(K, N), seed), nn.ReLU(), randomized(nn.Linear(N, 8), seed + 1)).eval()
    qcutlass.replace_linear(model, scheme, skip=["2"])
    return model


def assert_close_to_dense(layer: Any, weights: Tensor, bias: Tensor, a: Tensor) -> None:
    """Nothing is lost of the activations: the product is that of the weights in fp32."""
    expected = a.double() @ weights.double().T + bias.double()
    largest = a.double().abs() @ weights.double().abs().T + bias.double().abs()
    assert bool(((layer(a).double() - expected).abs() <= K * 2**-23 * largest).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_layers_multiply_activations_as_they_are(scheme: Scheme, seed: int) -> None:
    """Weights are the same to the bit."""
    model, a = model_of(scheme, seed), randn(5, K, seed=seed)
    weights, bias = model[0].weights(), model[0].bias
    assert use_activations(model, "none") == ["0"]
    assert type(model[0]) is WeightOnlyLinear
    assert not model[0].training
    testing.assert_equal(model[0].weights(), weights)
    assert_close_to_dense(model[0], weights, bias, a)
    assert use_activations(model, "none") == []


@pytest.mark.parametrize("kind", [Int8Linear, Fp8Linear])
def test_what_divides_activations_becomes_a_factor_of_theirs(kind: Any, seed: int) -> None:
    quantize = qcutlass.quantize_weights_int8 if kind is Int8Linear else qcutlass.quantize_weights_fp8
    smooth, a = randn(K, seed=seed).abs() + 0.5, randn(5, K, seed=seed + 1)
    model: Any = nn.Sequential(kind(*quantize(randn(N, K, seed=seed + 2)), smooth=smooth, bias=torch.ones(N)))
    weights = model[0].weights()
    assert use_activations(model, "none") == ["0"]
    assert_close_to_dense(model[0], weights.double() / smooth.double(), torch.ones(N), a)


def test_what_weight_only_layers_quantise_is_undone(seed: int) -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64))
    qcutlass.replace_linear(model, qcutlass.WeightOnly(4, 32))
    assert use_activations(model, "int8") == ["0"]
    assert use_activations(model, "none") == ["0"]
    assert model[0].activations is None


def test_zero_points_of_activations_are_refused_by_name(seed: int) -> None:
    model = model_of(W8A8(symmetric=False), seed)
    with pytest.raises(UnsupportedError, match="0: layer: there is no canonical form of an Int8Linear"):
        use_activations(model, "none")


def test_layers_for_which_a_gpu_has_no_kernel_take_16_bits(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As on a GPU of compute capability 8.0, which refuses fp8 products; those of int8 stay."""
    model: Any = nn.ModuleDict({"one": model_of(FP8(), seed), "other": model_of(W8A8(), seed)})
    model["again"] = model["one"]
    weights, a = model["one"][0].weights(), randn(5, K, seed=seed)

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise UnsupportedError(MESSAGE)

    monkeypatch.setattr(Fp8Linear, "_steps", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert activations.fit_activations(model) == []  # the CPU is not asked
    monkeypatch.setattr(activations, "_is_gpu", lambda device: True)
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.9"):
        model["one"](a)
    with pytest.warns(UserWarning, match=r"2 layers, as one.0, .* this one has 8.0\); activations=\"none\"") as told:
        assert activations.fit_activations(model) == ["one.0", "again.0"]
    assert len(told) == 1
    assert type(model["other"][0]) is Int8Linear
    assert model["again"][0] is model["one"][0]
    testing.assert_equal(model["one"][0].weights(), weights)
    assert model["one"](a).shape == (5, 8)
