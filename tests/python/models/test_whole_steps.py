"""All blocks of a model in one call: what may come between them, whose results count then."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.python.models.test_block_fusing import fused, tiny
from tests.python.models.test_block_steps import STEPS, Counter, made
from torch import Tensor

import qcutlass
from qcutlass.models.cache_argument import CACHE

pytest.importorskip("transformers", reason="needs transformers")
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from qcutlass.models import block_modules, whole_steps
from qcutlass.models.growing_cache import growing_cache

BLOCKS = 3


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def by_blocks(model: Any) -> Any:
    """The same model, each of whose blocks computes itself."""
    twin = copy.deepcopy(model)
    twin.model.layers.__class__ = torch.nn.ModuleList
    return twin


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_token_is_one_call(family: str, batch: int, seed: int, counter: Counter) -> None:
    together = fused(tiny(family, seed))
    found = made(together, seed, batch)
    assert (counter.count, counter.calls) == (STEPS * BLOCKS, STEPS)
    assert torch.equal(made(by_blocks(together), seed, batch), found)
    assert counter.calls == STEPS + STEPS * BLOCKS


def test_copies_and_a_second_fusing(seed: int, counter: Counter) -> None:
    together = fused(tiny("Llama", seed))
    expected = made(together, seed)
    qcutlass.fuse_block(together)
    for twin in (together, copy.deepcopy(together), pickle.loads(pickle.dumps(together))):
        before = counter.calls
        assert torch.equal(made(twin, seed), expected)
        assert counter.calls == before + STEPS


def test_only_the_loop_of_a_running_model_finds_one_block(seed: int) -> None:
    """It may ask that for what it asks blocks for; all others find the blocks."""
    model = fused(tiny("Qwen3", seed)).model
    seen: list[tuple[type, int]] = []
    for module in (model.embed_tokens, model.rotary_emb, model.norm):
        module.register_forward_pre_hook(lambda *_: seen.append((type(model.layers[:]), len(model.layers[:BLOCKS]))))
    model(torch.tensor([[3, 4]]))
    assert seen == 3 * [(whole_steps.BlockList, BLOCKS)]
    found = whole_steps._AllBlocks(model.layers)
    assert found.hidden_size == model.layers[0].hidden_size


def test_loops_of_others_find_the_blocks(seed: int) -> None:
    def forward(input_ids: Tensor, **options: Any) -> Any:
        hidden = model.embed_tokens(input_ids)
        angles = model.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        for index, block in enumerate(model.layers[: model.config.num_hidden_layers]):
            hidden = block(2 * hidden if index == 1 else hidden, position_embeddings=angles)
        return BaseModelOutputWithPast(model.norm(hidden))

    outs = []
    for together in (fused(tiny("Llama", seed)), by_blocks(fused(tiny("Llama", seed)))):
        model = together.model
        model.forward = forward
        with torch.inference_mode():
            outs.append(together(torch.tensor([[3, 4, 5]])).logits)
    assert torch.equal(*outs)


def test_a_removed_block_is_freed(seed: int) -> None:
    together = fused(tiny("Llama", seed))
    made(together, seed)
    last = weakref.ref(together.model.layers[2])
    del together.model.layers[2]
    gc.collect()
    assert last() is None


def _other_input(block: Any) -> Any:
    return block.register_forward_pre_hook(lambda _, given: (2 * given[0], *given[1:]))


def _other_output(block: Any) -> Any:
    return block.register_forward_hook(lambda _, given, out: out + 1)


def _other_weights(block: Any) -> Any:
    def change(*_: Any) -> None:
        block.mlp.down_proj.scales.mul_(1.5)

    return block.register_forward_pre_hook(change)


@pytest.mark.parametrize("index", range(BLOCKS))
@pytest.mark.parametrize("hook", [_other_input, _other_output, _other_weights])
def test_hooks_of_blocks(hook: Callable[[Any], Any], index: int, seed: int, counter: Counter) -> None:
    together = fused(tiny("Llama", seed))
    plain = made(together, seed)
    one, other = copy.deepcopy(together), by_blocks(together)
    for model in (one, other):
        hook(model.model.layers[index])
    found = made(one, seed)
    assert not torch.equal(found, plain)
    assert torch.equal(found, made(other, seed))


def test_hidden_states_of_all_blocks(seed: int) -> None:
    together = fused(tiny("Llama", seed))
    states = []
    for model in (together, by_blocks(together)):
        cache = growing_cache(model.config)
        with torch.inference_mode():
            model(torch.tensor([[3, 4]]), **{CACHE: cache})
            found = model(torch.tensor([[5]]), output_hidden_states=True, **{CACHE: cache}).hidden_states
        assert len(found) == BLOCKS + 1
        states.append(torch.stack(found))
    assert torch.equal(*states)


class _Skipping(torch.nn.Module):
    """Leaves a block out of the model's loop, or calls another one in its place."""

    def __init__(self, block: Any, other: Any) -> None:
        super().__init__()
        self.block, self.other = block, other

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        out: Tensor = hidden_states if self.other is None else self.other(hidden_states, *arguments, **options)
        return out


@pytest.mark.parametrize("replaced", [False, True])
def test_blocks_that_are_left_out_or_replaced(replaced: bool, seed: int, counter: Counter) -> None:
    together = fused(tiny("Llama", seed))
    twin = by_blocks(together)
    for model in (together, twin):
        layers = model.model.layers
        layers[1] = _Skipping(layers[1], layers[1] if replaced else None)
    assert torch.equal(made(together, seed), made(twin, seed))


def test_a_cache_that_is_cropped_between(seed: int) -> None:
    """By the model's own code: what was computed ahead is for another length."""
    together = fused(tiny("Llama", seed))
    outs = []
    for model in (together, by_blocks(together)):
        cache = growing_cache(model.config)
        with torch.inference_mode():
            model(torch.tensor([[3, 4, 5, 6]]), **{CACHE: cache})
            block = model.model.layers[0]
            handle = block.register_forward_hook(lambda *_, cache=cache: cache.layers[1].crop(-2))
            outs.append(model(torch.tensor([[7]]), **{CACHE: cache}).logits)
            handle.remove()
            assert [layer.get_seq_length() for layer in cache.layers] == [5, 3, 5]
    assert torch.equal(*outs)


def test_blocks_that_are_called_by_hand_compute_themselves(seed: int, counter: Counter) -> None:
    """Between them anything may happen: here weights come when they are needed."""
    together = fused(tiny("Llama", seed))
    cache = growing_cache(together.config)
    with torch.inference_mode():
        together(torch.tensor([[3, 4]]), **{CACHE: cache})
        hidden = together.model.embed_tokens(torch.tensor([[5]]))
        angles = together.model.rotary_emb(hidden, torch.tensor([[2]]))
        for block in together.model.layers:
            block.mlp.down_proj.scales.mul_(1.5)
            hidden = block(hidden, position_embeddings=angles, **{CACHE: cache})
    assert (counter.count, counter.calls) == (BLOCKS, BLOCKS)


def by_modules(call: Callable[[], Any]) -> Any:
    """What modules do where steps are not taken: a result, or an error's type."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(block_modules, "stepped", lambda *_: None)
        return outcome(call)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        return type(error)


def continued(
    model: Any, seed: int, ids: Tensor, before: Callable[[Any], Any] = lambda cache: cache, **options: Any
) -> Any:
    """Logits of a token behind a prompt of one sequence."""
    cache = growing_cache(model.config)
    with torch.inference_mode():
        model(torch.tensor([[3, 4, 5, 6]]), **{CACHE: cache})
        before(model)
        return model(ids, use_cache=True, **{CACHE: cache}, **options).logits


@pytest.mark.parametrize(
    "call",
    [
        lambda model, seed: continued(model, seed, torch.tensor([[7], [8], [9]])),
        lambda model, seed: continued(model, seed, torch.tensor([[7]]), lambda model: model.to(torch.bfloat16)),
        lambda model, seed: continued(model.to(torch.bfloat16), seed, torch.tensor([[7]]), lambda model: model.float()),
        lambda model, seed: continued(model, seed, torch.tensor([[7]]), position_ids=torch.tensor([[4], [5], [6]])),
    ],
    ids=["another batch", "a narrower type", "a wider type", "more angles than rows"],
)
def test_caches_and_angles_of_another_kind(call: Callable[[Any, int], Any], seed: int) -> None:
    """Modules raise, or have a result of their own; memory is not written."""
    model = tiny("Llama", seed)
    expected, found = by_modules(lambda: call(fused(model), seed)), outcome(lambda: call(fused(model), seed))
    assert torch.equal(found, expected) if isinstance(expected, Tensor) else found is expected


def test_caches_go_when_they_are_dropped(seed: int, counter: Counter) -> None:
    model = fused(tiny("Llama", seed))
    with torch.inference_mode():
        cache = growing_cache(model.config)
        for _ in range(3):
            model(torch.tensor([[7]]), **{CACHE: cache})
        assert counter.count == 2 * BLOCKS
        memory = weakref.ref(cache.layers[0].room.keys)
        assert memory() is not None
        cache.reset()
        gc.collect()
        assert memory() is None
        for _ in range(3):
            model(torch.tensor([[7]]), **{CACHE: cache})
        memory = weakref.ref(cache.layers[0].room.keys)
        for _ in range(255):  # the room is full, and half as large again
            model(torch.tensor([[7]]), **{CACHE: cache})
        gc.collect()
        assert memory() is None
        memory = weakref.ref(cache.layers[0].room.keys)
        assert memory() is not None
        del cache
        gc.collect()
    assert memory() is None


def _moved(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys.share_memory_()
        layer.values.share_memory_()


def _of_another_kind(cache: Any) -> None:
    layer = DynamicLayer()
    layer.update(cache.layers[1].keys, cache.layers[1].values)
    cache.layers[1] = layer


def _of_another_class(cache: Any) -> None:
    layer = cache.layers[1]
    kind = type(layer)

    def update(self: Any, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Any:
        return kind.update(self, keys, 2 * values, *rest, **options)

    layer.__class__ = type("Doubled", (kind,), {"update": update})


def _scaled(cache: Any) -> None:
    for layer in cache.layers:
        layer.values.mul_(2)


def _cropped_and_replaced(cache: Any) -> None:
    cache.crop(-1)
    cache.layers[2].keys = cache.layers[2].keys * 2


@pytest.mark.parametrize("change", [_moved, _of_another_kind, _of_another_class, _scaled, _cropped_and_replaced])
def test_changes_of_a_cache_count(change: Callable[[Any], None], seed: int) -> None:
    together = fused(tiny("Llama", seed))

    def made(model: Any) -> Tensor:
        cache = growing_cache(model.config)
        tokens = [model(torch.tensor([[token]]), **{CACHE: cache}).logits for token in (3, 4, 5)]
        change(cache)
        return torch.stack([*tokens, *(model(torch.tensor([[token]]), **{CACHE: cache}).logits for token in (6, 7, 8))])

    with torch.no_grad():  # blocks that compute themselves remember nothing of a cache
        assert torch.equal(made(together), made(by_blocks(together)))


def _one_cache_layer_for_two(model: Any) -> None:
    model.model.layers[1].self_attn.layer_idx = 0


def _one_block_thrice(model: Any) -> None:
    block = model.model.layers[0]
    block.following = (block.input_layernorm,)
    for index in range(BLOCKS):
        model.model.layers[index] = block


def _a_layer_of_another_class(model: Any) -> None:
    layer = model.model.layers[1].self_attn.o_proj
    kind = type(layer)
    layer.__class__ = type("Tripled", (kind,), {"forward": lambda self, a: 3 * kind.forward(self, a)})


def _an_mlp_of_another_class(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    kind = type(mlp)
    mlp.__class__ = type("Tripled", (kind,), {"forward": lambda self, x: 3 * kind.forward(self, x)})


def _no_mlp(model: Any) -> None:
    model.model.layers[1].mlp = torch.nn.Identity()


def _a_block_of_another_class(model: Any) -> None:
    block = model.model.layers[1]
    kind = type(block)
    block.__class__ = type("Tripled", (kind,), {"forward": lambda self, x, **rest: 3 * kind.forward(self, x, **rest)})


def _a_block_called_otherwise(model: Any) -> None:
    block = model.model.layers[1]
    kind = type(block)
    block.__class__ = type("Tripled", (kind,), {"__call__": lambda self, x, **rest: 3 * kind.__call__(self, x, **rest)})


def _another_order(model: Any) -> None:
    layers = model.model.layers
    first = layers[0]
    delattr(layers, "0")
    setattr(layers, "0", first)


def _another_dictionary(model: Any) -> None:
    layers = model.model.layers
    names, blocks = list(layers._modules), list(layers._modules.values())
    vars(layers)["_modules"] = dict(zip(names, [blocks[2], *blocks[:2]], strict=True))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        _one_cache_layer_for_two,
        _one_block_thrice,
        _a_layer_of_another_class,
        _an_mlp_of_another_class,
        _no_mlp,
        _a_block_of_another_class,
        _a_block_called_otherwise,
        _another_order,
        _another_dictionary,
    ],
)
def test_models_that_were_changed(change: Callable[[Any], None], late: bool, seed: int) -> None:
    """Before the first step, or behind it."""
    together = fused(tiny("Llama", seed))
    if late:
        made(together, seed)
    change(together)
    expected = by_modules(lambda: made(together, seed))
    error = (made(together, seed) - expected).abs().max() / expected.abs().max()
    assert error <= 2**-14  # other orders of fp32 sums; what was wrong before differed in the first digit


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["LlamaDecoderLayer", "LlamaMLP", "LlamaAttention"])
def test_classes_that_were_changed(name: str, late: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = fused(tiny("Llama", seed))
    if late:
        made(together, seed)
    kind: Any = getattr(block_modules, f"Fused{name}")
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *given, **options: _tripled(forward(self, *given, **options)))
    expected = by_modules(lambda: made(by_blocks(together), seed))
    error = (made(together, seed) - expected).abs().max() / expected.abs().max()
    assert error <= 2**-14


def _tripled(out: Any) -> Any:
    return (3 * out[0], *out[1:]) if isinstance(out, tuple) else 3 * out


def test_layers_of_several_types_have_masks_of_their_own(seed: int) -> None:
    together = fused(tiny("Qwen2", seed))
    twin = by_blocks(together)
    made(together, seed)
    for model in (together, twin):
        model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
        model.config.sliding_window = 2
        model.model.has_sliding_layers = True
    assert torch.equal(made(together, seed), made(twin, seed))


def test_shallow_copies_of_a_cache(seed: int) -> None:
    """Each has its own tokens, though they began in one room."""
    together = fused(tiny("Llama", seed))
    one = growing_cache(together.config)
    with torch.inference_mode():
        together(torch.tensor([[3, 4, 5, 6]]), **{CACHE: one})
        together(torch.tensor([[7]]), **{CACHE: one})
        other = copy.copy(one)
        other.layers = [copy.copy(layer) for layer in one.layers]
        alone = copy.deepcopy(other)
        together(torch.tensor([[8]]), **{CACHE: one})
        found = together(torch.tensor([[9]]), **{CACHE: other}).logits
        expected = together(torch.tensor([[9]]), **{CACHE: alone}).logits
    assert torch.equal(found, expected)
    assert [layer.get_seq_length() for layer in other.layers] == [6] * BLOCKS


def test_other_values_in_a_cache_stay(seed: int) -> None:
    together = fused(tiny("Llama", seed))
    cache = growing_cache(together.config)
    with torch.inference_mode():
        together(torch.tensor([[3, 4, 5, 6]]), **{CACHE: cache})
        together(torch.tensor([[7]]), **{CACHE: cache})
        cache.layers[0].values = values = 2 * cache.layers[0].values
        together(torch.tensor([[8]]), **{CACHE: cache})
    assert torch.equal(cache.layers[0].values[:, :, :5], values)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("name", ["embed_tokens", "norm"])
def test_an_interrupt_leaves_nothing(name: str, error: type[BaseException], seed: int) -> None:
    """Before the loop or behind it: the blocks are found, and the next call is as before."""

    def interrupt(*_: Any) -> None:
        raise error

    together = fused(tiny("Llama", seed))
    expected = made(together, seed)
    handle = together.model.get_submodule(name).register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        made(together, seed)
    handle.remove()
    assert len(together.model.layers[:]) == BLOCKS
    assert torch.equal(made(together, seed), expected)


def test_threads_do_not_meet(seed: int) -> None:
    together = fused(tiny("Llama", seed))
    expected = [made(together, seed, batch) for batch in (1, 2, 3)]
    found: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}

    def work(index: int) -> None:
        found[index] += [made(together, seed, index + 1) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, outs in found.items():
        assert len(outs) == 5
        assert all(torch.equal(out, expected[index]) for out in outs)


def test_a_compiled_model_is_as_before(seed: int) -> None:
    together = fused(tiny("Llama", seed))
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        expected = together(ids, use_cache=False).logits
        found = torch.compile(together, backend="eager", fullgraph=True)(ids, use_cache=False).logits
    assert torch.equal(found, expected)
