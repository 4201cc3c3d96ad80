"""Whether tokens are a model's greedy ones: on the CPU one by one, on a GPU as far as 16-bit floats tell them apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.python.vllm.engine import DEVICE
from torch import Tensor

from qcutlass.models.transformers import load_model
from qcutlass.testing.models import NOISE


@dataclass(frozen=True)
class Reference:
    """A model in transformers, which says what an engine's tokens have to be.

    Attributes:
        exact: in float32, on the CPU.
        rounded: makes it as transformers runs it on a GPU, in float16.
    """

    exact: Any
    rounded: Callable[[], Any]

    @classmethod
    def of_folder(cls, folder: Path) -> Reference:
        """With qcutlass's layers."""
        return cls(load_model(folder)[0], lambda: load_model(folder, "cuda", torch.float16)[0])

    @classmethod
    def of_model(cls, model: Any) -> Reference:
        """With the layers that it has."""
        return cls(model, lambda: in_float16(copy.deepcopy(model).to("cuda")))

    def check(self, found: list[list[int]], prompts: list[list[int]], rerouted: float = 0) -> None:
        """Fails unless `found` are the tokens behind the prompts; of mixtures, but for a share that may be `rerouted`.

        On a GPU an engine sums in other orders than transformers, and takes another token where two are as likely. If
        the engine's logits err by e at most, the exact logit of its token is less than the largest by 2 e at most; e is
        `NOISE` times the largest error of transformers in float16. Where two experts of a mixture are as likely, a
        token may get the other one, there too, and logits that are not near: the largest of the others' errors counts.
        """
        if DEVICE == "cpu":
            assert found == [self._greedy(ids, len(tokens)) for ids, tokens in zip(prompts, found, strict=True)]
            return
        rounded, errors, behind = self.rounded(), [], []
        for ids, tokens in zip(prompts, found, strict=True):
            exact = self._logits(self.exact, ids, tokens)
            errors.append((self._logits(rounded, ids, tokens) - exact).abs().amax(-1))
            chosen = exact[torch.arange(len(tokens)), torch.tensor(tokens)]
            behind.append(exact.amax(-1) - chosen)
        error, deficits = float(torch.cat(errors).quantile(1 - rerouted)), torch.cat(behind)
        assert float((deficits > 2 * NOISE * error).double().mean()) <= rerouted
        assert float((deficits > 0).double().mean()) < 0.05  # where two are as likely, and seldom so

    def _greedy(self, ids: list[int], count: int) -> list[int]:
        a = torch.tensor([ids])
        no_end = -1
        out = self.exact.generate(
            a, attention_mask=torch.ones_like(a), do_sample=False, max_new_tokens=count, eos_token_id=no_end
        )
        found: list[int] = out[0, len(ids) :].tolist()
        return found

    @staticmethod
    def _logits(model: Any, ids: list[int], tokens: list[int]) -> Tensor:
        """[token, vocabulary]: those that each token is chosen by, if it follows the ones before it."""
        with torch.inference_mode():
            found: Tensor = model(torch.tensor([ids + tokens[:-1]], device=model.device)).logits
        return found[0, len(ids) - 1 :].cpu().double()


def in_float16(model: Any) -> Any:
    """The model with its parameters in float16, as transformers loads it: rotations stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
    return model
