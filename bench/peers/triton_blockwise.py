"""A plain Triton kernel of blockwise int8 and fp8, `triton_kernel.py`, tiles of 128 x 128 x 128."""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch
from torch import Tensor

from bench.gpu_timing import Contestant, rotation
from bench.layer import Layer
from bench.layer_blockwise import BLOCK, BlockwiseLayer, QuantizedOutputs
from bench.peers.base import Peer, Product, import_library, require

CONFIGURATIONS: Final = ((4, 3), (8, 3), (8, 4))
"""Warps and stages, of which the fastest counts."""
_BAND: Final = 8


def _kernel() -> Any:
    return importlib.import_module("bench.peers.triton_kernel").multiply


class TritonBlockwise(Peer):
    """The public implementations of this product are Triton kernels of this form; ours is written for the comparison.

    With a quantised output it quantises in its epilogue, as those do.
    """

    key = "triton_blockwise"
    label = "Triton 128x128x128"

    def load(self) -> str:
        version = import_library("triton", "triton").__version__
        return f"triton {version}, warps and stages {CONFIGURATIONS}"

    def prepare(self, layer: Layer) -> Product:
        ours = require(layer, BlockwiseLayer)
        kernel, weights, kept = _kernel(), rotation([ours.b, ours.b_s]), QuantizedOutputs()
        modes = ours.quantizes, ours.scheme.operands == "fp8"

        def contestants(m: int) -> list[Contestant]:
            a, a_s = ours.a[:m], ours.a_s[:m]
            grid = (-(-m // BLOCK) * -(-ours.n // BLOCK),)

            def contestant(warps: int, stages: int) -> Contestant:
                def launch(index: int, out: Tensor) -> Tensor:
                    b, b_s = weights[index]
                    scales = out
                    if ours.quantizes:
                        out = out.new_empty(out.shape, dtype=torch.int8)
                        scales = out.new_empty((m, -(-ours.n // BLOCK)), dtype=torch.float32)
                    options = {"num_warps": warps, "num_stages": stages}
                    kernel[grid](a, a_s, b, b_s, out, scales, m, ours.n, ours.k, BLOCK, _BAND, *modes, **options)
                    return kept.keep(out, scales) if ours.quantizes else out

                complete = kept.numbers if ours.quantizes else None
                return Contestant(f"{self.key} w{warps}_s{stages}", launch, len(weights), complete=complete)

            return [contestant(*configuration) for configuration in CONFIGURATIONS]

        return contestants
