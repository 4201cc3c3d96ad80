"""torch._scaled_mm: fp8 products with a scale for each token and each channel."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from bench.gpu_timing import Contestant, rotation
from bench.layer import Layer
from bench.layer_w8a8 import EightBitLayer
from bench.peers.base import Peer, Product, Skip, require, require_gpu

_MULTIPLE: Final = 16


class ScaledMm(Peer):
    """`torch._scaled_mm` with row-wise scales, bias, and its fast accumulation: all sums stay in the MMAs."""

    key = "scaled_mm"
    label = "torch._scaled_mm"
    fast = True

    def load(self) -> str:
        require_gpu()
        return f"torch {torch.__version__}, {'fast accumulation' if self.fast else 'sums promoted to fp32'}"

    def prepare(self, layer: Layer) -> Product:
        ours = require(layer, EightBitLayer)
        if ours.scheme.operands != "fp8":
            raise Skip("multiplies fp8 alone")
        if ours.n % _MULTIPLE != 0 or ours.k % _MULTIPLE != 0:
            raise Skip(f"takes N and K that are multiples of {_MULTIPLE}")
        weights = rotation([ours.w, ours.w_scale[None, :], ours.bias])

        def contestants(m: int) -> list[Contestant]:
            a, a_scale = ours.a[:m], ours.a_scale[:m, None]

            def launch(index: int, out: Tensor) -> Tensor:
                w, w_scale, bias = weights[index]
                return torch._scaled_mm(
                    a,
                    w.T,
                    scale_a=a_scale,
                    scale_b=w_scale,
                    bias=bias,
                    out_dtype=ours.dtype,
                    use_fast_accum=self.fast,
                    out=out,
                )

            return [Contestant(self.key, launch, len(weights))]

        return contestants


class PromotedScaledMm(ScaledMm):
    """The same with sums that are promoted to fp32 every now and then, as those of `qcutlass.gemm_fp8` are."""

    key = "scaled_mm_promoted"
    label = "torch._scaled_mm, sums promoted"
    fast = False
