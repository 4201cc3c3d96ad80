"""Stock CUTLASS 2.x products: a library that bench/CMakeLists.txt builds, reached through ctypes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from bench.gpu_timing import Contestant, rotation
from bench.layer import Layer, WeightOnlyLayer
from bench.layer_w8a8 import EightBitLayer
from bench.peers.base import Peer, Product, Skip, reason, require, require_gpu

ENVIRONMENT_VARIABLE: Final = "QCUTLASS_BENCH_CUTLASS"


class TileLibrary:
    """The tile shapes of one kind of product, each a kernel.

    Args:
        path: of libqcutlass_bench_cutlass.so.
        family: "dense" or "int8", as the functions of the library are named.
        operands: number of tensors that a product takes, the output among them.

    Raises:
        OSError: the file can't be loaded.
    """

    def __init__(self, path: Path, family: str, operands: int) -> None:
        library = ctypes.CDLL(str(path.resolve()))
        prefix = f"qcutlass_bench_{family}"
        name = library[f"{prefix}_name"]
        name.restype = ctypes.c_char_p
        self._run = library[f"{prefix}_run"]
        self._run.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * operands, *[ctypes.c_int] * 3, ctypes.c_void_p]
        self.names: list[str] = [name(index).decode() for index in range(library[f"{prefix}_count"]())]

    def run(self, index: int, operands: Sequence[Tensor]) -> None:
        """Launches tile `index` on the current stream; contiguous CUDA tensors: a [M, K], weight [N, K], ..., out.

        Raises:
            RuntimeError: CUTLASS refuses the problem or the launch fails.
        """
        a, weight = operands[:2]
        (m, k), n = a.shape, weight.shape[0]
        stream = torch.cuda.current_stream(a.device).cuda_stream
        status = self._run(index, *(operand.data_ptr() for operand in operands), m, n, k, stream)
        if status != 0:
            raise RuntimeError(f"CUTLASS {self.names[index]} at M={m} N={n} K={k}: cutlass::Status {status}")


class _Tiles(Peer):
    """Every tile shape of one kind of product; the fastest counts.

    Args:
        path: of libqcutlass_bench_cutlass.so; None: where QCUTLASS_BENCH_CUTLASS points.
    """

    family: ClassVar[str]
    operands: ClassVar[int]

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._library: TileLibrary | None = None

    def load(self) -> str:
        require_gpu()
        library = self._load()
        return f"{len(library.names)} tiles: {' '.join(library.names)}"

    def _load(self) -> TileLibrary:
        if self._library is None:
            path = self._path or Path(os.environ.get(ENVIRONMENT_VARIABLE, ""))
            if path == Path(""):
                raise Skip(f"not built: see bench/CMakeLists.txt; then set {ENVIRONMENT_VARIABLE}")
            try:
                self._library = TileLibrary(path, self.family, self.operands)
            except (OSError, AttributeError) as error:  # no such file, or one of another version
                raise Skip(reason(error)) from error
        return self._library

    def product(self, rows: Callable[[int], Sequence[Tensor]], channels: Sequence[Sequence[Tensor]]) -> Product:
        """A contestant for each tile shape.

        Args:
            rows: operands that belong to the first m rows, the activations first.
            channels: copies of the operands that belong to the channels, the weight first.
        """
        library = self._load()

        def contestants(m: int) -> list[Contestant]:
            a, *of_rows = rows(m)

            def contestant(tile: int) -> Contestant:
                def launch(index: int, out: Tensor) -> Tensor:
                    weight, *of_channels = channels[index]
                    library.run(tile, [a, weight, *of_rows, *of_channels, out])
                    return out

                return Contestant(f"{self.key} {library.names[tile]}", launch, len(channels))

            return [contestant(tile) for tile in range(len(library.names))]

        return contestants


def _require_multiples(layer: Layer, dtype: torch.dtype, n: int, k: int) -> None:
    """Raises `Skip` unless outputs have this type, and N and K are multiples of these."""
    if layer.dtype != dtype or layer.n % n != 0 or layer.k % k != 0:
        name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        raise Skip(f"built for {name} outputs, N a multiple of {n}, K of {k}")


class Cutlass(_Tiles):
    """cutlass_dense.cu: fp16 by fp16."""

    key = "cutlass"
    label = "CUTLASS 2.x fp16"
    family = "dense"
    operands = 3

    def prepare(self, layer: Layer) -> Product:
        layer = require(layer, WeightOnlyLayer)
        _require_multiples(layer, torch.float16, 8, 8)
        return self.product(lambda m: [layer.dense_rows(m)], layer.dense)


class CutlassInt8(_Tiles):
    """cutlass_int8.cu: int8 by int8 with scales and bias in CUTLASS's visitor epilogue."""

    key = "cutlass_int8"
    label = "CUTLASS 2.x int8"
    family = "int8"
    operands = 6

    def prepare(self, layer: Layer) -> Product:
        ours = require(layer, EightBitLayer)
        if ours.scheme.operands != "int8" or ours.azp is not None:
            raise Skip("built for int8 without zero points")
        _require_multiples(ours, torch.bfloat16, 8, 16)
        return self.product(lambda m: [ours.a[:m], ours.a_scale[:m]], rotation([ours.w, ours.w_scale, ours.bias]))
