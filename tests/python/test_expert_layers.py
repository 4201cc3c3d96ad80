"""`QuantExperts`: what it computes, parts of it, states, copies, moves, compilation; what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.python.modules import assert_same_state, randn, snapshot
from torch import Tensor, nn

import qcutlass
from qcutlass import WeightOnly, testing
from qcutlass.algorithms import quantize_floats
from qcutlass.layers import QuantExperts, WeightOnlyLinear, shard
from qcutlass.layers.experts import Expert
from qcutlass.products.checks import E8M0
from qcutlass.testing.models import NOISE, noise_ratio

E, H = 6, 64
POWERS = E8M0[0] if E8M0 else torch.float32
SCHEMES = {
    "w4": WeightOnly(4, 32),
    "w8": WeightOnly(8, 16),
    "symmetric": WeightOnly(4, 32, symmetric=True),
    "channel": WeightOnly(8, None, scale_dtype=torch.float16),
    "MXFP4": WeightOnly(4, 32, weight_dtype="e2m1", scale_dtype=POWERS),
    "NVFP4": WeightOnly(4, 16, weight_dtype="e2m1", scale_dtype=torch.float8_e4m3fn),
    "fp8": WeightOnly(8, 32, weight_dtype="e4m3"),
}


def weights(seed: int, i: int = 64) -> tuple[Tensor, Tensor]:
    return randn(E, 2 * i, H, seed=seed) / H**0.5, randn(E, H, i, seed=seed + 1) / i**0.5


def inputs(seed: int, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(E, generator=g)[:3] for _ in range(tokens)])
    return torch.randn(tokens, H, generator=g), ids, torch.rand(tokens, 3, generator=g)


def made(
    seed: int, scheme: str = "w4", i: int = 64, activation: str = "silu", group_size: int | None = None
) -> QuantExperts:
    chosen = SCHEMES[scheme]
    chosen = chosen if group_size is None else replace(chosen, group_size=group_size)
    return QuantExperts.from_weights(*weights(seed, i), chosen, activation)


def computed(experts: QuantExperts, x: Tensor, ids: Tensor, scores: Tensor, dtype: torch.dtype) -> Tensor:
    """By dense layers with the dequantised weights, expert by expert."""
    out = torch.zeros(x.shape, dtype=dtype)
    for index in range(experts.gate_up.experts):
        gate, up, down = (dense_layer(layer, dtype) for layer in experts.expert(index))
        tokens, slots = torch.where(ids == index + experts.gate_up.first)
        a = x[tokens].to(dtype)
        gated = testing.activate(gate(a), experts.activation) * up(a)
        out.index_add_(0, tokens, down(gated) * scores[tokens, slots, None].to(dtype))
    return out


def dense_layer(layer: WeightOnlyLinear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return partial(nn.functional.linear, weight=layer.weights().to(dtype), bias=bias)


@pytest.mark.parametrize("i", [64, 48, 40, 20])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_token_gets_its_experts(scheme: str, i: int, seed: int) -> None:
    """Strips of 16 channels end at the last of gate, or do not; the last group of down is whole, or is not."""
    experts, given = made(seed, scheme, i), inputs(seed)
    exact, dense = (computed(experts, *given, dtype) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(experts(*given), dense, exact) <= NOISE
    wrong = given[1].roll(1, dims=1)
    assert noise_ratio(experts(given[0], wrong, given[2]), dense, exact) > 10 * NOISE


def test_weights_are_those_of_the_quantiser(seed: int) -> None:
    experts, (gate_up, down) = made(seed, i=40), weights(seed, 40)
    for index in range(E):
        found = experts.expert(index)
        for layer, weight in zip(found, (*gate_up[index].chunk(2), down[index]), strict=True):
            expected = qcutlass.quantize(weight, bits=4, group_size=32)
            testing.assert_equal(layer.weights(), expected.dequantize(torch.float32))


def test_the_activation_and_types_of_inputs(seed: int) -> None:
    x, ids, scores = inputs(seed)
    experts = made(seed, activation="gelu_tanh")
    exact, dense = (computed(experts, x, ids, scores, dtype) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(experts(x, ids, scores), dense, exact) <= NOISE
    out = experts(x.view(3, 3, H).bfloat16(), ids, scores.bfloat16())
    assert (out.shape, out.dtype) == ((3, 3, H), torch.bfloat16)
    with pytest.raises(ValueError, match="activation: expected silu, gelu_tanh or swigluoai, got 'relu'"):
        QuantExperts(experts.gate_up, experts.down, "relu")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parts_along_experts_add_up(world_size: int, seed: int) -> None:
    experts, given = made(seed), inputs(seed)
    parts = [shard(experts, rank, world_size, "experts") for rank in range(world_size)]
    assert [part.gate_up.first for part in parts] == [rank * E // world_size for rank in range(world_size)]
    assert all(part.num_experts == E for part in parts)
    for part in parts:  # each is alone with the tokens of its experts
        exact, dense = (computed(part, *given, dtype) for dtype in (torch.float64, torch.float32))
        assert noise_ratio(part(*given), dense, exact) <= NOISE
    total = sum(part(*given).double() for part in parts)
    exact, dense = (computed(experts, *given, dtype) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(total, dense, exact) <= world_size * NOISE  # each part rounds
    assert sum(part.gate_up.experts for part in parts) == E
    assert {part.gate_up.experts for part in parts} == {E // world_size, -(-E // world_size)}
    again = shard(parts[-1], 1, 2, "experts")  # of 3, 2 and 2
    assert again.gate_up.first == (4 if world_size == 2 else 5)


CUTS: dict[str, tuple[str, int, int | None, list[int], list[int]]] = {
    "w8": ("w8", 64, None, [16] * 4, [16] * 4),
    "Qwen3-30B-A3B": ("w4", 768, 128, [192] * 4, [128, 64, 128, 64]),
    "symmetric": ("symmetric", 768, 128, [192] * 4, [128, 64, 128, 64]),
    "channel": ("channel", 768, None, [192] * 4, [192] * 4),
    "fp8": ("fp8", 768, 128, [192] * 4, [128, 64, 128, 64]),  # blocks of 128 in files are such groups
    "two ranks": ("w4", 192, 128, [96] * 2, [96, 32]),
    "three ranks": ("symmetric", 192, 128, [64] * 3, [64] * 3),
    "five ranks": ("w4", 192, 128, [32, 32, 48, 32, 48], [32, 32, 48, 16, 16]),
    "powers of two as scales": ("MXFP4", 64, None, [16] * 4, [16] * 4),
    "8-bit scales": ("NVFP4", 192, 64, [96] * 2, [64, 32]),
    "no whole groups": ("w4", 40, None, [32, 8], [32, 8]),
    "three ranks of four steps": ("w4", 64, None, [16, 16, 32], [16, 16, 32]),
}
"""By name: scheme, I, group size, and of each rank the channels and the columns of a group."""


def check_sum(experts: QuantExperts, given: tuple[Tensor, Tensor, Tensor], parts: list[QuantExperts]) -> None:
    """The outputs of parts, each of which rounds, add up to that of the whole."""
    exact, dense = (computed(experts, *given, dtype) for dtype in (torch.float64, torch.float32))
    total = sum(part(*given).double() for part in parts)
    assert noise_ratio(total, dense, exact) <= NOISE
    assert noise_ratio(total - parts[0](*given), dense, exact) > 10 * NOISE


@pytest.mark.parametrize("name", CUTS)
def test_parts_along_intermediate_channels_add_up(name: str, seed: int) -> None:
    """Cuts through groups, and channels that are no multiple of the ranks, too."""
    scheme, i, group_size, sizes, groups = CUTS[name]
    experts, given = made(seed, scheme, i, group_size=group_size), inputs(seed)
    parts = [shard(experts, rank, len(sizes), "intermediate") for rank in range(len(sizes))]
    assert [part.down.in_features for part in parts] == sizes
    assert [part.down.group_size for part in parts] == groups
    for part in parts:
        part.check()
    for index in range(E):
        found = [part.expert(index) for part in parts]
        whole = experts.expert(index)
        for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
            joined = torch.cat([getattr(part, name).weights() for part in found], dim=dim)
            testing.assert_equal(joined, getattr(whole, name).weights())
    check_sum(experts, given, parts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "two ranks", "five ranks", "fp8", "no whole groups"])
def test_parts_along_intermediate_channels_add_up_on_a_gpu(name: str, seed: int) -> None:
    scheme, i, group_size, sizes, _ = CUTS[name]
    experts, (x, ids, scores) = made(seed, scheme, i, group_size=group_size), inputs(seed)
    x = x.half().float()
    exact, dense = (computed(experts, x, ids, scores, dtype) for dtype in (torch.float64, torch.float16))
    parts = [shard(experts, rank, len(sizes), "intermediate").cuda() for rank in range(len(sizes))]
    outs = [part(x.half().cuda(), ids.cuda(), scores.cuda()).double().cpu() for part in parts]
    assert noise_ratio(sum(outs), dense, exact) <= len(parts) * NOISE  # each part rounds
    assert noise_ratio(sum(outs[1:]), dense, exact) > 4 * len(parts) * NOISE


def test_the_first_part_has_the_bias_of_down(seed: int) -> None:
    gate_up, down = weights(seed, 192)
    biases = {"gate_up_bias": randn(E, 2 * 192, seed=seed), "down_bias": randn(E, H, seed=seed + 1)}
    experts = QuantExperts.from_weights(gate_up, down, WeightOnly(4, 128), **biases)
    parts = [shard(experts, rank, 2, "intermediate") for rank in range(2)]
    assert [part.down.bias is not None for part in parts] == [True, False]
    halves = [part.gate_up.bias.unflatten(1, (2, 96)) for part in parts]  # type: ignore[union-attr]
    testing.assert_equal(torch.cat(halves, dim=2).flatten(1), biases["gate_up_bias"])
    check_sum(experts, inputs(seed), parts)


@pytest.mark.parametrize(
    ("world_size", "axis", "message"),
    [
        (7, "experts", "world_size: expected at most 6, the number of experts, E = 6, got 7; use fewer ranks"),
        (5, "intermediate", "world_size: expected at most 4, the number of steps of 16 channels, I = 64, got 5"),
        (2, "out", "axis: expected 'intermediate' or 'experts', got 'out'"),
    ],
)
def test_parts_that_there_are_not(world_size: int, axis: Any, message: str, seed: int) -> None:
    with pytest.raises(ValueError, match=message):
        shard(made(seed), 0, world_size, axis)


def test_states_copies_and_casts(seed: int) -> None:
    experts, given = made(seed), inputs(seed)
    state, out = snapshot(experts), experts(*given)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts)), copy.deepcopy(experts).half()):
        assert_same_state(other, state)
        testing.assert_equal(other(*given), out)
    other = made(seed + 7)
    other.load_state_dict(state)
    testing.assert_equal(other(*given), out)
    with torch.device("meta"):
        empty = QuantExperts.from_weights(*(torch.empty_like(each) for each in weights(seed)), SCHEMES["w4"])
    assert empty.gate_up.w_packed.is_meta
    empty.load_state_dict(state, assign=True)
    testing.assert_equal(empty(*given), out)
    empty.check()
    assert "num_experts=6, activation='silu'" in repr(empty)
    assert "experts=3..5" in repr(shard(empty, 1, 2, "experts"))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("w8", r"bits = 8, not 4; group_size = 16, not 32"),
        ("shape", r"N = 96, not 128"),
        ("count", r"experts = 3, not 6"),
        ("rank", r"first = 3, not 0"),
        ("version", r"packed in layout version 1"),
    ],
)
def test_states_of_others_change_nothing(other: str, message: str, seed: int) -> None:
    experts = made(seed)
    before = snapshot(experts)
    if other == "version":
        state = snapshot(made(seed + 1))
        state["gate_up.layout"][0] = state["down.layout"][0] = 1
    elif other in ("count", "rank"):
        state = snapshot(shard(made(seed + 1), 1 if other == "rank" else 0, 2, "experts"))
        if other == "rank":
            experts = shard(experts, 0, 2, "experts")
            before = snapshot(experts)
    else:
        state = snapshot(made(seed + 1, "w8") if other == "w8" else made(seed + 1, i=48))
    with pytest.raises(RuntimeError, match=message):
        experts.load_state_dict(state)
    assert_same_state(experts, before)


def test_compiled_whole(seed: int) -> None:
    experts, given = made(seed), inputs(seed)
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        testing.assert_equal(compiled(*given), experts(*given))


def test_exported_for_any_number_of_tokens(seed: int) -> None:
    tokens = torch.export.Dim("tokens", min=2)
    with torch.inference_mode():
        experts, given = made(seed), inputs(seed)
        shapes = ({0: tokens},) * 3
        program = torch.export.export(experts, given, dynamic_shapes=shapes).module()
        for others in (given, inputs(seed, tokens=4)):
            testing.assert_equal(program(*others), experts(*others))


def expert(seed: int, **options: Any) -> Expert:
    """Of H = 64 and I = 32."""
    quantized = [qcutlass.quantize(randn(*shape, seed=seed), **{"bits": 4, "group_size": 32, **options})
                 for shape in ((32, H), (32, H), (H, 32))]  # fmt: skip
    return Expert(*(WeightOnlyLinear(each) for each in quantized))


def test_joined_layers_agree_in_types(seed: int) -> None:
    """One expert has no zeros and one real-valued ones, scales are of several types, one has biases."""
    experts = [expert(seed, symmetric=True), expert(seed + 1), expert(seed + 2, scale_dtype=torch.float16)]
    real = experts[2].gate
    assert real.zeros is not None
    real.zeros = real.zeros.half() + 0.25
    experts[1].down.bias = randn(H, seed=seed).half()
    joined = QuantExperts.from_layers(experts, 3)
    joined.check()
    assert (joined.gate_up.scales.dtype, joined.down.scales.dtype) == (torch.float32, torch.float32)
    for index, given in enumerate(experts):
        for layer, expected in zip(joined.expert(index), given, strict=True):
            testing.assert_equal(layer.weights(), expected.weights())
    assert joined.down.bias is not None
    testing.assert_equal(joined.down.bias[1], experts[1].down.bias.float())
    assert not bool(joined.down.bias[0].any())


def with_minimums(seed: int, bits: int = 4) -> Expert:
    """Of H = 64 and I = 32; scales are negative and 0 too."""
    g = torch.Generator().manual_seed(seed)

    def layer(n: int, k: int) -> WeightOnlyLinear:
        codes = torch.randint(0, 2**bits, (n, k), generator=g, dtype=torch.uint8)
        sign = torch.randint(-1, 2, (k // 32, n), generator=g)
        scales = sign * torch.rand(k // 32, n, generator=g) / (2**bits * k**0.5)
        minimums = torch.randn(k // 32, n, generator=g) / k**0.5
        return WeightOnlyLinear(qcutlass.QuantizedTensor(codes, scales, None, bits, 32, minimums=minimums))

    return Expert(layer(32, H), layer(32, H), layer(H, 32))


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_with_minimums(bits: int, seed: int) -> None:
    experts = [with_minimums(seed + index, bits) for index in range(E)]
    stacked, given = QuantExperts.from_layers(experts, E), inputs(seed)
    stacked.check()
    assert stacked.gate_up.minimums is not None
    for index, each in enumerate(experts):
        for layer, expected in zip(stacked.expert(index), each, strict=True):
            testing.assert_equal(layer.weights(), expected.weights())
    exact, dense = (computed(stacked, *given, dtype) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(stacked(*given), dense, exact) <= NOISE
    for rank in range(2):
        part = shard(stacked, rank, 2, "experts")
        testing.assert_equal(part.expert(1).down.weights(), experts[3 * rank + 1].down.weights())
    other = QuantExperts.from_layers([with_minimums(seed + 50, bits)] * E, E)
    other.load_state_dict(snapshot(stacked))
    testing.assert_equal(other(*given), stacked(*given))
    stacked.down.minimums = stacked.down.minimums.flip(0)  # type: ignore[union-attr]
    assert noise_ratio(stacked(*given), dense, exact) > 10 * NOISE


def test_joined_layers_have_global_scales_of_their_own(seed: int) -> None:
    """Gate and up of an expert agree or not, experts need not; 8-bit scales beside floating ones become these."""
    scheme = {"weight_dtype": "e2m1", "group_size": 16}
    options = [{"scale_dtype": torch.float8_e4m3fn}] * 2 + [{"scale_dtype": torch.float16}]

    def layers(index: int, places: int) -> Expert:
        shapes = ((32, H), (32, H), (H, 32))
        each = [
            quantize_floats(randn(*shape, seed=seed + index + place % places), **scheme, **options[index])
            for place, shape in enumerate(shapes)
        ]
        return Expert(*(WeightOnlyLinear(one) for one in each))

    for count, places, kept in ((2, 1, True), (2, 2, False), (3, 1, False)):
        experts = [layers(index, places) for index in range(count)]
        stacked = QuantExperts.from_layers(experts, count)
        stacked.check()
        assert (stacked.gate_up.global_scale is not None) == kept
        for index, given in enumerate(experts):
            for layer, expected in zip(stacked.expert(index), given, strict=True):
                testing.assert_equal(layer.weights(), expected.weights())


def ordered(seed: int, **options: Any) -> Expert:
    """One whose columns have an order, one for gate and up."""
    found = expert(seed, **options)
    g = torch.Generator().manual_seed(seed)
    found.gate.perm = found.up.perm = torch.randperm(H, generator=g).int()
    found.down.perm = torch.randperm(32, generator=g).int()
    return found


def in_order(seed: int, i: int = 64) -> QuantExperts:
    """Experts with orders of their own, but for the first one, which has none."""
    experts = made(seed, "w8", i)
    layers = [experts.expert(index) for index in range(E)]
    for index, (gate, up, down) in enumerate(layers[1:]):
        g = torch.Generator().manual_seed(seed + index)
        gate.perm = up.perm = torch.randperm(H, generator=g).int()
        down.perm = torch.randperm(i, generator=g).int()
    return QuantExperts.from_layers(layers, E)


@pytest.mark.parametrize("i", [64, 40])
def test_experts_with_orders_of_columns(i: int, seed: int) -> None:
    experts, given = in_order(seed, i), inputs(seed)
    experts.check()
    for stack in (experts.gate_up, experts.down):
        assert stack.perm is not None
        assert (stack.perm.dtype, stack.perm.shape) == (torch.int32, (E, stack.in_features))
        assert torch.equal(stack.perm[0], torch.arange(stack.in_features))
    exact, dense = (computed(experts, *given, dtype) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(experts(*given), dense, exact) <= NOISE
    twin = copy.deepcopy(experts)
    for stack in (twin.gate_up, twin.down):
        assert stack.perm is not None
        stack.perm.copy_(stack.perm.roll(1, 0))  # those of other experts
        assert noise_ratio(twin(*given), dense, exact) > 10 * NOISE
    twin.load_state_dict(experts.state_dict())
    assert_same_state(twin, experts.state_dict())
    moved = twin.to("meta").down.perm
    assert moved is not None
    assert (moved.is_meta, moved.dtype) == (True, torch.int32)
    again = made(seed, "w8", i)
    again.load_state_dict(experts.state_dict())  # which brings what the experts lack
    testing.assert_equal(again(*given), experts(*given))


def test_orders_of_columns_that_there_are_not(seed: int) -> None:
    experts = in_order(seed)
    perm = experts.down.perm
    assert perm is not None
    for wrong, error, message in (
        (perm + 1, ValueError, r"perm: expected values in \[0, 64\)"),
        (perm[:, 1:], ValueError, r"perm: expected shape \[experts, K\] = \[6, 64\], got \[6, 63\]"),
        (perm[1:], ValueError, r"perm: expected 6 experts, 2 dimensions"),
        (perm.long(), TypeError, "perm: expected a tensor of int32"),
    ):
        experts.down.perm = wrong
        with pytest.raises(error, match=message):
            experts.check()


def test_parts_of_experts_with_orders(seed: int) -> None:
    experts, given = in_order(seed), inputs(seed)
    exact, dense = (computed(experts, *given, dtype) for dtype in (torch.float64, torch.float32))
    parts = [shard(experts, rank, 2, "experts") for rank in range(2)]
    assert noise_ratio(sum(part(*given).double() for part in parts), dense, exact) <= 2 * NOISE
    parts = [shard(experts, rank, 2, "intermediate") for rank in range(2)]
    assert all(part.gate_up.perm is not None for part in parts)
    assert all(part.down.perm is None for part in parts)  # channels of gate and up lie as its columns do
    check_sum(experts, given, parts)


def test_layers_that_cannot_be_joined(seed: int) -> None:
    def joined(*experts: Expert) -> None:
        QuantExperts.from_layers(experts, len(experts))

    with pytest.raises(
        ValueError, match=r"expert 1: gate has .* = \[32, 64, 8, 32, integers\], not \[32, 64, 4, 32, integers\]"
    ):
        joined(expert(seed), expert(seed, bits=8))
    with pytest.raises(ValueError, match=r"expert 1: gate has .* = \[32, 64, 4, 16, integers\], not"):
        joined(expert(seed), expert(seed, group_size=16))
    with pytest.raises(
        ValueError, match=r"expert 1: gate has .* = \[.*, integers with minimums\], not \[.*, integers\]"
    ):
        joined(expert(seed), with_minimums(seed))
    other = ordered(seed)
    for perm in (None, other.gate.perm.flip(0)):  # type: ignore[union-attr]
        other.up.perm = perm
        with pytest.raises(ValueError, match=r"expert 1: gate and up reorder their input \(perm\) differently"):
            joined(ordered(seed), other)
    scaled = expert(seed)
    scaled.down.act_scale = torch.ones(32)
    with pytest.raises(ValueError, match=r"expert 0: down scales its input \(act_scale\)"):
        joined(scaled)


def test_float_experts_that_cannot_be_quantised(seed: int) -> None:
    gate_up, down = weights(seed)
    with pytest.raises(TypeError, match=r"scheme: expected qcutlass\.WeightOnly for experts, got W8A8"):
        QuantExperts.from_weights(gate_up, down, qcutlass.W8A8())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"gate_up, down: expected \[E, 2 I, H\] and \[E, H, I\], got"):
        QuantExperts.from_weights(gate_up, down.transpose(1, 2)[:, :32], SCHEMES["w4"])
    with pytest.raises(ValueError, match="gate_up: expected finite values"):
        QuantExperts.from_weights(gate_up.where(gate_up < gate_up.max(), torch.inf), down, SCHEMES["w4"])


class MixtralExperts(nn.Module):
    """As a model of transformers has it."""

    def __init__(self, gate_up: Tensor, down: Tensor, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)
        self.act_fn = act_fn


def test_experts_are_replaced_by_the_class_and_the_activation(seed: int) -> None:
    layers = {"known": nn.SiLU(), "other": nn.ReLU(), "hurt": nn.SiLU()}
    model = nn.ModuleDict({name: MixtralExperts(*weights(seed), act) for name, act in layers.items()})
    with torch.no_grad():
        model["hurt"].get_parameter("down_proj")[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="hurt: down: expected finite values"):
        qcutlass.replace_linear(model, SCHEMES["w4"])
    assert isinstance(model["known"], MixtralExperts)
    del model["hurt"]
    assert qcutlass.replace_linear(model, SCHEMES["w4"]) == ["known"]
    assert isinstance(model["other"], MixtralExperts)
    assert_same_state(model["known"], snapshot(made(seed)))
    with pytest.raises(ValueError, match="is itself the experts of a mixture"):
        qcutlass.replace_linear(MixtralExperts(*weights(seed), nn.SiLU()), SCHEMES["w4"])


def test_experts_with_hooks_or_a_forward_of_their_own_are_refused(seed: int) -> None:
    """Neither ran in the module that took their place."""
    model = nn.ModuleDict({"experts": MixtralExperts(*weights(seed), nn.SiLU())})
    handle = model["experts"].register_forward_hook(lambda module, inputs, out: 2 * out)
    with pytest.raises(ValueError, match=r"experts: has forward hooks, .* or list it in skip$"):
        qcutlass.replace_linear(model, SCHEMES["w4"])
    handle.remove()
    model["experts"].forward = lambda *inputs: inputs[0]
    with pytest.raises(ValueError, match=r"experts: its forward was replaced, .* or list it in skip$"):
        qcutlass.replace_linear(model, SCHEMES["w4"])
    assert isinstance(model["experts"], MixtralExperts)
