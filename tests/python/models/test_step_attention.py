"""Attention of steps against torch's plain one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from qcutlass.models import step_attention

gpu = pytest.mark.gpu
LENGTH, PLACE = 384, 200

HEADS = [(4, 4, 64, 64), (6, 2, 64, 64), (8, 1, 128, 128), (4, 2, 96, 64), (14, 2, 256, 256)]
"""Of queries, of keys; the size of a key, of a value."""


def assert_attends_as_torch_does(heads: int, kv_heads: int, size: int, value_size: int, device: str) -> None:
    torch.manual_seed(0)
    dtype, bound = (torch.float16, 2e-3) if device == "cuda" else (torch.float32, 1e-5)
    begins = torch.tensor([0, 3, 150, PLACE])
    query = torch.randn(4, heads, 1, size).to(device, dtype)
    key, value = (torch.randn(4, kv_heads, LENGTH, each).to(device, dtype) for each in (size, value_size))
    place = torch.tensor([PLACE], device=device)
    blocks = (place // step_attention.BLOCK + 1).int().expand(4, 1, 1).contiguous()
    mask = step_attention.block_mask(begins.to(device), place, blocks, LENGTH, heads // kv_heads)
    attend = torch.compile(step_attention.attend, dynamic=False) if device == "cuda" else step_attention.attend
    found, _ = attend(nn.Module(), query, key, value, mask, 0.1)
    keys = torch.arange(LENGTH)
    seen = ((keys >= begins[:, None]) & (keys <= PLACE))[:, None, None].to(device)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.1, enable_gqa=True)
    assert found.shape == (4, 1, heads, value_size)
    assert (found - expected.transpose(1, 2)).abs().max() < bound


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), HEADS)
def test_attends_as_torch_does(heads: int, kv_heads: int, size: int, value_size: int) -> None:
    assert_attends_as_torch_does(heads, kv_heads, size, value_size, "cpu")


@gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), HEADS)
def test_attends_as_torch_does_on_a_gpu(heads: int, kv_heads: int, size: int, value_size: int) -> None:
    assert_attends_as_torch_does(heads, kv_heads, size, value_size, "cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_keys_and_values_that_a_compiled_step_computes(device: str) -> None:
    """As DeepSeek's attention does, of what its cache holds: they don't lie as those of a cache."""
    torch.manual_seed(0)
    length, heads, size = step_attention.BLOCK, 4, 16
    query, weight = torch.randn(1, heads, 1, 2 * size).to(device), torch.randn(heads * 2 * size, 32).to(device) / 8
    latent, shared = (torch.randn(1, 1, length, each).to(device) for each in (32, size))
    place = torch.tensor([PLACE % length], device=device)
    blocks = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
    mask = step_attention.block_mask(torch.zeros(1, dtype=torch.int64, device=device), place, blocks, length, 1)

    def keys_and_values() -> tuple[torch.Tensor, torch.Tensor]:
        both = nn.functional.linear(latent, weight).view(1, length, heads, 2 * size).transpose(1, 2)
        own, value = both.split(size, dim=-1)
        return torch.cat([own, shared.expand(-1, heads, -1, -1)], dim=-1), value

    def step() -> torch.Tensor:
        return step_attention.attend(nn.Module(), query, *keys_and_values(), mask)[0]

    found = torch.compile(step, dynamic=False)()
    key, value = (part[:, :, : PLACE % length + 1] for part in keys_and_values())
    expected = nn.functional.scaled_dot_product_attention(query, key, value)
    assert (found - expected.transpose(1, 2)).abs().max() < 1e-3


@pytest.mark.parametrize(("blocks", "is_turned"), [(1, False), (4, True)])
def test_what_torch_does_not_compile_for_a_cpu_by_itself(blocks: int, is_turned: bool) -> None:
    """Queries of a linear layer that nothing turns, as those of OPT; 512 keys and more, for one token."""
    torch.manual_seed(0)
    heads, size, length = 4, 16, blocks * step_attention.BLOCK
    x, weight = torch.randn(1, 1, 32), torch.randn(heads * size, 32) / 8
    key, value = torch.randn(2, 1, 2, length, size)
    place, seen = torch.tensor([length - 20]), torch.full((1, 1, 1), blocks, dtype=torch.int32)
    mask = step_attention.block_mask(torch.zeros(1, dtype=torch.int64), place, seen, length, 2)

    def queries() -> torch.Tensor:
        found = nn.functional.linear(x, weight).view(1, 1, heads, size).transpose(1, 2)
        return found.sin() if is_turned else found

    def step() -> torch.Tensor:
        return step_attention.attend(nn.Module(), queries(), key, value, mask)[0]

    found = torch.compile(step, dynamic=False)()
    key, value = (part[:, :, : length - 19] for part in (key, value))
    expected = nn.functional.scaled_dot_product_attention(queries(), key, value, enable_gqa=True)
    assert (found - expected.transpose(1, 2)).abs().max() < 1e-3


def test_heads_of_a_model_are_counted_in_its_decoder() -> None:
    class Attention(nn.Module):
        def __init__(self, groups: int) -> None:
            super().__init__()
            self.num_key_value_groups = groups

    class Model(nn.Module):
        def __init__(self, *groups: int) -> None:
            super().__init__()
            self.vision, self.text = Attention(1), nn.ModuleList(map(Attention, groups))

        def get_decoder(self) -> nn.Module:
            return self.text

    assert step_attention.grouped_queries(Model(4, 4)) == 4
    assert step_attention.grouped_queries(Model(4, 2)) is None
    assert step_attention.grouped_queries(Model()) == 1
