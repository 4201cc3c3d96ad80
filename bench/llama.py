"""Models of Llama's and Qwen3's kind with random weights: no download, and the times of real ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import qcutlass
from bench.schemes import WeightOnly
from qcutlass import testing
from qcutlass.layers import QuantEmbedding, QuantLinear, TiedLinear, WeightOnlyLinear
from qcutlass.models import weights_of
from qcutlass.models.heads import HEAD_SCHEMES
from qcutlass.products.selection import weight_dtype


@dataclass(frozen=True)
class Size:
    """A model's numbers.

    Attributes:
        hidden, intermediate: widths of the residual stream and of the MLP.
        blocks: how many.
        heads, kv_heads: of queries, and of keys and values; `hidden / heads` is a head's width.
        vocabulary: rows of the embedding and of lm_head.
        tied: whether these two are one.
        qwen3: whether the model is Qwen3's, which normalises queries and keys, instead of Llama's.
    """

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    qwen3: bool = False


SIZES: Final = {
    "llama3-8b": Size(4096, 14336, 32, 32, 8, 128256),
    "qwen3-8b": Size(4096, 12288, 36, 32, 8, 151936, qwen3=True),
    "smollm2-135m": Size(576, 1536, 30, 9, 3, 49152, tied=True),
    "tiny": Size(64, 128, 2, 4, 2, 96),
    "tiny-qwen3": Size(64, 128, 2, 4, 2, 96, qwen3=True),
}


def quantized_model(size: Size, scheme: WeightOnly, device: torch.device, dtype: torch.dtype) -> Any:
    """A transformers model on `device`, its linears but lm_head quantised: random codes, made layer by layer there."""
    config = (Qwen3Config if size.qwen3 else LlamaConfig)(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.blocks,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        vocab_size=size.vocabulary,
        tie_word_embeddings=size.tied,
    )
    with torch.device("meta"):
        model = (Qwen3ForCausalLM if size.qwen3 else LlamaForCausalLM)(config)
    for seed, (name, linear) in enumerate(list(_linears(model.model))):
        model.model.set_submodule(name, _random_layer(linear, scheme, device, dtype, seed))
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
    linear: nn.Linear, scheme: WeightOnly, device: torch.device, dtype: torch.dtype, seed: int
) -> QuantLinear:
    p = scheme.case(1, linear.out_features, linear.in_features, dtype).random(device=device, seed=seed)
    weight = qcutlass.QuantizedTensor(p.codes, p.scales, p.zeros, p.bits, p.group_size, minimums=p.minimums)
    return QuantLinear.from_quantized(weight)


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
    for name, layer in list(twin.named_modules()):
        if isinstance(layer, QuantEmbedding):
            tied[layer] = weights_of(layer).to(dtype)
            twin.set_submodule(name, nn.Embedding.from_pretrained(tied[layer]))  # type: ignore[no-untyped-call]
        elif isinstance(layer, TiedLinear):
            twin.set_submodule(name, linear_of(tied[layer.embedding], layer.bias))
        elif isinstance(layer, QuantLinear):
            twin.set_submodule(name, linear_of(weights_of(layer).to(dtype), layer.bias))
    return twin


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


def check(
    layer: WeightOnlyLinear, a: Tensor, out: Tensor, label: object, product: WeightOnlyLinear | None = None
) -> float:
    """The largest error of a layer's output for `a`, as a share of its bound; `product`: what computed it, if fused.

    Raises:
        AssertionError: it is out of its bound.
    """
    by = product or layer
    more: dict[str, Any] = {name: getattr(by, name) for name in ("activation", "act_scale", "perm")}
    options: dict[str, Any] = {"group_size": by.group_size, "bits": by.bits}
    whole: dict[str, Any] = {"bias": by.bias, "minimums": by.minimums}
    rounded = weight_dtype(a, by.w_packed, by.scales, by.zeros, **whole, **options, **more)
    own: dict[str, Any] = {"k": layer.in_features, "minimums": layer.minimums}
    weight = qcutlass.dequantize(layer.w_packed, layer.scales, layer.zeros, dtype=rounded, **own, **options)
    return testing.assert_close(out, testing.reference(a, weight, bias=layer.bias, **more), label=label)
