"""For tests of layers and models: states of modules, and a small decoder with Llama's names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qcutlass import testing


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_linear(n: int, k: int, seed: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    g = torch.Generator().manual_seed(seed)
    linear = nn.Linear(k, n, bias, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) / k**0.5)
    return linear


def randomized(module: nn.Module, seed: int) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed + i))
    return module


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the state."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Asserts the same names, types and bits."""
    found = module.state_dict()
    assert list(found) == list(state)
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        wide = torch.float32 if tensor.is_floating_point() else tensor.dtype  # fp8 cannot be compared
        testing.assert_equal(found[name].to(wide), tensor.to(wide), label=name)


class RMSNorm(nn.Module):
    """The norm of Llama; `offset` 1 makes it Gemma's, which multiplies by 1 + weight."""

    def __init__(self, k: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(k) - offset)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * (self.offset + self.weight)


class Attention(nn.Module):
    """Causal attention of two heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, hidden) for _ in range(3))
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (projection(x).unflatten(-1, (2, -1)).transpose(1, 2) for projection in self.inputs)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(-2))
        return out

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj


class GatedMlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A decoder block with Llama's names."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden), RMSNorm(hidden)
        self.self_attn, self.mlp = Attention(hidden), GatedMlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 16, hidden: int = 64, blocks: int = 2, length: int = 12) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(torch.randn(length, hidden))
        self.layers = nn.ModuleList(Block(hidden) for _ in range(blocks))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.lm_head(self.norm(x))
        return out
