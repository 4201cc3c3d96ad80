"""Layers whose buffers accelerate keeps elsewhere until they are called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.test_stored_form import q2_k, q4_1, table_codes
from torch import Tensor, nn, testing

import qcutlass
from qcutlass.layers import QuantEmbedding, QuantExperts, TiedLinear, WeightOnlyLinear

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

CPU = torch.device("cpu")


def short_codes(seed: int) -> WeightOnlyLinear:
    """Codes of 6 bits, as those of Q6_K, in products of 8."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(96, 160, (48, 128), generator=generator, dtype=torch.uint8)
    return WeightOnlyLinear(qcutlass.QuantizedTensor(codes, torch.rand(4, 48, generator=generator), None, 8, 32))


def minima(seed: int) -> WeightOnlyLinear:
    return WeightOnlyLinear(q4_1(48, 128, seed))


def offloaded(model: nn.Module, where: str, folder: Path) -> None:
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=True)
    elif where == "disk":
        accelerate.disk_offload(model, folder, execution_device=CPU, offload_buffers=True)
    else:
        options: dict[str, Any] = {
            "main_device": "cpu",
            "offload_dir": folder / "new",
            "offload_buffers": True,
            "force_hooks": True,
        }
        accelerate.dispatch_model(model, {"0": "disk"}, **options)


@pytest.mark.parametrize("where", ["cpu", "disk", "dispatched"])
@pytest.mark.parametrize("make", [short_codes, table_codes, q2_k, minima])
def test_buffers_that_the_state_holds_in_other_forms(
    make: Callable[[int], WeightOnlyLinear], where: str, seed: int, tmp_path: Path
) -> None:
    """accelerate put what the state has in the place of buffers of other shapes, or missed one."""
    layer = make(seed)
    layer.narrow()
    model = nn.Sequential(nn.Sequential(layer))
    before, a = copy.deepcopy(dict(layer.named_buffers())), torch.randn(3, layer.in_features)
    expected = model(a)
    offloaded(model, where, tmp_path)
    assert layer.w_packed.is_meta
    assert all(torch.equal(model(a), expected) for _ in range(2))
    assert layer.w_packed.is_meta
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    after = dict(layer.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], part) for name, part in before.items())


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_experts_are_brought_to_where_they_are_multiplied(where: str, tmp_path: Path) -> None:
    """Stacks are not called: their hooks did not run."""
    gate_up, down = torch.randn(4, 64, 32) / 8, torch.randn(4, 32, 32) / 8
    experts = QuantExperts.from_weights(gate_up, down, qcutlass.WeightOnly(bits=4, group_size=32))
    operands = torch.randn(5, 32), torch.tensor([[0, 3]] * 5), torch.full((5, 2), 0.5)
    expected = experts(*operands)
    offloaded(experts, where, tmp_path)
    assert experts.gate_up.w_packed.is_meta
    assert torch.equal(experts(*operands), expected)
    assert experts.gate_up.w_packed.is_meta
    with pytest.raises(Exception, match=r"top_k_index|ids"):
        experts(operands[0], operands[1].float(), operands[2])
    assert experts.down.w_packed.is_meta


class Tied(nn.Module):
    """An embedding of few bits, and a head that shares it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        layer = short_codes(seed)
        layer.narrow()
        self.embedding = QuantEmbedding(layer)
        self.head = TiedLinear(self.embedding)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.embedding(ids))


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_heads_whose_weights_are_an_embedding_elsewhere(where: str, seed: int, tmp_path: Path) -> None:
    model, ids = Tied(seed), torch.tensor([[3, 5, 7]])
    expected = model(ids)
    offloaded(model, where, tmp_path)
    assert model.embedding.w_packed.is_meta
    assert torch.equal(model(ids), expected)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, a: Tensor) -> Any:
        return self.gate_proj(a) * self.up_proj(a)


def test_fused_layers_are_not_kept_elsewhere(tmp_path: Path) -> None:
    """Their state has other tensors; it was an error of accelerate's at the first call."""
    model, a = Gated(), torch.randn(3, 64)
    qcutlass.replace_linear(model, qcutlass.WeightOnly(group_size=32))
    expected, other = model(a), copy.deepcopy(model)
    accelerate.cpu_offload(other, execution_device=CPU, offload_buffers=True)
    assert "has forward hooks" in str(qcutlass.fuse_projections(other).skipped)
    assert torch.equal(other(a), expected)
    assert qcutlass.fuse_projections(model).fused
    with pytest.raises(ValueError, match=r"^offload_buffers: .* pass offload_buffers=False, or load the model anew"):
        offloaded(copy.deepcopy(model), "cpu", tmp_path)
    accelerate.cpu_offload(model, execution_device=CPU)
    testing.assert_close(model(a), expected)


def test_a_model_whose_weights_are_elsewhere_is_not_saved(tmp_path: Path) -> None:
    """Hooks are removed first; transformers told of tensors without numbers."""
    pytest.importorskip("transformers", reason="needs transformers")
    from tests.python.models.mixtures import model_of

    model = model_of("llama")
    qcutlass.replace_linear(model, qcutlass.WeightOnly(group_size=32))
    offloaded(model, "cpu", tmp_path)
    with pytest.raises(ValueError, match=r"^model\.\S+_proj: its weights are not here, .*remove_hook_from_module"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    model.save_pretrained(tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").exists()
