"""How the layers of a model take their activations: as they are, or quantised on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from qcutlass.errors import UnsupportedError
from qcutlass.formats.activations import STORED_ACTIVATIONS
from qcutlass.layers.base import QuantLinear, from_layer
from qcutlass.layers.fusing import FusedProduct
from qcutlass.layers.int4 import Int4Linear
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.products.weight_only import check_quantized_activations

ACTIVATIONS: Final = ("int8", "fp8", "none")
"""Types to which layers can quantise their input, and the name for none."""
_AS_THEY_LIE: Final[dict[tuple[type[nn.Module], str], Callable[[Any], QuantLinear | None]]] = {
    (Int4Linear, "none"): Int4Linear.weights_alone,
    (WeightOnlyLinear, "fp8"): partial(Int4Linear.of_weight_only, activations="fp8"),
    (WeightOnlyLinear, "int8"): partial(Int4Linear.of_weight_only, activations="int8"),
}
"""Layers whose codes stay where they are in memory, for such activations; None: those of this one do not."""


def use_activations(model: nn.Module, activations: str | None) -> list[str]:
    """Has the weight-only layers of a model multiply activations as they are, or quantised.

    Args:
        model: with layers from `replace_linear`, `load_model` or by hand, fused ones, too; changed in place.
        activations: what layers do with their input.

            * None: weight-only layers take it as it is. Undoes "int8" on the CPU.
            * "int8", on the CPU: weight-only layers quantise it in blocks, as `gemm` describes it. Layers with floating
              codes, or with groups that are no multiple of 16 columns, stay as they are.
            * "int8", on a GPU: layers of 4-bit codes with integer zeros, or none, become `Int4Linear`s (`gemm_w4a8`).
            * "fp8": the same layers become `Int4Linear`s of e4m3 activations, and layers of e4m3 weights with scales of
              square blocks become `BlockwiseLinear`s (`fp8_gemm`).
            * "none": as None; and layers whose input is quantised (`Int8Linear`, `Fp8Linear`, `BlockwiseLinear`,
              `Int4Linear`) become weight-only layers with the same codes and scales.

            If a GPU has no kernel for a new layer, the former one stays, and a warning says so. Replaced layers do not
            come back: load the model again for the former ones. Fuse layers after this call, not before. Layers are
            replaced one after the other: codes of 4 bits stay where they are in memory; of others, one layer's are in
            memory twice.

    Returns:
        Names of the layers that do as asked; with "none", of those that have changed. Empty if a GPU has no kernel for
        any layer.

    Raises:
        TypeError: `model` is no module, or `activations` neither a name nor None.
        ValueError: `activations` is another name, or the model has no such layer.
        UnsupportedError: with "none", an `Int8Linear` has zero points of activations.

    Example:
        >>> import torch, qcutlass
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> _ = qcutlass.replace_linear(model, qcutlass.WeightOnly(bits=4, group_size=32))
        >>> qcutlass.layers.use_activations(model, "int8")
        ['0', '2']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    check_activations(activations)
    if activations == "none":
        names = [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]
        if not names:
            raise ValueError("model: expected one with quantised linear layers, got one without")
        if names[0] == "" and _quantises(model):
            raise ValueError("model: is itself a layer, in whose place another comes; pass the module that holds it")
        return _use_none(model)
    if activations == "fp8" or (activations == "int8" and _has_gpu_layers(model)):
        return _use_eight_bits(model, activations)
    layers = _weight_only(model).items()
    able = {name: layer for name, layer in layers if activations is None or layer.quantizes_activations}
    if not able and activations is None:
        raise ValueError("model: expected one with weight-only layers, got one without")
    if not able:
        raise ValueError(
            "model: expected layers with integer codes whose groups are a multiple of 16 columns, or one; pass "
            "activations=None"
        )
    for layer in able.values():
        layer.activations = activations
    return list(able)


def check_activations(activations: object) -> None:
    """Raises unless it is one of `ACTIVATIONS`, or None. Layers of any device can have each of them."""
    check_quantized_activations(activations, torch.device("cpu"), ACTIVATIONS)


def fit_activations(model: nn.Module) -> list[str]:
    """Has layers whose input is quantised take it as it is, where their GPU has no kernel for them.

    Codes and scales stay. A warning says how many layers that are, and what their GPU says of them.

    Returns:
        Names of the layers.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers.activations import fit_activations
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> _ = qcutlass.replace_linear(model, qcutlass.FP8())
        >>> fit_activations(model)  # the CPU has all products
        []
    """
    obstacles: list[str] = []

    def fails(layer: QuantLinear) -> bool:
        if not _quantises(layer):
            return False
        obstacle = _obstacle(layer)
        obstacles.extend([] if obstacle is None else [obstacle])
        return obstacle is not None

    names = _replaced(model, "none", fails)
    if names:
        warnings.warn(
            f"{len(names)} layers, as {names[0]}, multiply 16-bit activations by the same weights: this GPU has no "
            f'kernel for what they are ({obstacles[0]}); activations="none" (--activations none) says so beforehand',
            stacklevel=3,
        )
    return names


def _use_none(model: nn.Module) -> list[str]:
    """`use_activations` with "none"."""
    quantising: list[str] = []
    for name, layer in _weight_only(model).items():
        if layer.activations is not None:
            layer.activations = None
            quantising.append(name)
    return quantising + _replaced(model, "none", _quantises)


def _use_eight_bits(model: nn.Module, activations: str) -> list[str]:
    """`use_activations` with fp8, or with int8 on a GPU: other layers in the place of those that can."""
    found: list[str | None] = []

    def runs(layer: QuantLinear) -> bool:
        found.append(_obstacle(layer))
        return found[-1] is None

    replaced = _replaced(model, activations, _is_weight_only, runs)
    if not found:
        raise ValueError(f"model: expected {STORED_ACTIVATIONS[activations].expected}; got a model without")
    obstacles = [obstacle for obstacle in found if obstacle is not None]
    if obstacles:
        warnings.warn(
            f"activations: {len(obstacles)} of {len(found)} layers still multiply 16-bit activations: this GPU has no "
            f'kernel for {activations} ones ({obstacles[0]}); leave activations="{activations}" (--activations '
            f"{activations}) out",
            stacklevel=3,
        )
    return replaced


def _weight_only(model: nn.Module) -> dict[str, WeightOnlyLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, WeightOnlyLinear)}


def _has_gpu_layers(model: nn.Module) -> bool:
    return any(_is_gpu(layer.layout.device) for layer in _weight_only(model).values())


def _is_weight_only(layer: QuantLinear) -> bool:
    """Whether a layer is just that, or the product of several: no embedding."""
    return (layer.kind if isinstance(layer, FusedProduct) else type(layer)) is WeightOnlyLinear


def _quantises(layer: nn.Module) -> bool:
    """Whether a layer is of a kind that quantises its input."""
    return not isinstance(layer, WeightOnlyLinear)


def _replaced(
    model: nn.Module,
    activations: str,
    is_meant: Callable[[QuantLinear], bool],
    is_taken: Callable[[QuantLinear], bool] = lambda layer: True,
) -> list[str]:
    """Puts layers with the same weights for such activations in the place of those that are meant; their names.

    What cannot be is refused before anything changes. Then one layer follows the other, and nothing is held here but
    names: the weights before each are freed ahead of the next.
    """
    replaced: set[str] = set()
    for names in _meant(model, activations, is_meant):
        if _replace(model, names, activations, is_taken):
            replaced.update(names)
    return [name for name, _ in model.named_modules(remove_duplicate=False) if name in replaced]


def _meant(model: nn.Module, activations: str, is_meant: Callable[[QuantLinear], bool]) -> list[list[str]]:
    """All names of each of the layers that are meant."""
    names: dict[QuantLinear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and isinstance(module, QuantLinear) and (module in names or is_meant(module)):
            names.setdefault(module, []).append(name)
            if isinstance(module, FusedProduct):
                raise ValueError(
                    f"{name}: its layers are fused; choose activations before fuse_projections or fuse_block"
                )
            if not module._is_held:
                _made(module, name, activations)  # which raises: it has no canonical form
    return list(names.values())


def _replace(model: nn.Module, names: list[str], activations: str, is_taken: Callable[[QuantLinear], bool]) -> bool:
    """Puts another layer in the place of that of these names; False: there is none, or it is not taken."""
    layer = model.get_submodule(names[0])
    assert isinstance(layer, QuantLinear)
    made = _made(layer, names[0], activations)
    if made is None or not is_taken(made):
        return False
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)
    return True


def _made(layer: QuantLinear, name: str, activations: str) -> QuantLinear | None:
    """A layer with the same weights for such activations; None where it stays as it is."""
    as_it_lies = _AS_THEY_LIE.get((type(layer), activations))
    found = None if as_it_lies is None else as_it_lies(layer)
    if found is None:
        try:
            form = STORED_ACTIVATIONS[activations].form(layer.canonical())
        except UnsupportedError as error:
            raise UnsupportedError(f"{name}: {error}") from error
        found = None if form is None else from_layer(form, name, layer.activation)
    return None if found is None else found.train(layer.training)


def _obstacle(layer: QuantLinear) -> str | None:
    """Why the device of a layer's weights has no kernel for it: on a GPU a product tells."""
    device = layer.layout.device
    if not _is_gpu(device):
        return None
    try:
        layer(torch.zeros((1, layer.in_features), dtype=torch.float16, device=device))
    except UnsupportedError as error:
        return str(error)
    return None


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
