"""Packed embeddings in vLLM's own layers, on the CPU; vLLM's sources are needed, as `test_plugin` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.python.vllm.test_plugin import load
from torch import Tensor

import qcutlass
from qcutlass.quantized import QuantizedTensor
from qcutlass.vllm import config as configuration
from qcutlass.vllm import register
from qcutlass.vllm.embedding import QCutlassEmbeddingMethod

ROWS, COLUMNS = 104, 64
VALUES = {"quant_method": "qcutlass", "modules_to_not_convert": ["lm_head"]}


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def k_quant(seed: int = 0) -> QuantizedTensor:
    """With minimums, and scales of two levels."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8, generator=g)
    parts = {name: torch.randint(1, 64, (2, ROWS), dtype=torch.uint8, generator=g) for name in ("scales", "minimums")}
    supers = {f"super_{name}": torch.rand(1, ROWS, generator=g).half() / 64 for name in parts}
    return QuantizedTensor(codes, zeros=None, bits=4, group_size=32, **parts, **supers)


def stored(weight: QuantizedTensor) -> dict[str, Tensor]:
    made = qcutlass.QuantLinear.from_quantized(weight)
    return {**made.state_dict(), "weight": torch.zeros(1, dtype=torch.uint8)}


def embedding(values: dict[str, Any], prefix: str = "model.embed_tokens") -> Any:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return VocabParallelEmbedding(
        ROWS, COLUMNS, params_dtype=torch.float32, quant_config=configuration.QCutlassConfig(values), prefix=prefix
    )


def head(values: dict[str, Any]) -> Any:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    config = configuration.QCutlassConfig(values)
    return ParallelLMHead(ROWS, COLUMNS, params_dtype=torch.float32, quant_config=config, prefix="lm_head")


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_are_those_of_the_file(as_rank: Any, world_size: int) -> None:
    """Each rank has some; those past the vocabulary are zeros."""
    weight, found = k_quant(), []
    for rank in range(world_size):
        as_rank(rank, world_size)
        layer = embedding(VALUES)
        load(layer, stored(weight))
        layer.quant_method.process_weights_after_loading(layer)
        found.append(layer.quant_method.embedding(layer, torch.arange(layer.num_embeddings_per_partition)))
    rows = torch.cat(found)
    assert rows.dtype == torch.float32
    assert torch.equal(rows[:ROWS], weight.dequantize(torch.float32))
    assert not rows[ROWS:].any()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("floats", [True, False])
def test_a_tied_head_multiplies_by_the_same_weights(as_rank: Any, is_first: bool, floats: bool) -> None:
    """Whichever of both vLLM asks first, and also where the file holds floats after all."""
    layer = embedding(VALUES)
    tied = head(VALUES).tie_weights(layer)
    weight = k_quant()
    dense = weight.dequantize(torch.float32)
    load(layer, {"weight": dense.half()} if floats else stored(weight))
    for each in (tied, layer) if is_first else (layer, tied):
        each.quant_method.process_weights_after_loading(each)
    a, ids = torch.randn(5, COLUMNS), torch.tensor([[3, 100], [0, 3]])
    logits = tied.quant_method.apply(tied, a)
    assert torch.equal(logits, layer.products(a, None))
    assert logits.shape == (5, layer.num_embeddings_padded)
    assert tied.products is layer.products
    assert not hasattr(tied, "weight")
    rows = layer.quant_method.embedding(layer, ids)
    assert torch.equal(rows, (dense.half().float() if floats else dense)[ids])


@pytest.mark.parametrize(
    ("values", "prefix", "is_packed"),
    [
        (VALUES, "model.embed_tokens", True),
        (VALUES, "", True),
        ({**VALUES, "modules_to_not_convert": ["model.embed_tokens"]}, "model.embed_tokens", False),
        ({**VALUES, "modules_to_not_convert": ["language_model.embed_tokens"]}, "", False),
        ({"quant_method": "gptq"}, "model.embed_tokens", False),
    ],
)
def test_which_are_packed(as_rank: Any, values: dict[str, Any], prefix: str, is_packed: bool) -> None:
    assert (type(embedding(values, prefix).quant_method) is QCutlassEmbeddingMethod) == is_packed


def test_floating_codes_are_refused(as_rank: Any) -> None:
    layer = embedding(VALUES)
    scheme = qcutlass.WeightOnly(4, 16, weight_dtype="e2m1")
    made = qcutlass.QuantLinear.from_linear(torch.nn.Linear(COLUMNS, ROWS, bias=False), scheme)
    load(layer, made.state_dict())
    with pytest.raises(qcutlass.UnsupportedError, match="e2m1"):
        layer.quant_method.process_weights_after_loading(layer)
    made = qcutlass.QuantLinear.from_linear(torch.nn.Linear(COLUMNS, ROWS, bias=False), qcutlass.W8A8())
    layer = embedding(VALUES)
    load(layer, made.state_dict())
    with pytest.raises(qcutlass.UnsupportedError, match=r"model\.embed_tokens.*quantised alone"):
        layer.quant_method.process_weights_after_loading(layer)
