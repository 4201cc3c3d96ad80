"""Quantised language models in torch: fast products with weights of 4 and 8 bits, on NVIDIA GPUs and CPUs."""

# torch takes seconds to import, and the command imports this file before it knows whether it needs torch. So a name
# that needs torch is imported when it is first used, with only what it needs: to call `gemm` imports no models.

import ast
import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcutlass import _main_interpreter as _main_interpreter  # first: torch never returns where this refuses
from qcutlass import _registration
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.version import __version__

if TYPE_CHECKING:
    from qcutlass import blockwise as blockwise
    from qcutlass import moe as moe
    from qcutlass._public import *  # noqa: F403

__all__ = [  # noqa: F405
    "FP8",
    "W4A8",
    "W8A8",
    "Blockwise",
    "CheckpointError",
    "Explanation",
    "QuantLinear",
    "QuantizedTensor",
    "UnsupportedError",
    "WeightOnly",
    "__version__",
    "blockwise",
    "calibrate",
    "dequantize",
    "expand_scales",
    "explain",
    "fold_smoothing",
    "fuse_block",
    "fuse_projections",
    "gemm",
    "gemm_fp8",
    "gemm_grouped",
    "gemm_w4a8",
    "gemm_w8a8",
    "interleave_gate_up",
    "moe",
    "plan",
    "preprocess_weights",
    "quantize",
    "quantize_activations",
    "quantize_weights_fp8",
    "quantize_weights_int8",
    "replace_linear",
    "smooth",
    "smooth_model",
    "tactics",
    "tune",
    "unpack_weights",
    "weight_sums",
]

_PARTS = ("algorithms", "blockwise", "formats", "layers", "models", "moe", "products", "quantized", "schemes", "tuning")


@functools.cache
def _homes() -> dict[str, str]:
    """The module of each name that needs torch, as `_public.py` says, which is not run: it would import all."""
    lines = ast.parse(Path(__file__).with_name("_public.py").read_text()).body
    return {name.name: f"{line.module}" for line in lines if isinstance(line, ast.ImportFrom) for name in line.names}


if not TYPE_CHECKING:  # to type checkers a misspelt name stays one

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return importlib.import_module(f"qcutlass.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(importlib.import_module(_homes()[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS})


_registration.register()  # last: it may import what imports this module
