"""Single tokens through a fused decoder block on the CPU, in one call of the extension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from qcutlass.layers.fusing import shared_product
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.models.cache_argument import cache_layer
from qcutlass.models.growing_cache import GrowingLayer
from qcutlass.products.decoder_block import DecoderBlock, Norm, hold
from qcutlass.products.library import is_eager
from qcutlass.products.weight_only import GemmCall

GATES: Final = {"SiLUActivation": "silu_mul", "SiLU": "silu_mul", "GELUTanh": "gelu_tanh_mul"}
"""The operator of a gated MLP, by the class of its activation."""

_OPTIONS: Final = ("forward", "activations", "following", "config", "scaling", "variance_epsilon")
"""Attributes of modules that a step has taken over, or that would have it computed otherwise."""


class BlockStep:
    """A block as it was when it was prepared for one token of each sequence. It keeps alive what it points into."""

    def __init__(self, block: Any, dtype: torch.dtype) -> None:
        attention, layers = block.self_attn, _layers(block)
        size = attention.head_dim

        def call(layer: Any) -> GemmCall:
            return layer.call(torch.empty((1, layer.in_features), dtype=dtype))  # type: ignore[no-any-return]

        q_norm, k_norm, mlp_norm, next_norm = map(_described, (*_head_norms(attention), *_norms(block)))
        self._dtype, self._size, self._scaling = dtype, size, attention.scaling
        self._held = _Held(block)
        self._block = DecoderBlock(
            qkv=list(map(call, layers.qkv)),
            output=call(layers.output),
            gate_up=list(map(call, layers.gate_up)),
            down=call(layers.down),
            heads=attention.q_proj.out_features // size,
            kv_heads=attention.k_proj.out_features // size,
            head_size=size,
            gate=GATES[type(block.mlp.act_fn).__name__],
            head_norms=None if q_norm is None or k_norm is None else (q_norm, k_norm),
            mlp_norm=mlp_norm,
            next_norm=next_norm,
        )

    def fits(self, residual: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether the block is as it was, and these tensors are what it was prepared for."""
        dtype = self._dtype
        return (
            residual.dtype == dtype
            and cos.dtype == dtype
            and sin.dtype == dtype
            and cos.shape[-1] == self._size
            and residual.is_contiguous()
            and self._held.is_unchanged()
        )

    def run(
        self, normed: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, layer: GrowingLayer
    ) -> tuple[Tensor, ...]:
        """The residual stream behind the block, and the norm of what follows; `layer` gets the keys and values.

        Args:
            normed, residual: `[B, 1, K]`, the stream before the block and its norm.
            cos, sin: `[B or 1, 1, size]`.
        """
        room = layer.room_for_one()
        found = self._block.run(normed, residual, (cos, sin), (room.keys, room.values), room.used, self._scaling)
        layer.append_written(room)
        return found


def growing_layer(block: Any, hidden_states: Tensor, cache: Any) -> GrowingLayer | None:
    """The layer of the cache, where one token of each sequence comes to a block in an ordinary call on the CPU."""
    if hidden_states.shape[1] != 1 or not hidden_states.is_cpu or not is_eager(hidden_states):
        return None
    if torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0:
        return None
    return cache_layer(cache, block.self_attn.layer_idx, GrowingLayer)


def step_of(block: Any, residual: Tensor, cos: Tensor, sin: Tensor) -> BlockStep | None:
    """The step of a block as it is now; None where a step would not do what its modules do."""
    step: BlockStep | None = block._step
    if step is not None and step.fits(residual, cos, sin):
        return step
    if not _is_plain(block):
        return None
    block._step = step = BlockStep(block, residual.dtype)
    return step if step.fits(residual, cos, sin) else None


class _Held:
    """What a block has where: children, tensors, hooks, options.

    Each token of each block looks at some hundred of them, so that the extension compares them.
    """

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        owners = block, attention, mlp, *attention.children(), *mlp.children()
        called = _stands_for(block)
        places = [owner._modules for owner in owners]
        places += [tensors for module in called for tensors in (module._parameters, module._buffers)]
        entries = [(place, name, value) for place in places for name, value in place.items()]
        entries += [(vars(module), name, vars(module).get(name)) for module in (block, *called) for name in _OPTIONS]
        entries += [(vars(module), "training", module.training) for module in (block, attention, mlp)]
        options = vars(attention.config)  # to ask the configuration itself takes longer than all of this
        entries += [(options, name, value) for name, value in options.items() if "attn_implementation" in name]
        self._places, self._names, self._values = zip(*entries, strict=True)
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._hooks = _hooks(called)

    def is_unchanged(self) -> bool:
        """Whether all of it is as it was."""
        if not hold(self._places, self._names, self._values):
            return False
        # A tensor that moves, or is given other data, stays the same object.
        return not any(self._hooks) and self._addresses == [tensor.data_ptr() for tensor in self._tensors]


def _hooks(modules: Sequence[nn.Module]) -> list[Any]:
    """The hooks that calls of modules run, those of all modules of torch among them."""
    own = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    return [*own, nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]


class _Layers(NamedTuple):
    """The block's products: of those that read the same one that they share, or their own."""

    qkv: tuple[Any, ...]
    output: Any
    gate_up: tuple[Any, ...]
    down: Any

    @property
    def all(self) -> tuple[Any, ...]:
        return (*self.qkv, self.output, *self.gate_up, self.down)


def _layers(block: Any) -> _Layers:
    attention, mlp = block.self_attn, block.mlp
    qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    return _Layers(qkv, attention.o_proj, _joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj)


def _joined(*layers: Any) -> tuple[Any, ...]:
    product = shared_product(*layers)
    return layers if product is None else (product,)


def _head_norms(attention: Any) -> tuple[Any, Any]:
    return attention._modules.get("q_norm"), attention._modules.get("k_norm")


def _norms(block: Any) -> tuple[Any, Any]:
    """Those behind attention, and behind the block."""
    return block.post_attention_layernorm, block.following[0]


def _stands_for(block: Any) -> list[nn.Module]:
    """The modules that are not called where a step is taken."""
    attention, mlp = block.self_attn, block.mlp
    called = attention, *attention.children(), mlp, *mlp.children(), *_layers(block).all
    return [module for module in (block.input_layernorm, *called, *_norms(block)) if module is not None]


def _is_plain(block: Any) -> bool:
    """Whether the block's modules do what a step does in their place."""
    norms, called = [norm for norm in _head_norms(block.self_attn) if norm is not None], _stands_for(block)
    kinds = {(norm.weight.dtype, norm.variance_epsilon) for norm in norms}
    if len(kinds) > 1 or len(norms) == 1 or block.self_attn.config._attn_implementation != "sdpa":
        return False
    if not all(isinstance(layer, WeightOnlyLinear) for layer in _layers(block).all) or any(_hooks(called)):
        return False
    if block.training or block.self_attn.training or block.mlp.training:
        return False
    return not any("forward" in vars(module) for module in (block, *called))


def _described(norm: Any) -> Norm | None:
    return None if norm is None else Norm(norm.weight, norm.variance_epsilon)
