"""torch.mm on weights that are dequantised already: cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench.gpu_timing import Contestant
from bench.peers.base import Peer, Product, require_gpu

if TYPE_CHECKING:
    from bench.layer import Layer


class Cublas(Peer):
    """Dense 16-bit product."""

    key = "cublas"
    label = "cuBLAS 16-bit"

    def load(self) -> str:
        require_gpu()
        return f"torch {torch.__version__}"

    def prepare(self, layer: Layer) -> Product:
        weights = layer.dense

        def contestants(a: Tensor) -> list[Contestant]:
            def launch(index: int, out: Tensor) -> Tensor:
                return torch.mm(a, weights[index][0].T, out=out)

            return [Contestant(self.key, launch, len(weights))]

        return contestants
