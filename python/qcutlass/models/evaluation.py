"""Perplexity of a text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from qcutlass.models.positions import check_length
from qcutlass.products.checks import check_callable, check_integer, check_tokens


@dataclass(frozen=True)
class Evaluation:
    """The result of `perplexity`.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of a token; inf where it is beyond floats (that of a model
            which gives a token no chance), nan where the model's logits are.
        tokens: how many were predicted.
        seconds: that took.
    """

    perplexity: float
    tokens: int
    seconds: float


def perplexity(
    model: Any, ids: Tensor, window: int = 512, progress: Callable[[int, int], None] | None = None
) -> Evaluation:
    """Perplexity of a sequence of tokens, in windows that don't overlap: the first token of each is given.

    Tokens behind the last whole window are left out. Log-likelihoods are computed in fp32 and added up in fp64.

    Args:
        model: maps ids `[1, window]` to an object whose `logits` are `[1, window, vocabulary]`. A module gets them on
            the device of its parameters or else buffers, or on the CPU if it has neither.
        ids: int64 `[tokens]`, on any device.
        window: tokens of a window, at least 2.
        progress: called with the number of windows done and the number of all.

    Raises:
        TypeError: `ids` is no tensor of int64, or `window` no integer.
        ValueError: there is no whole window; a model with learned positions has none for as many tokens.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from qcutlass.models.evaluation import perplexity
        >>> uniform = lambda ids: SimpleNamespace(logits=torch.zeros(*ids.shape, 8))
        >>> round(perplexity(uniform, torch.arange(8), window=4).perplexity, 3)
        8.0
    """
    check_integer("window", window, minimum=2)
    check_tokens("ids", ids)
    check_callable("progress", progress)
    check_length("window", model, window, "it has", "take a smaller one (--window)")
    windows = ids[: len(ids) // window * window].view(-1, window)
    if not len(windows):
        raise ValueError(
            f"ids: expected at least one window of {window} tokens, got {len(ids)}; take a longer text, more of it "
            "(--tokens) or a smaller window (--window)"
        )
    device = ids.device
    if isinstance(model, torch.nn.Module):
        held = next(chain(model.parameters(), model.buffers()), None)  # quantised layers may have buffers only
        device = torch.device("cpu") if held is None else held.device
    total = 0.0
    begin = time.perf_counter()
    with torch.inference_mode():
        for count, tokens in enumerate(windows.to(device)):
            logits = model(tokens[None]).logits[0, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
            total += float(losses.double().sum())
            if progress is not None:
                progress(count + 1, len(windows))
    predicted = len(windows) * (window - 1)
    return Evaluation(_exp(total / predicted), predicted, time.perf_counter() - begin)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
