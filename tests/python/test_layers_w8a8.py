"""Layers with quantised activations, int8 and fp8."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.eight_bit import needs_instructions
from tests.python.modules import assert_same_state, randn, randomized, snapshot
from torch import Tensor, nn

import qcutlass
from qcutlass import FP8, W8A8, QuantLinear, WeightOnly, schemes, testing
from qcutlass.algorithms import calibration, smoothing
from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.layers import Fp8Linear, Int8Linear, Scheme, base, eight_bit, replace, weight_only
from qcutlass.models import folding
from qcutlass.models import smoothing as model_smoothing
from qcutlass.products import float8, int8
from qcutlass.tuning.layer import Layer
from qcutlass.tuning.layers import layers_of

N, K = 40, 96
INT8 = [W8A8(activations, symmetric) for activations in ("dynamic", "static") for symmetric in (True, False)]
SCHEMES: list[Scheme] = [*INT8, FP8(), FP8("static")]


class Problem:
    """A linear layer, activations with an offset and an outlier channel, and what they calibrate to."""

    def __init__(self, seed: int, smooth: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self.linear = randomized(nn.Linear(K, N), seed).to(dtype)
        a = randn(2, 9, K, seed=seed) + 2
        a[..., 7] *= 20
        with torch.no_grad():
            self.linear.weight[:, 7] /= 20
        self.a = a.to(dtype)
        self.statistics = ActivationStatistics.of(self.a)
        if smooth:
            factors = qcutlass.smooth(self.statistics.absmax, self.linear.weight)
            self.statistics = ActivationStatistics(self.statistics.minimum, self.statistics.maximum, factors)

    def layer(self, scheme: Scheme, activation: str | None = None) -> QuantLinear:
        return QuantLinear.from_linear(self.linear, scheme, statistics=self.statistics, activation=activation)


def rounding(values: Tensor, scheme: Scheme, static: bool, symmetric: bool = True) -> Tensor:
    """The largest error of each quantised value: half a step of its row, or of all; fp8's unit roundoff."""
    if isinstance(scheme, FP8):
        return 2.0**-4 * values.abs() + 2.0**-10 * values.abs().amax() / 448
    dims = tuple(range(values.dim())) if static else (-1,)
    low, high = (values.amin(dims, keepdim=True).clamp(max=0), values.amax(dims, keepdim=True).clamp(min=0))
    largest = torch.maximum(high, -low)
    return ((largest / 127 if symmetric else (high - low) / 255) / 2).expand_as(values)


@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_layer_errs_as_its_roundings_do(scheme: Scheme, smooth: bool, seed: int) -> None:
    """Within seven standard deviations of a sum of independent, uniform rounding errors."""
    p = Problem(seed, smooth)
    layer = p.layer(scheme)
    with torch.no_grad():
        out, expected = layer(p.a), p.linear(p.a)
    assert out.shape == expected.shape == (2, 9, N)
    factors = torch.ones(K) if p.statistics.smooth is None else p.statistics.smooth
    a, w = p.a.double() / factors, p.linear.weight.detach().double() * factors
    a_error = rounding(a, scheme, static=scheme.activations == "static", symmetric=getattr(scheme, "symmetric", True))
    w_error = rounding(w, scheme, static=False)
    variance = (a_error.square() @ w.square().T + (a.abs() + a_error).square() @ w_error.square().T) / 3
    assert bool(((out - expected).abs() <= 7 * variance.sqrt()).all())


def by_public_functions(p: Problem, scheme: Scheme, activation: str | None) -> Tensor:
    """The product that a layer of the scheme computes, step by step."""
    s, bias, dtype = p.statistics.smooth, p.linear.bias.detach(), p.a.dtype
    weight = p.linear.weight.detach().float() * (1 if s is None else s)
    low, high = p.statistics.extremes()
    static = scheme.activations == "static"
    if isinstance(scheme, FP8):
        scale = (torch.maximum(high, -low) / 448).reshape(1) if static else None
        a_q, a_scale = qcutlass.quantize_activations(p.a, dtype=torch.float8_e4m3fn, scale=scale, smooth=s)
        w_q, w_scale = qcutlass.quantize_weights_fp8(weight)
        return qcutlass.gemm_fp8(a_q, w_q, a_scale, w_scale, bias, activation, dtype)
    w_q, w_scale = qcutlass.quantize_weights_int8(weight)
    extent, steps = (torch.maximum(high, -low), 127) if scheme.symmetric else (high - low, 255)
    scale = (extent / steps).reshape(1) if static else None
    zero = -128 - (low / scale).round().to(torch.int32) if static and not scheme.symmetric else None
    asymmetric = not static and not scheme.symmetric
    a_q, a_scale, *azp = qcutlass.quantize_activations(p.a, scale=scale, asymmetric=asymmetric, azp=zero, smooth=s)
    w_packed = qcutlass.preprocess_weights(w_q, bits=8, activations="int8")
    return qcutlass.gemm_w8a8(a_q, w_packed, a_scale, w_scale, bias, azp[0] if azp else None, activation, dtype)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_layers_are_made_of_the_public_functions(
    scheme: Scheme, smooth: bool, dtype: torch.dtype, activation: str | None, seed: int
) -> None:
    p = Problem(seed, smooth, dtype)
    out = p.layer(scheme, activation)(p.a)
    assert out.dtype == dtype
    testing.assert_equal(out, by_public_functions(p, scheme, activation))


def test_a_layer_of_one_channel() -> None:
    for scheme in SCHEMES:
        layer = QuantLinear.from_linear(nn.Linear(K, 1, bias=False), scheme, statistics=Problem(1).statistics)
        assert layer(Problem(1).a).shape == (2, 9, 1)


@pytest.mark.parametrize("extremes", [(-10.0, 5.0), (-5.0, 10.0)])
def test_static_scales_span_the_larger_side(extremes: tuple[float, float]) -> None:
    low, high = (torch.full((K,), extreme) for extreme in extremes)
    for scheme, largest in ((W8A8("static"), 127), (FP8("static"), 448)):
        layer: Any = QuantLinear.from_linear(nn.Linear(K, N), scheme, statistics=ActivationStatistics(low, high))
        testing.assert_equal(layer.a_scale, torch.tensor([10.0]) / largest)


def test_zeros_alone_get_scale_one() -> None:
    statistics = ActivationStatistics(torch.zeros(K), torch.zeros(K))
    linear = nn.Linear(K, N)
    for scheme in (W8A8("static"), FP8("static")):
        layer: Any = QuantLinear.from_linear(linear, scheme, statistics=statistics)
        assert layer.a_scale.tolist() == [1]
        testing.assert_equal(layer(torch.zeros(3, K)), linear.bias.detach().expand(3, N))


@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_layers_are_saved_loaded_and_copied_bit_for_bit(
    scheme: Scheme, smooth: bool, tmp_path: Path, seed: int
) -> None:
    p = Problem(seed, smooth)
    layer = p.layer(scheme)
    before, expected = snapshot(layer), layer(p.a)
    save_file(layer.state_dict(), tmp_path / "state.safetensors")
    state = load_file(tmp_path / "state.safetensors")
    other = Problem(seed + 1, not smooth).layer(scheme)
    other.load_state_dict(state)
    with torch.device("meta"):
        empty = QuantLinear.from_linear(nn.Linear(K, N), scheme)
    empty.load_state_dict(state, assign=True)
    for twin in (other, empty, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.half()):
        assert_same_state(twin, before)
        testing.assert_equal(twin(p.a), expected)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_static_and_dynamic_follow_what_is_loaded(scheme: Scheme, seed: int) -> None:
    p = Problem(seed, smooth=True)
    opposite = dataclasses.replace(scheme, activations="static" if scheme.activations == "dynamic" else "dynamic")
    layer, other = p.layer(scheme), Problem(seed + 1).layer(opposite)
    other.load_state_dict(layer.state_dict())
    testing.assert_equal(other(p.a), layer(p.a))


def test_a_static_state_overrules_dynamic_zero_points(seed: int) -> None:
    p = Problem(seed)
    layer, other = p.layer(W8A8("static")), p.layer(W8A8(symmetric=False))
    other.load_state_dict(layer.state_dict())
    testing.assert_equal(other(p.a), layer(p.a))


@pytest.mark.parametrize("scheme", INT8, ids=str)
def test_the_sums_that_zero_points_need_are_kept(scheme: W8A8, seed: int) -> None:
    p = Problem(seed)
    layer: Any = p.layer(scheme)
    assert (layer.w_sums is None) == scheme.symmetric
    if not scheme.symmetric:
        testing.assert_equal(layer.w_sums, qcutlass.weight_sums(layer.w_packed, N))
        before = layer(p.a)
        layer.w_sums.zero_()
        assert not torch.equal(layer(p.a), before)


@pytest.mark.parametrize(
    ("scheme", "name", "value", "message"),
    [
        (W8A8(), "layout", torch.tensor([1, 8, N, K, K]), "in layout version 1, this build reads version 2: quantise"),
        (W8A8(), "w_packed", torch.zeros(3, 3, 32, 16, dtype=torch.uint8), "w_packed: expected a tensor of int8"),
        (W8A8(), "w_packed", torch.zeros(3, 4, 32, 16, dtype=torch.int8), "w_packed: for K = 96 its second dimension"),
        (W8A8(), "w_scale", torch.ones(N, dtype=torch.float16), "w_scale: expected a tensor of float32"),
        (W8A8(), "w_scale", torch.ones(N - 1), "w_scale: expected shape"),
        (W8A8(), "bias", torch.ones(N + 1), "bias: expected shape"),
        (W8A8(), "azp", torch.ones(1, dtype=torch.int32), "azp: a given zero point needs a given scale"),
        (W8A8("static"), "a_scale", torch.ones(2), "scale: expected one element, .*, got .2."),
        (W8A8("static", False), "azp", torch.ones(1), "azp: expected a tensor of int32"),
        (W8A8("static", False), "w_sums", torch.ones(N + 1, dtype=torch.int32), "w_sums: expected shape"),
        (W8A8(), "smooth", torch.ones(N), "smooth: expected shape"),
        (
            FP8(),
            "w_packed",
            torch.zeros(3, 3, 32, 16, dtype=torch.int8),
            "w_packed: expected a tensor of float8_e4m3fn",
        ),
        (FP8(), "w_packed", torch.zeros(N, K).to(torch.float8_e4m3fn), "w_packed: expected shape .ceil"),
        (FP8(), "smooth", torch.ones(N), "smooth: expected shape"),
        (FP8("static"), "a_scale", torch.ones(1, dtype=torch.float64), "scale: expected a tensor of float32"),
        (FP8(), "w_scale", torch.ones(N - 1), "w_scale: expected shape"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(scheme: Scheme, name: str, value: Tensor, message: str) -> None:
    layer, other = Problem(1).layer(scheme), Problem(2).layer(scheme)
    before = snapshot(layer)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(other.state_dict() | {name: value}, strict=False)
    assert_same_state(layer, before)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_layers_compile_in_one_graph(scheme: Scheme, seed: int) -> None:
    p = Problem(seed, smooth=True)
    layer = p.layer(scheme)
    compiled = torch.compile(nn.Sequential(nn.Identity(), layer), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        testing.assert_equal(compiled(p.a), layer(p.a))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_rows_and_single_rows(scheme: Scheme, seed: int) -> None:
    p = Problem(seed, smooth=True)
    layer = p.layer(scheme)
    assert layer(p.a[:, :0]).shape == (2, 0, N)
    testing.assert_equal(layer(p.a[0, 3]), layer(p.a[:1, 3])[0])
    with pytest.raises(
        ValueError, match=r"^input: expected shape \[\.\.\., in_features\] = \[\.\.\., 96\], got \[3, 32\]"
    ):
        layer(torch.ones(3, K // 3))


def test_layers_describe_themselves() -> None:
    described = [repr(Problem(1, smooth).layer(scheme)) for scheme in SCHEMES for smooth in (False, True)]
    start = f"in_features={K}, out_features={N}"
    assert described[0] == f"Int8Linear({start}, activations=dynamic, symmetric=True, bias=True)"
    assert described[1] == f"Int8Linear({start}, activations=dynamic, smooth=True, symmetric=True, bias=True)"
    assert described[2] == f"Int8Linear({start}, activations=dynamic, symmetric=False, bias=True)"
    assert described[6] == f"Int8Linear({start}, activations=static, symmetric=False, bias=True)"
    assert described[11] == f"Fp8Linear({start}, activations=static, smooth=True, bias=True)"


def test_the_tuner_finds_the_layers_beside_weight_only_ones() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48), nn.Linear(48, 64))
    model[1] = QuantLinear.from_linear(model[1], bits=8, group_size=None)
    model[2] = QuantLinear.from_linear(model[2], FP8())
    qcutlass.replace_linear(model, W8A8())
    assert layers_of(model, torch.float16) == [
        Layer(64, 64, 8, 64, torch.int8, torch.float32, kind=int8.INT8),
        Layer(48, 64, 8, 64, scale_dtype=torch.float32, zero_dtype=torch.uint8),
        Layer(64, 48, 8, 48, torch.float8_e4m3fn, torch.float32, kind=float8.FLOAT8),
    ]


def test_schemes_differ_from_layer_to_layer() -> None:
    model = nn.ModuleDict({"attention": nn.Linear(K, K), "mlp": nn.Linear(K, K)})
    assert qcutlass.replace_linear(model, FP8(), skip=["mlp"]) == ["attention"]
    assert qcutlass.replace_linear(model, WeightOnly(bits=4, group_size=32)) == ["mlp"]
    assert isinstance(model["attention"], Fp8Linear)


def int8_layer(**options: Any) -> Int8Linear:
    return Int8Linear(torch.ones((N, K), dtype=torch.int8), torch.ones(N), **options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: W8A8("always"), ValueError, "activations: expected 'dynamic' or 'static', got 'always'"),
        (lambda: FP8("always"), ValueError, "activations: expected 'dynamic' or 'static', got 'always'"),
        (lambda: Problem(1).layer(FP8(), "swish"), ValueError, "activation: expected one of"),
        (lambda: Problem(1).layer(W8A8(), "swish"), ValueError, "activation: expected one of"),
        (lambda: W8A8(symmetric="no"), TypeError, "symmetric: expected True or False, got str"),
        (lambda: W8A8(["static"]), ValueError, "activations: expected 'dynamic' or 'static'"),
        (lambda: int8_layer(symmetric=1), TypeError, "symmetric: expected True or False, got int"),
        (lambda: int8_layer(activation=["relu"]), TypeError, "activation: expected a name or None, got list"),
        (
            lambda: int8_layer(a_scale=torch.ones(1), symmetric=False),
            ValueError,
            "azp: expected the zero point of static activations that are not symmetric, got None",
        ),
        (lambda: Int8Linear(None, torch.ones(N)), TypeError, "w_q: expected a torch.Tensor, got NoneType"),
        (lambda: Int8Linear(torch.ones(N, dtype=torch.int8), torch.ones(N)), ValueError, r"w_q: expected shape .N, K."),
        (lambda: Fp8Linear(None, torch.ones(N)), TypeError, "w_q: expected a torch.Tensor, got NoneType"),
        (lambda: Fp8Linear(torch.ones(N).to(torch.float8_e4m3fn), torch.ones(N)), ValueError, "w_q: expected shape"),
    ],
)
def test_options_that_make_no_layer(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({7: 0.0}, r"statistics\.smooth: expected factors above 0, got 0\.0"),
        ({7: -1.0}, r"statistics\.smooth: expected factors above 0, got -1\.0"),
        ({7: torch.nan}, r"statistics\.smooth: expected finite values"),
        ({7: torch.inf}, r"statistics\.smooth: expected finite values"),
        ({7: 3e38}, r"statistics\.smooth: linear\.weight times these factors is more than float32 holds"),
    ],
    ids=str,
)
@pytest.mark.parametrize("scheme", [W8A8(), W8A8("static"), FP8()], ids=str)
def test_factors_that_make_no_weights(scheme: Scheme, change: dict[int, float], message: str) -> None:
    p = Problem(1, smooth=True)
    with torch.no_grad():
        p.linear.weight[:, 7] = 2
    assert p.statistics.smooth is not None
    for channel, factor in change.items():
        p.statistics.smooth[channel] = factor
    with pytest.raises(ValueError, match=message):
        p.layer(scheme)


def test_factors_of_another_layer() -> None:
    p = Problem(1)
    p.statistics = dataclasses.replace(p.statistics, smooth=torch.ones(1))
    with pytest.raises(ValueError, match=rf"statistics\.smooth: expected shape \[K\] = \[{K}\], got \[1\]"):
        p.layer(W8A8())


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("scheme", INT8, ids=str)
def test_sums_that_a_state_lacks_are_computed(scheme: W8A8, assign: bool, seed: int) -> None:
    p = Problem(seed)
    layer: Any = p.layer(scheme)
    state = {name: tensor for name, tensor in layer.state_dict().items() if name != "w_sums"}
    source = dict(state)
    with torch.device("meta"):
        empty = QuantLinear.from_linear(nn.Linear(K, N), scheme)
    other: Any = empty if assign else Problem(seed + 1).layer(scheme)
    nn.ModuleDict({"inner": other}).load_state_dict({f"inner.{name}": state[name] for name in state}, assign=assign)
    assert_same_state(other, snapshot(layer))
    testing.assert_equal(other(p.a), layer(p.a))
    assert state.keys() == source.keys()


def test_sums_are_not_made_of_nothing() -> None:
    with torch.device("meta"):
        layer: Any = QuantLinear.from_linear(nn.Linear(K, N), W8A8(symmetric=False))
        state = layer.state_dict()
    del state["w_sums"]
    layer.load_state_dict(state, strict=False, assign=True)
    assert layer.w_sums is None


@pytest.mark.parametrize("scheme", [W8A8("static"), FP8("static")], ids=str)
def test_static_layers_need_good_statistics(scheme: Scheme) -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 8))
    with torch.no_grad(), qcutlass.calibrate(model[:1]) as statistics:
        model(torch.ones(2, K))
    with pytest.raises(ValueError, match="2: statistics: static activations need them; record some"):
        qcutlass.replace_linear(model, scheme, statistics=statistics)
    assert type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match=rf"statistics: expected those of K = {N} channels, got \[{K}\]"):
        QuantLinear.from_linear(model[2], scheme, statistics=statistics["0"])
    damaged = ActivationStatistics(statistics["0"].minimum, statistics["0"].maximum * torch.nan)
    with pytest.raises(ValueError, match="statistics: the recorded activations hold NaN or infinity"):
        QuantLinear.from_linear(model[0], scheme, statistics=damaged)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [WeightOnly(bits=4, group_size=32), *SCHEMES], ids=str)
def test_layers_move_to_a_gpu_and_run_in_graphs(scheme: Scheme, seed: int) -> None:
    needs_instructions(torch.float8_e4m3fn if isinstance(scheme, FP8) else torch.int8)
    p = Problem(seed, smooth=True, dtype=torch.float16)
    layer = p.layer(scheme).cuda()
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"cuda"}
    a = p.a.cuda()
    expected = layer(a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(a)
    out.zero_()
    graph.replay()
    testing.assert_equal(out, expected)
    layer.load_state_dict(Problem(seed + 1, smooth=True, dtype=torch.float16).layer(scheme).state_dict())
    layer.load_state_dict({name: tensor.cpu() for name, tensor in p.layer(scheme).state_dict().items()})
    graph.replay()  # the buffers are where they were
    testing.assert_equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", INT8, ids=str)
def test_layers_of_a_gpu_model_are_those_of_the_cpu(scheme: W8A8, seed: int) -> None:
    p = Problem(seed, smooth=True)
    on_cpu = snapshot(p.layer(scheme))
    p.linear.cuda()
    on_gpu = {name: tensor.cpu() for name, tensor in p.layer(scheme).state_dict().items()}
    assert on_gpu.keys() == on_cpu.keys()
    for name, tensor in on_cpu.items():
        testing.assert_equal(on_gpu[name], tensor, label=name)


@pytest.mark.parametrize(
    "module", [schemes, base, eight_bit, replace, weight_only, calibration, smoothing, folding, model_smoothing]
)
def test_the_examples_run(module: ModuleType) -> None:
    torch.manual_seed(0)
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
