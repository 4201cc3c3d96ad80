"""What `save_pretrained` of transformers writes of a model with packed layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from qcutlass.formats.specs import GUARD, LayerSpec, guard
from qcutlass.layers import QuantLinear
from qcutlass.layers.packed import PackedModule
from qcutlass.models.expert_modules import expert_modules, specs_of, split
from qcutlass.models.experts import TAKEN
from qcutlass.models.fitting import is_linear

Saved = tuple[dict[str, Tensor], object]
"""Tensors and their `quantization_config`, or None where no layer is packed."""


def saved_tensors(model: Any, state: Mapping[str, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, LayerSpec]]:
    """The tensors of a converted folder, guards of layers included, and the descriptions of its layers.

    Args:
        model: of transformers.
        state: what is written in place of the model's own state; None: that.

    Raises:
        ValueError: `state` has tensors of packed layers that are not as those of the model; tensors are on the meta
            device.
    """
    if state is not None:
        _check_state(model, state)
    tensors = split(model, model.state_dict() if state is None else dict(state))
    layers = [name.removesuffix(".w_packed") for name in tensors if name.endswith(".w_packed")]
    if not layers:
        return tensors, {}
    away = next((name for name in layers if tensors[f"{name}.w_packed"].is_meta), None)
    if away is not None:
        raise ValueError(
            f"{away}: its weights are not here, but where accelerate keeps them (offload_buffers=True), or on the "
            "meta device; bring them back before the model is saved: "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True), or load the model without offloading"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    specs = {name: modules[name].spec for name in layers if isinstance(modules.get(name), QuantLinear)}
    return {**tensors, **{f"{name}.{GUARD}": guard() for name in layers}}, specs | specs_of(model)


def _check_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """A description holds for a layer's tensors together; floats may be in the place of a layer."""
    described = set[str]()
    for place, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedModule):
            own = {f"{place}.{name}": tensor for name, tensor in module.state_dict().items()}
            described |= own.keys()
            given = {name for name in own if name in state}
            if given and f"{place}.weight" not in state:
                _check_tensors(own, state)
    for name in state:
        if name.endswith(".w_packed") and name not in described:
            raise ValueError(
                f"state_dict: {name}: the model has no packed layer there, so that nothing says how to read it; save "
                "the model that the state is of"
            )


def _check_tensors(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        expected = (
            f"state_dict: {name}: expected {tensor.dtype} {[*tensor.shape]}, as the packed layer of the model has"
        )
        if name not in state:
            raise ValueError(f"{expected}; it is absent: a packed layer is saved whole")
        found = state[name]
        if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            raise ValueError(f"{expected}, got {found.dtype} {[*found.shape]}; pass packed tensors as they are")


@contextmanager
def _attributes(target: object, values: Mapping[str, object]) -> Iterator[None]:
    """An object with other attributes for a while; those that are None it lacks."""
    own = vars(target)
    before = {name: own[name] for name in values if name in own}

    def put(given: Mapping[str, object]) -> None:
        for name in values:
            own.pop(name, None)
        own.update({name: value for name, value in given.items() if value is not None})

    put(values)
    try:
        yield
    finally:
        put(before)


def floats(model: nn.Module) -> list[str]:
    """Names of what may be floats in a folder: of a packed layer, too, in whose place a given state has them."""
    modules = model.named_modules()
    layers = [name for name, module in modules if is_linear(module) or isinstance(module, QuantLinear)]
    return [*layers, *expert_modules(model)]


def save(
    model: Any, saved: Callable[[Any, Mapping[str, Tensor] | None], Saved], *arguments: Any, **options: Any
) -> Any:
    """In place of `save_pretrained`: transformers' own, of the tensors and with the configuration of a folder.

    Neither stays with the model, which may lose its packed layers later, nor with its configuration, of which other
    models may be made.

    Args:
        model: of transformers.
        saved: what is written of it, or of a state that `save_pretrained` is given.
        arguments: of `save_pretrained`, as `options` are.
    """
    call = inspect.signature(type(model).save_pretrained).bind(model, *arguments, **options)
    state, config = saved(model, call.arguments.get("state_dict"))
    own: dict[str, object] = {"hf_quantizer": None}  # which would replace a given state
    if config is not None:
        call.arguments["state_dict"] = state
        if "hf_quantizer" not in vars(model) and model.config.model_type not in TAKEN:
            own["_weight_conversions"] = []  # the renamed experts of those are found; other layers have one name
    with _attributes(model, own), _attributes(model.config, {"quantization_config": config}):
        return type(model).save_pretrained(*call.args, **call.kwargs)
