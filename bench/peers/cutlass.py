"""Stock CUTLASS 2.x dense fp16 products: cutlass_dense.cu, built by bench/CMakeLists.txt, reached through ctypes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from bench.gpu_timing import Contestant
from bench.peers.base import Peer, Product, Skip, reason, require_gpu

if TYPE_CHECKING:
    from bench.layer import Layer

ENVIRONMENT_VARIABLE: Final = "QCUTLASS_BENCH_DENSE"
_ALIGNMENT: Final = 8  # elements: kAlignment of cutlass_dense.cu


class DenseLibrary:
    """The loaded library: a list of tile shapes, each a kernel.

    Args:
        path: of libqcutlass_bench_dense.so.

    Raises:
        OSError: the file can't be loaded.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path.resolve()))
        library.qcutlass_bench_dense_name.restype = ctypes.c_char_p
        self._run = library.qcutlass_bench_dense_run
        self._run.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 3, *[ctypes.c_int] * 3, ctypes.c_void_p]
        count = library.qcutlass_bench_dense_count()
        self.names: list[str] = [library.qcutlass_bench_dense_name(index).decode() for index in range(count)]

    def run(self, index: int, a: Tensor, weight: Tensor, out: Tensor) -> None:
        """out[M, N] = a[M, K] @ weight[N, K].T on the current stream, contiguous fp16 CUDA tensors.

        Raises:
            RuntimeError: CUTLASS refuses the problem or the launch fails.
        """
        (m, k), n = a.shape, weight.shape[0]
        stream = torch.cuda.current_stream(a.device).cuda_stream
        status = self._run(index, a.data_ptr(), weight.data_ptr(), out.data_ptr(), m, n, k, stream)
        if status != 0:
            raise RuntimeError(f"CUTLASS {self.names[index]} at M={m} N={n} K={k}: cutlass::Status {status}")


class Cutlass(Peer):
    """Every tile shape of the library; the fastest counts.

    Args:
        path: of libqcutlass_bench_dense.so; None: where QCUTLASS_BENCH_DENSE points.
    """

    key = "cutlass"
    label = "CUTLASS 2.x fp16"

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._library: DenseLibrary | None = None

    def load(self) -> str:
        require_gpu()
        if self._library is None:
            path = self._path or Path(os.environ.get(ENVIRONMENT_VARIABLE, ""))
            if path == Path(""):
                raise Skip(f"not built: see bench/CMakeLists.txt; then set {ENVIRONMENT_VARIABLE}")
            try:
                self._library = DenseLibrary(path)
            except OSError as error:
                raise Skip(reason(error)) from error
        return f"{len(self._library.names)} tiles: {' '.join(self._library.names)}"

    def prepare(self, layer: Layer) -> Product:
        self.load()
        library, weights, case = self._library, layer.dense, layer.case
        assert library is not None
        if case.dtype != torch.float16 or case.n % _ALIGNMENT != 0 or case.k % _ALIGNMENT != 0:
            raise Skip(f"built for fp16, N and K multiples of {_ALIGNMENT}")

        def contestants(a: Tensor) -> list[Contestant]:
            def contestant(tile: int) -> Contestant:
                def launch(index: int, out: Tensor) -> Tensor:
                    library.run(tile, a, weights[index][0], out)
                    return out

                return Contestant(f"{self.key} {library.names[tile]}", launch, len(weights))

            return [contestant(tile) for tile in range(len(library.names))]

        return contestants
