"""Layers of fp8 in blocks: of floats, of checkpoints whose blocks 16-bit activations multiply by default."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.blockwise import FLOATS, SIZES
from tests.python.formats.stored import as_fp8, named
from tests.python.modules import assert_same_state, randn, randomized, snapshot
from torch import Tensor, nn

import qcutlass
from qcutlass import Blockwise, QuantLinear, blockwise, formats, testing
from qcutlass.formats import CanonicalLinear
from qcutlass.formats.fp8 import in_blocks
from qcutlass.formats.specs import LayerSpec
from qcutlass.layers import BlockwiseLinear, WeightOnlyLinear, shard, use_activations

N, K = 200, 288
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
of_sizes = pytest.mark.parametrize("size", SIZES)


def linear_of(seed: int, n: int = N, k: int = K, dtype: torch.dtype = torch.float32) -> nn.Linear:
    linear = randomized(nn.Linear(k, n), seed).to(dtype)
    assert isinstance(linear, nn.Linear)
    return linear


def layer_of(seed: int, size: int = 128, **options: Any) -> QuantLinear:
    return QuantLinear.from_linear(linear_of(seed), Blockwise(size, "fp8"), **options)


@of_sizes
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layers_are_made_of_the_public_functions(dtype: torch.dtype, size: int, seed: int) -> None:
    linear, a = linear_of(seed, dtype=dtype), randn(2, 9, K, seed=seed).to(dtype)
    layer = QuantLinear.from_linear(linear, Blockwise(size, "fp8"), activation="silu")
    with torch.no_grad():
        operands = *blockwise.fp8_act_quant(a, size), *blockwise.fp8_weight_quant(linear.weight, size)
        options: dict[str, Any] = {"bias": linear.bias, "activation": "silu", "block_size": size}
        expected = blockwise.fp8_gemm(*operands, dtype, **options)
    testing.assert_equal(layer(a), expected)
    testing.assert_equal(layer.weights(), blockwise.fp8_weight_dequant(*operands[2:], size, torch.float32))


@of_sizes
def test_layers_are_saved_loaded_and_copied_bit_for_bit(size: int, tmp_path: Path, seed: int) -> None:
    a, layer = randn(3, K, seed=seed), layer_of(seed, size)
    before, expected = snapshot(layer), layer(a)
    save_file(layer.state_dict(), tmp_path / "state.safetensors")
    state = load_file(tmp_path / "state.safetensors")
    other = layer_of(seed + 1, size)
    other.load_state_dict(state)
    with torch.device("meta"):
        empty = QuantLinear.from_linear(nn.Linear(K, N), Blockwise(size, "fp8"))
    empty.load_state_dict(state, assign=True)
    for twin in (other, empty, copy.deepcopy(layer), layer.half()):
        assert_same_state(twin, before)
        testing.assert_equal(twin(a), expected)


def test_states_of_the_other_type_are_refused(seed: int) -> None:
    ours, theirs = layer_of(seed), QuantLinear.from_linear(linear_of(seed), Blockwise())
    for layer, other, bits in ((ours, theirs, "bits = 8, not -8"), (theirs, ours, "bits = -8, not 8")):
        before = snapshot(layer)
        with pytest.raises(RuntimeError, match=bits):
            layer.load_state_dict(other.state_dict())
        with pytest.raises(RuntimeError, match="w_packed: expected a tensor of"):
            layer.load_state_dict(layer.state_dict() | {"w_packed": other.state_dict()["w_packed"]})
        assert_same_state(layer, before)


def test_layers_compile_in_one_graph(seed: int) -> None:
    layer, a = layer_of(seed, activation="silu"), randn(2, 3, K, seed=seed)
    compiled = torch.compile(nn.Sequential(nn.Identity(), layer), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        testing.assert_equal(compiled(a), layer(a))


def test_parts_have_the_same_weights(seed: int) -> None:
    layer, a = QuantLinear.from_linear(linear_of(seed, 256), Blockwise(64, "fp8")), randn(5, K, seed=seed)
    testing.assert_equal(torch.cat([shard(layer, rank, 2, "out")(a) for rank in range(2)], 1), layer(a))


def test_descriptions() -> None:
    layer = layer_of(1)
    assert repr(layer) == "BlockwiseLinear(in_features=288, out_features=200, block_size=128, type='fp8', bias=True)"
    assert layer.spec.to_dict() == {
        "kind": "blockwise", "bits": 8, "weight_dtype": "e4m3", "group_size": 128, "bias": "float32"
    }  # fmt: skip
    assert layer.spec.words == "fp8 blocks of 128"
    assert LayerSpec.from_dict(layer.spec.to_dict(), "here") == layer.spec
    for changes, message in (({"weight_dtype": "e2m1"}, "expected e4m3 codes of kind blockwise, got 'e2m1'"),
                             ({"kind": "int8", "group_size": -1}, "expected no such codes of kind int8")):  # fmt: skip
        with pytest.raises(qcutlass.CheckpointError, match=message):
            LayerSpec.from_dict(layer.spec.to_dict() | changes, "here")
    for wrong in ("e4m3", "fp16", None, torch.int8):
        with pytest.raises(ValueError, match="type: expected 'int8' or 'fp8', got"):
            Blockwise(type=wrong)  # type: ignore[arg-type]


def stored(n: int, k: int, seed: int, scales: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], CanonicalLinear]:
    """The tensors of a checkpoint's layer in blocks, and what is loaded of them."""
    options: dict[str, Any] = {"block": (128, 128), "name": "weight_scale_inv", "dtype": scales}
    tensors, _ = as_fp8(randn(n, k, seed=seed), **options)
    layer = formats.load(named(tensors, "up"), config=BLOCKS)["up"]
    assert isinstance(layer, CanonicalLinear)
    return tensors, layer


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(576, 256), (128, 64), (129, 128), (2112, 300), (40, 129)])
def test_layers_of_checkpoints_multiply_fp8_activations(n: int, k: int, scales: torch.dtype, seed: int) -> None:
    """Weights and scales are the file's own, to the bit; ragged blocks included."""
    tensors, layer = stored(n, k, seed, scales)
    model = nn.Sequential(WeightOnlyLinear(layer.weight, activation="silu"), nn.ReLU(), nn.Linear(n, 4))
    model.eval()
    assert use_activations(model, "fp8") == ["0"]
    made = model[0]
    assert isinstance(made, BlockwiseLinear)
    assert not made.training
    a = randn(3, k, seed=seed)
    operands = *blockwise.fp8_act_quant(a), tensors["weight"], tensors["weight_scale_inv"].float()
    testing.assert_equal(made(a), blockwise.fp8_gemm(*operands, torch.float32, activation="silu"))


def test_a_layer_of_two_names_stays_one(seed: int) -> None:
    layer = WeightOnlyLinear(stored(128, 128, seed)[1].weight)
    model = nn.ModuleDict({"one": layer, "other": nn.Sequential(layer)})
    assert use_activations(model, "fp8") == ["one", "other.0"]
    other = model["other"]
    assert isinstance(other, nn.Sequential)
    assert model["one"] is other[0]


def test_weights_that_are_in_no_square_blocks(seed: int) -> None:
    _, layer = stored(300, 256, seed)
    assert in_blocks(layer) is not None
    scales = layer.weight.scales.clone()
    scales[1, 131] *= 2
    assert in_blocks(replace(layer, weight=replace(layer.weight, scales=scales))) is None
    order = torch.arange(256, dtype=torch.int32)
    assert in_blocks(replace(layer, perm=order)) is None
    assert in_blocks(replace(layer, act_scale=torch.ones(256))) is None
    assert in_blocks(layer.rows(torch.arange(5, 300))) is None
    w = randn(64, 256, seed=seed)
    assert in_blocks(CanonicalLinear(qcutlass.quantize(w, 8, 128, symmetric=True))) is None
    floats = QuantLinear.from_linear(linear_of(seed, 64, 256), qcutlass.WeightOnly(8, None, weight_dtype="e4m3"))
    with pytest.raises(ValueError, match=r"model: expected layers of .* e4m3 weights with scales of square blocks"):
        use_activations(nn.Sequential(floats), "fp8")
