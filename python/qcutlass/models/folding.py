"""Smoothing factors in the weights of the layers on both sides of an activation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qcutlass.products.checks import FLOATING, check_channels, check_tensor, shape_of


def fold_smoothing(norm_or_linear: nn.Module, linears: nn.Linear | Sequence[nn.Linear], s: Tensor) -> None:
    """Divides the outputs of a layer by smoothing factors and multiplies the next layers' columns by them, in place.

    The model's function stays what it was, up to the rounding of the changed weights to their own type, provided that
    `linears` are all that read the output, and that channels do not meet or bend on the way: a norm right before its
    linears, `v_proj` before `o_proj`, `up_proj` before `down_proj` of a gated MLP. An activation function in between is
    not allowed, except ReLU.

    Args:
        norm_or_linear: a norm that multiplies by its weight `[K]` (LayerNorm with or without bias, RMSNorm and its
            kin), or a Linear of K outputs.
        linears: Linear layers of K inputs.
        s: float16, bfloat16 or float32 `[K]`, positive: from `smooth`.

    Raises:
        TypeError: a layer is of another kind.
        ValueError: shapes disagree; a factor is not positive and finite; a layer or a weight comes twice; the norm does
            not scale with its weight (some multiply by 1 + weight), or cannot be run alone to find out; a changed
            weight would overflow its type, or all weights of a channel would round to zero in it. Nothing has been
            changed then.

    Example:
        >>> import torch, qcutlass
        >>> norm, linear, x = torch.nn.LayerNorm(4), torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> before = linear(norm(x))
        >>> qcutlass.fold_smoothing(norm, linear, torch.tensor([4.0, 1.0, 0.5, 2.0]))
        >>> bool((linear(norm(x)) - before).abs().max() < 1e-6)
        True
    """
    several: Any = [linears] if isinstance(linears, nn.Module) else linears
    if not isinstance(several, Iterable) or isinstance(several, Tensor):
        raise TypeError(f"linears: expected a torch.nn.Linear or a list of some, got {type(linears).__name__}")
    write(folded(norm_or_linear, list(several), s))


Changes = list[tuple[Tensor, Tensor]]
_Part = tuple[str, Tensor, Callable[[Tensor, Tensor], Tensor], Tensor]  # name, weight, what to do with it, by what


def folded(previous: nn.Module, linears: Sequence[nn.Module], s: Tensor) -> Changes:
    """Each weight that folding changes, with its new values; raises as `fold_smoothing` does."""
    if not linears:
        raise ValueError("linears: expected at least one Linear, got none")
    parts = _divided(previous, s)
    for index, linear in enumerate(linears):
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linears[{index}]: expected a torch.nn.Linear, got {type(linear).__name__}")
        check_channels(f"s, for linears[{index}]", s, linear.in_features)
        parts.append((f"linears[{index}].weight", linear.weight, torch.mul, s))
    if len({id(tensor) for _, tensor, _, _ in parts}) < len(parts):
        raise ValueError("linears: a layer or a weight comes twice, and would be multiplied twice; name it once")
    if not bool((s > 0).all()):
        raise ValueError("s: expected positive factors, got zero or a negative one")
    changes = []
    for name, tensor, operation, factor in parts:
        check_tensor(name, tensor, FLOATING)
        value = operation(tensor.detach().float(), factor.to(tensor.device, torch.float32)).to(tensor.dtype)
        if not bool((value.isfinite() | ~tensor.isfinite()).all()):
            raise ValueError(f"{name}: smoothing overflows {tensor.dtype}; limit s, or fold in a wider type first")
        lost = _nonzero_channels(tensor, factor) & ~_nonzero_channels(value, factor)
        if name != "norm_or_linear.bias" and bool(lost.any()):  # a bias may be tiny beside what it is added to
            raise ValueError(
                f"{name}: smoothing rounds all of channel {int(lost.nonzero()[0])} to zero in {tensor.dtype}; "
                "limit s, or fold in a wider type first"
            )
        changes.append((tensor, value))
    return changes


def write(changes: Changes) -> None:
    """Writes what `folded` returned."""
    with torch.no_grad():
        for tensor, value in changes:
            tensor.copy_(value)


def _nonzero_channels(weight: Tensor, factor: Tensor) -> Tensor:
    """bool `[K]`: channels with a weight that is not zero; `factor` is `[K]`, or `[K, 1]` if they are the rows."""
    nonzero = weight.detach() != 0
    return nonzero if weight.dim() == 1 else nonzero.any(dim=factor.dim() - 1)


def _divided(previous: nn.Module, s: Tensor) -> list[_Part]:
    """The weights of the layer before."""
    if not isinstance(previous, nn.Module):
        raise TypeError(f"norm_or_linear: expected a torch.nn.Module, got {type(previous).__name__}")
    weight, bias = getattr(previous, "weight", None), getattr(previous, "bias", None)
    kind = type(previous).__name__
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"norm_or_linear: {kind} has no weight to divide; let the quantised layer divide its input instead "
            "(smooth_model does so for layers in no group)"
        )
    if not isinstance(previous, nn.Linear) and weight.dim() != 1:
        raise TypeError(f"norm_or_linear: expected a Linear, or a norm with a weight [K], got {kind}")
    check_channels("s, for norm_or_linear", s, weight.shape[0])
    if weight.dim() == 1:
        _check_norm(previous, weight, bias)
    parts: list[_Part] = [("norm_or_linear.weight", weight, torch.div, s if weight.dim() == 1 else s[:, None])]
    if isinstance(bias, Tensor):
        parts.append(("norm_or_linear.bias", bias, torch.div, s))
    return parts


def _check_norm(norm: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError unless the norm's output is proportional to its weight, plus its bias: that, for zeros."""
    state = {name: buffer.clone() for name, buffer in norm.named_buffers()}  # a BatchNorm would change its own
    state["weight"] = torch.zeros_like(weight)
    expected = torch.zeros_like(weight)
    if isinstance(bias, Tensor):
        state["bias"] = expected = torch.ones_like(bias)
    probe = torch.linspace(-1, 1, weight.shape[0], dtype=weight.dtype, device=weight.device)[None]
    kind = type(norm).__name__
    try:
        with torch.no_grad():
            answer: Tensor = torch.func.functional_call(norm, state, (probe,))
    except Exception as error:
        raise ValueError(
            f"norm_or_linear: expected a norm that runs on one row of activations {shape_of(probe)}, but {kind} "
            f"raised: {error}; call eval() on a model in training mode, else leave this layer out"
        ) from error
    if bool((answer != expected).any()):
        raise ValueError(
            f"norm_or_linear: the output of {kind} is not proportional to its weight, plus its bias (some norms "
            "multiply by 1 + weight), so dividing them does not divide the output"
        )
