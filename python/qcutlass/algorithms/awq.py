"""AWQ: channels with large activations are scaled up before rounding, so that their weights lose less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from qcutlass.algorithms.clipping import Penalty, checked_scheme, group_size_of, quantize_with
from qcutlass.algorithms.statistics import InputStatistics, check_inputs, check_layer, output_error
from qcutlass.products.checks import ceil_div, check_shares
from qcutlass.quantized import QuantizedTensor
from qcutlass.schemes import WeightOnly

EXPONENTS: Final = tuple(step / 10 for step in range(11))
_SMALLEST: Final = 1e-4  # of a scale, before all are normalised


@dataclass(frozen=True, eq=False)
class AwqScales:
    """The result of `awq_scales`.

    Attributes:
        scales: float32 `[K]`, which the weights' columns are multiplied by and the activations divided by.
        exponent: of the mean magnitudes; 0: all scales are 1.
        error: of the layers' outputs with these scales, see `output_error`.
        plain_error: the same without scales.
    """

    scales: Tensor
    exponent: float
    error: float
    plain_error: float


def awq_scales(
    weights: Sequence[Tensor],
    statistics: InputStatistics,
    scheme: WeightOnly | None = None,
    *,
    exponents: Sequence[float] = EXPONENTS,
) -> AwqScales:
    """Searches the scales of channels that make the outputs of quantised layers change least.

    Scales are `mean|x[k]|**exponent`, over the square root of the largest times the smallest. Lin et al., "AWQ:
    Activation-aware Weight Quantization for LLM Compression and Acceleration" (2023), section 3.2. The error of outputs
    is taken from the second moment of the inputs, exactly what running all calibration tokens would give.

    Args:
        weights: floating `[N_i, K]`: all layers that read the same input.
        statistics: of that input, on their device.
        scheme: bits, group size, symmetry; None: `WeightOnly()`.
        exponents: that are tried, in [0, 1]. The first of equally good ones is taken; 0 is always among them.

    Raises:
        TypeError, ValueError: as for `gptq`; no weights.

    Example:
        >>> import torch
        >>> from qcutlass.algorithms import InputStatistics, awq_scales
        >>> generator = torch.Generator().manual_seed(0)
        >>> weight, x = torch.randn(64, 256, generator=generator), torch.randn(512, 256, generator=generator)
        >>> x[:, ::64] *= 30  # a few channels matter most
        >>> statistics = InputStatistics.empty(256)
        >>> statistics.add(x)
        >>> found = awq_scales([weight], statistics)
        >>> found.error < found.plain_error / 2
        True
    """
    check_inputs(weights, statistics)
    check_shares("exponents", exponents)
    scheme = checked_scheme(scheme)
    magnitudes = statistics.mean_abs.clamp(min=_SMALLEST * max(float(statistics.mean_abs.max()), _SMALLEST))
    best: AwqScales | None = None
    plain = 0.0
    for exponent in dict.fromkeys([0.0, *exponents]):
        powers = magnitudes.double().pow(exponent)
        scales = (powers / (powers.max() * powers.min()).sqrt()).float()
        error = sum(
            output_error(
                weight,
                quantize_with(weight.float() * scales, scheme, None).dequantize() / scales,
                statistics.second_moment,
            )
            for weight in weights
        )
        if best is None:
            plain = error
        if best is None or error < best.error:
            best = AwqScales(scales, exponent, error, plain)
    assert best is not None
    return best


def awq(weight: Tensor, second_moment: Tensor, scheme: WeightOnly | None = None) -> QuantizedTensor:
    """Rounds to nearest, with each group's range clipped as suits the outputs: the second half of AWQ.

    The cost of a group's errors e is eT H e, H being the group's part of `second_moment`, as if other groups had none.

    Args:
        weight: floating `[N, K]`, scaled already.
        second_moment: float32 `[K, K]`, of inputs that are divided already: `statistics.divided(scales)`.
        scheme: bits, group size, symmetry and type of the scales; None: `WeightOnly()`.

    Raises:
        TypeError, ValueError: as for `gptq`.

    Example:
        >>> import torch
        >>> from qcutlass.algorithms import InputStatistics, awq, awq_scales
        >>> weight, statistics = torch.randn(64, 256), InputStatistics.empty(256)
        >>> statistics.add(torch.randn(512, 256))
        >>> s = awq_scales([weight], statistics).scales
        >>> q = awq(weight * s, statistics.divided(s).second_moment)
        >>> (q.dequantize() / s).shape  # the layer has act_scale = 1 / s, or what comes before it is divided by s
        torch.Size([64, 256])
    """
    check_layer(weight, second_moment)
    scheme = checked_scheme(scheme)
    return quantize_with(weight, scheme, _outputs(second_moment, group_size_of(scheme, weight.shape[1])))


def _outputs(second_moment: Tensor, step: int) -> Penalty:
    """The penalty of errors by the outputs that they change, each group by itself."""
    k = len(second_moment)
    blocks = second_moment.new_zeros((ceil_div(k, step), step, step))
    for group, begin in enumerate(range(0, k, step)):
        part = second_moment[begin : begin + step, begin : begin + step]
        blocks[group, : len(part), : len(part)] = part

    def penalty(errors: Tensor) -> Tensor:
        by_group = errors.transpose(0, 1)
        return ((by_group @ blocks) * by_group).sum(dim=2).T

    return penalty
