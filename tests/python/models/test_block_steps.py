"""Single tokens through fused blocks in one call of the extension: logits, changes of the model, what is left."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.python.models.test_block_fusing import FAMILIES, dense, fused, logits, tiny
from tests.python.soak import threads_of_the_cpu
from torch import Tensor

import qcutlass
from qcutlass import _C
from qcutlass.models.cache_argument import CACHE
from qcutlass.testing.models import NOISE, noise_ratio

transformers = pytest.importorskip("transformers", reason="needs transformers")

STEPS = 4


class Counter:
    """How many blocks took a step, and in how many calls of the extension they were computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from qcutlass.models.growing_cache import GrowingLayer
        from qcutlass.products.decoder_block import PlacedBlocks

        self.count = self.calls = 0
        append, run = GrowingLayer.append_written, PlacedBlocks.run

        def counted(*arguments: Any) -> None:
            self.count += 1
            append(*arguments)

        def called(*arguments: Any) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return run(*arguments)

        monkeypatch.setattr(GrowingLayer, "append_written", counted)
        monkeypatch.setattr(PlacedBlocks, "run", called)

    def during(self, call: Callable[[], object]) -> int:
        before = self.count
        call()
        return self.count - before


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def made(model: Any, seed: int, batch: int = 1, steps: int = STEPS) -> Tensor:
    from qcutlass.models.growing_cache import growing_cache

    with torch.inference_mode():
        return logits(model, batch, seed, growing_cache(model.config), steps, mask=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "Mistral"])
def test_logits_are_those_of_the_model_but_for_rounding(
    family: str, batch: int, dtype: torch.dtype, seed: int, counter: Counter
) -> None:
    model = tiny(family, seed).to(dtype)
    exact, rounded = (made(dense(model, kind), seed, batch) for kind in (torch.float64, dtype))
    together = fused(model)
    assert noise_ratio(made(together, seed, batch), rounded, exact) <= NOISE
    assert counter.count == STEPS * len(model.model.layers)


def test_a_window_keeps_the_way_of_modules(seed: int, counter: Counter) -> None:
    model = tiny("Mistral", seed)
    expected, exact = (made(each, seed) for each in (model, dense(model, torch.float64)))
    assert noise_ratio(made(fused(model), seed), expected, exact) <= NOISE
    assert counter.count == 0


def test_long_sequences_and_many_threads(seed: int, counter: Counter) -> None:
    model = tiny("Qwen3", seed)
    exact, rounded = (made(dense(model, kind), seed, 2, 300) for kind in (torch.float64, torch.float32))
    with threads_of_the_cpu(3):
        assert noise_ratio(made(fused(model), seed, 2, 300), rounded, exact) <= NOISE
    assert counter.count == 300 * len(model.model.layers)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(7, 1, 16), (6, 2, 24), (12, 4, 20), (8, 8, 6), (8, 8, 34)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_all_shapes(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, seed: int, counter: Counter
) -> None:
    """Some fill vectors and some do not, and several queries share keys; on however many threads it is the same."""
    from qcutlass.models.growing_cache import growing_cache

    shape = {"hidden_size": heads * size, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    model = tiny("Llama", seed, **shape).to(dtype)
    exact, rounded = (made(dense(model, kind), seed, 2, 41) for kind in (torch.float64, dtype))
    together = fused(model)
    assert noise_ratio(made(together, seed, 2, 41), rounded, exact) <= NOISE
    assert counter.count == 41 * len(model.model.layers)

    def continued(threads: int) -> Tensor:
        """What the head reads, behind a prompt that one thread has read: torch's products, the head's too, depend on
        their number on some processors. The prompt is so long that threads share the heads of a token."""
        tokens = torch.arange(4 * 710).view(4, 710) % 60
        cache = growing_cache(model.config)
        with torch.inference_mode(), threads_of_the_cpu(1):
            together(tokens[:, :700], **{CACHE: cache})
            torch.set_num_threads(threads)
            counted, steps = counter.count, tokens[:, 700:].split(1, 1)
            read = [together.model(token, **{CACHE: cache}).last_hidden_state for token in steps]
            assert counter.count == counted + len(steps) * len(model.model.layers)
            return torch.stack(read)

    expected = continued(1)
    assert all(torch.equal(continued(threads), expected) for threads in (2, 3))


def test_padded_sequences_keep_the_way_of_modules(seed: int, counter: Counter) -> None:
    from qcutlass.models.growing_cache import growing_cache

    model = tiny("Llama", seed)
    together = fused(model)
    exact, rounded = (
        logits(dense(model, kind), 3, seed, transformers.DynamicCache(config=model.config))
        for kind in (torch.float64, torch.float32)
    )
    with torch.inference_mode():
        found = logits(together, 3, seed, growing_cache(model.config))
    assert noise_ratio(found, rounded, exact) <= NOISE
    assert counter.count == 0


def _other_down(model: Any) -> None:
    layer = model.model.layers[1].mlp.down_proj
    weight = torch.randn(layer.out_features, layer.in_features)
    model.model.layers[1].mlp.down_proj = qcutlass.layers.QuantLinear.from_quantized(qcutlass.quantize(weight))


def _other_scales(model: Any) -> None:
    layer = model.model.layers[1].self_attn.o_proj
    layer.scales = 2 * layer.scales


def _scales_in_place(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.scales.mul_(2)


def _scales_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.model.layers[1].self_attn.q_proj.product.scales[0] *= 2


def _zeros_in_place(model: Any) -> None:
    zeros = model.model.layers[1].mlp.down_proj.zeros
    zeros.copy_(zeros.roll(1))


def _scales_with_other_data(model: Any) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer.scales.data = 2 * layer.scales


def _another_norm_weight(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.weight = torch.nn.Parameter(torch.full((64,), 2.0))


def _another_epsilon(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1.0


def _another_scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.01


def _other_norm(model: Any) -> None:
    model.model.layers[2].input_layernorm.weight.data = torch.full((64,), 2.0)


def _quantized_activations(model: Any) -> None:
    qcutlass.layers.use_activations(model, "int8")


@pytest.mark.parametrize(
    "change",
    [
        _other_down,
        _other_scales,
        _scales_in_place,
        _scales_in_inference_mode,
        _zeros_in_place,
        _scales_with_other_data,
        _other_norm,
        _another_norm_weight,
        _another_epsilon,
        _another_scaling,
        _quantized_activations,
    ],
    ids=lambda f: f.__name__,
)
def test_changes_of_the_model_count(change: Callable[[Any], None], seed: int, counter: Counter) -> None:
    together = fused(tiny("Llama", seed))
    before = made(together, seed)
    with torch.no_grad():
        torch.manual_seed(seed)
        change(together)
    fresh = fused(tiny("Llama", seed))
    with torch.no_grad():
        torch.manual_seed(seed)
        change(fresh)
    after = made(together, seed)
    assert not torch.equal(after, before)
    assert torch.equal(after, made(fresh, seed))
    assert counter.count == 3 * STEPS * 3


def test_another_type_counts(seed: int, counter: Counter) -> None:
    together = fused(tiny("Llama", seed))
    made(together, seed)
    expected = made(fused(tiny("Llama", seed)).to(torch.bfloat16), seed)
    assert torch.equal(made(together.to(torch.bfloat16), seed), expected)
    assert counter.count == 3 * STEPS * 3


@pytest.mark.parametrize(
    "name", ["self_attn", "self_attn.k_proj", "mlp", "mlp.act_fn", "mlp.down_proj", "input_layernorm"]
)
def test_hooks_run_wherever_they_are(name: str, seed: int, counter: Counter) -> None:
    together = fused(tiny("Llama", seed))
    expected = made(together, seed)
    called: list[str] = []
    handle = together.model.layers[1].get_submodule(name).register_forward_hook(lambda *_: called.append(name))
    steps = counter.during(lambda: made(together, seed))
    assert len(called) == STEPS + 1
    assert steps in (STEPS * 2, STEPS * 1)  # a norm is also the end of the block before
    handle.remove()
    assert counter.during(lambda: made(together, seed)) == STEPS * 3
    assert torch.equal(made(together, seed), expected)


def _forward_of_its_own(model: Any) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)


def _a_hook_of_all_modules(model: Any) -> None:
    torch.nn.modules.module.register_module_forward_hook(lambda module, x, out: None)


def _another_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def _a_part_in_training(model: Any) -> None:
    model.model.layers[1].mlp.train()


@pytest.mark.parametrize(
    ("change", "steps"),
    [(_forward_of_its_own, 2), (_a_hook_of_all_modules, 0), (_another_attention, 0), (_a_part_in_training, 2)],
)
def test_what_a_step_does_not_have_keeps_the_way_of_modules(
    change: Callable[[Any], None], steps: int, seed: int, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        monkeypatch.setattr(torch.nn.modules.module, name, OrderedDict())  # which the test may change
    together, fresh = fused(tiny("Llama", seed)), fused(tiny("Llama", seed))
    made(together, seed)
    change(together)
    change(fresh)
    assert counter.during(lambda: made(together, seed)) == STEPS * steps
    assert torch.equal(made(together, seed), made(fresh, seed))


def test_caches_of_other_kinds(seed: int) -> None:
    """Continuous batching has a cache without layers, which its attention takes."""
    model = tiny("Llama", seed)
    model.set_attn_implementation("paged|sdpa")
    prompts = [[3, 4, 5, 6, 7], [9, 8]]
    room = {"num_blocks": 16, "max_batch_tokens": 32}  # or transformers takes what memory there is
    options = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, **room)
    kind = getattr(transformers, "ContinuousBatchingConfig", None)  # versions without have these in the options
    small = {} if kind is None else {"continuous_batching_config": kind(**room)}

    def tokens(model: Any) -> list[list[int]]:
        found = model.generate_batch(prompts, generation_config=options, progress_bar=False, **small)
        return [found[name].generated_tokens for name in sorted(found)]

    assert tokens(fused(model)) == tokens(model)


def test_gradients_tracing_and_training_keep_the_way_of_modules(seed: int, counter: Counter) -> None:
    from qcutlass.models.growing_cache import growing_cache

    together = fused(tiny("Llama", seed))
    cache = growing_cache(together.config)
    token = torch.tensor([[3]])
    with torch.no_grad():
        together(token, **{CACHE: cache})
        compiled = torch.compile(together.model.layers[0].mlp, backend="eager")
        compiled(torch.randn(1, 1, 64))
        assert counter.during(lambda: together(token, **{CACHE: cache})) == 3
        together.train()
        assert counter.during(lambda: together(token, **{CACHE: cache})) == 0
        together.eval()
    assert counter.during(lambda: together(token, **{CACHE: cache})) == 0


def test_copies_have_steps_of_their_own(seed: int, counter: Counter) -> None:
    together = fused(tiny("Qwen2", seed))
    expected = made(together, seed)
    for twin in (copy.deepcopy(together), pickle.loads(pickle.dumps(together))):
        assert all("_step" not in vars(block) for block in twin.model.layers)
        assert torch.equal(made(twin, seed), expected)


def _unchanged(name: str, parts: dict[str, Any]) -> None:
    """Nothing that counts."""
    parts["place"]["more"] = parts["in_place"].data
    parts["other"].mul_(2)
    parts["in_place"].data.mul_(2)


def _other_value(name: str, parts: dict[str, Any]) -> None:
    parts["place"]["number"] = 2


def _a_value_where_there_was_none(name: str, parts: dict[str, Any]) -> None:
    parts["place"]["absent"] = 1


def _no_value(name: str, parts: dict[str, Any]) -> None:
    del parts["place"]["number"]


def _another_class(name: str, parts: dict[str, Any]) -> None:
    parts["module"].__class__ = torch.nn.Module


def _another_forward(name: str, parts: dict[str, Any]) -> None:
    kind: Any = type(parts["module"])
    kind.forward = lambda self, x: 2 * x


def _another_call(name: str, parts: dict[str, Any]) -> None:
    kind: Any = type(parts["module"])
    kind.__call__ = lambda self, x: 2 * x


def _a_hook(name: str, parts: dict[str, Any]) -> None:
    parts["hooks"]["one"] = print


def _other_data(name: str, parts: dict[str, Any]) -> None:
    parts[name].data = parts[name].clone()


def _in_place(name: str, parts: dict[str, Any]) -> None:
    parts["in_place"].mul_(2)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_unchanged, ""),
        (_other_value, ""),
        (_a_value_where_there_was_none, ""),
        (_no_value, ""),
        (_another_class, ""),
        (_another_forward, ""),
        (_another_call, ""),
        (_a_hook, ""),
        (_other_data, "in_place"),
        (_other_data, "other"),
        (_in_place, ""),
    ],
)
def test_each_change_of_a_snapshot_is_seen(change: Callable[[str, dict[str, Any]], None], name: str) -> None:
    from qcutlass.products.decoder_block import Snapshot

    class Kind(torch.nn.Identity):
        """Whose methods the test may change."""

    parts: dict[str, Any] = {"place": {"number": 1}, "module": Kind(), "hooks": OrderedDict()}
    parts |= {"in_place": torch.ones(3), "other": torch.ones(3)}
    tensors = [(parts[each], each == "in_place", 0, 0) for each in ("in_place", "other")]
    entries = [(parts["place"], "number", 1), (parts["place"], "absent", None)]
    ways = [(Kind, Kind.forward, Kind.__call__)]
    # More of the same, so that loops look ahead.
    state = Snapshot(100 * entries, 100 * [parts["module"]], ways, 100 * [parts["hooks"]], 100 * tensors)
    assert state.is_unchanged()
    change(name, parts)
    assert state.is_unchanged() is (change is _unchanged)


def test_the_collector_finds_methods_that_hold_their_owner() -> None:
    from qcutlass.models.block_steps import Held

    def owner() -> weakref.ref[torch.nn.Module]:
        block: Any = torch.nn.Module()

        class Gate(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x if block.training else -x

        block.gate = Gate()
        object.__setattr__(block, "held", Held([], [block.gate], []))
        assert block.held.is_unchanged()
        return weakref.ref(block)

    block = owner()
    gc.collect()
    assert block() is None


def test_parts_that_do_not_fit_are_refused() -> None:
    def product(n: int, k: int) -> _C.GemmArguments:
        arguments = _C.GemmArguments()
        weights = _C.WeightArguments()
        weights.n, weights.k = n, k
        arguments.weights = weights
        arguments.a_type = _C.DType.FLOAT32
        return arguments

    def block(**changes: Any) -> _C.DecoderBlock:
        norm, none = (4096, _C.DType.FLOAT32, 1e-5), (0, _C.DType.NONE, 0.0)
        parts: dict[str, Any] = {
            "type": _C.DType.FLOAT32, "heads": 4, "kv_heads": 2, "size": 16, "activation": _C.Activation.SILU,
            "qkv": [product(128, 64)], "output": product(64, 64), "gate_up": [product(320, 64)],
            "down": product(64, 160), "query_norm": none, "key_norm": none, "mlp_norm": norm, "next_norm": norm,
        }  # fmt: skip
        return _C.DecoderBlock(**{**parts, **changes})

    block()
    block(qkv=[product(64, 64), product(32, 64), product(32, 64)], gate_up=[product(160, 64)] * 2)
    for changes, message in (
        ({"qkv": [product(96, 64)]}, "qkv: expected 128 channels, got 96"),
        ({"qkv": [product(64, 64), product(64, 32)]}, "qkv: expected 64 columns, got 32"),
        ({"gate_up": [product(160, 64)]}, "gate_up: expected 320 channels, got 160"),
        ({"heads": 5}, "heads: expected a multiple of kv_heads, 2, got 5"),
        ({"size": 15}, "size must be even, got 15"),
        ({"query_norm": (4096, _C.DType.FLOAT32, 1e-5)}, "query_norm, key_norm: expected both or neither"),
        ({"next_norm": (0, _C.DType.NONE, 0.0)}, "next_norm is a null pointer"),
        ({"type": _C.DType.BFLOAT16}, "expected activations of the block's type"),
    ):
        with pytest.raises(ValueError, match=message):
            block(**changes)
