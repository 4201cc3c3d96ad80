"""The experts of a loaded model: from the layers of a checkpoint to its modules, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.specs import LayerSpec
from qcutlass.formats.tensors import REQUANTIZE
from qcutlass.layers import QuantExperts, QuantLinear, WeightOnlyLinear
from qcutlass.layers.experts import REPLACED, Expert, Gate, gate_of, sizes_of
from qcutlass.models.experts import expert_layer, file_forms, module_forms, part_names


@dataclass(frozen=True)
class Block:
    """The experts of one block, in files and in a model.

    Attributes:
        place: the name of the module.
        layers: the names of each expert's gate, up and down in the files.
        gate: what the module computes between the products.
        shape: (H, I).
    """

    place: str
    layers: list[tuple[str, ...]]
    gate: Gate
    shape: tuple[int, int]

    @property
    def names(self) -> list[str]:
        """Of all layers in the files."""
        return [name for expert in self.layers for name in expert]

    def read(self, read: Callable[[str], QuantLinear]) -> QuantExperts:
        """The experts, whose layers `read` gives by their names in the files.

        Raises:
            CheckpointError: they are not those of the module.
            UnsupportedError: they differ from each other, or are not of weights alone.
        """

        def experts() -> Iterator[Expert]:
            for names in self.layers:
                found = [
                    self._checked(name, read(name), part) for name, part in zip(names, Expert._fields, strict=True)
                ]
                yield Expert(*found)

        try:
            return QuantExperts.from_layers(experts(), len(self.layers), self.gate)
        except (CheckpointError, UnsupportedError):  # which are ValueErrors, too
            raise
        except ValueError as error:
            raise UnsupportedError(f"{self.place}: {error}; {REQUANTIZE}") from error

    def _checked(self, name: str, layer: QuantLinear, part: str) -> WeightOnlyLinear:
        if not isinstance(layer, WeightOnlyLinear):
            raise UnsupportedError(
                f"{name}: experts of weights alone are taken, got {type(layer).__name__}; qcutlass convert "
                "--requantize makes them such"
            )
        expected = self.shape if part == "down" else self.shape[::-1]
        if (layer.out_features, layer.in_features) != expected:
            raise CheckpointError(f"{name}: expected weights {[*expected]} for {self.place}, got {layer}")
        return layer

    def specs(self, module: QuantExperts) -> dict[str, LayerSpec]:
        """The descriptions of the layers that `split` gives, by their names in the files."""
        return _specs(module, self.layers)


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with float experts whose place `QuantExperts` can take, by name."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ in REPLACED}


def find_blocks(names: Iterable[str], model: Any) -> tuple[list[Block], list[str]]:
    """The blocks of experts that a checkpoint has layers for, and the names of its other layers.

    Raises:
        CheckpointError: a block lacks an expert or a part of one, or has more than the model.
        UnsupportedError: the experts have an activation that their product has not.
    """
    found, others = of_experts(names, model)
    check_counts(found, model)
    return [_block(place, layers, model.get_submodule(place)) for place, layers in found.items()], others


def of_experts(names: Iterable[str], model: Any) -> tuple[dict[str, dict[tuple[int, str], str]], list[str]]:
    """The names of experts' layers, by their module, number and part, and the names of others."""
    prefix = f"{model.base_model_prefix}."
    modules = expert_modules(model)
    found: dict[str, dict[tuple[int, str], str]] = {}
    others: list[str] = []
    for name in names:
        layer = expert_layer(name)
        forms = [] if layer is None else list(module_forms(layer.block))
        candidates = [each for form in forms for each in (form, prefix + form, form.removeprefix(prefix))]
        place = next((each for each in candidates if each in modules), None)
        if layer is None or place is None:
            others.append(name)
        else:
            found.setdefault(place, {})[layer.expert, layer.part] = name
    return found, others


def check_counts(found: Mapping[str, Mapping[tuple[int, str], str]], model: Any) -> None:
    """Raises unless the model has as many experts as there are layers for, of what `of_experts` finds.

    Raises:
        CheckpointError: a block has more or fewer than the model.
        UnsupportedError: the experts have an activation that their product has not.
    """
    for place, layers in found.items():
        module = model.get_submodule(place)
        if gate_of(module) is None:
            raise UnsupportedError(f"{place}: experts with {type(module.act_fn).__name__} are not taken")
        (expected, _, _), count = sizes_of(module), 1 + max(expert for expert, _ in layers)
        if count != expected:
            raise CheckpointError(
                f"{place}: expected {expected} experts, as config.json has it, all quantised or none; the quantised "
                f"layers are those of {count}"
            )


def _block(place: str, layers: dict[tuple[int, str], str], module: Any) -> Block:
    count, hidden, intermediate = sizes_of(module)
    gate = gate_of(module)
    assert gate is not None  # see `check_counts`
    wanted = [[(expert, part) for part in Expert._fields] for expert in range(count)]
    absent = [key for keys in wanted for key in keys if key not in layers]
    if absent:
        expert, part = absent[0]
        raise CheckpointError(
            f"{place}: expected {count} experts, all quantised or none; expert {expert} has no quantised {part} "
            "projection"
        )
    return Block(place, [tuple(layers[key] for key in keys) for keys in wanted], gate, (hidden, intermediate))


def specs_of(model: Any) -> dict[str, LayerSpec]:
    """The descriptions of the layers that `split` gives, by each name that files may have for them."""
    words, found = part_names(model.config.model_type), dict[str, LayerSpec]()
    for place, module in model.named_modules():
        if isinstance(module, QuantExperts):
            for form in file_forms(place, model.config.model_type):
                experts = range(module.gate_up.experts)
                found |= _specs(module, [[f"{form}.{expert}.{word}" for word in words] for expert in experts])
    return found


def _specs(module: QuantExperts, layers: Iterable[Iterable[str]]) -> dict[str, LayerSpec]:
    """By name: `layers` has those of each expert's gate, up and down."""
    of_parts = [layer.spec for layer in module.expert(0)]
    return {name: spec for names in layers for name, spec in zip(names, of_parts, strict=True)}


def split(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state of a model with the layers of each expert, as converted folders hold them, in place of joined ones."""
    words = part_names(model.config.model_type)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, QuantExperts)}
    found = {name: part for name, part in state.items() if not name.startswith(tuple(f"{each}." for each in modules))}
    for place, own in modules.items():
        tensors = {name: part for name, part in state.items() if name.startswith(f"{place}.")}
        module = _holding(own, tensors, place)
        for expert in range(module.gate_up.experts if tensors else 0):
            for word, layer in zip(words, module.expert(expert), strict=True):
                each = layer.state_dict()
                found |= {f"{place}.{expert}.{word}.{name}": part.clone() for name, part in each.items()}
    return found


def _holding(module: QuantExperts, tensors: Mapping[str, Tensor], place: str) -> QuantExperts:
    """The experts with these tensors: a copy, unless they are their own."""
    own = {f"{place}.{name}": part for name, part in module.state_dict().items()}
    if all(name in own and part.data_ptr() == own[name].data_ptr() for name, part in tensors.items()):
        return module
    found = copy.deepcopy(module)
    found.load_state_dict({name.removeprefix(f"{place}."): part for name, part in tensors.items()})
    return found
