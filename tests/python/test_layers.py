"""Quantised layers: what they compute, how they are saved, loaded, moved and put into models."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.modules import assert_same_state, random_linear, snapshot
from torch import Tensor, nn

import qcutlass
from qcutlass import QuantLinear, WeightOnly, testing
from qcutlass.layers import WeightOnlyLinear
from qcutlass.tuning.layer import Layer
from qcutlass.tuning.layers import layers_of

Multiply = Callable[..., Tensor]

CASES = [
    testing.Case(3, 40, 128, group_size=64, zeros="none"),
    testing.Case(9, 33, 100, bits=8, group_size=48, dtype=torch.bfloat16, bias=True, activation="gelu"),
    testing.Case(5, 48, 256, zeros="real", dtype=torch.float32, bias=True, act_scale=True, perm=True),
    testing.Case(2, 17, 20, bits=8, group_size=20, scale_dtype=torch.float32, activation="silu"),
]
CASE_IDS = ["symmetric", "ragged", "epilogue", "narrow"]


def layer_of(p: testing.Problem) -> WeightOnlyLinear:
    quantized = qcutlass.QuantizedTensor(p.codes, p.scales, p.zeros, p.bits, p.group_size)
    layer = QuantLinear.from_quantized(
        quantized, bias=p.bias, activation=p.activation, act_scale=p.act_scale, perm=p.perm
    )
    assert isinstance(layer, WeightOnlyLinear)
    return layer


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_layer_multiplies_as_gemm_does(case: testing.Case, multiply: Multiply, seed: int) -> None:
    p = case.random(seed=seed)
    layer = layer_of(p)
    testing.assert_equal(layer(p.a), multiply(p), label=p)
    batched = p.a.expand(2, *p.a.shape)
    expected = multiply(dataclasses.replace(p, a=batched))
    testing.assert_equal(layer(batched), expected, label=p)
    assert (layer.in_features, layer.out_features, layer.bits) == (case.k, case.n, case.bits)


@pytest.mark.parametrize("options", [{}, {"bits": 8, "group_size": None}, {"group_size": 48, "symmetric": True}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_from_linear_rounds_to_nearest(options: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    linear = random_linear(40, 200, seed, dtype)
    before = snapshot(linear)
    layer = QuantLinear.from_linear(linear, activation="relu", **options)
    q = qcutlass.quantize(linear.weight, **options)
    a = torch.randn(6, 200, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)
    ref = testing.reference(a, q.dequantize(torch.float32), bias=linear.bias.detach(), activation="relu")
    testing.assert_close(layer(a), ref)
    assert layer.bias is not None
    layer.bias.zero_()
    assert_same_state(linear, before)


def test_from_linear_takes_the_scheme_or_its_options(seed: int) -> None:
    linear = random_linear(16, 64, seed, bias=False)
    by_options = QuantLinear.from_linear(linear, bits=8, group_size=32, symmetric=True)
    by_scheme = QuantLinear.from_linear(linear, WeightOnly(bits=8, group_size=32, symmetric=True))
    assert_same_state(by_scheme, snapshot(by_options))
    assert by_scheme.bias is None
    narrow = QuantLinear.from_linear(linear, WeightOnly(scale_dtype=torch.float16))
    assert isinstance(narrow, WeightOnlyLinear)
    assert narrow.scales.dtype == torch.float16
    assert not QuantLinear.from_linear(linear.eval()).training


@pytest.mark.parametrize(
    ("linear", "arguments", "error", "message"),
    [
        (nn.ReLU(), {}, TypeError, "linear: expected a torch.nn.Linear, got ReLU"),
        (nn.Linear(8, 8).to(torch.float64), {}, TypeError, r"linear\.weight: .*float64"),
        (nn.Linear(8, 8), {"scheme": "int4"}, TypeError, "scheme: expected qcutlass.WeightOnly"),
        (nn.Linear(8, 8), {"scheme": WeightOnly(), "bits": 8}, TypeError, r"bits: pass it to the scheme, WeightOnly"),
        (nn.Linear(8, 8), {"bits": 3}, ValueError, "bits: expected one of 4, 8"),
        (nn.Linear(8, 8), {"group_size": 0}, ValueError, "group_size: expected at least 1, or -1"),
        (nn.Linear(8, 8), {"scale_dtype": torch.int8}, TypeError, "scale_dtype"),
        (nn.Linear(8, 8), {"color": "red"}, TypeError, "color"),
        (nn.Linear(8, 8), {"activation": "swish"}, ValueError, "activation: expected one of"),
        (nn.Linear(8, 8), {"activation": ["relu"]}, TypeError, "activation: expected a name or None, got list"),
        (nn.Linear(8, 8), {"statistics": {"a": 1}}, TypeError, "statistics: expected ActivationStatistics or None"),
        (nn.Linear(8, 8), {"symmetric": 3}, TypeError, "symmetric: expected True or False, got int"),
    ],
)
def test_from_linear_says_what_is_wrong(
    linear: nn.Linear, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        QuantLinear.from_linear(linear, **arguments)


def test_weights_that_are_not_finite_are_refused() -> None:
    linear = nn.Linear(8, 8)
    with torch.no_grad():
        linear.weight[3, 3] = torch.inf
    with pytest.raises(ValueError, match=r"linear\.weight: expected finite values"):
        QuantLinear.from_linear(linear)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bias": torch.zeros(41)}, ValueError, r"bias: expected shape \[N\] = \[40\]"),
        ({"act_scale": torch.zeros(128, dtype=torch.int32)}, TypeError, "act_scale"),
        ({"perm": torch.arange(1, 129, dtype=torch.int32)}, ValueError, r"perm: expected values in \[0, 128\)"),
        ({"perm": torch.arange(-1, 127, dtype=torch.int32)}, ValueError, r"perm: expected values in \[0, 128\)"),
        ({"activation": "swish"}, ValueError, "activation"),
    ],
)
def test_from_quantized_says_what_is_wrong(change: dict[str, Any], error: type[Exception], message: str) -> None:
    quantized = qcutlass.quantize(torch.randn(40, 128))
    with pytest.raises(error, match=message):
        QuantLinear.from_quantized(quantized, **change)


@pytest.mark.parametrize("name", ["scales", "zeros", "bias"])
def test_checking_a_layer_finds_numbers_that_are_not_finite(name: str) -> None:
    quantized = qcutlass.quantize(torch.randn(40, 128))
    assert quantized.zeros is not None
    real = dataclasses.replace(quantized, zeros=quantized.zeros.float())
    layer = QuantLinear.from_quantized(real, bias=torch.zeros(40))
    layer.check()
    layer.get_buffer(name).view(-1)[7] = torch.inf
    with pytest.raises(ValueError, match=f"{name}: expected finite numbers"):
        layer.check()


@pytest.mark.parametrize("quantized", [None, (1, 2)], ids=str)
def test_weights_in_canonical_form_are_asked_for(quantized: Any) -> None:
    for make in (QuantLinear.from_quantized, WeightOnlyLinear):
        with pytest.raises(TypeError, match=r"quantized: expected a qcutlass\.QuantizedTensor, got (NoneType|tuple)"):
            make(quantized)


def test_inputs_of_another_width_are_refused() -> None:
    layer = QuantLinear.from_linear(nn.Linear(64, 16))
    with pytest.raises(
        ValueError, match=r"^input: expected shape \[\.\.\., in_features\] = \[\.\.\., 64\], got \[3, 32\]"
    ):
        layer(torch.ones(3, 32))
    with pytest.raises(ValueError, match=r"in_features\] = \[\.\.\., 64\], got \[\]"):
        layer(torch.tensor(1.0))


def test_groups_end_with_the_channel() -> None:
    q = qcutlass.quantize(torch.randn(40, 100), group_size=128)
    longer = QuantLinear.from_quantized(dataclasses.replace(q, group_size=128))
    assert longer.group_size == 100
    longer.load_state_dict(QuantLinear.from_quantized(q).state_dict())


def test_a_layer_is_for_inference(seed: int) -> None:
    layer = QuantLinear.from_linear(random_linear(16, 64, seed))
    assert list(layer.parameters()) == []
    with pytest.raises(RuntimeError, match="a requires grad, but qcutlass is for inference"):
        layer(torch.randn(2, 64, requires_grad=True))


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_saved_layer_is_loaded_bit_for_bit(case: testing.Case, tmp_path: Path, seed: int) -> None:
    p, other = case.random(seed=seed), case.random(seed=seed + 1)
    layer, target = layer_of(p), layer_of(other)
    save_file(nn.ModuleDict({"inner": layer}).state_dict(), tmp_path / "state.safetensors")
    result = nn.ModuleDict({"inner": target}).load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert result.missing_keys == result.unexpected_keys == []
    assert_same_state(target, snapshot(layer))
    testing.assert_equal(target(p.a), layer(p.a), label=p)


def test_the_state_is_named_and_versioned(seed: int) -> None:
    state = layer_of(CASES[2].random(seed=seed)).state_dict()
    assert list(state) == ["w_packed", "scales", "zeros", "bias", "act_scale", "perm", "layout"]
    assert state["layout"].tolist() == [int(qcutlass._C.build_info()["layout_version"]), 4, 48, 256, 128]


def test_types_and_optional_tensors_follow_what_is_loaded(seed: int) -> None:
    rich = layer_of(testing.Case(3, 48, 256, zeros="real", bias=True, act_scale=True, perm=True).random(seed=seed))
    plain = layer_of(testing.Case(3, 48, 256, zeros="none", scale_dtype=torch.float32).random(seed=seed))
    for source, target in ((rich, copy.deepcopy(plain)), (plain, copy.deepcopy(rich))):
        target.load_state_dict(source.state_dict())
        assert_same_state(target, snapshot(source))
        a = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
        testing.assert_equal(target(a), source(a))
        target.scales.zero_()
        assert bool(source.scales.any())  # a copy, not the same tensor


def damaged(name: str, value: Any) -> Callable[[dict[str, Tensor]], None]:
    def damage(state: dict[str, Tensor]) -> None:
        if value is None:
            del state[name]
        else:
            state[name] = value

    return damage


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            damaged("layout", torch.tensor([7, 4, 40, 128, 64])),
            "in layout version 7, this build reads version 2",
        ),
        (damaged("layout", torch.tensor([2, 8, 40, 128, 64])), "bits = 8, not 4: build the layer with the same scheme"),
        (damaged("layout", torch.tensor([2, 4, 41, 128, 32])), "N = 41, not 40; group_size = 32, not 64"),
        (damaged("layout", torch.tensor(1)), "layout: expected .version, bits, N, K, group_size., got 1"),
        (damaged("layout", None), "no `layout` beside the buffers"),
        (damaged("layout", [1, 4, 40, 128, 64]), "layout: expected a torch.Tensor, got list"),
        (damaged("w_packed", torch.zeros(3, 2, 32, 16, dtype=torch.int8)), "packed for int8 activations"),
        (damaged("w_packed", torch.zeros(3, 3, 32, 16, dtype=torch.uint8)), "w_packed: "),
        (damaged("w_packed", None), "w_packed: expected a torch.Tensor, got None"),
        (damaged("scales", torch.ones(1, 40)), "zeros: expected the shape of scales, .1, 40., got .2, 40."),
        (damaged("scales", None), "scales: expected a torch.Tensor, got NoneType"),
        (damaged("zeros", torch.ones(2, 40, dtype=torch.int64)), "zeros: "),
        (damaged("zeros", torch.full((2, 40), 17, dtype=torch.uint8)), r"zeros: expected integers in \[0, 16\]"),
        (damaged("perm", torch.full((128,), 128, dtype=torch.int32)), r"perm: expected values in \[0, 128\)"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    damage: Callable[[dict[str, Tensor]], None], message: str, strict: bool, assign: bool
) -> None:
    def layer() -> QuantLinear:
        return QuantLinear.from_linear(nn.Linear(128, 40), bits=4, group_size=64)

    model, state = nn.Sequential(layer()), layer().state_dict()
    before = snapshot(model)
    damage(state)
    with pytest.raises(RuntimeError, match=rf"0: .*{message}"):
        model.load_state_dict({f"0.{name}": tensor for name, tensor in state.items()}, strict, assign)
    assert_same_state(model, before)


def test_states_of_float_layers_are_refused(seed: int) -> None:
    layer = QuantLinear.from_linear(random_linear(16, 64, seed, bias=False))
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*w_packed.*Unexpected key.*weight"):
        layer.load_state_dict(random_linear(16, 64, seed, bias=False).state_dict())
    before = snapshot(layer)
    assert layer.load_state_dict({}, strict=False).missing_keys == ["w_packed", "scales", "zeros", "layout"]
    assert_same_state(layer, before)


@pytest.mark.parametrize(
    "scheme",
    [WeightOnly(), WeightOnly(8, None, symmetric=True), WeightOnly(group_size=48, scale_dtype=torch.float16)],
    ids=str,
)
def test_a_model_without_values_is_loaded_into(scheme: qcutlass.layers.Scheme, seed: int) -> None:
    def network(device: str) -> nn.Sequential:
        torch.manual_seed(seed)
        with torch.device(device):
            model = nn.Sequential(nn.Linear(200, 48), nn.ReLU(), nn.Linear(48, 40, bias=False))
        qcutlass.replace_linear(model, scheme)
        return model

    model, empty = network("cpu"), network("meta")
    assert all(tensor.is_meta for tensor in copy.deepcopy(empty).state_dict().values())
    assert [(t.shape, t.dtype) for t in empty.state_dict().values()] == [
        (t.shape, t.dtype) for t in model.state_dict().values()
    ]
    empty.load_state_dict(model.state_dict(), assign=True)
    assert_same_state(empty, snapshot(model))
    a = torch.randn(3, 200, generator=torch.Generator().manual_seed(seed))
    testing.assert_equal(empty(a), model(a))


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.double, nn.Module.bfloat16], ids=lambda cast: cast.__name__)
def test_casts_convert_nothing(cast: Callable[[nn.Module], nn.Module], seed: int) -> None:
    p = testing.Case(3, 48, 256, zeros="real", scale_dtype=torch.float32, bias=True, act_scale=True).random(seed=seed)
    layer = layer_of(p)
    before, expected = snapshot(layer), layer(p.a)
    cast(layer)
    assert_same_state(layer, before)
    testing.assert_equal(layer(p.a), expected)
    moved = nn.Sequential(layer).to("meta", torch.float16)[0]
    assert {name: (t.device.type, t.dtype) for name, t in moved.state_dict().items()} == {
        name: ("meta", t.dtype) for name, t in before.items()
    }


def test_copies_are_independent(seed: int) -> None:
    p = CASES[2].random(seed=seed)
    layer = layer_of(p)
    before = snapshot(layer)
    twin = copy.deepcopy(layer)
    revived = pickle.loads(pickle.dumps(layer))
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for other in (twin, revived, torch.load(saved, weights_only=False)):
        assert_same_state(other, before)
        testing.assert_equal(other(p.a), layer(p.a), label=p)
        other.w_packed.zero_()
    assert_same_state(layer, before)


def test_pickles_of_another_layout_are_refused(seed: int) -> None:
    layer = QuantLinear.from_linear(random_linear(16, 64, seed))
    layer.layout[0] -= 1
    with pytest.raises(ValueError, match="packed in layout version 1, this build reads version 2"):
        pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_layers_compile_in_one_graph(case: testing.Case, seed: int) -> None:
    p = case.random(seed=seed)
    layer = layer_of(p)
    compiled = torch.compile(nn.Sequential(nn.Identity(), layer), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        testing.assert_equal(compiled(p.a), layer(p.a), label=p)


def test_a_layer_describes_itself(seed: int) -> None:
    assert repr(layer_of(CASES[2].random(seed=seed))) == (
        "WeightOnlyLinear(in_features=256, out_features=48, bits=4, group_size=128, zeros=float32, act_scale=True, "
        "perm=True, bias=True)"
    )
    assert repr(layer_of(CASES[3].random(seed=seed))) == (
        "WeightOnlyLinear(in_features=20, out_features=17, bits=8, group_size=20, zeros=uint8, bias=False, "
        "activation='silu')"
    )


def test_the_tuner_finds_the_layers(seed: int) -> None:
    model = nn.Sequential(random_linear(48, 100, seed, torch.float16), nn.ReLU(), random_linear(32, 48, seed))
    qcutlass.replace_linear(model, WeightOnly(bits=8, group_size=48))
    assert layers_of(model, None) == [
        Layer(48, 100, 8, 48, zero_dtype=torch.uint8),
        Layer(32, 48, 8, 48, scale_dtype=torch.float32, zero_dtype=torch.uint8),
    ]
