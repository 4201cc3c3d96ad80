"""Layers that share one product: what they compute, their states, copies, moves and compilation; what is not fused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.python.modules import Decoder, assert_same_state, randn, randomized, snapshot
from torch import Tensor, nn

import qcutlass
from qcutlass import QuantLinear, WeightOnly, fuse_projections, testing
from qcutlass.layers import FusedProjection, WeightOnlyLinear
from qcutlass.layers.fusing import GROUPS
from qcutlass.tuning.layers import layers_of

K = 128
SIZES = {"q_proj": 48, "k_proj": 16, "v_proj": 40}  # the last may end anywhere


def case(n: int, **options: Any) -> testing.Case:
    return testing.Case(3, n, K, **{"group_size": 64, "zeros": "int", **options})


MODES = [torch.no_grad, torch.inference_mode]

CASES: dict[str, dict[str, Any]] = {
    "int zeros": {},
    "8 bits, symmetric, bias, silu": {"bits": 8, "zeros": "none", "bias": True, "activation": "silu"},
    "real zeros, act_scale, perm": {"zeros": "real", "act_scale": True, "perm": True, "scale_dtype": torch.float32},
    "per channel": {"group_size": K},
}


def attention(seed: int, sizes: dict[str, int] | None = None, **options: Any) -> nn.ModuleDict:
    """Layers of one input: act-order and activation scales are the first one's."""
    layers: dict[str, nn.Module] = {}
    shared: dict[str, Any] = {}
    for i, (name, n) in enumerate((sizes or SIZES).items()):
        p = case(n, **options).random(seed=seed + i)
        weight = qcutlass.QuantizedTensor(p.codes, p.scales, p.zeros, p.bits, p.group_size)
        shared = shared or {"act_scale": p.act_scale, "perm": p.perm}
        layers[name] = QuantLinear.from_quantized(weight, bias=p.bias, activation=p.activation, **shared)
    return nn.ModuleDict(layers)


def fused(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    assert fuse_projections(twin).skipped == {}
    return twin


def outputs(model: Any, a: Tensor) -> list[Tensor]:
    return [layer(a) for layer in model.values()]


def count_products(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the activations of every product from now on."""
    seen: list[torch.Size] = []
    forward = WeightOnlyLinear.forward

    def counted(self: WeightOnlyLinear, a: Tensor) -> Tensor:
        seen.append(a.shape)
        return forward(self, a)

    monkeypatch.setattr(WeightOnlyLinear, "forward", counted)
    return seen


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_outputs_are_those_of_the_separate_layers(
    options: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attention(seed, **options)
    together = fused(model)
    a = randn(2, 3, K, seed=seed)
    expected = outputs(model, a)
    products = count_products(together, monkeypatch)
    for _ in range(2):
        for out, wanted in zip(outputs(together, a), expected, strict=True):
            testing.assert_equal(out, wanted)
    assert products == [a.shape] * 2
    assert [tuple(out.shape) for out in expected] == [(2, 3, n) for n in SIZES.values()]


def test_every_call_gets_the_product_of_its_own_input(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attention(seed)
    together: Any = fused(model)
    a, b = randn(3, K, seed=seed), randn(3, K, seed=seed + 1)
    products = count_products(together, monkeypatch)
    calls: list[tuple[str, Tensor]] = [
        ("q_proj", a), ("k_proj", b), ("v_proj", b),  # of attention across two sequences
        ("v_proj", a), ("v_proj", a), ("k_proj", a),  # one of them twice
        ("k_proj", a.clone()), ("q_proj", a),
    ]  # fmt: skip
    found = [together[name](x) for name, x in calls]
    assert len(products) == 2 + 2 + 2
    for out, (name, x) in zip(found, calls, strict=True):
        testing.assert_equal(out, model[name](x), label=name)


@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_is_changed_in_place_is_multiplied_again(mode: Any, seed: int) -> None:
    model = attention(seed)
    together: Any = fused(model)
    with mode():
        a = randn(3, K, seed=seed)
        together["q_proj"](a)
        a.add_(1)
        testing.assert_equal(together["k_proj"](a), model["k_proj"](a))


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_are_changed_in_place_multiply_again(mode: Any, seed: int) -> None:
    """Of a model that was made in this mode, too."""
    with mode():
        model = attention(seed)
        together: Any = fused(model)
        a = randn(3, K, seed=seed)
        together["q_proj"](a)
        together["q_proj"].product.scales.mul_(2)
        for name in ("k_proj", "v_proj"):
            model[name].scales.mul_(2)  # type: ignore[operator,union-attr]
            testing.assert_equal(together[name](a), model[name](a))


def _doubled_input(module: nn.Module, inputs: tuple[Tensor, ...], *_: Any) -> None:
    inputs[0].mul_(2)


def _doubled_first(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda a: forward(a.mul_(2))


CHANGES: dict[str, Callable[[Any], object]] = {
    "pre-hook": lambda layer: layer.register_forward_pre_hook(_doubled_input),
    "hook": lambda layer: layer.register_forward_hook(_doubled_input),
    "forward": _doubled_first,
}


class SideBySide(nn.Module):
    """All outputs of layers."""

    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, a: Tensor) -> Tensor:
        return torch.cat([layer(a) for layer in self.layers.values()], dim=-1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in SIZES), ("k_proj", True)])
def test_hooks_that_change_the_input_in_place(name: str, compiled: bool, change: str, mode: Any, seed: int) -> None:
    model = attention(seed)
    outs = []
    for each in (SideBySide(model), SideBySide(fused(model))):  # type: ignore[arg-type]
        CHANGES[change](each.layers[name])
        call = torch.compile(each, fullgraph=True, backend="eager") if compiled else each
        with mode():
            outs.append(call(randn(3, K, seed=seed)))
    testing.assert_equal(*outs)


def test_nothing_is_kept_when_all_have_been_called(seed: int) -> None:
    together: Any = fused(attention(seed))
    outputs(together, randn(3, K, seed=seed))
    assert together["q_proj"].product._pending is None


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_states_are_those_of_the_separate_layers(options: dict[str, Any], seed: int) -> None:
    model, other = attention(seed, **options), attention(seed + 10, **options)
    together = fused(other)
    assert_same_state(together, snapshot(other))
    state = model.state_dict()
    assert together.load_state_dict(state).missing_keys == []
    assert_same_state(together, state)
    a = randn(3, K, seed=seed)
    for out, wanted in zip(outputs(together, a), outputs(model, a), strict=True):
        testing.assert_equal(out, wanted)
    separate: Any = attention(seed + 20, **options)
    separate.load_state_dict(together.state_dict())
    assert_same_state(separate, state)
    assert_same_state(nn.ModuleDict({name: part.separate() for name, part in together.items()}), state)  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_dtype": torch.float32}, "q_proj: scales: the fused layers have float16 .*, got float32"),
        ({"zeros": "none"}, "q_proj: zeros: the fused layers have uint8 .*, got none"),
        ({"perm": True}, "q_proj: perm: the fused layers have none, got int32"),
        ({"bits": 8}, "q_proj: the weights to load have bits = 8, not 4"),
    ],
)
def test_states_of_other_types_are_refused(options: dict[str, Any], message: str, assign: bool, seed: int) -> None:
    together = fused(attention(seed, dtype=torch.float16))
    before = snapshot(together)
    with pytest.raises(RuntimeError, match=message):
        together.load_state_dict(attention(seed + 10, dtype=torch.float16, **options).state_dict(), assign=assign)
    assert_same_state(together, before)


def test_a_state_whose_layers_differ_in_what_they_share_is_refused(seed: int) -> None:
    together = fused(attention(seed, act_scale=True))
    state = snapshot(together)
    state["v_proj.act_scale"] *= 2
    with pytest.raises(RuntimeError, match="v_proj: act_scale: expected that of the layers it is fused with"):
        together.load_state_dict(state)


def test_missing_and_unexpected_tensors_are_named(seed: int) -> None:
    together = fused(attention(seed))
    state = snapshot(together)
    state["k_proj.weight"] = state.pop("k_proj.scales")
    found = together.load_state_dict({k: t for k, t in state.items() if "k_proj" not in k}, strict=False)
    assert found.missing_keys == ["k_proj.w_packed", "k_proj.scales", "k_proj.zeros", "k_proj.layout"]
    with pytest.raises(RuntimeError, match=r"k_proj: scales: expected a torch.Tensor"):
        together.load_state_dict(state)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "casts and moves": lambda model: copy.deepcopy(model).half().to("cpu").to(torch.float64),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_and_moves(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attention(seed)
    together: Any = fused(model)
    together["q_proj"](randn(3, K, seed=seed))  # the others' parts are waiting, and are no part of a copy
    twin = COPIES[kind](together)
    assert_same_state(twin, snapshot(model))
    a = randn(3, K, seed=seed + 1)
    expected = outputs(model, a)
    together["q_proj"].product.w_packed.zero_()
    products = count_products(twin, monkeypatch)
    for out, wanted in zip(outputs(twin, a), expected, strict=True):
        testing.assert_equal(out, wanted)
    assert len(products) == 1
    moved = twin.to("meta")
    assert all(tensor.is_meta for tensor in moved.state_dict().values())
    with pytest.raises(RuntimeError, match="on the meta device take no state"):
        moved.load_state_dict(model.state_dict(), assign=True)


def decoder(seed: int) -> Decoder:
    model = Decoder()
    randomized(model, seed)
    qcutlass.replace_linear(model, WeightOnly(group_size=32))
    return model.eval()


def test_a_model_gives_the_same_logits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(seed)
    together = copy.deepcopy(model)
    found = fuse_projections(together)
    assert found.fused[0] == tuple(f"layers.0.self_attn.{name}" for name in GROUPS[0])
    assert found.fused[3] == tuple(f"layers.1.mlp.{name}" for name in GROUPS[1])
    assert len(found.fused) == 4
    tokens = torch.randint(0, 16, (2, 12), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model(tokens)
        products = count_products(together, monkeypatch)
        testing.assert_equal(together(tokens), expected)
    assert len(products) == 2 * 4  # qkv, o, gate and up, down
    with torch.inference_mode():
        testing.assert_equal(together(tokens), expected)
    assert_same_state(together, snapshot(model))
    assert {layer.n for layer in layers_of(together, None)} == {192, 64, 256}


def test_fused_models_compile_in_one_graph(seed: int) -> None:
    model = decoder(seed)
    together = fused(model)
    tokens = torch.randint(0, 16, (3, 12), generator=torch.Generator().manual_seed(seed))
    compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
    products: list[str] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        products.extend(str(node.target) for node in graph.graph.nodes if "qcutlass" in str(node.target))
        return graph

    with torch.no_grad():
        expected = model(tokens)
        for _ in range(2):
            testing.assert_equal(compiled(tokens), expected)
        torch._dynamo.reset()
        testing.assert_equal(torch.compile(together, fullgraph=True, backend=count)(tokens), expected)
    assert len(products) == 2 * 4
    assert all(part.product._pending is None for part in together.modules() if isinstance(part, FusedProjection))


def hooked(model: nn.ModuleDict) -> None:
    model["k_proj"].register_forward_hook(lambda module, inputs, out: 2 * out)


def wrapped(model: nn.ModuleDict) -> None:
    model["k_proj"].forward = lambda a: a  # type: ignore[method-assign,assignment]


def ordered(model: nn.ModuleDict) -> None:
    layer: Any = model["v_proj"]
    layer.perm = layer.perm.flip(0)


def replaced(name: str, layer: nn.Module) -> Callable[[nn.ModuleDict], None]:
    def replace(model: nn.ModuleDict) -> None:
        model[name] = layer

    return replace


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (hooked, {}, "k_proj has forward hooks"),
        (wrapped, {}, "k_proj has forward hooks"),
        (ordered, {"perm": True}, "perm differs in its values"),
        (replaced("v_proj", nn.Linear(K, 16)), {}, "v_proj: expected a quantised linear layer, got Linear"),
        (
            replaced("k_proj", QuantLinear.from_linear(nn.Linear(K, 16), qcutlass.W8A8())),
            {},
            "kinds differ: WeightOnlyLinear, Int8Linear, WeightOnlyLinear",
        ),
        (replaced("k_proj", QuantLinear.from_linear(nn.Linear(64, 16), group_size=64)), {}, "in_features differs: 128"),
        (replaced("k_proj", QuantLinear.from_linear(nn.Linear(K, 16), bits=8)), {}, "bits differs: 4, 8, 4"),
        (replaced("k_proj", QuantLinear.from_linear(nn.Linear(K, 16))), {}, "group_size differs: 64, 128, 64"),
        (
            replaced("k_proj", QuantLinear.from_linear(nn.Linear(K, 16, bias=False), group_size=64, symmetric=True)),
            {"scale_dtype": torch.float32},
            "zeros differs: uint8 2 dimensions on cpu, none, uint8",
        ),
        (
            replaced("k_proj", QuantLinear.from_linear(nn.Linear(K, 16), group_size=64)),
            {"scale_dtype": torch.float32},
            "bias differs: none, float32 1 dimensions on cpu, none",
        ),
        (
            replaced("k_proj", QuantLinear.from_linear(nn.Linear(K, 16), group_size=64, activation="relu")),
            {},
            "activation differs: None, relu, None",
        ),
        (
            replaced("q_proj", QuantLinear.from_linear(nn.Linear(K, 40, bias=False), group_size=64)),
            {"scale_dtype": torch.float32},
            "q_proj has 40 channels, no multiple of 16",
        ),
        (lambda model: model.to("meta"), {}, "q_proj is on the meta device"),
        (lambda model: fuse_projections(model), {}, "q_proj: expected a quantised linear layer, got FusedProjection"),
    ],
)
def test_what_cannot_be_fused_is_left_alone(
    change: Callable[[nn.ModuleDict], object], options: dict[str, Any], reason: str, seed: int
) -> None:
    model = attention(seed, **options)
    change(model)
    before = dict(model.named_modules())
    found = fuse_projections(nn.ModuleDict({"self_attn": model}))
    assert found.fused == ()
    ((names, why),) = found.skipped.items()
    assert names == ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    assert why.startswith(reason), why
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize(
    ("model", "groups", "error", "message"),
    [
        ("model", GROUPS, TypeError, "model: expected a torch.nn.Module, got str"),
        (nn.ReLU(), GROUPS, ValueError, "no module has layers named q_proj, k_proj, v_proj or gate_proj, up_proj"),
        (nn.ReLU(), ["q_proj"], TypeError, "groups: expected lists of names, got 'q_proj'"),
        (nn.ReLU(), [["q_proj"]], ValueError, "groups: expected two different names or more in each"),
        (nn.ReLU(), [["q", "q"]], ValueError, "groups: expected two different names or more in each"),
        (nn.ReLU(), [[1, 2]], TypeError, "groups: expected lists of names"),
    ],
)
def test_wrong_arguments(model: Any, groups: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fuse_projections(model, groups)


def test_groups_by_other_names_and_wrong_inputs(seed: int) -> None:
    model = attention(seed, {"a": 16, "b": 32, "c": 16})
    assert fuse_projections(model, [("b", "a")]).fused == (("b", "a"),)
    assert repr(model["a"]).startswith("FusedProjection(\n  in_features=128, out_features=16, channels 32 to 48")
    assert isinstance(model["c"], WeightOnlyLinear)
    with pytest.raises(ValueError, match=r"input: expected shape \[..., in_features\] = \[..., 128\], got \[3, 64\]"):
        model["a"](torch.zeros(3, 64))
    with pytest.raises(TypeError, match=r"a: expected a torch\.Tensor"):
        model["a"](None)


def mlp(seed: int, **options: Any) -> nn.ModuleDict:
    return attention(seed, {"gate_proj": 48, "up_proj": 48}, **options)


GATED = {name: options for name, options in CASES.items() if "activation" not in options} | {
    "8 bits, bias": {"bits": 8, "zeros": "none", "bias": True}
}


@pytest.mark.parametrize("options", GATED.values(), ids=GATED)
def test_interleaved_layers_are_the_same_layers(options: dict[str, Any], seed: int) -> None:
    model = mlp(seed, **options)
    together: Any = fused(model)
    product, a = together["gate_proj"].product, randn(2, 3, K, seed=seed)
    expected = outputs(model, a)
    assert product.interleave()
    assert product.interleave()  # and are once
    for out, wanted in zip(outputs(together, a), expected, strict=True):
        testing.assert_equal(out, wanted)
    gate, up = model.values()
    weight = qcutlass.interleave_gate_up(gate.weights(), up.weights())  # type: ignore[operator]
    bias = None if gate.bias is None else qcutlass.interleave_gate_up(gate.bias, up.bias)  # type: ignore[type-var]
    for name in testing.bounds.GATES:
        out = product.gated(a, name)
        assert out.shape == (2, 3, 48)
        whole = {"bias": bias, "act_scale": gate.act_scale, "activation": name}
        testing.assert_close(out, testing.reference(a, weight, **whole))  # type: ignore[arg-type]
    assert_same_state(together, snapshot(model))
    assert_same_state(nn.ModuleDict({name: part.separate() for name, part in together.items()}), snapshot(model))
    assert_same_state(copy.deepcopy(together), snapshot(model))
    other = mlp(seed + 10, **options)
    together.load_state_dict(other.state_dict())
    assert_same_state(together, snapshot(other))
    for out, wanted in zip(outputs(together, a), outputs(other, a), strict=True):
        testing.assert_equal(out, wanted)


@pytest.mark.parametrize("sizes", [{"gate_proj": 48, "up_proj": 32}, {"gate_proj": 48, "up_proj": 40}, SIZES], ids=str)
def test_layers_that_are_no_pair_are_not_interleaved(sizes: dict[str, int], seed: int) -> None:
    together: Any = nn.ModuleDict(attention(seed, sizes))
    assert fuse_projections(together, [tuple(sizes)]).skipped == {}
    product = next(iter(together.values())).product
    before = product.w_packed.clone()
    assert not product.interleave()
    assert not product.interleaved
    assert torch.equal(product.w_packed, before)
    active: Any = fused(mlp(seed, activation="relu"))
    assert not active["gate_proj"].product.interleave()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 100, 2048])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_outputs_on_a_gpu(options: dict[str, Any], dtype: torch.dtype, m: int, seed: int, ledger: Any) -> None:
    together: Any = fused(attention(seed, **options)).cuda()
    a = randn(m, K, seed=seed).to("cuda", dtype)
    product = together["q_proj"].product
    more = {name: getattr(product, name) for name in ("activation", "act_scale", "perm")}
    scheme = {"group_size": product.group_size, "bits": product.bits}
    weights = product.w_packed, product.scales, product.zeros
    rounded = qcutlass.products.selection.weight_dtype(a, *weights, bias=product.bias, **scheme, **more)
    for name, out in zip(together, outputs(together, a), strict=True):
        layer = together[name].separate()
        weight = qcutlass.dequantize(layer.w_packed, layer.scales, layer.zeros, k=K, dtype=rounded, **scheme)
        ledger.close(out, testing.reference(a, weight, bias=layer.bias, **more), label=(name, m, dtype, options))


@pytest.mark.gpu
def test_graphs_and_moves_on_a_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attention(seed)
    together: Any = fused(model)
    together["q_proj"](randn(3, K, seed=seed))  # parts that wait on the CPU are of no use on the GPU
    together.cuda()
    assert_same_state(copy.deepcopy(together).cpu(), snapshot(model))
    static = randn(3, K, seed=seed).to("cuda", torch.float16)
    for _ in range(2):
        outputs(together, static)
    products = count_products(together, monkeypatch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs(together, static)
    assert len(products) == 1
    for shift in range(3):
        static.copy_(randn(3, K, seed=seed + shift))
        graph.replay()
        for out, wanted in zip(captured, outputs(together, static), strict=True):
            testing.assert_equal(out, wanted)
