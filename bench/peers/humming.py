"""humming-kernels (PyPI): weight-only products compiled for their shape when they are first used."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.gpu_timing import Contestant, copies_for
from bench.peers.base import Peer, Product, import_library

if TYPE_CHECKING:
    from bench.layer import Layer


class Humming(Peer):
    """`humming.layer.HummingLayer` with the kernels that its own heuristics choose for the GPU and M."""

    key = "humming"
    label = "humming"

    def load(self) -> str:
        version: str = import_library("humming", "humming-kernels").__version__
        return version

    def prepare(self, layer: Layer) -> Product:
        humming = import_library("humming.layer", "humming-kernels")
        pack = import_library("humming.ops", "humming-kernels").pack_weight
        case, problem = layer.case, layer.problem
        groups = case.k // case.group_size

        # Codes are packed along K, integer zeros along N; both are [N, ...] as the scales are.
        tensors = {
            "weight": pack(problem.codes.to(torch.int32).contiguous(), case.bits),
            "weight_scale": problem.scales.reshape(groups, case.n).T.to(case.dtype).contiguous(),
        }
        if case.zeros == "int":
            assert problem.zeros is not None
            tensors["zero_point"] = pack(problem.zeros.to(torch.int32).contiguous(), case.bits).T.contiguous()
        elif case.zeros == "real":
            assert problem.zeros is not None
            tensors["zero_point"] = problem.zeros.T.to(case.dtype).contiguous()
        config: dict[str, Any] = {
            "dtype": f"uint{case.bits}",
            "group_size": 0 if groups == 1 else case.group_size,
            "has_zero_point": case.zeros != "none",
            "is_fp_zero_point": case.zeros == "real",
        }
        first = humming.HummingLayer(
            shape_n=case.n, shape_k=case.k, weight_config=config, torch_dtype=case.dtype
        ).cuda()
        first.load_from_tensors(tensors)
        first.transform()
        copies = copies_for(sum(parameter.nbytes for parameter in first.parameters()))
        layers = [first, *(copy.deepcopy(first) for _ in range(copies - 1))]

        def contestants(a: Tensor) -> list[Contestant]:
            def launch(index: int, out: Tensor) -> Tensor:
                layers[index](a, outputs=out)
                return out

            return [Contestant(self.key, launch, copies)]

        return contestants
