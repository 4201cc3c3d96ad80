"""Products: all that happens between a call such as `qcutlass.gemm` and the extension.

`kinds.KINDS` lists the kinds of products, one file each; `kind` says what a kind is.
"""

from qcutlass.products import decoder_operators as decoder_operators  # registers its operators
from qcutlass.products import expert_block as expert_block  # likewise, and those of its steps
from qcutlass.products import rotary_operators as rotary_operators  # likewise
from qcutlass.products.functions import gemm, gemm_fp8, gemm_grouped, gemm_w4a8, gemm_w8a8, weight_sums
from qcutlass.products.operators import register_products
from qcutlass.products.packing import expand_scales
from qcutlass.products.selection import Explanation, explain, plan, tactics
from qcutlass.products.weights import dequantize, preprocess_weights, unpack_weights

__all__ = [
    "Explanation",
    "dequantize",
    "expand_scales",
    "explain",
    "gemm",
    "gemm_fp8",
    "gemm_grouped",
    "gemm_w4a8",
    "gemm_w8a8",
    "plan",
    "preprocess_weights",
    "tactics",
    "unpack_weights",
    "weight_sums",
]

register_products()
