"""SmoothQuant for all layers of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.algorithms.smoothing import smooth
from qcutlass.models.folding import folded, write
from qcutlass.products.checks import check_flag

Group = tuple[str, Sequence[str]]

# Names in a Llama-like block: a norm, and the linears, which alone read its output.
_BLOCK: Final[tuple[Group, ...]] = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
)

_FACTORS: Final = (8.0, 0.5, 0.125, 2.0)
_CHANGED: Final = 1e-3
"""The part of a model's output by which it differs where factors reach what does not undo them."""


def smooth_model(
    model: nn.Module,
    statistics: Mapping[str, ActivationStatistics],
    alpha: float = 0.5,
    *,
    groups: Iterable[Group] | None = None,
    others: bool = True,
) -> dict[str, ActivationStatistics]:
    """Smooths a model in place: factors go into the norm or linear before, and into the weights behind.

    The model computes what it did, up to the rounding of its weights. Layers in no group are left as they are, but
    their returned statistics hold factors, by which `replace_linear` has the quantised layer divide its own input.

    Args:
        model: with Linear layers, not yet quantised.
        statistics: from `calibrate`.
        alpha: as for `smooth`.
        groups: pairs of names, as in `model.named_modules()`: a norm or linear, and all the linears that read its
            output (see `fold_smoothing` for what may lie in between). None: found in Llama-like blocks, whose only
            norms are `input_layernorm`, before `self_attn.q_proj`, `k_proj`, `v_proj`, and `post_attention_layernorm`,
            before `mlp.gate_proj`, `up_proj`. A model of transformers is run, on its `dummy_inputs`, to see whether
            others read these norms, too (MiniMax's residual, Laguna's gates): such groups are left out.
        others: whether layers in no group get factors of their own.

    Returns:
        Statistics of the smoothed model, for `replace_linear`.

    Raises:
        ValueError: no group was given or found; a name is not in the model or has no statistics; a layer is in two
            groups; or as for `smooth` and `fold_smoothing`. The model is unchanged then, and after any other error.

    Example:
        >>> import torch, qcutlass
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.SiLU(),
        ...                             torch.nn.Linear(32, 4))
        >>> with torch.no_grad(), qcutlass.calibrate(model) as statistics:
        ...     _ = model(torch.randn(64, 16))
        >>> statistics = qcutlass.smooth_model(model, statistics, groups=[("0", ["1"])])
        >>> statistics["1"].smooth is None, statistics["3"].smooth.shape
        (True, torch.Size([32]))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(statistics, Mapping):
        raise TypeError(f"statistics: expected a mapping by names of layers, got {type(statistics).__name__}")
    for name, record in statistics.items():
        if not isinstance(record, ActivationStatistics):
            raise TypeError(f"statistics: expected ActivationStatistics of {name!r}, got {type(record).__name__}")
    check_flag("others", others)
    if groups is not None:
        groups = list(groups)
        for group in groups:
            if not isinstance(group, tuple | list) or len(group) != 2 or not isinstance(group[0], str):
                raise TypeError(f"groups: expected pairs (name, [names]), got {group!r}")
    modules = dict(model.named_modules(remove_duplicate=False))
    groups = _wired(model, modules, list(_llama_groups(modules))) if groups is None else list(groups)
    if not groups:
        raise ValueError(
            "groups: found no block whose only norms are input_layernorm and post_attention_layernorm, which nothing "
            "reads but q_proj, k_proj, v_proj in self_attn and gate_proj, up_proj in mlp; pass pairs (norm, [linears])"
        )
    _check_names(modules, groups, statistics)
    result = dict(statistics)
    work = []
    for previous, linears in groups:
        absmax = reduce(torch.maximum, [statistics[name].absmax for name in linears])
        with _naming(previous, linears):
            s = smooth(absmax, [_weight(modules[name]) for name in linears], alpha)
            folded(modules[previous], [modules[name] for name in linears], s)
        result |= {name: statistics[name].divided(s) for name in linears}
        work.append((previous, linears, s))
    if others:
        members = {id(modules[name]) for _, linears in groups for name in linears}
        for name, record in statistics.items():
            module = modules.get(name)
            if isinstance(module, nn.Linear) and id(module) not in members:
                result[name] = replace(record, smooth=smooth(record.absmax, module.weight, alpha))
    before: dict[int, tuple[Tensor, Tensor]] = {}
    try:
        for previous, linears, s in work:  # folded again: an earlier group may have changed a layer of this one
            with _naming(previous, linears):
                for tensor, value in folded(modules[previous], [modules[name] for name in linears], s):
                    if id(tensor) not in before:  # on the host: all copies at once might not fit on the model's device
                        before[id(tensor)] = tensor, tensor.detach().to("cpu", copy=True)
                    write([(tensor, value)])
    except BaseException:
        write([(tensor, old) for tensor, old in before.values() if not torch.equal(tensor.cpu(), old)])
        raise
    return result


@contextmanager
def _naming(previous: str, linears: Sequence[str]) -> Iterator[None]:
    """Errors in the block name the group."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"group {previous} -> {', '.join(linears)}: {error}") from error


def _weight(module: nn.Module) -> Tensor:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"expected torch.nn.Linear layers, got {type(module).__name__}")
    return module.weight


def _llama_groups(modules: Mapping[str, nn.Module]) -> Iterator[Group]:
    """The groups of the blocks that are known to be wired like Llama's: each norm is read by its linears alone.

    A block with other norms, or fewer, is wired in another way: norms behind attention and MLP, or one for both.
    """
    norms = {norm for norm, _ in _BLOCK}
    for name, block in modules.items():
        if {child for child, _ in block.named_children() if "norm" in child} != norms:
            continue
        prefix = f"{name}." if name else ""
        for norm, linears in _BLOCK:
            if all(isinstance(modules.get(prefix + linear), nn.Linear) for linear in linears):
                yield prefix + norm, [prefix + linear for linear in linears]


def _wired(model: nn.Module, modules: Mapping[str, nn.Module], groups: list[Group]) -> list[Group]:
    """Those of the groups whose linears alone read the norm's output, as far as running the model tells.

    Powers of two round nothing: divided out of the norms' outputs, and multiplied into the linears' inputs, they
    change a model where another module meets them.
    """
    inputs = getattr(model, "dummy_inputs", None)  # of transformers' models
    if not groups or not isinstance(inputs, Mapping):
        return groups
    kinds = {norm: [group for group in groups if group[0].rpartition(".")[2] == norm] for norm, _ in _BLOCK}
    training = [module for module in modules.values() if module.training]
    model.eval()
    try:
        expected = _run(model, inputs)
        for norm, alike in kinds.items():
            with ExitStack() as hooks:
                for previous, linears in alike:
                    for handle in _factored(modules[previous], [modules[name] for name in linears]):
                        hooks.callback(handle.remove)
                difference = _run(model, inputs) - expected
            if bool(difference.square().mean() > _CHANGED**2 * expected.square().mean()):
                kinds[norm] = []
    except Exception:  # it takes other inputs: nothing is found out
        return groups
    finally:
        for module in training:
            module.training = True
    return [group for group in groups if group in kinds[group[0].rpartition(".")[2]]]


@torch.no_grad()
def _run(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    device = next(model.parameters()).device
    output: Tensor = model(**{name: each.to(device) for name, each in inputs.items()})[0]
    return output.float()


def _factored(norm: nn.Module, linears: Sequence[nn.Module]) -> Iterator[RemovableHandle]:
    """Hooks that divide a norm's output by factors, and multiply the linears' inputs by them."""

    def factors(x: Tensor) -> Tensor:
        return torch.tensor(_FACTORS, dtype=x.dtype, device=x.device).repeat(x.shape[-1])[: x.shape[-1]]

    yield norm.register_forward_hook(lambda module, inputs, output: output / factors(output))
    for linear in linears:
        yield linear.register_forward_pre_hook(lambda module, inputs: (inputs[0] * factors(inputs[0]), *inputs[1:]))


def _check_names(
    modules: Mapping[str, nn.Module], groups: Sequence[Group], statistics: Mapping[str, ActivationStatistics]
) -> None:
    owners = Counter(id(getattr(module, "weight", None)) for module in set(modules.values()))
    read: set[int] = set()
    written: set[int] = set()
    for previous, linears in groups:
        if isinstance(linears, str):
            raise TypeError(f"groups: expected a list of names after {previous!r}, got the string {linears!r}")
        if not linears:
            raise ValueError(f"groups: expected the names of one linear or more after {previous!r}, got none")
        for name in (previous, *linears):
            if name not in modules:
                raise ValueError(f"groups: the model has no module {name!r}; named_modules() lists them")
            weight = getattr(modules[name], "weight", None)
            if weight is not None and owners[id(weight)] > 1:
                raise ValueError(f"groups: the weight of {name!r} is also another module's, which would change with it")
        for name in linears:
            if name not in statistics:
                raise ValueError(f"statistics: none for {name!r}; was it called while calibrating?")
        for seen, names in ((written, [previous]), (read, linears)):
            for name in names:
                if id(modules[name]) in seen:
                    raise ValueError(f"groups: {name!r} comes twice; put all the linears behind a layer in one group")
                seen.add(id(modules[name]))
