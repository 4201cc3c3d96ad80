"""What the tests of engines on a GPU hold tokens to: it passes greedy ones and those of ties, and no others."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.python.models.folders import RandomCut
from tests.python.vllm import greedy
from tests.python.vllm.greedy import Reference, in_float16

pytest.importorskip("transformers", reason="needs transformers")

PROMPTS = [[2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    cut = RandomCut(tmp_path_factory.mktemp("greedy"), seed=0)
    model = cut.dense(cut.gptq(), torch.float32)
    return Reference(model, lambda: in_float16(copy.deepcopy(model)))


def tokens(reference: Reference, choice: int, places: tuple[int, ...]) -> list[list[int]]:
    """32 behind each prompt: the most likely ones, but for places, where it is the `choice`-th."""
    found = []
    for ids in PROMPTS:
        text = list(ids)
        for place in range(32):
            with torch.inference_mode():
                order = reference.exact(torch.tensor([text])).logits[0, -1].argsort(descending=True)
            text.append(int(order[choice if place in places else 0]))
        found.append(text[len(ids) :])
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_greedy_tokens_pass_and_others_do_not(
    device: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greedy, "DEVICE", device)
    reference.check(tokens(reference, 0, ()), PROMPTS)
    for places in ((7,), tuple(range(32))):
        with pytest.raises(AssertionError):
            reference.check(tokens(reference, 8, places), PROMPTS)


def test_a_share_may_be_rerouted(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "DEVICE", "cuda")
    other = tokens(reference, 8, (7,))
    reference.check(other, PROMPTS, rerouted=1 / 32)
    with pytest.raises(AssertionError):
        reference.check(other, PROMPTS, rerouted=1 / 33)
    with pytest.raises(AssertionError):  # whatever may be rerouted, few tokens are others
        reference.check(tokens(reference, 8, (7, 9)), PROMPTS, rerouted=1)


def test_other_numbers_of_tokens_do_not_pass(reference: Reference) -> None:
    with pytest.raises(ValueError, match="zip"):
        reference.check(tokens(reference, 0, ())[:1], PROMPTS)
