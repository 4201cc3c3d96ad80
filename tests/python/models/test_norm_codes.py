"""Norms of fused blocks that quantise for the product behind them: logits are those of separate quantisation."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.python.models.test_block_fusing import _add_to_output, _hook, _triple_input, floats, fused, prompt, tiny
from torch import Tensor

import qcutlass
from qcutlass import FP8, W4A8, W8A8, Blockwise, QuantLinear, WeightOnly, testing
from qcutlass.layers.fusing import FusedProduct

block_modules = pytest.importorskip("qcutlass.models.block_modules", reason="needs transformers")
FusedNorm = block_modules.FusedNorm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
QUANTISED: dict[str, Any] = {
    "w8a8": W8A8(),
    "w8a8, static": W8A8("static"),
    "fp8": FP8(),
    "fp8, static": FP8("static"),
    "w4a8, fp8": W4A8(group_size=32),
    "w4a8, int8": W4A8(group_size=32, symmetric=True, activations="int8"),
}
OTHERS: dict[str, Any] = {
    "w8a8, zero points": W8A8(symmetric=False),
    "w8a8, static, zero points": W8A8("static", symmetric=False),
    "blockwise": Blockwise(32),
    "weight-only": WeightOnly(group_size=32),
}
schemes = pytest.mark.parametrize("scheme", QUANTISED.values(), ids=QUANTISED)
modes = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


def model_of(scheme: Any, seed: int, family: str = "Llama", **options: Any) -> Any:
    """A model of random weights whose layers are quantised, static ones by what a prompt has them read."""
    if getattr(scheme, "activations", None) != "static":
        return tiny(family, seed, scheme=scheme, **options)
    model = floats(family, seed, **options)
    with qcutlass.calibrate(model) as statistics, torch.no_grad():
        model(prompt(2, seed)[0])
    qcutlass.replace_linear(model, scheme, skip=["lm_head"], statistics=statistics)
    return model


@contextlib.contextmanager
def separately() -> Iterator[None]:
    """Has norms leave quantising to the products."""
    own = FusedNorm._quantising
    FusedNorm._quantising = lambda self, x: None
    try:
        yield
    finally:
        FusedNorm._quantising = own


def logits_of(model: Any, seed: int, batch: int = 2) -> Tensor:
    ids = prompt(batch, seed)[0].to(model.device)
    found: Tensor = model(ids, use_cache=False).logits
    return found


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of activations that products quantised."""
    seen: list[torch.Size] = []
    for kind in (QuantLinear, FusedProduct):

        def ready(self: Any, a: Tensor, own: Callable[..., Any] = kind._ready_codes) -> Any:
            codes = own(self, a)
            if codes is None:
                seen.append(a.shape)
            return codes

        monkeypatch.setattr(kind, "_ready_codes", ready)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@schemes
def test_logits_are_those_of_separate_quantisation(
    scheme: Any, dtype: torch.dtype, device: str, seed: int, quantised: list[torch.Size]
) -> None:
    """And of the four products of a block those behind attention and behind the gate alone quantise."""
    model = fused(model_of(scheme, seed).to(device, dtype))
    quantised.clear()  # what calibration did
    for batch in (1, 3):
        with separately():
            expected = logits_of(model, seed, batch)
        assert len(quantised) == 3 * 4
        quantised.clear()
        testing.assert_equal(logits_of(model, seed, batch), expected)
        assert len(quantised) == 3 * 2
        quantised.clear()


@torch.no_grad()
@pytest.mark.parametrize("scheme", OTHERS.values(), ids=OTHERS)
def test_norms_of_other_schemes_are_not_quantised(scheme: Any, seed: int) -> None:
    model = fused(model_of(scheme, seed))
    norms = [norm for norm in model.modules() if isinstance(norm, FusedNorm)]
    assert [norm._quantising(torch.ones(1, 64)) for norm in norms] == [None] * 7
    with separately():
        expected = logits_of(model, seed)
    testing.assert_equal(logits_of(model, seed), expected)


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@schemes
def test_compiled_models(scheme: Any, device: str, seed: int, quantised: list[torch.Size]) -> None:
    """Both ways are compiled, as the operators between products are others in compiled code on a GPU."""
    model = fused(model_of(scheme, seed, num_hidden_layers=2).to(device, torch.float16))
    quantised.clear()  # what calibration did
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = logits_of(compiled, seed)
    assert len(quantised) == 2 * 2
    with separately():
        torch._dynamo.reset()
        again = torch.compile(model, fullgraph=True, backend="aot_eager")
        testing.assert_equal(found, logits_of(again, seed))


def through_blocks(model: Any, x: Tensor) -> Tensor:
    """The hidden states behind all blocks and the norm, without what a model does on the host."""
    angles = model.model.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
    for block in model.model.layers:
        x = block(x, position_embeddings=angles)
    found: Tensor = model.model.norm(x)
    return found


@torch.no_grad()
@pytest.mark.gpu
@schemes
@pytest.mark.parametrize("tokens", [1, 11])
def test_blocks_in_graphs(tokens: int, scheme: Any, seed: int) -> None:
    """A graph with norms that quantise beside one without, each replayed with inputs in turns."""
    model = fused(model_of(scheme, seed).to("cuda", torch.float16))
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(2, tokens, 64, generator=generator).to("cuda", torch.float16) for _ in range(3)]
    held, graphs, outs = inputs[0].clone(), [], []
    for way in (separately, contextlib.nullcontext):
        with way():
            through_blocks(model, held)  # kernels are loaded before a capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs.append(through_blocks(model, held))
        graphs.append(graph)
    for i in range(60):
        held.copy_(inputs[i % 3])
        for graph in graphs:
            graph.replay()
        testing.assert_equal(outs[1], outs[0], label=f"replay {i}")


IN_PLACE = {
    "model.layers.0": _add_to_output,
    "model.layers.0.self_attn": _add_to_output,
    "model.layers.0.mlp.gate_proj": _triple_input,
    "model.layers.0.mlp": _triple_input,
    "model.layers.1": _triple_input,
    "model.layers.1.self_attn.k_proj": _triple_input,
    "model.layers.1.input_layernorm": _add_to_output,
    "model.layers.1.post_attention_layernorm": _triple_input,
    "model.norm": _triple_input,
}


@modes
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", IN_PLACE)
def test_hooks_that_change_tensors_in_place(name: str, compiled: bool, mode: Any, seed: int) -> None:
    """Codes that were made ahead of a change are not multiplied."""
    model = fused(tiny("Llama", seed, scheme=W8A8(), num_hidden_layers=2))
    with mode():
        before = logits_of(model, seed)
        _hook(model, name, IN_PLACE[name])
        with separately():
            expected = logits_of(model, seed)
        assert not torch.equal(expected, before)
        call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
        testing.assert_equal(logits_of(call, seed), expected)


@torch.no_grad()
def test_changes_between_norm_and_product(seed: int) -> None:
    """In place of the norm, of the scale, of the layer; codes serve one product alone."""
    model = fused(model_of(W8A8("static"), seed))
    norm, mlp = model.model.layers[0].post_attention_layernorm, model.model.layers[0].mlp
    product, x = mlp.gate_proj.product, torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    assert product._ready is None
    normed = norm(x)
    ready = product._ready
    assert ready is not None
    testing.assert_equal(mlp(normed), mlp(normed.clone()))
    assert product._ready is None

    def changed(change: Any) -> None:
        found = norm(x)
        assert product._ready is not None
        change(found)
        testing.assert_equal(product(found), product(found.clone()))

    changed(lambda found: found.mul_(2))
    changed(lambda found: product.a_scale.mul_(2))
    changed(lambda found: product.register_buffer("smooth", torch.full((64,), 0.5)))
    assert product.input_codes is None
    norm(x)
    assert product._ready is None


@torch.no_grad()
@schemes
def test_copies(scheme: Any, seed: int) -> None:
    """Each has codes for its own products; those that wait are no part of it."""
    model = fused(model_of(scheme, seed, "Qwen3"))
    expected, block = logits_of(model, seed), model.model.layers[1]
    block.input_layernorm(torch.ones(1, 2, 64))
    assert block.self_attn.q_proj.product._ready is not None
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other = twin.model.layers[1]
        assert other.input_layernorm.reader == (other.self_attn,)
        assert other.self_attn.q_proj.product._ready is None
        testing.assert_equal(logits_of(twin, seed), expected)
    assert model.state_dict().keys() == model_of(scheme, seed, "Qwen3").state_dict().keys()


@torch.no_grad()
def test_layers_that_are_replaced_take_the_norm_itself(seed: int) -> None:
    model = fused(tiny("Llama", seed, scheme=FP8()))
    attention, norm = model.model.layers[1].self_attn, model.model.layers[1].input_layernorm
    assert norm._quantising(torch.ones(1, 64)) is not None
    attention.v_proj = attention.v_proj.separate()
    assert norm._quantising(torch.ones(1, 64)) is None
    with separately():
        expected = logits_of(model, seed)
    testing.assert_equal(logits_of(model, seed), expected)
