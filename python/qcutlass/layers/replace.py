"""All linear layers of a model at once."""

from __future__ import annotations

import dis
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Final

from torch import Tensor, nn

from qcutlass.algorithms.calibration import ActivationStatistics
from qcutlass.algorithms.conv1d import as_linear, is_conv1d
from qcutlass.defaults import ROUTERS as ROUTERS
from qcutlass.defaults import SKIPPED as SKIPPED
from qcutlass.errors import UnsupportedError
from qcutlass.layers.base import QuantLinear, check_plain, kind_of
from qcutlass.layers.experts import gate_of, is_replaced, quantized_experts
from qcutlass.schemes import Scheme

_LOADS: Final = ("LOAD_ATTR", "LOAD_METHOD")
_VARIABLES: Final = re.compile("(LOAD|STORE)_(?:FAST|DEREF)")  # names of steps have two from Python 3.13 on

AFTER: Final[list[Callable[[nn.Module], None]]] = []
"""What `replace_linear` calls with the model when its layers are in place, for those who save models of theirs."""


def replace_linear(
    model: nn.Module,
    scheme: Scheme,
    skip: Sequence[str] | None = None,
    *,
    statistics: Mapping[str, ActivationStatistics] | None = None,
) -> list[str]:
    """Replaces the Linear layers of a model, and the experts of a mixture, in place, by quantised ones.

    Replaced are layers of exactly the type `torch.nn.Linear`, and transformers' `Conv1D` (GPT-2). Not replaced are
    layers of derived types, whose owners may look into them (parametrized Linears, the output projection of torch's
    attention), and layers whose owner's code reads their weights itself (those directly in a
    `torch.nn.TransformerEncoderLayer`, `wo` of T5, some of Mamba's). A layer with several names is quantised once. With
    `WeightOnly`, modules with all experts of a block become `qcutlass.layers.QuantExperts`, in Mixtral, Qwen2-MoE,
    Qwen3-MoE, OLMoE, DeepSeek-V2 and -V3 and gpt-oss of transformers 5. With other schemes, and in other models,
    experts stay as they are. All new layers are made before the first one is put in. So an error changes nothing, but
    old and new weights are in memory together.

    Args:
        model: any module that is not itself a Linear. On the meta device it becomes one to load a state into, with
            `load_state_dict(state, assign=True)`.
        scheme: `WeightOnly(...)`, `W4A8(...)`, `W8A8(...)`, `FP8(...)` or `Blockwise(...)`.
        skip: layers to leave alone: names as in `model.named_modules()`, their last parts, or patterns of either
            (`"*.experts.*"`); a layer inside a skipped module is skipped. None: `lm_head` and routers (`gate`,
            `router`, `shared_expert_gate` and the like), where there are such.
        statistics: from `calibrate` or `smooth_model`; needed by static schemes for every layer.

    Returns:
        Names of the replaced layers, and of the experts' modules.

    Raises:
        TypeError: an argument is of another type.
        ValueError: nothing to replace, an entry of `skip` matches no module, or a layer (named) can't be quantised:
            it has forward hooks, as of `torch.nn.utils.weight_norm`, or a forward of its own, for example.
        UnsupportedError: a layer is on a GPU that has no kernel for the scheme.

    Example:
        >>> import torch, qcutlass
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> qcutlass.replace_linear(model, qcutlass.WeightOnly(bits=4, group_size=32), skip=["2"])
        ['0']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    kind_of(scheme)
    if skip is not None:
        check_skip(skip)
    if statistics is not None and not isinstance(statistics, Mapping):
        raise TypeError(f"statistics: expected a mapping by names of layers, got {type(statistics).__name__}")
    modules = dict(model.named_modules(remove_duplicate=False))
    strangers = [name for name in statistics or {} if name not in modules]
    if strangers:
        raise ValueError(f"statistics: {strangers[0]!r} names no module; model.named_modules() lists them")
    skipped = _skipped(modules, SKIPPED if skip is None else skip, must_match=skip is not None)
    skipped |= _read_by_others(modules.values())
    linears: dict[str, Any] = {
        name: module for name, module in modules.items() if type(module) is nn.Linear or is_conv1d(module)
    }
    names = [name for name, module in linears.items() if module not in skipped]
    mixtures = [name for name, module in modules.items() if is_replaced(module, scheme) and module not in skipped]
    if "" in names:
        raise ValueError("model: is itself a Linear; use qcutlass.QuantLinear.from_linear(model, scheme)")
    if "" in mixtures:
        raise ValueError("model: is itself the experts of a mixture; use qcutlass.layers.QuantExperts.from_weights")
    if not names and not mixtures:
        raise ValueError("model: it has no torch.nn.Linear to replace (without skip and TransformerEncoderLayers)")

    for name in (*names, *mixtures):
        check_plain(name, modules[name], ", or list it in skip")
    layers: dict[nn.Module, nn.Module] = {}
    for name in (*names, *mixtures):
        module = modules[name]
        if module in layers:
            continue
        try:
            if name in linears:
                found = (statistics or {}).get(name)
                layers[module] = QuantLinear.from_linear(as_linear(module), scheme, statistics=found)
            else:
                layers[module] = quantized_experts(module, scheme)
        except (TypeError, ValueError, UnsupportedError) as error:
            raise type(error)(f"{name}: {error}") from error
    replaced = [name for name, module in modules.items() if module in layers]
    for name in replaced:
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, layers[modules[name]])
    for act in AFTER:
        act(model)
    return replaced


def check_skip(skip: object) -> None:
    """Raises TypeError unless `skip` is a collection of names."""
    if isinstance(skip, str):
        raise TypeError(f"skip: expected a list of names, got the string {skip!r}")
    if not isinstance(skip, Collection) or isinstance(skip, Tensor):
        raise TypeError(f"skip: expected a list of names, got {type(skip).__name__}")
    for pattern in skip:
        if not isinstance(pattern, str):
            raise TypeError(f"skip: expected a list of names, got one with {pattern!r}")


def _read_by_others(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Layers whose owner reads their weights itself, or may: as that of an encoder layer does in inference."""
    owners = list(modules)
    read = {kind: _weights_read(kind) for kind in {type(owner) for owner in owners}}
    found: set[nn.Module] = set()
    for owner in owners:
        if not getattr(owner, "slow_but_exact", True):
            continue  # BLOOM's, which reads weights where that is true alone
        children = owner._modules
        found |= {child for name in read[type(owner)] if (child := children.get(name)) is not None}
    return found


def _weights_read(kind: type[nn.Module]) -> frozenset[str]:
    """Names of children whose `weight` methods of a class read, if only for its type: packed layers have none.

    They are found in the byte code, where `self.child.weight` loads these two names one behind the other, and
    `layer = self.child` makes a variable stand for the first. Methods that make or initialise modules do not count.
    """
    found: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for name, member in vars(base).items():
            method = inspect.unwrap(member) if callable(member) else None
            if inspect.isfunction(method) and "init" not in name and "reset" not in name:
                found |= _owners_of_weights(list(_accesses(method)))
    return frozenset(found)


def _owners_of_weights(accesses: Sequence[tuple[str, str]]) -> set[str]:
    """Names of attributes whose `weight` is loaded, of variables' attributes, too."""
    found, aliases = set[str](), defaultdict[str, set[str]](set)
    for (kind, name), (action, target) in pairwise(accesses):
        if (kind, action) == ("ATTRIBUTE", "STORE"):
            aliases[target].add(name)
    for (kind, name), after in pairwise(accesses):
        if after == ("ATTRIBUTE", "weight"):
            found |= {name} if kind == "ATTRIBUTE" else aliases[name] if kind == "LOAD" else set()
    return found


def _accesses(method: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """What byte code does with names, one after the other: it loads an attribute, or loads or stores a variable."""
    for step in dis.get_instructions(method):
        actions = ["ATTRIBUTE"] if step.opname in _LOADS else _VARIABLES.findall(step.opname) or [""]
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        yield from zip(actions, map(str, names), strict=False)


def _skipped(modules: Mapping[str, nn.Module], skip: Sequence[str], must_match: bool) -> set[nn.Module]:
    """The modules that match, and all inside them."""
    found: set[nn.Module] = set()
    for pattern in skip:
        matches = [
            module
            for name, module in modules.items()
            if name and any(fnmatchcase(each, pattern) for each in _names(name, module))
        ]
        if must_match and not matches:
            raise ValueError(f"skip: {pattern!r} matches no module; model.named_modules() lists them")
        found.update(inner for module in matches for inner in module.modules())
    return found


def _names(name: str, module: nn.Module) -> list[str]:
    """The names by which a module is skipped: experts by those of their weights, too, as `"*.experts.*"` means them."""
    weights = [f"{name}.{weight}" for weight in module._parameters] if gate_of(module) else []
    return [name, name.rpartition(".")[2], *weights]
