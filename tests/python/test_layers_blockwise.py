"""Layers of blockwise int8."""

from __future__ import annotations

import copy
import doctest
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.blockwise import DEVICES, FLOATS, SIZES
from tests.python.modules import assert_same_state, randn, randomized, snapshot
from torch import Tensor, nn

import qcutlass
from qcutlass import Blockwise, QuantLinear, blockwise, testing
from qcutlass.layers import BlockwiseLinear, shard
from qcutlass.layers import blockwise as module

N, K = 200, 288

of_sizes = pytest.mark.parametrize("size", SIZES)
on_devices = pytest.mark.parametrize("device", DEVICES)


def linear_of(seed: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    linear = randomized(nn.Linear(K, N, bias=bias), seed).to(dtype)
    assert isinstance(linear, nn.Linear)
    return linear


def layer_of(seed: int, size: int = 128, activation: str | None = None) -> BlockwiseLinear:
    layer = QuantLinear.from_linear(linear_of(seed), Blockwise(size), activation=activation)
    assert isinstance(layer, BlockwiseLinear)
    return layer


@on_devices
@of_sizes
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_layers_are_made_of_the_public_functions(
    activation: str | None, dtype: torch.dtype, size: int, device: str, seed: int
) -> None:
    linear, a = linear_of(seed, dtype).to(device), randn(2, 9, K, seed=seed).to(device, dtype)
    layer = QuantLinear.from_linear(linear, Blockwise(size), activation=activation)
    with torch.no_grad():
        weight = blockwise.weight_quant(linear.weight, size)
        expected = blockwise.int8_addmm(
            *blockwise.act_quant(a, size), *weight, linear.bias, dtype, activation=activation, block_size=size
        )
    out = layer(a)
    assert out.dtype == dtype
    testing.assert_equal(out, expected)
    testing.assert_equal(layer(a), expected)


@of_sizes
def test_a_layer_errs_as_its_roundings_do(size: int, seed: int) -> None:
    """Within seven standard deviations of a sum of independent, uniform rounding errors."""
    linear, a = linear_of(seed), randn(50, K, seed=seed)
    with torch.no_grad():
        out, expected = QuantLinear.from_linear(linear, Blockwise(size))(a), linear(a)
        _, a_s = blockwise.act_quant(a, size)
        _, w_s = blockwise.weight_quant(linear.weight, size)
    a_error = a_s.repeat_interleave(size, 1)[:, :K].double() / 2
    w_error = w_s.repeat_interleave(size, 0)[:N].repeat_interleave(size, 1)[:, :K].double() / 2
    w = linear.weight.detach().double()
    variance = (a_error.square() @ w.square().T + (a.double().abs() + a_error).square() @ w_error.square().T) / 3
    assert bool(((out - expected).abs() <= 7 * variance.sqrt()).all())


@of_sizes
def test_layers_are_saved_loaded_and_copied_bit_for_bit(size: int, tmp_path: Path, seed: int) -> None:
    a, layer = randn(3, K, seed=seed), layer_of(seed, size)
    before, expected = snapshot(layer), layer(a)
    save_file(layer.state_dict(), tmp_path / "state.safetensors")
    state = load_file(tmp_path / "state.safetensors")
    assert sorted(state) == ["bias", "layout", "w_packed", "w_scale"]
    other = layer_of(seed + 1, size)
    other.load_state_dict(state)
    with torch.device("meta"):
        empty = QuantLinear.from_linear(nn.Linear(K, N), Blockwise(size))
    empty.load_state_dict(state, assign=True)
    for twin in (other, empty, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.half()):
        assert_same_state(twin, before)
        testing.assert_equal(twin(a), expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layout", torch.tensor([1, 8, N, K, 128]), "in layout version 1, this build reads version 2"),
        ("layout", torch.tensor([2, 8, N, K, 64]), "group_size = 64, not 128"),
        ("w_packed", torch.zeros(13, 9, 32, 16, dtype=torch.uint8), "w_packed: expected a tensor of int8"),
        ("w_packed", torch.zeros(13, 8, 32, 16, dtype=torch.int8), "b: for K = 288 its second dimension"),
        ("w_packed", torch.zeros(12, 9, 32, 16, dtype=torch.int8), "n: N = 200 needs b of 13 tiles"),
        ("w_packed", torch.zeros(N, K, dtype=torch.int8), r"w_packed: expected shape .ceil\(N/16\)"),
        ("w_scale", torch.ones(2, 3, dtype=torch.float16), "w_scale: expected a tensor of float32"),
        ("w_scale", torch.ones(2, 2), r"w_scale: expected shape .* \[2, 3\], got \[2, 2\]"),
        ("bias", torch.ones(N + 1), "bias: expected shape"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(name: str, value: Tensor, message: str) -> None:
    layer, other = layer_of(1), layer_of(2)
    before = snapshot(layer)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(other.state_dict() | {name: value})
    assert_same_state(layer, before)


def test_a_bias_follows_what_is_loaded(seed: int) -> None:
    layer = layer_of(seed)
    without = QuantLinear.from_linear(linear_of(seed, bias=False), Blockwise())
    assert without.bias is None
    layer.load_state_dict(without.state_dict(), strict=False)
    assert layer.bias is None
    a = randn(3, K, seed=seed)
    testing.assert_equal(layer(a), without(a))


def test_layers_compile_in_one_graph(seed: int) -> None:
    layer, a = layer_of(seed, activation="silu"), randn(2, 3, K, seed=seed)
    compiled = torch.compile(nn.Sequential(nn.Identity(), layer), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        testing.assert_equal(compiled(a), layer(a))


def test_no_rows_and_other_columns(seed: int) -> None:
    layer, a = layer_of(seed), randn(2, 9, K, seed=seed)
    assert layer(a[:, :0]).shape == (2, 0, N)
    testing.assert_equal(layer(a[0, 3]), layer(a[:1, 3])[0])
    with pytest.raises(
        ValueError, match=r"^input: expected shape \[\.\.\., in_features\] = \[\.\.\., 288\], got \[3, 32\]"
    ):
        layer(torch.ones(3, 32))


def test_whole_models_and_descriptions() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 8, bias=False))
    assert qcutlass.replace_linear(model, Blockwise(32)) == ["0", "2"]
    assert repr(model[0]) == "BlockwiseLinear(in_features=64, out_features=48, block_size=32, bias=True)"
    assert repr(model[2]) == "BlockwiseLinear(in_features=48, out_features=8, block_size=32, bias=False)"
    assert model(torch.randn(3, 64)).shape == (3, 8)


@pytest.mark.parametrize(
    ("axis", "world_size", "size"), [("out", 2, 32), ("in", 3, 32), ("in", 1, 128), ("out", 1, 64)]
)
def test_parts_have_the_same_weights(axis: str, world_size: int, size: int, seed: int) -> None:
    linear = randomized(nn.Linear(K, 192), seed)
    assert isinstance(linear, nn.Linear)
    layer = QuantLinear.from_linear(linear, Blockwise(size))
    a = randn(5, K, seed=seed)
    parts = [shard(layer, rank, world_size, axis) for rank in range(world_size)]  # type: ignore[arg-type]
    whole = layer(a)
    if axis == "out":
        testing.assert_equal(torch.cat([part(a) for part in parts], 1), whole)
    else:  # blocks are those of the whole: the sums differ by roundings alone
        columns = a.split(K // world_size, 1)
        total = sum(part(c.contiguous()).double() for part, c in zip(parts, columns, strict=True))
        assert isinstance(total, Tensor)
        a_q, a_s = blockwise.act_quant(a, size)
        w_q, w_s = blockwise.weight_quant(linear.weight.detach(), size)
        problem = testing.BlockwiseProblem(a_q, a_s, w_q, w_s, linear.bias.detach(), None, torch.float32, size)
        testing.assert_close(total.float(), problem.reference(), splits=world_size + 1)


def test_parts_that_cut_through_blocks_are_refused(seed: int) -> None:
    layer = layer_of(seed, 128)
    for axis in ("in", "out"):
        with pytest.raises(ValueError, match="cut through blocks of 128"):
            shard(layer, 0, 2, axis)  # type: ignore[arg-type]


def weights() -> tuple[Tensor, Tensor]:
    return torch.ones(N, K, dtype=torch.int8), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Blockwise(100), ValueError, "block_size: expected one of 32, 64"),
        (lambda: Blockwise("128"), TypeError, "block_size: expected an int, got str"),  # type: ignore[arg-type]
        (lambda: BlockwiseLinear(weights()[0].float(), weights()[1]), TypeError, "w_q: expected a tensor of int8"),
        (lambda: BlockwiseLinear(weights()[0][0], weights()[1]), ValueError, r"w_q: expected shape .N, K."),
        (lambda: BlockwiseLinear(weights()[0], None), TypeError, "w_s: expected a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: BlockwiseLinear(*weights(), 64), ValueError, r"w_s: expected shape .* \[4, 5\], got \[2, 3\]"),
        (lambda: BlockwiseLinear(*weights(), bias=torch.ones(3)), ValueError, "bias: expected shape"),
        (lambda: BlockwiseLinear(*weights(), activation="swish"), ValueError, "activation: expected one of"),
        (lambda: QuantLinear.from_linear(nn.Linear(4, 4), 3), TypeError, "W8A8, FP8 or Blockwise"),  # type: ignore[arg-type]
    ],
)
def test_options_that_make_no_layer(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_examples() -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
    result = doctest.testmod(blockwise)
    assert result.attempted > 0
    assert result.failed == 0
