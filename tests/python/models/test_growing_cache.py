"""The cache that is written in place holds what transformers' dynamic one holds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qcutlass import testing

transformers = pytest.importorskip("transformers", reason="needs transformers")

HEADS, SIZE = 2, 8


def caches(**options: Any) -> tuple[Any, Any]:
    from qcutlass.models.growing_cache import growing_cache

    config = transformers.MistralConfig(num_hidden_layers=2, **{"sliding_window": None, **options})
    return transformers.DynamicCache(config=config), growing_cache(config)


def states(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 3, HEADS, count, SIZE, generator=generator)
    return keys, values


def assert_same_update(both: tuple[Any, Any], count: int, seed: int) -> None:
    for layer in range(2):
        keys, values = states(count, seed + layer)
        expected, found = (cache.update(keys, values, layer) for cache in both)
        for ours, theirs in zip(found, expected, strict=True):
            testing.assert_equal(ours, theirs)
    assert both[1].get_seq_length() == both[0].get_seq_length()


def test_it_holds_what_is_appended(seed: int) -> None:
    both = caches()
    for step, count in enumerate((200, 1, 100, 1, 1, 400)):
        assert_same_update(both, count, seed + 2 * step)


def test_it_is_written_in_place(seed: int) -> None:
    from qcutlass.models.growing_cache import GrowingLayer

    _, cache = caches()
    assert all(isinstance(layer, GrowingLayer) for layer in cache.layers)
    places = set()
    for step in range(200):
        keys, _ = cache.update(*states(1, seed + step), 0)
        places.add(keys.data_ptr())
    assert len(places) == 1


def test_cropped_reordered_and_copied_caches_go_on(seed: int) -> None:
    both = caches()
    assert_same_update(both, 20, seed)
    for cache in both:
        cache.crop(-5)
    assert_same_update(both, 1, seed + 1)
    for cache in both:
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert_same_update(both, 2, seed + 2)
    deep, shallow = tuple(map(copy.deepcopy, both)), tuple(map(copy.copy, both))
    for cache in shallow:
        cache.layers = [copy.copy(layer) for layer in cache.layers]
    for seeds, each in enumerate((both, deep, shallow)):
        assert_same_update(each, 1, seed + 10 * seeds + 3)
    for seeds, each in enumerate((both, deep, shallow)):  # none has written into another's room
        assert_same_update(each, 1, seed + 10 * seeds + 5)


def test_layers_with_a_window_are_left_alone(seed: int) -> None:
    both = caches(sliding_window=16)
    assert [type(layer) for layer in both[1].layers] == [type(layer) for layer in both[0].layers]
    assert_same_update(both, 30, seed)
    assert_same_update(both, 1, seed + 1)


def both_after(act: Callable[[Any], Any], *, tokens: int = 3, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """What transformers' cache gives, and ours, or the classes of what they raise; one layer of each is filled."""
    found = []
    for cache in caches():
        if tokens:
            cache.update(*(part.to(**options) for part in states(tokens, seed)), 0)
        try:
            found.append(act(cache.layers[0]))
        except Exception as error:
            found.append(type(error))
    return found[0], found[1]


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize(("before", "after"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_types_are_promoted(before: torch.dtype, after: torch.dtype, tokens: int, seed: int) -> None:
    expected, found = both_after(
        lambda layer: layer.update(*(part.to(after) for part in states(tokens, seed + 1)))[0], seed=seed, dtype=before
    )
    testing.assert_equal(found, expected)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("tokens", [1, 300])
def test_other_batches_are_refused(tokens: int, seed: int) -> None:
    expected, found = both_after(lambda layer: layer.update(*(part[:1] for part in states(tokens, seed))))
    assert expected is found is RuntimeError


def test_gradients_pass(seed: int) -> None:
    def gradient(layer: Any) -> Any:
        keys, values = (part.requires_grad_() for part in states(2, seed))
        layer.update(keys, values)
        sums = [layer.update(*states(1, seed + step))[0].pow(2).sum() for step in range(2)]
        torch.stack(sums).sum().backward()
        return keys.grad

    expected, found = both_after(gradient, seed=seed)
    testing.assert_equal(found, expected)


def test_caches_of_inference_mode_go_on_without_it(seed: int) -> None:
    _, cache = caches()
    with torch.inference_mode():
        cache.update(*states(5, seed), 0)
    with torch.no_grad():
        keys, _ = cache.update(*states(2, seed + 1), 0)
    testing.assert_equal(keys, torch.cat([states(5, seed)[0], states(2, seed + 1)[0]], -2))


def test_pickled_caches_are_written_where_they_are_shown(seed: int) -> None:
    def changed(layer: Any) -> Any:
        twin = pickle.loads(pickle.dumps(layer))
        twin.keys.zero_()
        return twin.update(*states(1, seed + 1))[0]

    expected, found = both_after(changed, seed=seed)
    testing.assert_equal(found, expected)
