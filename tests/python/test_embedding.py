"""Packed embeddings and tied heads: rows against the dequantised matrix, types, states, sharing."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcutlass
from qcutlass.layers import QuantEmbedding, TiedLinear, WeightOnlyLinear
from qcutlass.testing.models import NOISE, noise_ratio

SHAPES = [(48, 256, 64), (50, 130, 32), (17, 576, 128), (16, 64, None), (33, 40, 40)]  # N, K, group size


def quantized(n: int, k: int, group_size: int | None, bits: int, zeros: str, seed: int) -> qcutlass.QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    found = qcutlass.quantize(torch.randn(n, k, generator=generator), bits, group_size, symmetric=zeros == "none")
    if zeros != "real":
        return found
    assert found.zeros is not None
    shifted = found.zeros.float() + torch.rand(found.zeros.shape, generator=generator)
    return qcutlass.QuantizedTensor(found.codes, found.scales, shifted, bits, found.group_size)


def embedding(seed: int, dtype: torch.dtype = torch.float32) -> QuantEmbedding:
    return QuantEmbedding(WeightOnlyLinear(quantized(50, 96, 32, 8, "none", seed)), dtype)


@pytest.mark.parametrize("zeros", ["none", "whole", "real"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_rows_are_those_of_the_dequantised_matrix(
    n: int, k: int, group_size: int | None, bits: int, zeros: str, seed: int
) -> None:
    weight = quantized(n, k, group_size, bits, zeros, seed)
    ids = torch.randint(0, n, (3, 7), generator=torch.Generator().manual_seed(seed))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = QuantEmbedding(WeightOnlyLinear(weight), dtype)(ids)
        assert found.dtype == dtype
        assert torch.equal(found, weight.dequantize(dtype)[ids])


def test_one_group_without_its_dimension(seed: int) -> None:
    layer = WeightOnlyLinear(quantized(48, 64, None, 4, "whole", seed))
    assert layer.zeros is not None
    layer.scales, layer.zeros = layer.scales[0], layer.zeros[0]
    ids = torch.arange(48)
    assert torch.equal(QuantEmbedding(layer)(ids), layer.weights())


def test_ids_of_any_shape(seed: int) -> None:
    layer = embedding(seed)
    assert layer(torch.tensor(3)).shape == (96,)
    assert layer(torch.empty((2, 0), dtype=torch.int64)).shape == (2, 0, 96)
    assert torch.equal(layer(torch.tensor([49], dtype=torch.int32)), layer.weights()[49:])
    assert (layer.num_embeddings, layer.embedding_dim) == (50, 96)


@pytest.mark.parametrize("wrong", [-1, 50, 63, 64])
def test_ids_outside_are_refused(wrong: int, seed: int) -> None:
    with pytest.raises(IndexError, match=r"expected integers in \[0, 50\), got"):
        embedding(seed)(torch.tensor([1, wrong]))


def test_types_of_rows_follow_the_module_and_numbers_stay(seed: int) -> None:
    layer = embedding(seed)
    scales = layer.scales.clone()
    half = copy.deepcopy(layer).half()
    assert half(torch.tensor([1])).dtype == torch.float16
    assert torch.equal(half.scales, scales)
    assert half.to("cpu").dtype == torch.float16
    assert half.to(torch.bfloat16)(torch.tensor([1])).dtype == torch.bfloat16


def test_what_an_embedding_cannot_have_is_refused(seed: int) -> None:
    weight = quantized(48, 64, 32, 4, "whole", seed)
    for options in ({"bias": torch.zeros(48)}, {"act_scale": torch.ones(64)}, {"activation": "silu"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            QuantEmbedding(WeightOnlyLinear(weight, **options))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a WeightOnlyLinear, got Linear"):
        QuantEmbedding(nn.Linear(4, 4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dtype: expected one of"):
        QuantEmbedding(WeightOnlyLinear(weight), torch.int32)


class _Model(nn.Module):
    def __init__(self, layer: QuantEmbedding) -> None:
        super().__init__()
        self.embedding = layer
        self.head = TiedLinear(layer, nn.Parameter(torch.linspace(0, 1, 50)))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids))
        return out


def test_a_tied_head_multiplies_by_the_embedding_and_stores_nothing(seed: int) -> None:
    model = _Model(embedding(seed))
    x, weight = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(seed)), model.embedding.weights()
    bias = model.head.bias
    assert bias is not None
    with torch.inference_mode():
        exact = x.double() @ weight.double().T + bias.double()
        assert noise_ratio(model.head(x), x @ weight.T + bias, exact) <= NOISE
    assert [name for name in model.state_dict() if name.startswith("head")] == ["head.bias"]
    assert {name.partition(".")[2] for name in model.state_dict() if "embedding" in name} == {
        "w_packed", "scales", "layout"
    }  # fmt: skip


def _pickled(model: nn.Module) -> nn.Module:
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded: nn.Module = torch.load(stored, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_copies_of_a_model_share_its_weights_as_the_model_does(copied: Any, seed: int) -> None:
    model = _Model(embedding(seed))
    ids = torch.tensor([[3, 4, 49]])
    other = copied(model)
    assert other.head.embedding is other.embedding
    assert other.embedding is not model.embedding
    assert torch.equal(other(ids), model(ids))


def test_states_are_loaded_and_others_refused(seed: int) -> None:
    first, second = _Model(embedding(seed)), _Model(embedding(seed + 1))
    ids = torch.tensor([1, 2])
    assert not torch.equal(first(ids), second(ids))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(ids), second(ids))
    state = first.state_dict() | {"embedding.bias": torch.zeros(50)}
    with pytest.raises(RuntimeError, match="an embedding has none"):
        second.load_state_dict(state)


def test_the_whole_is_one_graph(seed: int) -> None:
    model = _Model(embedding(seed))
    ids = torch.tensor([[3, 4, 49]])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(ids), model(ids))


@pytest.mark.parametrize("bits", [4, 8])
def test_exported_for_any_number_of_ids(bits: int, seed: int) -> None:
    model = nn.Sequential(QuantEmbedding(WeightOnlyLinear(quantized(50, 96, 32, bits, "none", seed))))
    batch, tokens = torch.export.Dim("batch", min=2), torch.export.Dim("tokens", min=2)
    with torch.inference_mode():
        program = torch.export.export(
            model, (torch.ones(2, 9, dtype=torch.int64),), dynamic_shapes=({0: batch, 1: tokens},)
        )
        ids = torch.tensor([[3, 4], [49, 0], [1, 2]])
        assert torch.equal(program.module()(ids), model(ids))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_on_a_gpu_within_a_graph(bits: int, seed: int) -> None:
    weight = quantized(50, 130, 32, bits, "real", seed)
    layer = QuantEmbedding(WeightOnlyLinear(weight), torch.float16).cuda()
    ids = torch.zeros(6, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # ids are what it wrote
    with torch.cuda.stream(side), torch.inference_mode():
        layer(ids)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        rows = layer(ids)
    ids.copy_(torch.tensor([49, 3, 16, 15, 8, 3]))
    graph.replay()
    assert torch.equal(rows.cpu(), weight.dequantize(torch.float16)[ids.cpu()])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [96, 128])
def test_one_id_is_as_many(bits: int, k: int, seed: int) -> None:
    """One is read by the extension: the same bits, the same errors."""
    weight = torch.randn(40, k, generator=torch.Generator().manual_seed(seed))
    embedding = QuantEmbedding(WeightOnlyLinear(qcutlass.quantize(weight, bits, 32)))
    for dtype in (torch.int32, torch.int64):
        ids = torch.arange(40, dtype=dtype)
        alone = torch.cat([embedding(each[None]) for each in ids])
        assert torch.equal(alone, embedding(ids))
    assert embedding(torch.tensor(3)).shape == (k,)
    for wrong in (torch.tensor([40]), torch.tensor([-1])):
        with pytest.raises(IndexError):
            embedding(wrong)
    for other in (torch.tensor([3.7]), torch.ones(40, dtype=torch.bool), torch.ones(40, dtype=torch.uint8), [3]):
        with pytest.raises(TypeError, match=r"input: expected a (tensor of int32|torch\.Tensor)"):
            embedding(other)
