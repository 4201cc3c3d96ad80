"""SmoothQuant: moves the outliers of activations into the weights, where int8 has room for them.

Source of the method: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models" (2022).
"""

from qcutlass.smoothquant.calibration import ActivationStatistics, calibrate
from qcutlass.smoothquant.factors import smooth
from qcutlass.smoothquant.folding import fold_smoothing
from qcutlass.smoothquant.models import smooth_model

__all__ = ["ActivationStatistics", "calibrate", "fold_smoothing", "smooth", "smooth_model"]
