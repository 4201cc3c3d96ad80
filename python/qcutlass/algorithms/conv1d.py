"""transformers' `Conv1D`, which GPT-2 and its like have: a linear layer whose weight lies transposed, `[K, N]`."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

_TYPE: Final = ("transformers.pytorch_utils", "Conv1D")
"""Module and name of the class: transformers may not be there."""


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is such a layer."""
    return (type(module).__module__, type(module).__name__) == _TYPE


def as_linear(module: nn.Module) -> nn.Linear:
    """The linear layer that computes what a `Conv1D` does, with a weight of its own; a Linear is itself."""
    conv: Any = module
    if not is_conv1d(module):
        assert isinstance(conv, nn.Linear)
        return conv
    linear = nn.Linear(conv.nx, conv.nf, bias=False, device="meta")
    linear.weight = nn.Parameter(conv.weight.detach().T.contiguous(), requires_grad=conv.weight.requires_grad)
    linear.bias = conv.bias
    return linear.train(conv.training)
