"""torch.mm, or torch.addmm where there is a bias, on weights and activations that are dequantised already: cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu_timing import Contestant
from bench.layer import Layer
from bench.peers.base import Peer, Product, require_gpu


class Cublas(Peer):
    """Dense 16-bit product."""

    key = "cublas"
    label = "cuBLAS 16-bit"

    def load(self) -> str:
        require_gpu()
        return f"torch {torch.__version__}"

    def prepare(self, layer: Layer) -> Product:
        weights, bias = layer.dense, layer.bias

        def contestants(m: int) -> list[Contestant]:
            a = layer.dense_rows(m)

            def launch(index: int, out: Tensor) -> Tensor:
                weight = weights[index][0].T
                return torch.mm(a, weight, out=out) if bias is None else torch.addmm(bias, a, weight, out=out)

            return [Contestant(self.key, launch, len(weights))]

        return contestants
