"""Tolerances of quantisers: their sums in fp32 against the same in float64."""

from __future__ import annotations

from typing import Final

from torch import Tensor

MEANS: Final = 1e-5
"""Largest relative error of means over some hundred tokens, in fp32."""

OUTPUTS: Final = 1e-3
"""Largest relative difference of one output error, a sum of squares of differences, computed in two ways in fp32."""

SUM_SLACK: Final = 1 + 1e-5
"""The share by which a sum of squares may exceed another one, if it did not when summed in another order."""

ELIMINATION: Final = 1e-2
"""The distance allowed, in codes, from an elimination in float64: fp32 weights near a tie round either way."""


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The largest error over the largest value.

    Example:
        >>> import torch
        >>> from qcutlass.testing.quantizing import relative_error
        >>> relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        0.5
    """
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max())


FOLDING: Final = 1e-4
"""Largest change of a block's contribution, both as norms, when factors move from one of its layers to the next."""


def relative_norm(found: Tensor, exact: Tensor) -> float:
    """The norm of the error over the norm of the value.

    Example:
        >>> import torch
        >>> from qcutlass.testing.quantizing import relative_norm
        >>> relative_norm(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0]))
        1.3333333333333333
    """
    return float((found.double() - exact.double()).norm() / exact.double().norm())
