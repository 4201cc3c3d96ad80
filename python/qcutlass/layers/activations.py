"""How the layers of a model take their activations: as they are, or quantised on the way."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from qcutlass.errors import UnsupportedError
from qcutlass.formats.fp8 import in_blocks
from qcutlass.formats.layers import for_eight_bits
from qcutlass.layers.base import QuantLinear, from_layer
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.products.weight_only import check_quantized_activations

ACTIVATIONS: Final = ("int8", "fp8")
"""Types to which layers can quantise their input."""


def use_activations(model: nn.Module, activations: str | None) -> list[str]:
    """Has the weight-only layers of a model multiply activations as they are, or quantised.

    Args:
        model: with layers from `replace_linear`, `load_model` or by hand, fused ones, too; changed in place.
        activations: None: as they are; "int8": quantised, as `gemm` describes it, by layers on the CPU; "fp8": layers
            of e4m3 weights with scales of square blocks become `BlockwiseLinear`s, with `fp8_gemm` as their product,
            and those of 4-bit codes with integer zeros, or none, `Int4Linear`s, with `gemm_w4a8`, but for those on a
            GPU whose kernels do not take them. These stay: load the model again for the former ones. Fuse layers after
            it, not before.

    Returns:
        Names of the layers; with "fp8" none where a GPU has no kernel for any. Others are left as they are: with "int8"
        those with groups that are no multiple of 16 columns, or with floating codes.

    Raises:
        TypeError: `model` is no module, or `activations` neither a name nor None.
        ValueError: `activations` is another name, or the model has no such layer.
        UnsupportedError: a layer is on a GPU, with "int8".

    Example:
        >>> import torch, qcutlass
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> _ = qcutlass.replace_linear(model, qcutlass.WeightOnly(bits=4, group_size=32))
        >>> qcutlass.layers.use_activations(model, "int8")
        ['0', '2']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    check_activations(activations, torch.device("cpu"))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, WeightOnlyLinear)}
    for layer in layers.values():
        check_activations(activations, layer.w_packed.device)
    if activations == "fp8":
        return _use_fp8(model)
    able = {name: layer for name, layer in layers.items() if activations is None or layer.quantizes_activations}
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


def check_activations(activations: object, device: torch.device) -> None:
    """Raises unless layers on `device` can quantise their input so; None: they do not."""
    check_quantized_activations(activations, device, ACTIVATIONS)


def _use_fp8(model: nn.Module) -> list[str]:
    """`use_activations` with fp8: other layers in the place of those that can."""
    made: dict[nn.Module, nn.Module] = {}
    able = False
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if type(module) is WeightOnlyLinear and module not in made:
            stored = module.canonical()
            layer = for_eight_bits(stored, "fp8") if module.weight_dtype is None else in_blocks(stored)
            if layer is None or not name:
                continue
            able = True
            quantised = from_layer(layer, name, module.activation).train(module.training)
            if _runs(quantised):
                made[module] = quantised
    if not able:
        raise ValueError(
            "model: expected layers of 4-bit codes with integer zeros, or of e4m3 weights with scales of square blocks "
            "of 32, 64 or 128"
        )
    replaced = [name for name, module in modules.items() if module in made]
    for name in replaced:
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, made[modules[name]])
    return replaced


def _runs(layer: QuantLinear) -> bool:
    """Whether the device of a layer's weights has a kernel for it: on a GPU a product tells."""
    device = layer.layout.device
    if device.type != "cuda":
        return True
    try:
        layer(torch.zeros((1, layer.in_features), dtype=torch.float16, device=device))
    except UnsupportedError:
        return False
    return True
