"""gemlite (PyPI): Triton kernels, tuned when they are first used."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bench.gpu_timing import Contestant, rotation
from bench.layer import Layer
from bench.peers.base import Peer, Product, Skip, import_library, require_integers

AUTOTUNE_MODES: Final = ("default", "fast", "max")
_MOST_ROWS: Final = 64  # beyond, each M tunes dozens of kernels that are slower than a dense product


class Gemlite(Peer):
    """`gemlite.GemLiteLinear`.

    It ships the results of its tuning for some shapes on some GPUs. On compute capability 9.0 those of the H100 are
    used; other shapes are tuned here, which takes a while.

    Args:
        autotune: how much it tunes: "default" (a few candidates), "fast" (what it does by itself) or "max".
    """

    key = "gemlite"
    label = "gemlite"

    def __init__(self, autotune: str = "fast") -> None:
        if autotune not in AUTOTUNE_MODES:
            raise ValueError(f"gemlite's autotune mode {autotune!r}: expected one of {', '.join(AUTOTUNE_MODES)}")
        self._autotune = autotune

    def load(self) -> str:
        gemlite = import_library("gemlite", "gemlite")
        gemlite.set_autotune(self._autotune)
        configurations = Path(str(gemlite.__file__)).parent / "configs" / "h100.json"
        shipped = torch.cuda.get_device_capability() == (9, 0) and configurations.exists()
        if shipped:
            gemlite.load_config(str(configurations))
        return f"{gemlite.__version__}, autotune {self._autotune}" + (", its H100 configurations" if shipped else "")

    def prepare(self, layer: Layer) -> Product:
        gemlite = import_library("gemlite", "gemlite")
        layer = require_integers(layer)
        case, problem = layer.case, layer.problem
        if problem.minimums is not None:
            raise Skip("takes zeros, not minimums")
        dtype = {torch.float16: gemlite.DType.FP16, torch.bfloat16: gemlite.DType.BF16}[case.dtype]
        linear = gemlite.GemLiteLinear(
            W_nbits=case.bits,
            group_size=case.group_size,
            in_features=case.k,
            out_features=case.n,
            input_dtype=dtype,
            output_dtype=dtype,
        )
        scales = problem.scales.reshape(-1, case.n).T.to(case.dtype).contiguous()
        zeros = None if problem.zeros is None else problem.zeros.reshape(-1, case.n).T.to(case.dtype).contiguous()
        linear.pack(problem.codes, scales, 2 ** (case.bits - 1) if zeros is None else zeros)
        weights = rotation(linear.get_tensor_args())
        settings = linear.get_meta_args()

        def contestants(m: int) -> list[Contestant]:
            if m > _MOST_ROWS:
                raise Skip(f"M > {_MOST_ROWS}: not tuned here")
            a = problem.a[:m]

            def launch(index: int, out: Tensor) -> Tensor:  # allocates its output
                result: Tensor = gemlite.forward_functional(a, None, weights[index], settings)
                return result

            return [Contestant(self.key, launch, len(weights))]

        return contestants
