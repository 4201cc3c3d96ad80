"""A layer on the GPU in every form that a contestant multiplies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

import qcutlass
from bench import limits
from bench.dense import DenseLibrary
from bench.gpu_timing import Contestant, copies_for
from bench.schemes import Scheme
from bench.shapes import Shape
from qcutlass import testing

_INT4PACK_GROUPS: Final = (32, 64, 128, 256)
_INT4PACK_MOST_ROWS: Final = 64  # beyond, it is many times slower than dense
_INNER_K_TILES: Final = 8


def _rotation(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """As many copies as it takes that each is cold in L2 when its turn comes."""
    return [[t.clone() for t in tensors] for _ in range(copies_for(sum(t.nbytes for t in tensors)))]


class Layer:
    """Random weights of one scheme and shape: packed, dequantised and in torch's own int4 form."""

    def __init__(self, scheme: Scheme, shape: Shape, most_rows: int) -> None:
        self.scheme = scheme
        self.case = scheme.case(most_rows, *shape, torch.float16)
        self.problem = self.case.random(device="cuda", seed=1)
        self.weight = self.problem.weight(self.case.dtype)
        self.reference = testing.reference(self.problem.a, self.weight)

    @cached_property
    def packed(self) -> list[list[Tensor]]:
        """Copies of (packed codes, scales, zeros if there are any)."""
        packed = qcutlass.preprocess_weights(self.problem.codes, bits=self.case.bits)
        return _rotation([t for t in (packed, self.problem.scales, self.problem.zeros) if t is not None])

    @cached_property
    def dense(self) -> list[list[Tensor]]:
        return _rotation([self.weight])

    @cached_property
    def int4pack(self) -> list[list[Tensor]]:
        """Copies of (codes, scales and zeros) for `torch._weight_int4pack_mm`: w = (code - 8) * scale + zero."""
        codes, scales, zeros = self.problem.codes, self.problem.scales.float(), self.problem.zeros
        shift = torch.zeros_like(scales) if zeros is None else (8 - zeros.float()) * scales
        nibbles = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
        packed = torch._convert_weight_to_int4pack(nibbles, _INNER_K_TILES)
        return _rotation([packed, torch.stack([scales, shift], dim=2).bfloat16().contiguous()])

    def qcutlass_contestant(self, a: Tensor, tactic: str = "", split_k: int = 0) -> Contestant:
        """The fused product, through the public function; the tactic is the selected one or forced by name."""
        keywords: dict[str, Any] = self.problem.keywords | ({"tactic": tactic, "split_k": split_k} if tactic else {})

        def launch(index: int, out: Tensor) -> Tensor:
            return qcutlass.gemm(a, *self.packed[index], out=out, **keywords)

        plan = qcutlass.plan(a, *self.packed[0], **keywords)
        name = plan.tactic if plan.split_k == 1 else f"{plan.tactic} split {plan.split_k}"
        return Contestant(name, launch, len(self.packed))

    def forced_contestants(self, a: Tensor, wanted: str, splits: Sequence[int]) -> Iterator[Contestant]:
        """Each tactic whose name contains `wanted`, with each split-K, as far as the GPU and K allow."""
        for tactic in qcutlass.tactics(a, *self.packed[0], **self.problem.keywords):
            for split in splits if wanted in tactic else ():
                with contextlib.suppress(qcutlass.UnsupportedError):
                    yield self.qcutlass_contestant(a, tactic, split)

    def cublas_contestant(self, a: Tensor) -> Contestant:
        def launch(index: int, out: Tensor) -> Tensor:
            return torch.mm(a, self.dense[index][0].T, out=out)

        return Contestant("cublas", launch, len(self.dense))

    def cutlass_contestants(self, a: Tensor, library: DenseLibrary) -> list[Contestant]:
        """One for each tile shape; none where the alignment does not allow it."""

        def contestant(tile: int) -> Contestant:
            def launch(index: int, out: Tensor) -> Tensor:
                library.run(tile, a, self.dense[index][0], out)
                return out

            return Contestant(f"cutlass_{library.names[tile]}", launch, len(self.dense))

        return [contestant(tile) for tile in range(len(library.names)) if library.supports(a, self.case.n)]

    def int4pack_contestants(self, a: Tensor) -> list[Contestant]:
        """torch's int4 product on bfloat16 activations, where it takes the scheme and the shape."""
        case, rows = self.case, a.bfloat16()
        grouped = case.bits == 4 and case.group_size in _INT4PACK_GROUPS and case.k % case.group_size == 0
        aligned = case.n % 8 == 0 and case.k % (16 * _INNER_K_TILES) == 0
        if not (grouped and aligned and len(a) <= _INT4PACK_MOST_ROWS):
            return []

        def launch(index: int, out: Tensor) -> Tensor:  # allocates its output
            codes, scales_and_zeros = self.int4pack[index]
            return torch._weight_int4pack_mm(rows, codes, case.group_size, scales_and_zeros)

        return [Contestant("int4pack", launch, len(self.int4pack))]

    def limit_seconds(self, m: int) -> float | None:
        """The least time for m rows on this GPU, None where its ceilings are unknown.

        Weights, scales, zeros and activations are read once, the output is written once.
        """
        machine = limits.machine(torch.cuda.get_device_name())
        if machine is None:
            return None
        moved = sum(t.nbytes for t in self.packed[0]) + 2 * m * (self.case.k + self.case.n)
        return machine.seconds(moved, 2 * m * self.case.n * self.case.k)
