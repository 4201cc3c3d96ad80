"""What tests in vLLM's own layers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Has vLLM's layers take themselves for those of one rank."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    def become(rank: int, world_size: int) -> None:
        for module in (linear, parameter, vocab_parallel_embedding):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: world_size)

    become(0, 1)
    yield become  # noqa: PT022  (the patches end with the fixture)
