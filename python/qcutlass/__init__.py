"""Fast products of fp16 / bf16 activations with int4 / int8 weights, on NVIDIA GPUs and CPUs."""

from qcutlass import _C
from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.products import gemm, plan, tactics
from qcutlass.quantization import QuantizedTensor, quantize
from qcutlass.weights import dequantize, preprocess_weights, unpack_weights

__version__: str = _C.build_info()["version"]

__all__ = [
    "CheckpointError",
    "QuantizedTensor",
    "UnsupportedError",
    "__version__",
    "dequantize",
    "gemm",
    "plan",
    "preprocess_weights",
    "quantize",
    "tactics",
    "unpack_weights",
]
