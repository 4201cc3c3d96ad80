"""The modules of a decoder block of transformers, with fewer operators between the products.

Each class is one of transformers with another `forward`, so that a module may change its class and keep all it has.
Where something is asked for that the short way does not have, the class's own `forward` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.utils import TransformersKwargs

from qcutlass.layers.base import InputCodes
from qcutlass.layers.changes import Seen, has_hooks
from qcutlass.layers.fusing import GROUPS, shared_product
from qcutlass.models.block_steps import EXACT, PLAIN, BlockStep, gate_of, ways_of
from qcutlass.models.block_steps import GATES as GATES
from qcutlass.models.cache_argument import CACHE, cache_layer, pop_cache
from qcutlass.models.families import FAMILIES
from qcutlass.models.growing_cache import PlacedLayer
from qcutlass.models.whole_steps import stepped
from qcutlass.products.decoder_operators import (
    add_rms_norm,
    add_rms_norm_quantized,
    gate,
    rms_norm,
    rms_norm_quantized,
)
from qcutlass.products.library import is_traced
from qcutlass.products.rotary_operators import rotary, rotary_append

Pending: TypeAlias = tuple[Seen, Tensor]

_KNOWN: Final = PLAIN | TransformersKwargs.__annotations__.keys()
"""Arguments that change nothing of attention, or that its implementations take."""


def _is_traced_on_gpu(x: Tensor) -> bool:
    """Whether a compiler that fuses by itself what stands between products will see these operations."""
    return not x.is_cpu and torch.compiler.is_compiling()


def _is_mixed(x: Tensor) -> bool:
    """Whether tensors of several types meet, as modules have them where torch casts their inputs."""
    return torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type)  # a device is slow to say its type


class FusedNorm(nn.Module):
    """An RMS norm that may have been computed with the sum before it, and quantised for the product behind it.

    Attributes:
        reader: attention or the MLP, whose first product reads it, in a tuple, since it is no child of the norm; none
            of a norm behind all blocks.
    """

    weight: nn.Parameter
    variance_epsilon: float
    reader: tuple[Any, ...] = ()
    _pending: Pending | None

    def forward(self, hidden_states: Tensor) -> Tensor:
        pending = self._pending
        if pending is not None:
            self.forget()
            seen, normed = pending
            if seen.is_still(hidden_states, self._weights()) and (seen.notices or not has_hooks(self)):
                return normed
        quantising = self._quantising(hidden_states)
        if quantising is None:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        product, kind = quantising
        found, *codes = rms_norm_quantized(hidden_states, self.weight, self.variance_epsilon, *kind)
        product.hand_codes(found, *codes)
        return found

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`x + residual`, whose norm the next call hands out."""
        if x.dtype != residual.dtype:
            return x + residual
        quantising, operands = self._quantising(x), (x, residual, self.weight, self.variance_epsilon)
        if quantising is None:
            total, normed = add_rms_norm(*operands)
        else:
            product, kind = quantising
            total, normed, *codes = add_rms_norm_quantized(*operands, *kind)
            product.hand_codes(normed, *codes)
        self.hand_out(total, normed)
        return total

    def hand_out(self, x: Tensor, normed: Tensor) -> None:
        """Has the next call with `x` return its norm, `normed`."""
        vars(self)["_pending"] = Seen(x, self._weights()), normed

    def forget(self) -> None:
        """Has the next call compute its norm."""
        vars(self)["_pending"] = None  # a module's own way of setting attributes takes several microseconds

    def _quantising(self, x: Tensor) -> tuple[Any, InputCodes] | None:
        """The product that takes codes of the norm of `x`, and which; None: none does, or hooks may change the norm."""
        for reader in self.reader:
            product: Any = reader._modules[reader.GROUP[0]]._modules.get("product")
            codes: InputCodes | None = getattr(product, "input_codes", None)
            if codes is None or x.shape[-1:] != (product.in_features,) or has_hooks(self) or has_hooks(reader):
                return None
            if product is not first_product(reader) or (codes.scale is not None and codes.scale.device != x.device):
                return None
            return product, codes
        return None

    def _weights(self) -> list[Any]:
        return [self._parameters["weight"]]  # to ask for the attribute takes twice the time

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pending": None}


def first_product(reader: Any) -> Any:
    """The product of the layers that read a part of a block's input; None: each has one."""
    return shared_product(*[reader._modules[name] for name in reader.GROUP])


class FusedMLP(nn.Module):
    """A gated MLP whose gate is one operator, or a part of the product before it."""

    GROUP: ClassVar = GROUPS[1]

    act_fn: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self._modules["gate_proj"]
        second: Any = self._modules["up_proj"]
        product, name = first_product(self), gate_of(self)
        if name is None or _is_mixed(x):
            plain: Tensor = super().forward(x)
            return plain
        if product is not None and product.interleaved:
            hidden = product.gated(x, name)
        else:
            halves = (first(x), second(x)) if product is None else product(x).split(product.sizes, dim=-1)
            hidden = gate(name, *halves)
        out: Tensor = self.down_proj(hidden)
        return out


class FusedAttention(nn.Module):
    """Attention of grouped heads, whose keys and values are not repeated; rotated by one operator."""

    GROUP: ClassVar = GROUPS[0]

    config: Any
    o_proj: nn.Module
    layer_idx: int
    head_dim: int
    scaling: float

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cos, sin = position_embeddings
        cache = pop_cache(options)
        # The layer of a cache whose place no host code knows, where one token of each sequence comes.
        layer = cache_layer(cache, self.layer_idx, PlacedLayer) if hidden_states.shape[1] == 1 else None
        traced, norms = _is_traced_on_gpu(hidden_states) and layer is None, self.head_norms()
        is_plain = cos.shape[-1] == self.head_dim and options.keys() <= _KNOWN and not _is_mixed(hidden_states)
        if self.training or traced or norms is None or not is_plain:
            plain: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **{CACHE: cache},
                **options,
            )
            return plain
        shape = hidden_states.shape[:-1]
        parts = [part.view(*shape, -1, self.head_dim) for part in self._projected(hidden_states)]
        if layer is None:
            q, k = rotary(parts[0], parts[1], cos, sin, *norms)
            queries, keys, values = q.transpose(1, 2), k.transpose(1, 2), parts[2].transpose(1, 2)
            if cache is not None:
                keys, values = cache.update(keys, values, self.layer_idx)
        else:
            keys, values, place = layer.keys, layer.values, layer.cumulative_length
            q = rotary_append(parts[0], parts[1], parts[2], cos, sin, keys, values, place, *norms)
            queries = q.transpose(1, 2)
        weights = None
        if queries.is_cpu and self.config._attn_implementation == "sdpa" and options.keys() <= PLAIN:
            out = attend(queries, keys, values, attention_mask, self.scaling)
        else:
            own = getattr(self, "sliding_window", None)
            window = {} if own is None else {"sliding_window": own}
            call = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, modeling_llama.eager_attention_forward
            )
            out, weights = call(
                self, queries, keys, values, attention_mask, dropout=0.0, scaling=self.scaling, **window, **options
            )
        return self.o_proj(out.reshape(*shape, -1)), weights

    def head_norms(self) -> tuple[Tensor, Tensor, float] | tuple[()] | None:
        """Weights of the norms of queries and of keys, and their eps; nothing if there are none; None: they do more."""
        q_norm: Any = self._modules.get("q_norm")
        k_norm: Any = self._modules.get("k_norm")
        if q_norm is None and k_norm is None:
            return ()
        if not all(type(norm) in FUSED and not has_hooks(norm) for norm in (q_norm, k_norm)):
            return None
        eps: float = q_norm.variance_epsilon
        return (q_norm.weight, k_norm.weight, eps) if k_norm.variance_epsilon == eps else None

    def _projected(self, hidden_states: Tensor) -> Sequence[Tensor]:
        product = first_product(self)
        if product is None:
            layers: list[Any] = [self._modules[name] for name in self.GROUP]
            return [layer(hidden_states) for layer in layers]
        return product(hidden_states).split(product.sizes, dim=-1)  # type: ignore[no-any-return]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention on the CPU, `[B, tokens, heads, size]` of queries `[B, heads, tokens, size]`, keys and values.

    Without a mask it is causal: queries are the last tokens if there is one of them, else the first ones.
    """
    batch, heads, tokens, size = q.shape
    groups = heads // k.shape[1]
    if tokens == 1:  # the heads of a group are as many queries of one head, for which the kernel is faster
        q = q.reshape(batch, k.shape[1], groups, size)
        if mask is not None and mask.shape[1] != 1:
            mask = mask.reshape(batch, k.shape[1], groups, -1)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        return out.reshape(batch, 1, heads, size)
    if mask is None:
        k, v = k[:, :, :tokens], v[:, :, :tokens]  # an empty static cache is longer
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1
    )
    return out.transpose(1, 2)


class FusedBlock(nn.Module):
    """A decoder block whose residual additions are parts of the norms behind them.

    Attributes:
        following: the norm that reads the block's output, in a tuple, since it is no child of the block.
    """

    input_layernorm: FusedNorm
    self_attn: FusedAttention
    post_attention_layernorm: FusedNorm
    mlp: FusedMLP
    following: tuple[FusedNorm]
    _step: BlockStep | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        cache, is_unseen = pop_cache(options), has_hooks(self) and is_traced()
        if is_unseen and isinstance(self.input_layernorm, FusedNorm):
            self.input_layernorm.forget()  # hooks may change what comes and goes, which nobody may have counted
        if attention_mask is None and position_embeddings is not None and options.keys() <= PLAIN:
            total = stepped(self, hidden_states, position_embeddings, cache)
            if total is not None:
                return total
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **{CACHE: cache},
            **options,
        )
        norm = self.post_attention_layernorm
        hidden_states = norm.add(attended, hidden_states)
        out = self.mlp(norm(hidden_states))
        total = self.following[0].add(out, hidden_states)
        if is_unseen:
            self.following[0].forget()
        return total

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_step"}


FUSED: Final[dict[type[nn.Module], type[nn.Module]]] = {}
"""The class that a module of each class may change to."""

for _family, _file in FAMILIES.items():
    for _own, _name in (
        (FusedBlock, f"{_family}DecoderLayer"),
        (FusedAttention, f"{_family}Attention"),
        (FusedMLP, f"{_family}MLP"),
        (FusedNorm, f"{_family}RMSNorm"),
    ):
        _base = getattr(_file, _name)
        _kind: Any = type(f"Fused{_name}", (_own, _base), {"__module__": __name__, "__doc__": _own.__doc__})
        setattr(_kind, EXACT, ways_of(_kind))
        FUSED[_base] = globals()[f"Fused{_name}"] = _kind
