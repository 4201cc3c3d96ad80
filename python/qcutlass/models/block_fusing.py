"""Decoder blocks of transformers' models with fewer operators between their products."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from qcutlass.layers.fusing import GROUPS, FusedProjection, fuse_projections, shared_product

_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")  # of transformers.models


@dataclass(frozen=True)
class BlockFusion:
    """The result of `fuse_block`.

    Attributes:
        fused: names of the blocks that are fused now.
        skipped: why others, or projections of a block, are not, by their names, joined by commas.
    """

    fused: tuple[str, ...]
    skipped: dict[str, str]


def fuse_block(model: nn.Module) -> BlockFusion:
    """Lets the decoder blocks of a model do with fewer operators, for inference.

    In models of transformers of the kinds of Llama, Mistral, Qwen2 and Qwen3:

    - q, k and v are one product, gate and up another, as `fuse_projections` has it;
    - a residual addition and the norm behind it are one operator, so are the activation of a gated MLP and its
      multiplication (a part of the product before, where the model was on a GPU when it was fused), and the rotary
      embedding of queries and keys (with the norms of heads that Qwen3 has);
    - a norm is quantised by the operator that computes it, where q, k and v, or gate and up, are one product whose
      layers quantise their input to int8 without zero points or to e4m3, each token or by a static scale, and as it
      comes: without smoothing factors or an order of columns;
    - attention on the CPU reads grouped keys and values without repeating them;
    - a token of each sequence goes through all blocks in one call of the extension, with a cache of `growing_cache` and
      without gradients and masks, where the model was on the CPU when it was fused, its layers are weight-only and
      nothing has a hook.

    Modules keep their names and children, `state_dict` has the keys and values it had, and caches of every kind serve.
    Each operator computes in fp32 and rounds once, where the model rounded after each of its steps: results differ by
    rounding alone. On a GPU norms and gates let the product behind them start early; the rotary embedding is an
    operator there in eager calls, and in the steps of a `Decoder`, where it writes keys and values into the static
    cache, and is left to the compiler otherwise. In training mode attention is the model's own, under `torch.autocast`
    the MLPs are, too.

    Hooks run wherever they are. Where an activation or a norm of heads has some, or was replaced, the MLP or attention
    around it is the model's own. Hooks may change tensors in place: what was computed ahead of them is computed anew.
    Compiled code sees no changes in place that are made between blocks by others than hooks.

    Args:
        model: changed in place. Its linear layers may be of any kind.

    Returns:
        What was fused, and why the rest was not: models of other kinds are left as they are.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> import torch, qcutlass
        >>> qcutlass.fuse_block(torch.nn.Linear(8, 8)).skipped
        {'model': 'Linear: expected decoder blocks of a Llama, Mistral, Qwen2 or Qwen3 model of transformers'}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    stacks = [(name, stack) for name, stack in model.named_modules() if _is_stack(stack)]
    if not stacks:
        kinds = "a Llama, Mistral, Qwen2 or Qwen3 model of transformers"
        return BlockFusion((), {"model": f"{type(model).__name__}: expected decoder blocks of {kinds}"})
    fused: list[str] = []
    skipped: dict[str, str] = {}
    for prefix, stack in stacks:
        for name, block, norm in _blocks(stack):
            whole = f"{prefix}.{name}" if prefix else name
            if _is_fused(block):
                continue
            obstacle = _obstacle(block, norm)
            if obstacle is None:
                _fuse(block, norm)
                fused.append(whole)
            else:
                skipped[whole] = obstacle
        if all(parameter.is_cpu for parameter in stack.parameters()):
            importlib.import_module("qcutlass.models.whole_steps").run_as_one(stack)
        for names, reason in _projections(stack).items():
            skipped[", ".join(f"{prefix}.{name}" if prefix else name for name in names)] = reason
        _interleave(stack)
    return BlockFusion(tuple(fused), skipped)


def _is_stack(module: nn.Module) -> bool:
    """Whether it is the model of a known family that holds the blocks and the norm behind them."""
    home = type(module).__module__
    known = any(home == f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES)
    return known and isinstance(getattr(module, "layers", None), nn.ModuleList) and hasattr(module, "norm")


def _blocks(stack: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each block with its name and the norm that reads its output."""
    blocks = list(stack.layers)
    norms = [getattr(block, "input_layernorm", None) for block in blocks[1:]] + [stack.norm]
    for index, (block, norm) in enumerate(zip(blocks, norms, strict=True)):
        yield f"layers.{index}", block, norm


def _classes() -> Any:
    """What needs transformers, which is imported where there is a model of it."""
    return importlib.import_module("qcutlass.models.block_modules")


def _is_fused(block: nn.Module) -> bool:
    return isinstance(block, _classes().FusedBlock)


def _parts(block: Any, norm: Any) -> dict[str, Any]:
    """The modules that change their class."""
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    return {"the block": block, **{name: getattr(block, name, None) for name in names}, "the norm behind it": norm}


def _obstacle(block: Any, norm: Any) -> str | None:
    """The reason why a block cannot be fused; None if it can."""
    classes = _classes()
    known = {**classes.FUSED, **{fused: fused for fused in classes.FUSED.values()}}
    parts = _parts(block, norm)
    for name, part in parts.items():
        if type(part) not in known:
            return f"{name}: expected a module as transformers makes it, got {type(part).__name__}"
        if "forward" in vars(part):
            return f"{name} has a forward of its own, which would no longer run"
    if type(block.mlp.act_fn).__name__ not in classes.GATES:
        return f"mlp.act_fn: expected SiLU or GELU in its tanh form, got {type(block.mlp.act_fn).__name__}"
    after = block.post_attention_layernorm
    if after._forward_hooks or after._forward_pre_hooks:
        return "post_attention_layernorm has forward hooks"
    if norm.weight.device != after.weight.device:
        return f"it is on {after.weight.device}, the norm behind it on {norm.weight.device}"
    return None


def _fuse(block: Any, norm: Any) -> None:
    fused = _classes().FUSED
    for part in _parts(block, norm).values():
        if type(part) in fused:
            part.__class__ = fused[type(part)]
    for each in (block.input_layernorm, block.post_attention_layernorm, norm):
        each._pending = None
    block.following = (norm,)
    block.input_layernorm.reader, block.post_attention_layernorm.reader = (block.self_attn,), (block.mlp,)


def _projections(stack: nn.Module) -> dict[tuple[str, ...], str]:
    """Fuses the projections; why some cannot be."""
    names = dict(stack.named_modules())
    if not any(name.rpartition(".")[2] in group for name in names for group in GROUPS):
        return {}
    skipped = fuse_projections(stack).skipped
    return {group: why for group, why in skipped.items() if not isinstance(names[group[0]], FusedProjection)}


def _interleave(stack: nn.Module) -> None:
    """Puts gate and up in turns on a GPU, where the epilogue of their product has the gate.

    On a CPU a token passes through all blocks in one call, which was measured to be faster with the gate behind it.
    """
    for mlp in stack.modules():
        if isinstance(mlp, _classes().FusedMLP):
            product = shared_product(*(getattr(mlp, name, mlp) for name in GROUPS[1]))
            if product is not None and product.w_packed.is_cuda:
                product.interleave()
