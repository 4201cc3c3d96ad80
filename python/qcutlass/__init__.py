"""Quantised language models in torch: fast products with weights of 4 and 8 bits, on NVIDIA GPUs and CPUs."""

# torch takes seconds to import, and the command imports this file before it knows whether it needs torch. So the names
# that need it come where torch is loaded already, or with the first use of one.

import importlib
import sys
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

_PARTS = ("algorithms", "formats", "layers", "models", "products", "quantized", "schemes", "tuning")


def _load() -> None:
    public = importlib.import_module("qcutlass._public")
    for name in ("blockwise", "moe"):
        importlib.import_module(f"qcutlass.{name}")  # which makes it an attribute of this package
    globals().update({name: value for name, value in vars(public).items() if name in __all__ and name[:2] != "__"})


if not TYPE_CHECKING:  # to type checkers a misspelt name stays one

    def __getattr__(name: str) -> Any:
        if name not in __all__ and name not in _PARTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _load()
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})


if "torch" in sys.modules:
    _load()
_registration.register()  # last: it may import what imports this module
