"""Whole models: no a-priori bound holds for them, so they are measured by what rounding alone does."""

from __future__ import annotations

from typing import Final

from torch import Tensor

NOISE: Final = 4.0
"""Largest error of a correct model, in units of that of the same model in the same type with dense weights.

Both err by rounding alone, in sums of another order; wrong weights err by thousands of that.
"""

PERPLEXITY: Final = 1e-4
"""Largest relative difference of perplexities that rounding alone explains, in fp32; a thousand times what it makes."""

INT8_ACTIVATIONS: Final = 0.05
"""Largest relative difference of perplexities, of short texts and models cut to few blocks, that activations quantised
to int8 in blocks of 32 make; wrong scales make orders of magnitude."""

IMPORTED: Final = 0.01
"""Largest difference of the perplexity of SmolLM2, imported without loss, in fp32 or fp16, from that of the dequantised
model in fp32, which is about 15. Activations in fp16 make a tenth of that, bf16 more than all of it."""


def noise_ratio(out: Tensor, dense: Tensor, exact: Tensor) -> float:
    """The largest error of `out` over that of `dense`; at most `NOISE` if `out` is correct.

    Args:
        out: logits of the model under test.
        dense: those of the same model, in the same type, with dequantised weights.
        exact: those of the dense model in float64.

    Example:
        >>> import torch
        >>> from qcutlass.testing.models import noise_ratio
        >>> exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> noise_ratio(exact.float() + 2**-22, exact.float() + 2**-22, exact)
        1.0
    """
    ours, theirs = ((values.double() - exact).abs().max() for values in (out, dense))
    return float(ours / theirs)
