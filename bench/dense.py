"""Stock CUTLASS 2.x dense fp16 products: cutlass_dense.cu, built by bench/CMakeLists.txt, reached through ctypes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

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

    @staticmethod
    def supports(a: Tensor, n: int) -> bool:
        """Whether the kernels take these activations [M, K] for N channels."""
        return a.dtype == torch.float16 and a.shape[1] % _ALIGNMENT == 0 and n % _ALIGNMENT == 0

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


def load(path: Path | None) -> DenseLibrary | None:
    """The library at `path`, else where QCUTLASS_BENCH_DENSE points, else None."""
    if path is None and ENVIRONMENT_VARIABLE in os.environ:
        path = Path(os.environ[ENVIRONMENT_VARIABLE])
    return None if path is None else DenseLibrary(path)
