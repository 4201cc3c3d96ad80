"""torch's own int4 product, on bfloat16 activations."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from bench.gpu_timing import Contestant, rotation
from bench.layer import Layer
from bench.peers.base import Peer, Product, Skip, require_gpu, require_integers

_GROUPS: Final = (32, 64, 128, 256)
_MOST_ROWS: Final = 64  # beyond, it is many times slower than dense
_INNER_K_TILES: Final = 8


class Int4pack(Peer):
    """`torch._weight_int4pack_mm`: w = (code - 8) * scale + zero in bfloat16."""

    key = "int4pack"
    label = "torch int4pack (bf16)"

    def load(self) -> str:
        require_gpu()
        return f"torch {torch.__version__}"

    def prepare(self, layer: Layer) -> Product:
        layer = require_integers(layer)
        case, problem = layer.case, layer.problem
        if case.bits != 4 or case.group_size not in _GROUPS or case.k % case.group_size != 0:
            raise Skip(f"takes 4 bits in whole groups of {', '.join(map(str, _GROUPS))}")
        if case.n % 8 != 0 or case.k % (16 * _INNER_K_TILES) != 0:
            raise Skip(f"takes N % 8 = 0 and K % {16 * _INNER_K_TILES} = 0")
        scales = problem.scales.float()
        shift = torch.zeros_like(scales) if problem.zeros is None else (8 - problem.zeros.float()) * scales
        if problem.minimums is not None:
            shift = 8 * scales - problem.minimums.float()
        nibbles = (problem.codes[:, ::2] << 4 | problem.codes[:, 1::2]).contiguous()
        packed = torch._convert_weight_to_int4pack(nibbles, _INNER_K_TILES)
        weights = rotation([packed, torch.stack([scales, shift], dim=2).bfloat16().contiguous()])

        def contestants(m: int) -> list[Contestant]:
            if m > _MOST_ROWS:
                raise Skip(f"M > {_MOST_ROWS}: made for fewer rows, many times slower than a dense product")
            rows = problem.a[:m].bfloat16()

            def launch(index: int, out: Tensor) -> Tensor:  # allocates its output
                codes, scales_and_zeros = weights[index]
                return torch._weight_int4pack_mm(rows, codes, case.group_size, scales_and_zeros)

            return [Contestant(self.key, launch, len(weights))]

        return contestants
