"""A fused decoder block as the extension takes it, for one token of each sequence on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from qcutlass.layers.changes import has_hooks
from qcutlass.layers.fusing import shared_product
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.models.growing_cache import GrowingLayer, Room
from qcutlass.products.decoder_block import OF_GROUPS, DecoderBlock, Norm, Place, Snapshot
from qcutlass.products.weight_only import GemmCall

GATES: Final = {"SiLUActivation": "silu_mul", "SiLU": "silu_mul", "GELUTanh": "gelu_tanh_mul"}
"""The operator of a gated MLP, by the class of its activation."""

EXACT: Final = "is_exact"
"""In the namespace of classes whose modules a step may stand for: their `forward` and `__call__`."""

PLAIN: Final = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"})
"""Arguments of a block that attention on the CPU need not look at."""

_OPTIONS: Final = ("forward", "activations", "following", "config", "layer_idx", "scaling", "variance_epsilon")
"""Attributes of modules that a step has taken over, or that would have it computed otherwise."""


class BlockStep:
    """A block as it was when it was prepared for one token of each sequence. It keeps alive what it points into."""

    def __init__(self, block: Any, dtype: torch.dtype) -> None:
        attention, layers, gate = block.self_attn, _layers(block), gate_of(block.mlp)
        assert gate is not None  # or the block would not be plain
        size = attention.head_dim

        def call(layer: Any) -> GemmCall:
            a = torch.empty((1, layer.in_features), dtype=dtype)
            return layer.call(a, layer.activation)  # type: ignore[no-any-return]

        q_norm, k_norm, mlp_norm, next_norm = map(_described, (*_head_norms(attention), *_norms(block)))
        self._dtype, self._size, self._scaling = dtype, size, attention.scaling
        self._kv_heads = attention.k_proj.out_features // size
        self.held = Held.of(block)  # first, so that what changes meanwhile has changed behind it
        self.block = DecoderBlock(
            qkv=list(map(call, layers.qkv)),
            output=call(layers.output),
            gate_up=list(map(call, layers.gate_up)),
            down=call(layers.down),
            heads=attention.q_proj.out_features // size,
            kv_heads=self._kv_heads,
            head_size=size,
            gate=gate,
            head_norms=None if q_norm is None or k_norm is None else (q_norm, k_norm),
            mlp_norm=mlp_norm,
            next_norm=next_norm,
        )

    def fits(self, residual: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether these tensors are what it was prepared for."""
        angles = cos.shape
        return (
            residual.dtype == cos.dtype == sin.dtype == self._dtype
            and angles == sin.shape
            and angles[1:] == (1, self._size)
            and angles[0] in (1, len(residual))
            and cos.is_cpu
            and sin.is_cpu
            and residual.is_contiguous()
        )

    @property
    def kind(self) -> tuple[torch.dtype, int]:
        """All that `fits` depends on, but for the tensors."""
        return self._dtype, self._size

    def takes(self, rows: int, layer: GrowingLayer) -> bool:
        """Whether keys and values of one more token of so many sequences can be written behind those of a layer."""
        keys, values = layer.keys, layer.values
        if keys.dim() != 4:  # there are none yet
            return False
        shape = rows, self._kv_heads, keys.shape[-2], self._size
        is_same = keys.dtype == values.dtype == self._dtype and keys.shape == values.shape == shape
        return bool(is_same and keys.is_cpu and values.is_cpu)

    def place(self, room: Room) -> Place:
        """Where it has keys and values."""
        return Place(room.keys, room.values, self._scaling)


def step_of(block: Any, residual: Tensor, cos: Tensor, sin: Tensor) -> BlockStep | None:
    """The step of a block as it is now; None where a step would not do what its modules do."""
    step: BlockStep | None = block._step
    if step is not None and step.held.is_unchanged() and step.fits(residual, cos, sin):
        return step
    if not _is_plain(block):
        return None
    block._step = step = BlockStep(block, residual.dtype)
    return step if step.fits(residual, cos, sin) else None


class Held:
    """What blocks have where: children, tensors, hooks, options; `copied`: tensors that may not change in place either.

    Each token looks at some hundred of them in each block, so that the extension compares them.
    """

    def __init__(
        self, entries: Sequence[tuple[dict[str, Any], str, Any]], called: Sequence[nn.Module], copied: Sequence[Tensor]
    ) -> None:
        self._entries, self._called, self._hooks, self._copied = entries, called, _hooks(called), copied
        read = {id(value): value for _, name, value in entries if name != "layout" and isinstance(value, Tensor)}
        in_place = set(map(id, copied))
        tensors = [
            (tensor, id(tensor) in in_place, tensor._cdata, tensor.untyped_storage()._cdata) for tensor in read.values()
        ]
        self._ways = [(kind, *ways_of(kind)) for kind in dict.fromkeys(map(type, called))]
        self._state = Snapshot(entries, called, self._ways, self._hooks, tensors)  # which borrows all of it

    @staticmethod
    def of(block: Any) -> Held:
        """What one block has."""
        attention, mlp = block.self_attn, block.mlp
        owners = block, attention, mlp, *attention.children(), *mlp.children()
        called = _stands_for(block)
        places = [owner._modules for owner in owners]
        places += [tensors for module in called for tensors in (module._parameters, module._buffers)]
        entries = [(place, name, value) for place in places for name, value in place.items()]
        options = ((module, name) for module in (block, *called) for name in _OPTIONS if hasattr(module, name))
        entries += [(vars(module), name, vars(module).get(name)) for module, name in options]
        entries += [(vars(module), "training", module.training) for module in (block, attention, mlp)]
        config = vars(attention.config)  # to ask the configuration itself takes longer than all of this
        entries += [(config, name, value) for name, value in config.items() if "attn_implementation" in name]
        buffers: list[dict[str, Any]] = [layer._buffers for layer in _layers(block).all]
        parts = [of_layer[name] for of_layer in buffers for name in OF_GROUPS if of_layer[name] is not None]
        return Held(entries, called, [part for part in parts if not part.is_inference()])

    @staticmethod
    def joined(parts: Sequence[Held], blocks: Sequence[nn.Module]) -> Held:
        """What several blocks have that are not called either."""
        every = (entry for part in parts for entry in part._entries)
        unique = {(id(place), name): (place, name, value) for place, name, value in every}
        modules = dict.fromkeys((*blocks, *(module for part in parts for module in part._called)))
        return Held(list(unique.values()), list(modules), [copied for part in parts for copied in part._copied])

    def is_unchanged(self) -> bool:
        """Whether all of it is as it was."""
        return self._state.is_unchanged()


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
    return layers if product is None or product.interleaved else (product,)


def _head_norms(attention: Any) -> tuple[Any, Any]:
    return attention._modules.get("q_norm"), attention._modules.get("k_norm")


def _norms(block: Any) -> tuple[Any, Any]:
    """Those behind attention, and behind the block."""
    return block.post_attention_layernorm, block.following[0]


def _stands_for(block: Any) -> list[nn.Module]:
    """The modules that are not called where a step is taken."""
    attention, mlp = block.self_attn, block.mlp
    called = attention, *attention.children(), mlp, *mlp.children(), *_layers(block).all
    modules = block.input_layernorm, *called, *_norms(block)
    return list(dict.fromkeys(module for module in modules if module is not None))


def _is_plain(block: Any) -> bool:
    """Whether the block's modules do what a step does in their place."""
    if not all(map(is_exact, (block.self_attn, block.mlp, block.input_layernorm, *_norms(block)))):
        return False
    if block.self_attn.head_norms() is None:
        return False
    norms, called = [norm for norm in _head_norms(block.self_attn) if norm is not None], _stands_for(block)
    kinds = {(norm.weight.dtype, norm.variance_epsilon) for norm in norms}
    if len(kinds) > 1 or block.self_attn.config._attn_implementation != "sdpa":
        return False
    if not all(map(_is_product, _layers(block).all)) or any(_hooks(called)):
        return False
    if block.training or block.self_attn.training or block.mlp.training or gate_of(block.mlp) is None:
        return False
    return not any("forward" in vars(module) for module in (block, *called))


def gate_of(mlp: Any) -> str | None:
    """The operator that stands for the activation of a gated MLP and its product; None where none does."""
    activation = mlp._modules.get("act_fn")
    if activation is None or has_hooks(activation):
        return None
    return GATES.get(type(activation).__name__)


def ways_of(kind: type) -> tuple[Any, Any]:
    """What a call of a module of this class runs."""
    return kind.forward, kind.__call__  # type: ignore[attr-defined]


def is_exact(module: Any) -> bool:
    """Whether it is of a class that `fuse_block` gives, as that was made, and of none that is derived from it."""
    kind = type(module)
    return bool(vars(kind).get(EXACT) == ways_of(kind))


def _is_product(layer: Any) -> bool:
    """Whether a layer computes what `WeightOnlyLinear` does."""
    kind: Any = type(layer)
    return isinstance(layer, WeightOnlyLinear) and all(
        getattr(kind, name) is getattr(WeightOnlyLinear, name) for name in ("forward", "call")
    )


def _described(norm: Any) -> Norm | None:
    return None if norm is None else Norm(norm.weight, norm.variance_epsilon)
