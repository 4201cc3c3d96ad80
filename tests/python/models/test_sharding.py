"""Parts of layers, for tensor parallelism: the same weights to the bit, and cuts that are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.models.folders import RandomCut
from tests.python.modules import randn

import qcutlass
from qcutlass import QuantLinear, UnsupportedError, models
from qcutlass.layers import Fp8Linear, Int8Linear, WeightOnlyLinear, shard

N, K = 48, 384


def layer(seed: int, *, bits: int = 4, group_size: int | None = 64, **options: Any) -> WeightOnlyLinear:
    q = qcutlass.quantize(randn(N, K, seed=seed), bits, group_size)
    made = QuantLinear.from_quantized(q, bias=randn(N, seed=seed + 1), **options)
    assert isinstance(made, WeightOnlyLinear)
    return made


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [64, 128, None])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parts_hold_the_weights_of_the_whole(bits: int, group_size: int | None, world_size: int, seed: int) -> None:
    """On 4 ranks groups of 64 and 128 become such of 32: parts have 96 columns."""
    whole = layer(seed, bits=bits, group_size=group_size)
    weight = models.weights_of(whole)
    for axis, dim in (("out", 0), ("in", 1)):
        parts = [shard(whole, rank, world_size, axis) for rank in range(world_size)]  # type: ignore[arg-type]
        assert torch.equal(torch.cat([models.weights_of(part) for part in parts], dim), weight)
        for part in parts:
            part.check()
            assert part.w_packed.data_ptr() != whole.w_packed.data_ptr()  # type: ignore[operator]


def test_outputs_are_those_of_the_whole(seed: int) -> None:
    """Integers, so that sums in any order are exact."""
    codes = torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    weight = qcutlass.QuantizedTensor(codes, torch.ones(6, N), None, 4, 64)
    whole = QuantLinear.from_quantized(weight, bias=torch.arange(float(N)), act_scale=torch.arange(float(K)) % 4 + 1)
    x = torch.randint(-4, 5, (5, K), generator=torch.Generator().manual_seed(seed)).float()
    by_channel = [shard(whole, rank, 3, "out")(x) for rank in range(3)]
    assert torch.equal(torch.cat(by_channel, dim=1), whole(x))
    parts = [shard(whole, rank, 3, "in") for rank in range(3)]
    assert torch.equal(sum(part(x[:, i * 128 : (i + 1) * 128]) for i, part in enumerate(parts)), whole(x))
    assert [part.bias is not None for part in parts] == [True, False, False]


def test_act_order_and_activations_go_with_the_channels(seed: int) -> None:
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(seed)).int()
    whole = layer(seed, perm=perm, activation="silu")
    x = randn(4, K, seed=seed + 2)
    parts = [shard(whole, rank, 2, "out")(x) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole(x))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 16, "in"), {}, "parts of 24 columns cut groups of 64 into ones that are no multiples of 16"),
        ((0, 5, "out"), {}, "divisor of N = 48"),
        ((0, 5, "in"), {}, "divisor of K = 384"),
        ((0, 2, "in"), {"perm": torch.arange(K - 1, -1, -1, dtype=torch.int32)}, "act-order"),
        ((0, 2, "in"), {"activation": "relu"}, "must follow the sum"),
        ((2, 2, "in"), {}, "rank"),
        ((0, 2, "across"), {}, "expected 'out' or 'in'"),
    ],
)
def test_cuts_that_are_refused(arguments: Any, options: dict[str, Any], message: str, seed: int) -> None:
    with pytest.raises(ValueError, match=message):
        shard(layer(seed, **options), *arguments)


EIGHT_BIT: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "dynamic, zero points, smooth": {"symmetric": False, "smooth": True},
    "static": {"a_scale": torch.tensor([0.5])},
    "static, zero points": {"a_scale": torch.tensor([0.5]), "azp": torch.tensor([3], dtype=torch.int32)},
    "one scale": {"w_scale": torch.tensor([0.25])},
    "fp8 dynamic": {"fp8": True},
    "fp8 static, smooth": {"fp8": True, "a_scale": torch.tensor([0.5]), "smooth": True},
}


def eight_bit(seed: int, *, fp8: bool = False, smooth: bool = False, **options: Any) -> Any:
    """Integers and powers of two, so that sums of parts in any order are exact where scales are given."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-4, 5, (N, K), generator=g)
    options = {"w_scale": torch.exp2(-torch.arange(N).float() % 3), "bias": torch.arange(float(N)), **options}
    if smooth:
        options["smooth"] = torch.exp2(torch.arange(K).float() % 2)
    w_scale = options.pop("w_scale")
    if fp8:
        return Fp8Linear(codes.float().to(torch.float8_e4m3fn), w_scale, **options)
    return Int8Linear(codes.to(torch.int8), w_scale, **options)


def eight_bit_input(seed: int) -> Any:
    return torch.randint(-8, 9, (5, K), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("options", EIGHT_BIT.values(), ids=EIGHT_BIT)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_by_channel_of_8_bit_layers(options: dict[str, Any], world_size: int, seed: int) -> None:
    whole, x = eight_bit(seed, activation="relu", **options), eight_bit_input(seed)
    parts = [shard(whole, rank, world_size, "out") for rank in range(world_size)]
    assert torch.equal(torch.cat([part(x) for part in parts], dim=1), whole(x))
    for part in parts:
        part.check()
        assert type(part) is type(whole)
        assert part.extra_repr().replace(f"out_features={N // world_size}", f"out_features={N}") == whole.extra_repr()
        for name, buffer in part.named_buffers():
            assert buffer.data_ptr() != getattr(whole, name).data_ptr(), name


@pytest.mark.parametrize("options", EIGHT_BIT.values(), ids=EIGHT_BIT)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_by_column_of_8_bit_layers(options: dict[str, Any], world_size: int, seed: int) -> None:
    whole, x = eight_bit(seed, **options), eight_bit_input(seed)
    parts = [shard(whole, rank, world_size, "in") for rank in range(world_size)]
    assert [part.bias is not None for part in parts] == [True] + [False] * (world_size - 1)
    size = K // world_size
    columns = [slice(rank * size, (rank + 1) * size) for rank in range(world_size)]
    outs = [part(x[:, piece]) for part, piece in zip(parts, columns, strict=True)]
    for part, piece, out in zip(parts, columns, outs, strict=True):
        part.check()
        alone = type(whole)(
            _codes(whole)[:, piece],
            whole.w_scale,
            a_scale=whole.a_scale,
            bias=part.bias,
            **({} if isinstance(whole, Fp8Linear) else {"azp": whole.azp, "symmetric": whole.symmetric}),
            smooth=None if whole.smooth is None else whole.smooth[piece],
        )
        assert torch.equal(out, alone(x[:, piece]))
    if whole.a_scale is not None:  # what dynamic ones are differs from part to part
        assert torch.equal(sum(outs), whole(x))


def _codes(layer: Any) -> Any:
    return qcutlass.unpack_weights(layer.w_packed, 8, (layer.out_features, layer.in_features))


def test_a_loaded_state_decides_on_zero_points(seed: int) -> None:
    """A layer made for dynamic zero points loads static scales without any: its parts have none either."""
    whole = eight_bit(seed, symmetric=False)
    whole.load_state_dict(eight_bit(seed, a_scale=torch.tensor([0.5])).state_dict())
    x = eight_bit_input(seed)
    assert torch.equal(torch.cat([shard(whole, rank, 2, "out")(x) for rank in range(2)], dim=1), whole(x))


@pytest.mark.parametrize("options", [{}, {"fp8": True}])
def test_cuts_of_8_bit_layers_that_are_refused(options: dict[str, Any], seed: int) -> None:
    with pytest.raises(ValueError, match="must follow the sum"):
        shard(eight_bit(seed, activation="relu", **options), 0, 2, "in")
    with pytest.raises(ValueError, match="divisor of N = 48"):
        shard(eight_bit(seed, **options), 0, 5, "out")


def test_other_layers_are_refused() -> None:
    class Other(WeightOnlyLinear.__base__):  # type: ignore[misc,name-defined]
        def _check(self, parts: Any) -> None: ...

    other = Other(64, 16, 4, 64, None, {"w_packed": torch.zeros(1)})
    with pytest.raises(UnsupportedError, match=r"expected a layer of qcutlass\.layers, got Other"):
        shard(other, 0, 2, "out")
    with pytest.raises(TypeError, match="expected a QuantLinear"):
        shard(torch.nn.Linear(64, 16), 0, 2, "out")  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("kind", ["awq", "compressed", "w8a8"])
def test_parts_of_a_checkpoint_go_through_files(kind: str, axis: Any, random_cut: RandomCut, tmp_path: Path) -> None:
    """Each rank of a server saves its own part and loads it again."""
    folder = getattr(random_cut, kind)().folder
    for name in (f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")):
        whole = QuantLinear.from_checkpoint(folder, name)
        x = randn(3, whole.in_features, seed=1)
        parts = [shard(whole, rank, 2, axis) for rank in range(2)]
        for rank, part in enumerate(parts):
            save_file(part.state_dict(), tmp_path / f"{rank}.safetensors")
        outs = []
        for rank, (part, other) in enumerate(zip(parts, reversed(parts), strict=True)):
            loaded = copy.deepcopy(other)
            loaded.load_state_dict(load_file(tmp_path / f"{rank}.safetensors"))
            mine = x if axis == "out" else x[:, rank * part.in_features : (rank + 1) * part.in_features]
            outs.append(loaded(mine))
            assert torch.equal(outs[-1], part(mine))
            assert not torch.equal(outs[-1], other(mine))
        if axis == "out":
            assert torch.equal(torch.cat(outs, dim=1), whole(x))
        else:
            weights = [models.weights_of(part) for part in parts]
            assert torch.equal(torch.cat(weights, dim=1), models.weights_of(whole))
