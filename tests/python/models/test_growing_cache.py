"""The cache that is written in place holds what transformers' dynamic one holds."""

from __future__ import annotations

import copy
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
