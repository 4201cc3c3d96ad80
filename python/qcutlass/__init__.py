"""Quantised language models in torch: fast products with weights of 4 and 8 bits, on NVIDIA GPUs and CPUs."""

from qcutlass import _registration, blockwise
from qcutlass.algorithms.calibration import calibrate
from qcutlass.algorithms.eight_bit import quantize_activations, quantize_weights_fp8, quantize_weights_int8
from qcutlass.algorithms.nearest import quantize
from qcutlass.algorithms.smoothing import smooth
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.layers import QuantLinear, fuse_projections, replace_linear
from qcutlass.models.block_fusing import fuse_block
from qcutlass.models.folding import fold_smoothing
from qcutlass.models.smoothing import smooth_model
from qcutlass.products import (
    Explanation,
    dequantize,
    explain,
    gemm,
    gemm_fp8,
    gemm_w8a8,
    plan,
    preprocess_weights,
    tactics,
    unpack_weights,
    weight_sums,
)
from qcutlass.quantized import QuantizedTensor
from qcutlass.schemes import FP8, W8A8, Blockwise, WeightOnly
from qcutlass.tuning.tuner import tune
from qcutlass.version import __version__

__all__ = [
    "FP8",
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
    "explain",
    "fold_smoothing",
    "fuse_block",
    "fuse_projections",
    "gemm",
    "gemm_fp8",
    "gemm_w8a8",
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

_registration.register()  # last: it may import what imports this module
