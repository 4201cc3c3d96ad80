"""Tensor parallelism of models that transformers loaded: each rank keeps its part of the layers of every block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import torch.distributed
from torch import Tensor, nn

from qcutlass.layers import QuantExperts, QuantLinear
from qcutlass.layers.sharding import shard

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")
_WHOLE: Final = ("num_heads", "activation_sparsity")
"""Attributes of modules that count on all heads (StableLM), or whose activation looks at all channels (Gemma 3n)."""

Axis = Literal["intermediate", "experts"]
"""Along which experts are cut."""
AXIS: Final = "intermediate"
Add = Callable[[Tensor], Any]
"""Adds, in place, the tensors that all ranks call it with."""


def parallelise(model: nn.Module, group: Any = None, experts: Axis = AXIS) -> nn.Module:
    """Cuts the blocks of a model for tensor parallelism: this rank's parts take the layers' places.

    Queries, keys, values, gate and up are cut by channels, the projections behind them by columns, and the sums of
    all ranks are added (Shoeybi et al., "Megatron-LM", 2019); so are those of experts, with one sum for all experts of
    a block. Shared experts are MLPs like others. Attention whose heads of keys are no multiple of the ranks, layers
    whose columns `qcutlass.layers.shard` does not cut, and attention and MLPs that compute with several heads or
    channels together (norms over all of them, sinks) stay whole on every rank; so do all others: norms, embeddings,
    routers, output heads. Every rank loads the whole model first; save it before, as a rank has parts that are refused
    where they are loaded.

    Args:
        model: of Llama's kind, with layers of `qcutlass.layers` of the names that transformers gives them; changed.
        group: the ranks, of `torch.distributed`. Default: all of them.
        experts: how `QuantExperts` are cut: "intermediate": each rank has a part of every expert; "experts": some
            experts, whole (expert parallelism, for the tokens of all ranks).

    Returns:
        The model. Outputs are the same on all ranks, but for the rounding of sums those of the whole model.

    Raises:
        RuntimeError: `torch.distributed` has not been initialised.
        ValueError: nothing of the model can be cut into so many parts, or `experts` is another word.

    Example:
        >>> import torch.distributed
        >>> from qcutlass.models import parallelise
        >>> if torch.distributed.is_initialized():
        ...     model = parallelise(model)
    """
    if not torch.distributed.is_initialized():
        raise RuntimeError(
            "parallelise: torch.distributed is not initialised; start the script with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    rank, world_size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    return cut_blocks(model, rank, world_size, lambda out: torch.distributed.all_reduce(out, group=group), experts)


def cut_blocks(model: nn.Module, rank: int, world_size: int, add: Add, experts: Axis = AXIS) -> nn.Module:
    """`parallelise` for one of `world_size` ranks, whose sums `add` adds."""
    if experts not in get_args(Axis):
        raise ValueError(f"experts: expected 'intermediate' or 'experts', got {experts!r}")
    if world_size == 1:
        return model
    modules = list(model.modules())
    found = [_cut(module, rank, world_size, add) for module in modules]
    found += [_cut_experts(module, rank, world_size, add, experts) for module in modules]
    if not any(found):
        raise ValueError(
            f"model: {type(model).__name__} has no attention, MLP or experts of quantised layers that can be cut into "
            f"{world_size} parts; use a number of ranks that divides its heads of keys, or its groups of columns; what "
            "normalises all of its heads together stays whole"
        )
    return model


def _cut_experts(module: nn.Module, rank: int, world_size: int, add: Add, axis: Axis) -> bool:
    """Whether a module has experts that were cut."""
    found = [(name, child) for name, child in module.named_children() if isinstance(child, QuantExperts)]
    for name, child in found:
        try:
            part = shard(child, rank, world_size, axis)
        except ValueError:  # fewer experts, or steps of channels, than there are ranks
            return False
        part.register_forward_hook(_summing(add))
        setattr(module, name, part)
    return bool(found)


def _cut(module: nn.Module, rank: int, world_size: int, add: Add) -> bool:
    """Whether a module is an attention or an MLP that was cut."""
    for names in (_ATTENTION, _MLP):
        layers = [layer for name in names if isinstance(layer := getattr(module, name, None), QuantLinear)]
        if len(layers) < len(names):
            continue
        if names is _ATTENTION and not _has_equal_heads(module, world_size):
            return False
        if not _is_separable(module, names):
            return False
        try:
            parts = [shard(layer, rank, world_size, "out") for layer in layers[:-1]]
            parts.append(shard(layers[-1], rank, world_size, "in"))
        except ValueError:  # through groups that do not become smaller ones, or of columns in another order
            return False
        parts[-1].register_forward_hook(_summing(add))
        for name, part in zip(names, parts, strict=True):
            setattr(module, name, part)
        return True
    return False


def _has_equal_heads(attention: Any, world_size: int) -> bool:
    """Whether each rank gets as many heads of keys as the others, and the queries that belong to them."""
    heads, rest = divmod(attention.k_proj.out_features, attention.head_dim)
    return bool(rest == 0 and heads % world_size == 0)


def _is_separable(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a module has nothing beside its layers that takes more than one head, or channel of an MLP, at a time."""
    if any(getattr(module, name, 0) for name in _WHOLE):
        return False
    packed = {name for name, child in module.named_modules() if isinstance(child, QuantLinear)}
    others = [(name, each) for name, each in module.named_parameters() if name.partition(".")[0] not in names]
    head = [getattr(module, "head_dim", None)]  # a norm of each head has so many weights
    return packed == set(names) and all(name.count(".") == 1 and list(each.shape) == head for name, each in others)


def _summing(add: Add) -> Callable[..., Tensor]:
    def hook(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        add(out)
        return out

    return hook
