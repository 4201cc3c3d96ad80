"""Layers that quantise their activations and share one product: outputs, states, copies, gates, models."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.python.eight_bit import needs_instructions
from tests.python.models.test_block_fusing import dense, prompt, tiny
from tests.python.modules import assert_same_state, randn, random_linear, snapshot
from torch import Tensor, nn

from qcutlass import (
    FP8,
    W4A8,
    W8A8,
    Blockwise,
    QuantLinear,
    WeightOnly,
    fuse_block,
    fuse_projections,
    interleave_gate_up,
    testing,
)
from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.layers import BlockwiseLinear, FusedProjection, Int8Linear, use_activations
from qcutlass.tuning.layers import layers_of

K: Final = 128
SCHEMES: Final[dict[str, Any]] = {
    "w8a8": W8A8(),
    "w8a8, zero points": W8A8(symmetric=False),
    "w8a8, static": W8A8("static"),
    "w8a8, static, zero points": W8A8("static", symmetric=False),
    "fp8": FP8(),
    "fp8, static": FP8("static"),
    "w4a8, fp8": W4A8(group_size=64),
    "w4a8, int8": W4A8(group_size=K, symmetric=True, activations="int8"),
    "blockwise int8": Blockwise(64),
    "blockwise fp8": Blockwise(64, "fp8"),
}


def statistics() -> ActivationStatistics:
    """Of inputs that are smoothed, too."""
    smooth = torch.rand(K, generator=torch.Generator().manual_seed(0)) + 0.5
    return ActivationStatistics(torch.full((K,), -3.0), torch.full((K,), 4.0), smooth)


def layers(scheme: Any, seed: int, sizes: dict[str, int], bias: bool = True) -> nn.ModuleDict:
    known = None if isinstance(scheme, WeightOnly | W4A8 | Blockwise) else statistics()
    linears = {name: random_linear(n, K, seed + i, bias=bias) for i, (name, n) in enumerate(sizes.items())}
    return nn.ModuleDict(
        {name: QuantLinear.from_linear(linear, scheme, statistics=known) for name, linear in linears.items()}
    )


def attention(scheme: Any, seed: int, times: int = 1) -> nn.ModuleDict:
    """The last layer may end anywhere; blocks of 64 channels, or so many times 64, end with the others."""
    return layers(scheme, seed, {"q_proj": 128 * times, "k_proj": 64 * times, "v_proj": 40})


def fused(model: nn.ModuleDict) -> Any:
    twin = copy.deepcopy(model)
    assert fuse_projections(twin).skipped == {}
    return twin


def outputs(model: Any, a: Tensor) -> list[Tensor]:
    return [layer(a) for layer in model.values()]


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of activations that were quantised and multiplied."""
    seen: list[torch.Size] = []
    own = QuantLinear._computed

    def count(layer: QuantLinear, a: Tensor, activation: str | None) -> Tensor:
        seen.append(a.shape)
        return own(layer, a, activation)

    monkeypatch.setattr(QuantLinear, "_computed", count)
    return seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_outputs_are_those_of_the_separate_layers(
    scheme: Any, mode: Any, seed: int, quantised: list[torch.Size]
) -> None:
    """And the input is quantised once."""
    model = attention(scheme, seed)
    together = fused(model)
    a = randn(2, 3, K, seed=seed)
    with mode():
        expected = outputs(model, a)
        quantised.clear()
        for _ in range(2):
            for out, wanted in zip(outputs(together, a), expected, strict=True):
                testing.assert_equal(out, wanted)
        assert quantised == [a.shape] * 2
        a = a.clone()
        together["q_proj"](a)
        a.mul_(2)
        testing.assert_equal(together["k_proj"](a), model["k_proj"](a))


COPIES: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "casts": lambda model: copy.deepcopy(model).half().to("cpu"),
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_states_and_copies_are_those_of_the_separate_layers(scheme: Any, seed: int) -> None:
    model, other = attention(scheme, seed), attention(scheme, seed)
    for layer in other.values():
        layer.w_scale.mul_(2) if hasattr(layer, "w_scale") else layer.scales.mul_(2)  # type: ignore[operator,union-attr]
    together = fused(other)
    assert_same_state(together, snapshot(other))
    assert together.load_state_dict(model.state_dict()).missing_keys == []
    a = randn(3, K, seed=seed)
    expected = outputs(model, a)
    together["k_proj"](a)  # the others' parts are waiting, and are no part of a copy
    for make in COPIES.values():
        twin = make(together)
        assert_same_state(twin, snapshot(model))
        for out, wanted in zip(outputs(twin, a), expected, strict=True):
            testing.assert_equal(out, wanted)
    separate = nn.ModuleDict({name: part.separate() for name, part in together.items()})
    assert [type(layer) for layer in separate.values()] == [type(layer) for layer in model.values()]
    assert_same_state(separate, snapshot(model))
    for out, wanted in zip(outputs(separate, a), expected, strict=True):
        testing.assert_equal(out, wanted)
    assert {layer.n for layer in layers_of(together, None)} == {128 + 64 + 40}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_gates_are_parts_of_products_that_take_them(scheme: Any, seed: int) -> None:
    model = layers(scheme, seed, {"gate_proj": 128, "up_proj": 128})
    together = fused(model)
    product, a = together["gate_proj"].product, randn(3, K, seed=seed)
    gate, up = outputs(model, a)
    whole = product.weights()
    assert product.interleave()
    assert product.interleaved
    testing.assert_equal(product.weights(), interleave_gate_up(*whole.chunk(2)))
    for twin in (together, *(make(together) for make in COPIES.values())):
        for out, wanted in zip(outputs(twin, a), (gate, up), strict=True):
            testing.assert_equal(out, wanted)
        assert_same_state(twin, snapshot(model))
        assert_gated(twin["gate_proj"].product.gated(a, "silu_mul"), gate, up, 1e-6)
    other = layers(scheme, seed + 5, {"gate_proj": 128, "up_proj": 128})
    assert together.load_state_dict(other.state_dict()).missing_keys == []
    assert_same_state(together, snapshot(other))
    assert_gated(product.gated(a, "silu_mul"), *outputs(other, a), 1e-6)


def assert_gated(out: Tensor, gate: Tensor, up: Tensor, most: float) -> None:
    """Asserts SwiGLU of two outputs: but for a faster exponential, and on a GPU for their rounding."""
    wanted = nn.functional.silu(gate.double()) * up.double()
    assert float((out.double() - wanted).norm() / wanted.norm()) < most


def _halved(model: nn.ModuleDict) -> None:
    layer: Any = model["k_proj"]
    layer.a_scale = layer.a_scale / 2


def _one_scale(model: nn.ModuleDict) -> None:
    layer: Any = model["k_proj"]
    model["k_proj"] = Int8Linear(layer._codes(), layer.w_scale[:1].clone(), bias=layer.bias, smooth=layer.smooth)


def _other(name: str, n: int, scheme: Any) -> Callable[[nn.ModuleDict], None]:
    return lambda model: model.update({name: QuantLinear.from_linear(random_linear(n, K, 3), scheme)})


def _narrow(model: nn.ModuleDict) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        model[name] = QuantLinear.from_linear(random_linear(48, K, 3), Blockwise(64))


@pytest.mark.parametrize(
    ("scheme", "change", "reason"),
    [
        (W8A8("static"), _halved, "a_scale differs in its values"),
        (W8A8(), _one_scale, "k_proj has one w_scale for all channels"),
        (Blockwise(64), _narrow, "q_proj has 48 channels, no multiple of 64"),
        (W8A8(), _other("v_proj", 40, FP8()), "kinds differ: Int8Linear, Int8Linear, Fp8Linear"),
        (
            W4A8(group_size=64),
            _other("k_proj", 64, W4A8(group_size=64, activations="int8")),
            "activations differs: fp8, int8, fp8",
        ),
        (FP8(), lambda model: model.to("meta"), "q_proj is on the meta device"),
    ],
    ids=["scales of activations", "one scale", "blocks", "kinds", "activations", "meta"],
)  # fmt: skip
def test_what_cannot_be_fused_is_left_alone(scheme: Any, change: Any, reason: str, seed: int) -> None:
    model = attention(scheme, seed)
    change(model)
    before = dict(model.named_modules())
    (why,) = fuse_projections(model).skipped.values()
    assert why.startswith(reason)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scheme", [W8A8(), FP8(), W4A8(group_size=32), Blockwise(32)], ids=str)
def test_models_give_the_same_logits(scheme: Any, compiled: bool, seed: int, quantised: list[torch.Size]) -> None:
    """Of a Llama whose blocks are fused otherwise, too: each of its four products quantises once."""
    model = tiny("Llama", seed, scheme=scheme)
    together = copy.deepcopy(model)
    assert fuse_projections(together).skipped == {}
    ids, _ = prompt(4, seed)
    with torch.no_grad():
        expected = model(ids).logits
        quantised.clear()
        call = torch.compile(together, backend="aot_eager") if compiled else together
        found_logits = call(ids).logits
        assert compiled or (torch.equal(found_logits, expected) and len(quantised) == 3 * 4)
        blocks = copy.deepcopy(model)
        found = fuse_block(blocks)
        assert found.skipped == {}
        assert isinstance(blocks.model.layers[0].mlp.gate_proj, FusedProjection)
        close = blocks(ids).logits
        assert all(block.mlp.gate_proj.product.interleave() for block in blocks.model.layers)
        with_gates = blocks(ids).logits  # as on a GPU
    for each in (found_logits, close, with_gates):
        errors = (each - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
        assert float(errors.median()) < 1e-5  # of sums in another order; in a few sequences that decides a code
    assert_same_state(blocks, snapshot(model))


@pytest.mark.parametrize("scheme", [W8A8(), FP8(), W4A8(group_size=32), Blockwise(32, "fp8")], ids=str)
def test_fused_models_are_saved_as_they_were(scheme: Any, seed: int, tmp_path: Path) -> None:
    model = tiny("Llama", seed, scheme=scheme)
    ids, _ = prompt(2, seed)
    with torch.no_grad():
        expected = model(ids).logits
        fuse_block(model)
        model.save_pretrained(tmp_path)
        saved = type(model).from_pretrained(tmp_path, dtype=torch.float32)
        testing.assert_equal(saved(ids).logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 300])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_outputs_and_gates_on_a_gpu(scheme: Any, m: int, seed: int) -> None:
    if scheme == SCHEMES["blockwise fp8"]:
        scheme = Blockwise(128, "fp8")  # whose kernels take no other blocks
    model = attention(scheme, seed, times=2).cuda()
    a = randn(m, K, seed=seed).to("cuda", torch.float16)
    for out, wanted in zip(outputs(fused(model), a), outputs(model, a), strict=True):
        testing.assert_equal(out, wanted)
    # Blocks of 128 that gate and up have by themselves. Of fp8 by rows few channels take one kernel, together or not.
    channels = 384 if isinstance(scheme, Blockwise) else 128
    pair = layers(scheme, seed, {"gate_proj": channels, "up_proj": channels}).cuda()
    together = fused(pair)
    product, (gate, up) = together["gate_proj"].product, outputs(pair, a)
    assert product.interleave()
    assert_gated(product.gated(a, "silu_mul"), gate, up, 1e-3)
    for out, wanted in zip(outputs(together, a), (gate, up), strict=True):
        testing.assert_equal(out, wanted)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("scheme", [Blockwise(32), Blockwise(128, "fp8")], ids=str)
def test_blocks_on_a_gpu_have_the_gate_in_their_product(scheme: Any, seed: int) -> None:
    needs_instructions(torch.float8_e4m3fn if scheme.type == "fp8" else torch.int8)
    whole = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    options = whole if scheme.block_size == 128 else {}
    model = tiny("Llama", seed, scheme=scheme, **options).to("cuda", torch.float16)
    ids = prompt(2, seed)[0].cuda()
    together = copy.deepcopy(model)
    assert fuse_block(together).skipped == {}
    for block in together.model.layers:
        first, second = block.mlp.gate_proj, block.mlp.up_proj
        assert first.product.interleaved
        a = randn(5, first.in_features, seed=seed).to("cuda", torch.float16)
        assert_gated(first.product.gated(a, "silu_mul"), first(a), second(a), 1e-3)
    assert_same_state(together, snapshot(model))
    # Rounding decides codes of activations: the two differ from one another as much as each does from exact ones.
    exact = dense(model, torch.float32)(ids).logits
    found, expected = (float((each(ids).logits - exact).norm() / exact.norm()) for each in (together, model))
    assert found < 1.5 * expected


def test_blocks_of_the_last_layer_may_be_cut(seed: int) -> None:
    model = layers(Blockwise(64), seed, {"q_proj": 64, "k_proj": 64, "v_proj": 40})
    together = fused(model)
    part = together["v_proj"].separate()
    assert isinstance(part, BlockwiseLinear)
    assert part.w_scale.shape == (1, 2)
    testing.assert_equal(part.weights(), model["v_proj"].weights())  # type: ignore[operator]


@pytest.mark.parametrize(("scheme", "activations"), [(FP8(), "none"), (WeightOnly(4, 32), "fp8")], ids=str)
def test_activations_are_chosen_before_layers_are_fused(scheme: Any, activations: str, seed: int) -> None:
    model = attention(scheme, seed)
    together, a = fused(model), randn(3, K, seed=seed)
    with pytest.raises(ValueError, match=r"q_proj\.product: its layers are fused; choose activations before"):
        use_activations(together, activations)
    for out, wanted in zip(outputs(together, a), outputs(model, a), strict=True):
        testing.assert_equal(out, wanted)
    assert use_activations(model, activations) == ["q_proj", "k_proj", "v_proj"]


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn], ids=str)
def test_pickles_of_scales_of_8_bits(scale_dtype: torch.dtype, seed: int) -> None:
    size = 32 if scale_dtype == torch.float8_e8m0fnu else 16
    scheme = WeightOnly(group_size=size, scale_dtype=scale_dtype, weight_dtype="e2m1")
    model, a = attention(scheme, seed), randn(3, K, seed=seed)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert_same_state(twin, snapshot(model))
        for out, wanted in zip(outputs(twin, a), outputs(model, a), strict=True):
            testing.assert_equal(out, wanted)
