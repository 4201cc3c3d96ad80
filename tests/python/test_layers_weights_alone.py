"""Layers of quantised input that take 16-bit activations: as they are asked to, or as the GPU has no product."""

from __future__ import annotations

import copy
import warnings
import weakref
from typing import Any

import pytest
import torch
from tests.python.absent_gpu import refuse_as
from tests.python.modules import randn, randomized
from torch import Tensor, nn

import qcutlass
from qcutlass import FP8, W4A8, W8A8, Blockwise, QuantLinear, UnsupportedError, WeightOnly, testing
from qcutlass.formats.activations import STORED_ACTIVATIONS
from qcutlass.layers import Fp8Linear, Int4Linear, Int8Linear, WeightOnlyLinear, activations, use_activations
from qcutlass.layers.base import from_layer
from qcutlass.schemes import Scheme

N, K = 200, 288
SCHEMES: list[Scheme] = [
    W8A8(), FP8(), Blockwise(), Blockwise(64), Blockwise(type="fp8"), Blockwise(32, "fp8"), W4A8(32), W4A8(32, "int8"),
]  # fmt: skip


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
    """Before any layer is replaced."""
    model = nn.Sequential(model_of(FP8(), seed), model_of(W8A8(symmetric=False), seed))
    with pytest.raises(UnsupportedError, match=r"1\.0: layer: there is no canonical form of an Int8Linear"):
        use_activations(model, "none")
    assert [type(part[0]) for part in model] == [Fp8Linear, Int8Linear]  # type: ignore[index]


@pytest.mark.parametrize("scheme", [W8A8(), FP8(), Blockwise(64), Blockwise(type="fp8")], ids=str)
def test_weights_are_freed_before_the_next_layers_are_made(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Never are those of more than one layer there twice."""
    model: Any = nn.Sequential(*(randomized(nn.Linear(K, K), seed + place) for place in range(3)))
    qcutlass.replace_linear(model, scheme)
    own = activations.from_layer
    for name in ["none", *(["fp8"] if scheme == Blockwise(type="fp8") else [])]:
        model(randn(2, K, seed=seed))  # layers remember what a call needs
        old, alive = [weakref.ref(layer.w_packed) for layer in model], list[int]()

        def counted(*arguments: Any, old: Any = old, alive: list[int] = alive) -> Any:
            alive.append(sum(weights() is not None for weights in old))
            return own(*arguments)

        monkeypatch.setattr(activations, "from_layer", counted)
        assert use_activations(model, name) == ["0", "1", "2"]
        assert alive == [3, 2, 1]
        assert all(weights() is None for weights in old)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, None])
def test_codes_of_four_bits_stay_where_they_are(group_size: int | None, symmetric: bool, seed: int) -> None:
    """And the layers are those that their canonical forms give, to the bit."""
    weight = qcutlass.quantize(randn(N, K, seed=seed), 4, group_size, symmetric=symmetric)
    of_input = {"act_scale": randn(K, seed=seed + 1).abs() + 0.5, "perm": torch.randperm(K, dtype=torch.int32)}
    model: Any = nn.Sequential(WeightOnlyLinear(weight, bias=torch.ones(N), activation="silu", **of_input)).eval()
    place, a = model[0].w_packed.data_ptr(), randn(5, K, seed=seed + 2)
    for name, kind in (("fp8", Int4Linear), ("none", WeightOnlyLinear)):
        form = STORED_ACTIVATIONS[name].form(model[0].canonical())
        assert form is not None
        expected = from_layer(form, "0", "silu")
        assert use_activations(model, name) == ["0"]
        assert (type(model[0]), model[0].w_packed.data_ptr(), model[0].training) == (kind, place, False)
        found = model[0].state_dict()
        assert list(found) == list(expected.state_dict())
        for part, value in expected.state_dict().items():
            testing.assert_equal(found[part], value)
        testing.assert_equal(model[0](a), expected(a))


NO_FLOAT8 = r"products of float8 need a GPU of compute capability 8\.9 or newer .* this one has 8\.0"
NO_BLOCKS = r"kernels of float8_e4m3fn take blocks of 128, got 32"


@pytest.mark.parametrize(
    ("gpu", "scheme", "obstacle"),
    [
        ("a100", FP8(), NO_FLOAT8),
        ("a100", Blockwise(type="fp8"), NO_FLOAT8),
        ("a100", Blockwise(32, "fp8"), NO_BLOCKS),
        ("a100", W4A8(32), NO_FLOAT8),
        ("a100", W4A8(None, symmetric=True), NO_FLOAT8),
        ("l40s", Blockwise(32, "fp8"), NO_BLOCKS),
        ("h200", Blockwise(32, "fp8"), NO_BLOCKS),
    ],
    ids=str,
)
def test_layers_for_which_a_gpu_has_no_kernel_take_16_bits(
    gpu: str, scheme: Scheme, obstacle: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """It has some for the same weights alone; layers of other kinds, of which there are kernels, stay."""
    model: Any = nn.ModuleDict({"one": model_of(scheme, seed), "other": model_of(W8A8(), seed)})
    model["again"] = model["one"]
    a, expected = randn(5, K, seed=seed).half(), copy.deepcopy(model["one"])
    model["one"][2].half()
    expected[2].half()
    use_activations(expected, "none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert activations.fit_activations(model) == []  # the CPU is not asked
    refuse_as(gpu, monkeypatch)
    with pytest.raises(UnsupportedError, match=obstacle):
        model["one"](a)
    with pytest.warns(UserWarning, match=rf"2 layers, as one\.0, .*{obstacle}.*\); activations=\"none\"") as told:
        assert activations.fit_activations(model) == ["one.0", "again.0"]
    assert len(told) == 1
    assert type(model["other"][0]) is Int8Linear
    assert type(model["one"][0]) is WeightOnlyLinear
    assert model["again"][0] is model["one"][0]
    testing.assert_equal(model["one"][0].weights(), expected[0].weights())
    testing.assert_equal(model["one"](a), expected(a))


@pytest.mark.parametrize(
    ("gpu", "scheme"),
    [
        *(("a100", scheme) for scheme in (W8A8(), Blockwise(), Blockwise(64), W4A8(32, "int8"))),
        *(("l40s", scheme) for scheme in (FP8(), Blockwise(type="fp8"), W4A8(32))),
    ],
    ids=str,
)
def test_layers_for_which_a_gpu_has_kernels_stay(
    gpu: str, scheme: Scheme, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    model = model_of(scheme, seed)
    refuse_as(gpu, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert activations.fit_activations(model) == []


def test_fp8_activations_that_a_gpu_does_not_multiply_are_told(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Asked for, layers without kernels stay weight-only ones: on a GPU without fp8 all, else some."""
    linears = (randomized(nn.Linear(K, N), seed + place) for place in range(2))
    sizes = zip(linears, (32, 48), strict=True)
    model: Any = nn.Sequential(*(QuantLinear.from_linear(linear, WeightOnly(4, size)) for linear, size in sizes))
    with monkeypatch.context() as patch:
        refuse_as("a100", patch)
        with pytest.warns(UserWarning, match=rf"2 of 2 layers still multiply 16-bit activations.*{NO_FLOAT8}"):
            assert use_activations(model, "fp8") == []
    refuse_as("h200", monkeypatch)
    with pytest.warns(UserWarning, match=r"1 of 2 layers still .*group_size"):
        assert use_activations(model, "fp8") == ["0"]
    assert [type(layer) for layer in model] == [Int4Linear, WeightOnlyLinear]
