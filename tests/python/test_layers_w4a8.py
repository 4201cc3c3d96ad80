"""Layers of 4-bit weights and 8-bit activations, and the models that have them."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.python.kinds.int4 import DTYPES, INT4
from tests.python.modules import assert_same_state, randn, randomized
from torch import Tensor, nn

import qcutlass
from qcutlass import W4A8, QuantLinear, WeightOnly, models, testing
from qcutlass.layers import Int4Linear, WeightOnlyLinear, activations, shard, use_activations
from qcutlass.models.converted import ConvertedFolder
from qcutlass.schemes import Scheme

N, K = 48, 96
SCHEMES = [W4A8(group, name, symmetric) for group in (32, None) for name in DTYPES for symmetric in (False, True)]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def by_public_functions(layer: Int4Linear, a: Tensor) -> Tensor:
    """The product that a layer computes, step by step."""
    x = a if layer.act_scale is None else testing.scaled_activations(a, layer.act_scale)
    x = x if layer.perm is None else x[..., layer.perm.long()]
    a_q, a_scale = qcutlass.quantize_activations(x, dtype=DTYPES[layer.activations])
    options: dict[str, Any] = {"bias": layer.bias, "activation": layer.activation, "out_dtype": a.dtype}
    operands = layer.w_packed, a_scale, layer.scales, layer.zeros
    return qcutlass.gemm_w4a8(a_q, *operands, group_size=layer.group_size, **options)


def made(scheme: Scheme, seed: int, activation: str | None = None) -> Any:
    return QuantLinear.from_linear(randomized(nn.Linear(K, N), seed), scheme, activation=activation)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@schemes
def test_layers_are_made_of_the_public_functions(scheme: W4A8, dtype: torch.dtype, seed: int) -> None:
    layer, a = made(scheme, seed, "silu"), randn(2, 9, K, seed=seed).to(dtype)
    out = layer(a)
    assert (out.dtype, out.shape) == (dtype, (2, 9, N))
    testing.assert_equal(out, by_public_functions(layer, a))


@schemes
def test_a_layer_errs_by_the_rounding_of_its_activations(scheme: W4A8, seed: int) -> None:
    """Within seven standard deviations of a sum of independent, uniform rounding errors."""
    layer, a = made(scheme, seed), randn(17, K, seed=seed)
    w = layer.weights().double()
    expected = a.double() @ w.T + layer.bias.double()
    largest = a.abs().amax(1, keepdim=True).expand_as(a)
    step = largest / 254 if scheme.activations == "int8" else a.abs() * 2.0**-4 + 2.0**-10 * largest / 448
    deviation = (step.double().square() @ w.square().T / 3).sqrt()
    error = (layer(a).double() - expected).abs()
    assert bool((error <= 7 * deviation + 1e-5).all())
    assert float(error.max()) > 0  # activations were quantised


def test_act_order_and_activation_scales(seed: int) -> None:
    q = qcutlass.quantize(randn(N, K, seed=seed), group_size=32)
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(seed)).int()
    options: dict[str, Any] = {"perm": perm, "act_scale": torch.rand(K) + 0.5, "bias": randn(N, seed=seed)}
    layer, a = Int4Linear(q, "int8", **options), randn(5, K, seed=seed)
    testing.assert_equal(layer(a), by_public_functions(layer, a))
    near = WeightOnlyLinear(q, **options)(a)
    assert float((layer(a) - near).norm() / near.norm()) < 0.02
    testing.assert_equal(layer.weights(), WeightOnlyLinear(q, **options).weights())


@schemes
def test_layers_are_saved_copied_and_cut(scheme: W4A8, seed: int) -> None:
    layer, a = made(scheme, seed), randn(4, K, seed=seed)
    with torch.device("meta"):
        empty = nn.Linear(K, N)
    loaded = QuantLinear.from_linear(empty, scheme)
    loaded.load_state_dict(layer.state_dict(), assign=True)
    for other in (loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_state(other, layer.state_dict())
        testing.assert_equal(other(a), layer(a))
    halves = [shard(layer, rank, 2, "out")(a) for rank in range(2)]
    testing.assert_equal(torch.cat(halves, -1), layer(a))
    if scheme.group_size == 32:
        first = shard(layer, 0, 3, "in")
        assert isinstance(first, Int4Linear)
        assert (first.in_features, first.activations) == (32, scheme.activations)
        testing.assert_equal(first.weights(), layer.weights()[:, :32])
        with pytest.raises(
            ValueError, match="parts of 48 columns cut groups of 32 into ones that are no multiples of 32"
        ):
            shard(layer, 0, 2, "in")


def test_states_of_other_schemes_are_refused() -> None:
    layer = made(W4A8(32), 1)
    with pytest.raises(RuntimeError, match="group_size = 32, not 96"):
        made(W4A8(None), 1).load_state_dict(layer.state_dict())
    wrong = layer.state_dict() | {"zeros": layer.zeros + 100}
    with pytest.raises(RuntimeError, match="zeros"):
        layer.load_state_dict(wrong)


@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_compile(dynamic: bool) -> None:
    layer = made(W4A8(32, "int8"), 1, "gelu")
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5):
        testing.assert_equal(compiled(randn(rows, K, seed=rows)), layer(randn(rows, K, seed=rows)))


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="activations: expected 'fp8' or 'int8', got 'int4'"):
        W4A8(activations="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"group_size: expected at least 1, or -1 \(or None\) .*, got 0"):
        W4A8(0)
    with pytest.raises(ValueError, match="quantized: expected integer codes of 4 bits"):
        Int4Linear(qcutlass.quantize(torch.ones(16, 64), bits=8))
    q = qcutlass.quantize(torch.randn(16, 64), group_size=32)
    real = qcutlass.QuantizedTensor(q.codes, q.scales, q.scales, 4, 32)
    with pytest.raises(TypeError, match="zeros: expected a tensor of uint8, int8, int32, or None, got float32"):
        Int4Linear(real)


@pytest.mark.gpu
@pytest.mark.parametrize("activations", list(DTYPES))
def test_a_gpu_multiplies_as_the_cpu_does(activations: Any, seed: int) -> None:
    INT4.skip_without_instructions(INT4.case(5, 48, 256, dtype=DTYPES[activations]))
    layer = QuantLinear.from_linear(nn.Linear(256, 48), W4A8(64, activations=activations))
    x = randn(5, 256, seed=seed).half()
    expected = layer(x).float()
    error = layer.to("cuda")(x.cuda()).cpu().float() - expected
    assert float(error.norm()) <= 2**-9 * float(expected.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("activations", list(DTYPES))
def test_layers_stay_where_a_gpu_has_no_kernel(activations: str) -> None:
    INT4.skip_without_instructions(INT4.case(5, 48, 96, dtype=DTYPES[activations]))
    model = nn.Sequential(*(QuantLinear.from_linear(nn.Linear(96, 48), WeightOnly(4, size)) for size in (48, 32)))
    with pytest.warns(UserWarning, match="1 of 2 layers still multiply 16-bit activations"):
        assert use_activations(model.cuda(), activations) == ["1"]


def test_int8_is_of_tokens_on_a_gpu_and_of_blocks_on_the_cpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has no product that quantises in blocks; 8 bits and real zeros, which W4A8 does not take, stay there."""
    q = qcutlass.quantize(randn(N, K, seed=seed), group_size=32)
    assert q.zeros is not None
    real = WeightOnlyLinear(replace(q, zeros=q.zeros.half()))
    layers: list[Any] = [made(WeightOnly(4, 32), seed), made(WeightOnly(8, 32), seed), real]
    model, x = nn.Sequential(*layers), randn(5, K, seed=seed)
    for use in ("int8", None):
        assert use_activations(model, use) == ["0", "1", "2"]
        assert all(type(layer) is WeightOnlyLinear and layer.activations == use for layer in model)
    monkeypatch.setattr(activations, "_is_gpu", lambda device: True)
    assert use_activations(model, "int8") == ["0"]
    first: Any = model[0]
    testing.assert_equal(first(x), made(W4A8(32, "int8"), seed)(x))
    assert list(model[1:]) == layers[1:]
    with pytest.raises(ValueError, match="model: expected layers of 4-bit codes with integer zeros, or none; got a"):
        use_activations(model, "int8")
    assert use_activations(model, "none") == ["0"]
    testing.assert_equal(model[0](x), layers[0](x))


def test_models_can_have_their_activations_quantised(seed: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    qcutlass.replace_linear(model, WeightOnly(4, 32))
    first: Any = model[0]
    weights = first.weights()
    assert use_activations(model, "fp8") == ["0", "2"]
    made: Any = model[0]
    assert (type(made), made.activations) == (Int4Linear, "fp8")
    testing.assert_equal(made.weights(), weights)
    assert model(randn(3, 64, seed=seed)).shape == (3, 8)
    with pytest.raises(ValueError, match="model: expected layers of 4-bit codes"):
        use_activations(nn.Sequential(nn.Linear(8, 8)), "fp8")


@pytest.mark.parametrize("activations", list(DTYPES))
def test_folders_are_converted_to_it(activations: str, tmp_path: Path, seed: int) -> None:
    source, made = tmp_path / "float", tmp_path / "w4a8"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(
        {"up.weight": randn(N, K, seed=seed), "lm_head.weight": randn(N, K, seed=1)}, source / "model.safetensors"
    )
    done = models.convert(source, made, scheme=WeightOnly(4, 32), activations=activations, verify=True)
    assert (done.layers, done.verified) == (1, 1)
    folder = ConvertedFolder(made)
    assert folder.spec["up"].words == f"w4 g32 int zeros, {activations} activations"
    layer: Any = folder["up"]
    assert (type(layer), layer.activations) == (Int4Linear, activations)
    with pytest.raises(ValueError, match="activations: expected 'int8', 'fp8', 'none' or None, got 'int4'"):
        models.convert(source, tmp_path / "other", activations="int4")
    assert not (tmp_path / "other").exists()
