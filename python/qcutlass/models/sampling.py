"""How the next token is chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from qcutlass.products.checks import check_integer, check_number, check_seed


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest one, or one that is drawn.

    Attributes:
        temperature: by which logits are divided before one is drawn; 0: the likeliest token is taken each time.
        top_p: the likeliest tokens that have this probability together take part, the others do not.
        seed: of what is drawn; None: torch's generator as it is.

    Raises:
        TypeError: one is no number.
        ValueError: a temperature below 0 or not finite, a probability outside (0, 1], a seed below 0 or of more than
            64 bits; `top_p` or `seed` where nothing is drawn.

    Example:
        >>> from qcutlass.models.sampling import Sampling
        >>> Sampling(temperature=0.7, seed=1).keywords
        {'do_sample': True, 'temperature': 0.7, 'top_p': 1.0, 'top_k': 0}
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        check_number("top_p", self.top_p)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: expected a finite number from 0 on, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a probability in (0, 1], got {self.top_p}")
        if self.seed is not None:
            check_integer("seed", self.seed, minimum=0)
            check_seed("seed", self.seed)
        if self.temperature == 0 and (self.top_p != 1 or self.seed is not None):
            name = "top_p" if self.top_p != 1 else "seed"
            raise ValueError(f"{name}: nothing is drawn at temperature 0; pass temperature=, say 0.7, or leave it out")

    @property
    def keywords(self) -> dict[str, Any]:
        """For `generate` of transformers; top_k=0 turns a default of 50 off."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}

    @contextmanager
    def seeded(self, device: torch.device) -> Iterator[None]:
        """Has torch's generators begin with the seed inside; outside they go on as if nothing had been drawn."""
        if self.seed is None:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield
