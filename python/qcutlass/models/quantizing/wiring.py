"""Which linear layers of a block share an input, and which layer before them can take factors of it.

Found by running the block, not by names: factors are put in, and where the block's output stays, they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

_CHANGED: Final = 1e-3  # of the block's own contribution: powers of two round nothing, a wrong place changes much
_FACTORS: Final = (64.0, 0.5, 1 / 64, 8.0, 2.0, 1 / 8)  # large and small: an activation function bends either


@dataclass(frozen=True)
class InputGroup:
    """Linear layers that read the same tensor.

    Attributes:
        linears: their names in the block, in the order in which they run.
        previous: the norm or linear whose output can be divided instead, by its weight; None: there is none.
        is_telling: factors in these layers alone change what the block gives. Where they do not, as in a block of
            zeros, nothing can be found out, for this block or another.
        has_scales: whether they may divide their own input where there is no `previous`; experts may not.
    """

    linears: tuple[str, ...]
    previous: str | None
    is_telling: bool = True
    has_scales: bool = True


def input_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """The input with which a linear layer was called."""
    tensor: Tensor = arguments[0] if arguments else next(iter(keywords.values()))
    return tensor


@torch.no_grad()
def find_groups(
    block: nn.Module, linears: Sequence[str], hidden: Tensor, run: Callable[[Tensor], Tensor]
) -> list[InputGroup]:
    """All of `linears`, in groups; those that were not called are left out.

    Args:
        block: with weights in fp32, which are as before in the end.
        linears: names in the block.
        hidden: an input of the block; `run` gives the output for it.
    """
    seen: dict[int, list[str]] = {}
    kept: list[Tensor] = []  # so that no address comes twice

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            tensor = input_of(arguments, keywords)
            kept.append(tensor)
            names = seen.setdefault(tensor.data_ptr(), [])
            if name not in names:
                names.append(name)

        return hook

    with ExitStack() as hooks:
        for name in linears:
            hooks.enter_context(block.get_submodule(name).register_forward_pre_hook(watch(name), with_kwargs=True))
        expected = run(hidden)
    kept.clear()
    scale = (expected - hidden).square().mean().sqrt()
    groups = []
    for names in seen.values():
        group = [block.get_submodule(name) for name in names]

        def changes(previous: nn.Module | None, group: Sequence[nn.Module] = group) -> bool:
            with _factored(previous, group):
                difference = (run(hidden) - expected).square().mean().sqrt()
            return bool(difference > _CHANGED * scale)

        is_telling = changes(None)
        candidates = _candidates(block, names, linears) if is_telling else ()
        previous = next((name for name in candidates if not changes(block.get_submodule(name))), None)
        groups.append(InputGroup(tuple(names), previous, is_telling))
    return groups


def _candidates(block: nn.Module, names: Sequence[str], linears: Sequence[str]) -> Iterator[str]:
    """Norms, then some of `linears`, with as many outputs as the group has inputs."""
    k = block.get_submodule(names[0]).in_features
    found: dict[bool, list[str]] = {False: [], True: []}
    for name, module in block.named_modules():
        weight = module._parameters.get("weight")
        takes = weight is not None and (name in linears or weight.dim() == 1) and len(weight) == k
        if takes and name not in names:
            found[name in linears].append(name)
    yield from found[False]
    yield from found[True]


@contextmanager
def _factored(previous: nn.Module | None, group: Sequence[nn.Module]) -> Iterator[None]:
    """Divides what a layer, if any, gives out by factors, and multiplies the next layers' columns by them, for a
    while."""
    modules = [*group] if previous is None else [previous, *group]
    parameters = [tensor for module in modules for tensor in module.parameters(recurse=False)]
    before = [tensor.clone() for tensor in parameters]
    weight = group[0].get_parameter("weight")
    count = weight.shape[1]
    factors = torch.tensor(_FACTORS, device=weight.device).repeat(-(-count // len(_FACTORS)))[:count]
    try:
        if previous is not None:
            divide(previous, factors)
        for module in group:
            module.get_parameter("weight").mul_(factors)
        yield
    finally:
        for tensor, value in zip(parameters, before, strict=True):
            tensor.copy_(value)


def divide(previous: nn.Module, factors: Tensor) -> None:
    """Divides the output of a norm or linear, by its weight and bias in place."""
    weight, bias = previous.get_parameter("weight"), previous._parameters.get("bias")
    weight.div_(factors if weight.dim() == 1 else factors[:, None])
    if bias is not None:
        bias.div_(factors)
