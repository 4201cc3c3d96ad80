"""Products of every kind that has kernels of asynchronous MMAs, as functions of the rows of activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds import description as kinds
from torch import Tensor

import qcutlass
from qcutlass import _C

Shape = tuple[int, int, int]  # m, n, k
PRODUCTS = {name: kind for kind in DESCRIPTIONS.values() for name in kind.asynchronous}


@dataclass(frozen=True)
class Product:
    """A product with some of its rows, by a tactic."""

    whole: kinds.Product

    @property
    def a(self) -> Tensor:
        return self.whole.a

    @property
    def names(self) -> list[str]:
        """Of all its tactics."""
        return self.whole.tactics()

    def run(self, a: Tensor, **forced: Any) -> tuple[Tensor, ...]:
        """The outputs of these activations, so many as there are or the first ones; forced: tactic and split_k."""
        return self.whole.outs(**self.whole.rows(a), **forced)

    def explain(self, **forced: Any) -> qcutlass.Explanation:
        return self.whole.explain(**forced)

    def plan(self, tactic: str, split_k: int) -> Any:
        return self.explain(tactic=tactic, split_k=split_k).plan


def product(name: str, shape: Shape, device: str) -> Product:
    kind = PRODUCTS[name]
    return Product(kind.random(kind.case(*shape, **kind.asynchronous[name]), device, seed=1))


def needs_wgmma() -> None:
    """Skips a test where this GPU, or this build, has no asynchronous MMAs."""
    if not _C.device_traits(torch.cuda.current_device()).wgmma:
        pytest.skip("needs a GPU of compute capability 9.0, and kernels for 90a")


def on_gpu(name: str, shape: Shape) -> tuple[Product, list[str]]:
    """A product on the GPU, and its tactics of asynchronous MMAs."""
    needs_wgmma()
    found = product(name, shape, "cuda")
    wanted = [tactic for tactic in found.names if "_sm90a_" in tactic]
    assert wanted
    return found, wanted
