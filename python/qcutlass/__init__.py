"""Fast products of fp16 / bf16 activations with int4 / int8 weights, on NVIDIA GPUs and CPUs."""

from qcutlass import _C
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.products import gemm
from qcutlass.quantization import QuantizedTensor, quantize
from qcutlass.selection import Explanation, explain, plan, tactics
from qcutlass.tuning.tuner import tune
from qcutlass.weights import dequantize, preprocess_weights, unpack_weights

__version__: str = _C.build_info()["version"]

__all__ = [
    "CheckpointError",
    "Explanation",
    "QuantizedTensor",
    "UnsupportedError",
    "__version__",
    "dequantize",
    "explain",
    "gemm",
    "plan",
    "preprocess_weights",
    "quantize",
    "tactics",
    "tune",
    "unpack_weights",
]
