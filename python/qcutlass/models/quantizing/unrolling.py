"""A mixture's experts as linear layers of their own, so that each is quantised by the tokens that it really got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qcutlass.errors import UnsupportedError
from qcutlass.layers.experts import ACTIVATIONS, gate_of
from qcutlass.models.expert_modules import expert_modules
from qcutlass.models.experts import expert_layer
from qcutlass.models.quantizing.wiring import InputGroup


class UnrolledExpert(nn.Module):
    """One expert."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)


class UnrolledExperts(nn.Module):
    """The experts of a block, "0", "1" and so on; each is called with its tokens, and not without any.

    Args:
        experts: the module of transformers, of which shapes and the activation are taken.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        count, hidden, intermediate = experts.down_proj.shape
        self.experts = [UnrolledExpert(hidden, intermediate) for _ in range(count)]
        for index, expert in enumerate(self.experts):
            self.add_module(str(index), expert)
        self.act_fn = experts.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the module of transformers."""
        out = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self.experts):
            tokens, slots = torch.where(top_k_index == index)
            if len(tokens):
                x = hidden_states[tokens]
                y = expert.down_proj(self.act_fn(expert.gate_proj(x)) * expert.up_proj(x))
                out.index_add_(0, tokens, (y * top_k_weights[tokens, slots, None]).to(out.dtype))
        return out


def unroll(model: nn.Module) -> None:
    """Puts `UnrolledExperts`, with random weights, in the place of all experts; UnsupportedError for what is none."""
    for name, module in expert_modules(model).items():
        gate = gate_of(module)
        if gate is None or gate.activation not in ACTIVATIONS.values():
            raise UnsupportedError(
                f"{name}: experts of {type(module).__name__}, with another activation than SiLU and GELU (tanh), are "
                "not quantised here; qcutlass convert --bits 4 rounds the floats of gpt-oss to nearest"
            )
        model.set_submodule(name, UnrolledExperts(module))


def expert_groups(names: Sequence[str]) -> list[InputGroup]:
    """The expert layers among `names`, in groups of one input.

    The norm before gate and up feeds the router and all other experts, too, and takes no factors; up takes those of
    down, whose input is proportional to its output.
    """
    inputs: dict[tuple[str, int], list[str]] = {}
    groups: list[InputGroup] = []
    for name in names:
        layer = expert_layer(name)
        if layer is None:
            continue
        if layer.part == "down":
            up = name.replace("down_proj", "up_proj")
            groups.append(InputGroup((name,), up if up in names else None, has_scales=False))
        else:
            inputs.setdefault((layer.block, layer.expert), []).append(name)
    return [*(InputGroup(tuple(group), None, has_scales=False) for group in inputs.values()), *groups]
