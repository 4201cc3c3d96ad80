"""Whole models: no a-priori bound holds for them, so they are measured by what rounding alone does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

NOISE: Final = 4.0
"""Largest error of a correct model, in units of that of the same model in the same type with dense weights.

Both err by rounding alone, in sums of another order; wrong weights err by thousands of that.
"""

PERPLEXITY: Final = 1e-4
"""Largest relative difference of perplexities that rounding alone explains, in fp32; a thousand times what it makes."""

INT8_ACTIVATIONS: Final = 0.05
"""Largest relative difference of perplexities, of short texts and models cut to few blocks, that activations quantised
to int8 in blocks of 32 make; wrong scales make orders of magnitude."""

LLAMA_CPP: Final = 0.03
"""Largest relative norm of the difference of logits from llama.cpp's, of small random models with layers of Q8_0, whose
activations llama.cpp quantises: it makes 0.01, and another model makes 1."""

IMPORTED: Final = 0.01
"""Largest difference of the perplexity of SmolLM2, imported without loss, in fp32 or fp16, from that of the dequantised
model in fp32, which is about 15. Activations in fp16 make a tenth of that, bf16 more than all of it."""


def noise_ratio(out: Tensor, dense: Tensor, exact: Tensor) -> float:
    """The largest error of `out` over that of `dense`; at most `NOISE` if `out` is correct.

    Args:
        out: logits of the model under test.
        dense: those of the same model, in the same type, with dequantised weights; or several such, as of
            `rounded_logits`, along a dimension before the others.
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


def rounded_logits(model: nn.Module, logits: Callable[[nn.Module], Tensor], draws: int = 8) -> Tensor:
    """What a model says where its weights err by at most a unit in the last place: what rounding alone can do.

    Some random models have a token that amplifies rounding a thousand times, and its error in one way of summing is a
    draw of a wide distribution: one dense model may be lucky there. The largest of several draws is no such chance.

    Args:
        model: with dense weights in the type to look at; they are as before afterwards.
        logits: of a model, of any shape.
        draws: how many besides that of the weights as they are; always the same ones.

    Returns:
        [draws + 1, ...], those of the model as it is first.

    Example:
        >>> from torch import nn
        >>> from qcutlass.testing.models import rounded_logits
        >>> rounded_logits(nn.Linear(4, 2), lambda model: model(torch.ones(3, 4))).shape
        torch.Size([9, 3, 2])
    """
    found = [logits(model)]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    try:
        for _ in range(draws):
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    moves = (torch.rand(tensor.shape, generator=generator) - 0.5) * torch.finfo(tensor.dtype).eps
                    tensor.copy_(state[name].double() * (1 + moves.double().to(tensor.device)))
            found.append(logits(model))
    finally:
        model.load_state_dict(state)
    return torch.stack(found)
