"""Quantisers that look at data: plain functions on a layer's weights and on statistics of its input.

`InputStatistics` records what they need; `round_to_nearest` (clipping search), `quantize_floats` (e2m1, e4m3), `gptq`,
`awq_scales` with `awq`, and `search_smoothing` find codes or scales. `qcutlass.models.quantize_model` applies them to
whole models, block by block.
"""

from qcutlass.algorithms.awq import AwqScales, awq, awq_scales
from qcutlass.algorithms.clipping import round_to_nearest
from qcutlass.algorithms.floating import quantize_floats
from qcutlass.algorithms.gptq import GptqResult, gptq
from qcutlass.algorithms.smoothing import Smoothing, search_smoothing
from qcutlass.algorithms.statistics import InputStatistics, output_error

__all__ = [
    "AwqScales",
    "GptqResult",
    "InputStatistics",
    "Smoothing",
    "awq",
    "awq_scales",
    "gptq",
    "output_error",
    "quantize_floats",
    "round_to_nearest",
    "search_smoothing",
]
