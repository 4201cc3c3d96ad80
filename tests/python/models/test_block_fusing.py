"""Decoder blocks with fewer operators: logits of prompts and of single tokens, states, caches, hooks, what is left."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.python.models.folders import SmolCut
from torch import Tensor

import qcutlass
from qcutlass import WeightOnly, fuse_block, testing
from qcutlass.layers import FusedProjection
from qcutlass.models.cache_argument import CACHE
from qcutlass.testing.models import NOISE, noise_ratio

transformers = pytest.importorskip("transformers", reason="needs transformers")

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
}
VOCABULARY = 96


def floats(family: str, seed: int, **options: Any) -> Any:
    """A model of random weights."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **FAMILIES[family], **options})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(1, 0.2)
    return model


def tiny(family: str, seed: int, scheme: Any = None, **options: Any) -> Any:
    """One whose linear layers are quantised."""
    model = floats(family, seed, **options)
    qcutlass.replace_linear(model, scheme or WeightOnly(group_size=32), skip=["lm_head"])
    return model


def fused(model: Any) -> Any:
    twin = copy.deepcopy(model)
    found = fuse_block(twin)
    assert found.fused == tuple(f"model.layers.{i}" for i in range(len(twin.model.layers)))
    assert found.skipped == {}
    return twin


def dense(model: Any, dtype: torch.dtype) -> Any:
    from bench import llama

    return llama.dense(copy.deepcopy(model), torch.float64).to(dtype)


def prompt(batch: int, seed: int, tokens: int = 11) -> tuple[Tensor, Tensor]:
    """Tokens and their mask: all sequences but the first begin with padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 3 * row] = 0
    return ids * mask, mask


@torch.no_grad()
def logits(model: Any, batch: int, seed: int, cache: Any, steps: int = 3, mask: bool = True) -> Tensor:
    """Of the last tokens of a prompt and of single ones behind it, `[steps + 1, batch, vocabulary]`."""
    ids, given = prompt(batch, seed)
    found = []
    for step in range(steps + 1):
        options = {"attention_mask": given} if mask else {}
        out = model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache}, **options).logits
        found.append(out[:, -1])
        ids = torch.full((batch, 1), 5 + step % 64)
        given = torch.cat((given, torch.ones_like(ids)), dim=1)
    return torch.stack(found)


def new_cache(kind: str, model: Any) -> Any:
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=32)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_but_for_rounding(
    family: str, dtype: torch.dtype, batch: int, cache: str, seed: int
) -> None:
    model = tiny(family, seed).to(dtype)
    exact, rounded = (
        logits(each, batch, seed, new_cache("dynamic", model))
        for each in (dense(model, torch.float64), dense(model, dtype))
    )
    for with_mask in (True, False) if batch == 1 else (True,):
        found = logits(fused(model), batch, seed, new_cache(cache, model), mask=with_mask)
        assert noise_ratio(found, rounded, exact) <= NOISE


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_implementation_of_attention_serves(implementation: str, seed: int) -> None:
    model = tiny("Qwen3", seed)
    expected = logits(model, 3, seed, new_cache("dynamic", model))
    exact = logits(dense(model, torch.float64), 3, seed, new_cache("dynamic", model))
    together = fused(model)
    together.set_attn_implementation(implementation)
    assert noise_ratio(logits(together, 3, seed, new_cache("dynamic", model)), expected, exact) <= NOISE


@torch.no_grad()
def test_hidden_states_and_attentions_are_collected(seed: int) -> None:
    model = tiny("Llama", seed)
    ids, _ = prompt(1, seed)
    together = fused(model)
    for each in (model, together):
        each.set_attn_implementation("eager")
    expected, found = (each(ids, output_hidden_states=True, output_attentions=True) for each in (model, together))
    exact = dense(model, torch.float64)(ids, output_hidden_states=True, output_attentions=True)
    for name in ("hidden_states", "attentions"):
        assert len(found[name]) == len(expected[name])
        for ours, theirs, answer in zip(found[name][1:], expected[name][1:], exact[name][1:], strict=True):
            assert noise_ratio(ours, theirs, answer) <= NOISE


@torch.no_grad()
def test_a_block_that_is_called_with_another_input_norms_that_one(seed: int) -> None:
    """The norm of a block's output is computed with it, for the next block alone."""
    together = fused(tiny("Llama", seed))
    norm = together.model.norm
    x = torch.randn(1, 2, 64)
    total = norm.add(x, x)
    testing.assert_equal(norm(x + 1), together.model.norm.__class__.forward(norm, x + 1))
    total = norm.add(x, x)
    total.add_(1)
    testing.assert_equal(norm(total), norm(total.clone()))


def test_states_and_copies(seed: int) -> None:
    model = tiny("Qwen2", seed)
    together = fused(model)
    states = model.state_dict(), together.state_dict()
    assert states[0].keys() == states[1].keys()
    assert [name for name, _ in together.named_modules() if not name.endswith("product")] == [
        name for name, _ in model.named_modules()
    ]
    for name, tensor in states[0].items():
        testing.assert_equal(states[1][name], tensor, label=name)
    expected = logits(together, 1, seed, None)
    for twin in (copy.deepcopy(together), pickle.loads(pickle.dumps(together))):
        testing.assert_equal(logits(twin, 1, seed, None), expected)
    other = fused(tiny("Qwen2", seed + 1))
    other.load_state_dict(states[0])
    testing.assert_equal(logits(other, 1, seed, None), expected)


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gates_in_the_epilogue_of_the_product(device: str, seed: int) -> None:
    """As blocks that are fused on a GPU have them."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    model = tiny("Llama", seed).to(device, dtype)
    ids, _ = prompt(1, seed)
    ids = ids.to(device)
    exact, rounded = (dense(model, each)(ids, use_cache=False).logits for each in (torch.float64, dtype))
    together = fused(model)
    products = [block.mlp.gate_proj.product for block in together.model.layers]
    assert all(product.interleaved == (device == "cuda") for product in products)
    assert all(product.interleave() for product in products)
    compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
    for each in (together, compiled):
        assert noise_ratio(each(ids, use_cache=False).logits, rounded, exact) <= NOISE
    for name, tensor in model.state_dict().items():
        testing.assert_equal(together.state_dict()[name], tensor, label=name)


@torch.no_grad()
def test_it_compiles_without_a_break(seed: int) -> None:
    together = fused(tiny("Llama", seed))
    ids, _ = prompt(1, seed)
    expected = together(ids, use_cache=False).logits
    compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
    testing.assert_equal(compiled(ids, use_cache=False).logits, expected)


def test_fusing_twice_is_fusing_once(seed: int) -> None:
    together = fused(tiny("Llama", seed))
    expected = logits(together, 1, seed, None)
    again = fuse_block(together)
    assert again.fused == ()
    assert again.skipped == {}
    testing.assert_equal(logits(together, 1, seed, None), expected)


def test_what_is_left_alone_is_said(seed: int) -> None:
    model = tiny("Llama", seed)
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    model.model.layers[1].mlp.forward = lambda x: x
    model.model.layers[2].self_attn.k_proj.register_forward_hook(lambda *arguments: None)
    found = fuse_block(model)
    assert found.fused == ("model.layers.2",)
    assert found.skipped == {
        "model.layers.0": "mlp.act_fn: expected SiLU or GELU in its tanh form, got ReLU",
        "model.layers.1": "mlp has a forward of its own, which would no longer run",
        "model.layers.2.self_attn.q_proj, model.layers.2.self_attn.k_proj, model.layers.2.self_attn.v_proj": (
            "k_proj has forward hooks"
        ),
    }
    assert isinstance(model.model.layers[0].mlp.gate_proj, FusedProjection)


@torch.no_grad()
def test_models_of_other_kinds_are_left_as_they_are(seed: int) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY)
    model = transformers.GPT2LMHeadModel(config).eval()
    before = {name: type(module) for name, module in model.named_modules()}
    found = fuse_block(model)
    assert found.fused == ()
    assert found.skipped == {
        "model": "GPT2LMHeadModel: expected decoder blocks of a Llama, Mistral, Qwen2 or Qwen3 model of transformers"
    }
    assert {name: type(module) for name, module in model.named_modules()} == before
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        fuse_block("model")  # type: ignore[arg-type]


@torch.no_grad()
def test_hooks_of_modules_run(seed: int) -> None:
    together = fused(tiny("Llama", seed))
    called = []
    for name in ("self_attn", "mlp", "input_layernorm", "self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):
        module = together.model.layers[1].get_submodule(name)
        module.register_forward_hook(lambda *arguments, name=name: called.append(name))
    expected = logits(fused(tiny("Llama", seed)), 1, seed, None, steps=0)
    testing.assert_equal(logits(together, 1, seed, None, steps=0), expected)
    assert sorted(called) == [
        "input_layernorm",
        "mlp",
        "mlp.up_proj",
        "self_attn",
        "self_attn.q_proj",
        "self_attn.v_proj",
    ]


def _add_to_output(module: Any, inputs: Any, out: Any) -> None:
    (out[0] if isinstance(out, tuple) else out).add_(1)


def _triple_input(module: Any, inputs: Any) -> None:
    inputs[0].mul_(3)


IN_PLACE = {
    "model.layers.0": _add_to_output,
    "model.layers.0.self_attn": _add_to_output,
    "model.layers.0.mlp": _add_to_output,
    "model.layers.0.mlp.gate_proj": _triple_input,
    "model.layers.0.mlp.up_proj": _triple_input,
    "model.layers.1": _triple_input,
    "model.layers.1.self_attn.k_proj": _triple_input,
    "model.layers.1.self_attn.v_proj": _triple_input,
    "model.layers.1.post_attention_layernorm": _triple_input,
    "model.norm": _triple_input,
}


def _hook(model: Any, name: str, hook: Any) -> None:
    """Has it run before a module, or behind it."""
    module = model.get_submodule(name)
    (module.register_forward_pre_hook if hook is _triple_input else module.register_forward_hook)(hook)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", IN_PLACE)
def test_hooks_that_change_tensors_in_place(name: str, mode: Any, seed: int) -> None:
    """What was computed ahead is computed anew: outputs are those of the model with the same hook."""
    model = tiny("Llama", seed)
    answers = dense(model, torch.float64), dense(model, torch.float32), fused(model)
    ids, _ = prompt(1, seed)
    for each in answers:
        _hook(each, name, IN_PLACE[name])
    with mode():
        exact, rounded, found = (each(ids, use_cache=False).logits for each in answers)
    assert noise_ratio(found, rounded, exact) <= NOISE


@torch.inference_mode()
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0",
        "model.layers.0.mlp.up_proj",
        "model.layers.1",
        "model.layers.1.post_attention_layernorm",
        "model.norm",
    ],
)
def test_hooks_in_compiled_code(name: str, seed: int) -> None:
    """Where nobody counts changes in place."""
    together = fused(tiny("Llama", seed, num_hidden_layers=2))
    ids, _ = prompt(1, seed)
    before = together(ids, use_cache=False).logits
    _hook(together, name, IN_PLACE[name])
    expected = together(ids, use_cache=False).logits
    assert not torch.equal(expected, before)
    compiled = torch.compile(together, fullgraph=True, backend="eager")
    testing.assert_equal(compiled(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_steps_behind_hooks_that_change_the_residual_stream(mode: Any, seed: int) -> None:
    model = tiny("Llama", seed)
    answers = dense(model, torch.float64), dense(model, torch.float32), fused(model)
    for each in answers:
        _hook(each, "model.layers.1", _add_to_output)
    with mode():
        exact, rounded, found = (logits(each, 1, seed, growing(each), mask=False) for each in answers)
    assert noise_ratio(found, rounded, exact) <= NOISE


def growing(model: Any) -> Any:
    from qcutlass.models.growing_cache import growing_cache

    return growing_cache(model.config)


@torch.no_grad()
def test_weights_of_norms_that_are_changed_in_place(seed: int) -> None:
    together = fused(tiny("Llama", seed))
    norm = together.model.norm
    total = norm.add(torch.randn(1, 2, 64), torch.randn(1, 2, 64))
    norm.weight.mul_(2)
    testing.assert_equal(norm(total), norm(total.clone()))


def _halving(module: Any, inputs: Any, out: Tensor) -> Tensor:
    return out / 2


def _with_hook(model: Any, name: str) -> None:
    model.get_submodule(name).register_forward_hook(_halving)


def _other_activation(model: Any, name: str) -> None:
    model.get_submodule(name.rpartition(".")[0]).act_fn = torch.nn.ReLU()


def _other_head_norm(model: Any, name: str) -> None:
    model.get_submodule(name.rpartition(".")[0]).q_norm = torch.nn.Identity()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_with_hook, "model.layers.1.mlp.act_fn"),
        (_other_activation, "model.layers.1.mlp.act_fn"),
        (_with_hook, "model.layers.1.self_attn.q_norm"),
        (_other_head_norm, "model.layers.1.self_attn.q_norm"),
    ],
)
def test_modules_that_operators_stand_for_are_called_where_they_do_more(change: Any, name: str, seed: int) -> None:
    """Prompts and steps, which had been taken before."""
    model = tiny("Qwen3", seed)
    answers = dense(model, torch.float64), dense(model, torch.float32), fused(model)
    before = logits(answers[2], 1, seed, growing(model), mask=False)
    for each in answers:
        change(each, name)
    exact, rounded, found = (logits(each, 1, seed, growing(each), mask=False) for each in answers)
    assert not torch.equal(found, before)
    assert noise_ratio(found, rounded, exact) <= NOISE


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "growing"])
@pytest.mark.parametrize("quantised", [True, False])
def test_casts_of_torch(quantised: bool, cache: str, seed: int) -> None:
    """Where modules are given tensors of several types."""
    model = tiny("Qwen3", seed)
    exact = logits(dense(model, torch.float64), 1, seed, None)
    if not quantised:
        model = dense(model, torch.float32)
    together = copy.deepcopy(model)
    fuse_block(together)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = logits(dense(tiny("Qwen3", seed), torch.float32), 1, seed, new_cache("dynamic", model), mask=False)
        found = logits(together, 1, seed, growing(model) if cache == "growing" else new_cache(cache, model), mask=False)
    assert noise_ratio(found, rounded, exact) <= NOISE


def test_a_real_model(smol: SmolCut, seed: int) -> None:
    """Two blocks of SmolLM2."""
    cut = smol.awq()
    model = transformers.AutoModelForCausalLM.from_pretrained(cut.folder, dtype=torch.float32, config=_config(cut))
    exact, rounded = (
        logits(smol.dense(cut, dtype), 3, seed, new_cache("dynamic", model)) for dtype in (torch.float64, torch.float32)
    )
    assert noise_ratio(logits(fused(model), 3, seed, new_cache("dynamic", model)), rounded, exact) <= NOISE


def _config(cut: Any) -> Any:
    from qcutlass.models.transformers import checkpoint_config

    return checkpoint_config(cut.folder)
