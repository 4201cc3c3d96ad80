"""Models of Llama's and Qwen3's kind, mixtures too, with random weights: no download, and the times of real ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import qcutlass
from bench.schemes import WeightOnly
from qcutlass import testing
from qcutlass.layers import QuantEmbedding, QuantExperts, QuantLinear, TiedLinear, WeightOnlyLinear
from qcutlass.layers.experts import Expert
from qcutlass.models import weights_of
from qcutlass.models.heads import HEAD_SCHEMES
from qcutlass.products.selection import weight_dtype


@dataclass(frozen=True)
class Size:
    """A model's numbers.

    Attributes:
        hidden, intermediate: widths of the residual stream and of the MLP, or of each expert.
        blocks: how many.
        heads, kv_heads: of queries, and of keys and values.
        width: of a head; None: `hidden / heads`.
        vocabulary: rows of the embedding and of lm_head.
        tied: whether these two are one.
        qwen3: whether the model is Qwen3's, which normalises queries and keys, instead of Llama's.
        experts, slots: of each block's mixture, as Qwen3's have it, and how many of them a token goes to; 0: there is
            an MLP instead.
    """

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    qwen3: bool = False
    width: int | None = None
    experts: int = 0
    slots: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations on a GPU: compiled, torch's own grouped products of a dense mixture take no other."""
        return torch.bfloat16 if self.experts else torch.float16

    def config(self) -> Any:
        """That of transformers' model."""
        numbers: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.width or self.hidden // self.heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
        }
        if not self.experts:
            return (Qwen3Config if self.qwen3 else LlamaConfig)(**numbers)
        return Qwen3MoeConfig(
            **numbers,
            moe_intermediate_size=self.intermediate,
            num_experts=self.experts,
            num_experts_per_tok=self.slots,
            norm_topk_prob=True,
        )


SIZES: Final = {
    "llama3-8b": Size(4096, 14336, 32, 32, 8, 128256),
    "qwen3-8b": Size(4096, 12288, 36, 32, 8, 151936, qwen3=True),
    "qwen3-30b-a3b": Size(2048, 768, 48, 32, 4, 151936, qwen3=True, width=128, experts=128, slots=8),
    "smollm2-135m": Size(576, 1536, 30, 9, 3, 49152, tied=True),
    "tiny": Size(64, 128, 2, 4, 2, 96),
    "tiny-qwen3": Size(64, 128, 2, 4, 2, 96, qwen3=True),
    "tiny-moe": Size(64, 64, 2, 4, 2, 96, qwen3=True, width=32, experts=8, slots=2),
}


_MODELS: Final[dict[type, Any]] = {
    LlamaConfig: LlamaForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    Qwen3MoeConfig: Qwen3MoeForCausalLM,
}


def quantized_model(size: Size, scheme: WeightOnly, device: torch.device, dtype: torch.dtype) -> Any:
    """A transformers model on `device`, its linears but lm_head quantised: random codes, made layer by layer there.

    The experts of all blocks have the same numbers, in memory of their own.
    """
    config = size.config()
    with torch.device("meta"):
        model: Any = _MODELS[type(config)](config)
    for seed, (name, linear) in enumerate(list(_linears(model.model))):
        layer = _random_layer(linear.out_features, linear.in_features, scheme, device, dtype, seed)
        model.model.set_submodule(name, layer)
    experts: QuantExperts | None = None
    for name, module in list(model.model.named_modules()):
        if isinstance(module, Qwen3MoeExperts):  # made once: thousands of experts take minutes
            experts = _random_experts(size, scheme, device, dtype) if experts is None else copy.deepcopy(experts)
            model.model.set_submodule(name, experts)
    generator = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.ones(parameter.shape, dtype=dtype, device=device)  # norms
            if parameter.ndim == 2:
                value.normal_(0, size.hidden**-0.5, generator=generator)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.eval()


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def _random_layer(
    n: int, k: int, scheme: WeightOnly, device: torch.device, dtype: torch.dtype, seed: int
) -> WeightOnlyLinear:
    p = scheme.case(1, n, k, dtype).random(device=device, seed=seed)
    return WeightOnlyLinear(
        qcutlass.QuantizedTensor(p.codes, p.scales, p.zeros, p.bits, p.group_size, minimums=p.minimums)
    )


def _random_experts(size: Size, scheme: WeightOnly, device: torch.device, dtype: torch.dtype) -> QuantExperts:
    shapes = [(size.intermediate, size.hidden)] * 2 + [(size.hidden, size.intermediate)]

    def layers() -> Iterator[Expert]:
        for index in range(size.experts):
            seeds = range(3 * index, 3 * index + 3)
            each = [_random_layer(n, k, scheme, device, dtype, s) for (n, k), s in zip(shapes, seeds, strict=True)]
            yield Expert(*each)

    return QuantExperts.from_layers(layers(), size.experts)


def fused(model: Any) -> Any:
    """The model with fused projections; whatever is not fused is shared with it."""
    twin = _twin(model)
    qcutlass.fuse_projections(twin)
    return twin


def fused_blocks(model: Any) -> Any:
    """The model with fused blocks; whatever is not fused is shared with it."""
    twin = _twin(model)
    qcutlass.fuse_block(twin)
    return twin


def with_head(model: Any, bits: int) -> Any:
    """The model with an output head of 8 or 4 bits, as `qcutlass convert --lm-head` makes it; the rest is shared.

    Raises:
        ValueError: its head is tied to the embedding.
    """
    head = model.get_output_embeddings()
    if getattr(head, "weight", None) is model.get_input_embeddings().weight:
        raise ValueError("--lm-head: the model's head is its embedding; leave it out")
    scheme, twin = HEAD_SCHEMES[bits], _twin(model)
    quantized = qcutlass.quantize(
        head.weight, scheme.bits, scheme.group_size, scheme.symmetric, scale_dtype=scheme.scale_dtype
    )
    twin.set_output_embeddings(QuantLinear.from_quantized(quantized, bias=head.bias))
    return twin


def dense(model: Any, dtype: torch.dtype) -> Any:
    """The model with torch's own layers of the dequantised weights; everything else is shared with it."""
    twin = _twin(model)
    tied: dict[nn.Module, Tensor] = {}
    last: tuple[QuantExperts, nn.Module] | None = None  # experts that were made dense
    for name, layer in list(twin.named_modules()):
        if isinstance(layer, QuantEmbedding):
            tied[layer] = weights_of(layer).to(dtype)
            twin.set_submodule(name, nn.Embedding.from_pretrained(tied[layer]))  # type: ignore[no-untyped-call]
        elif isinstance(layer, TiedLinear):
            twin.set_submodule(name, linear_of(tied[layer.embedding], layer.bias))
        elif isinstance(layer, QuantExperts):
            if last is None or not _same(layer, last[0]):
                last = layer, experts_of(layer, twin.config, dtype)
            else:
                last = layer, copy.deepcopy(last[1], {id(twin.config): twin.config})  # all read one configuration
            twin.set_submodule(name, last[1])
        elif isinstance(layer, QuantLinear):
            twin.set_submodule(name, linear_of(weights_of(layer).to(dtype), layer.bias))
    return twin


def _same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules hold the same numbers."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == as_well and torch.equal(a, b) for (name, a), (as_well, b) in pairs)


def experts_of(experts: QuantExperts, config: Any, dtype: torch.dtype) -> nn.Module:
    """transformers' own experts with the dequantised weights."""
    with torch.device("meta"):
        found: nn.Module = Qwen3MoeExperts(config)
    for name in ("gate_up_proj", "down_proj"):
        empty = found.get_parameter(name).new_empty(0, device=experts.down.w_packed.device, dtype=dtype)
        setattr(found, name, nn.Parameter(empty.new_empty(found.get_parameter(name).shape), requires_grad=False))
    for index in range(experts.num_experts):
        gate, up, down = (weights_of(layer) for layer in experts.expert(index))
        found.get_parameter("gate_up_proj")[index].copy_(torch.cat([gate, up]))
        found.get_parameter("down_proj")[index].copy_(down)
    return found


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer that holds these very tensors."""
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
    return linear


def _twin(model: Any) -> Any:
    """Modules of its own, tensors of the other."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def check(layer: WeightOnlyLinear, a: Tensor, out: Tensor, label: object, product: QuantLinear | None = None) -> float:
    """The largest error of a layer's output for `a`, as a share of its bound; `product`: what computed it, if fused.

    Raises:
        AssertionError: it is out of its bound.
    """
    by = layer if product is None else product
    assert isinstance(by, WeightOnlyLinear)
    more: dict[str, Any] = {name: getattr(by, name) for name in ("activation", "act_scale", "perm")}
    options: dict[str, Any] = {"group_size": by.group_size, "bits": by.bits}
    whole: dict[str, Any] = {"bias": by.bias, "minimums": by.minimums}
    rounded = weight_dtype(a, by.w_packed, by.scales, by.zeros, **whole, **options, **more)
    own: dict[str, Any] = {"k": layer.in_features, "minimums": layer.minimums}
    weight = qcutlass.dequantize(layer.w_packed, layer.scales, layer.zeros, dtype=rounded, **own, **options)
    return testing.assert_close(out, testing.reference(a, weight, bias=layer.bias, **more), label=label)
