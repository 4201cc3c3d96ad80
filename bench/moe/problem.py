"""Blocks of public models with random weights: sizes, ids of the router, bytes that a block must read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor

import qcutlass
from bench.gpu_timing import ROTATION_BYTES, copies_for
from bench.limits import Machine
from qcutlass import moe

Skew: TypeAlias = Literal["uniform", "zipf"]
SKEWS: Final[tuple[Skew, ...]] = get_args(Skew)

BITS: Final = 4
GROUP: Final = 128
DTYPE: Final = torch.float16
MOST_ROUTINGS: Final = 64
"""Sets of ids that the launches of a graph use in turn."""


@dataclass(frozen=True)
class Size:
    """A block: E experts of which k compute a token, H columns, I channels of gate and of up."""

    name: str
    experts: int
    slots: int
    hidden: int
    intermediate: int

    @property
    def products(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(N, K) of both."""
        return (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)

    @property
    def expert_bytes(self) -> int:
        """Codes and scales of one expert."""
        return sum(n * k * BITS // 8 + 2 * n * math.ceil(k / GROUP) for n, k in self.products)

    def operations(self, tokens: int) -> int:
        return 2 * tokens * self.slots * sum(n * k for n, k in self.products)


SIZES: Final = {
    size.name: size
    for size in (
        Size("mixtral-8x7b", 8, 2, 4096, 14336),
        Size("qwen3-30b-a3b", 128, 8, 2048, 768),
        Size("qwen3-235b-a22b", 128, 8, 4096, 1536),
        Size("deepseek-v3", 256, 8, 7168, 2048),
        Size("deepseek-v3-tp8", 256, 8, 7168, 256),
        Size("gpt-oss-20b", 32, 4, 2880, 2880),
        Size("tiny", 4, 2, 256, 128),
    )
}


def router_ids(size: Size, tokens: int, skew: Skew, generator: torch.Generator) -> Tensor:
    """int64 `[T, k]` without repetition in a row: all experts alike, or the expert of rank r drawn as often as 1 / r.

    Drawing the k largest of log(weight) + Gumbel noise is drawing without replacement (Kool et al., "Stochastic beams
    and where to find them", 2019).

    Example:
        >>> import torch
        >>> ids = router_ids(SIZES["qwen3-30b-a3b"], 5, "zipf", torch.Generator().manual_seed(0))
        >>> ids.shape, all(len(set(row)) == 8 for row in ids.tolist())
        (torch.Size([5, 8]), True)
    """
    device = generator.device
    noise = torch.rand(tokens, size.experts, generator=generator, device=device).clamp(1e-7, 1 - 1e-7)
    scores = -torch.log(-torch.log(noise))
    if skew == "zipf":
        ranks = 1 + torch.randperm(size.experts, generator=generator, device=device)
        scores = scores - ranks.float().log()
    return scores.topk(size.slots, dim=-1).indices


@dataclass(frozen=True)
class Routed:
    """One set of ids, what is made of it, and activations.

    Attributes:
        routing: of `moe.route`.
        touched: distinct experts.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    routing: moe.Routing
    touched: int


class Block:
    """Random weights of a size, in our form and, an expert at a time, as codes.

    Random bytes are random codes: packing is a permutation of them, as sizes are whole tiles.
    """

    def __init__(self, size: Size, device: str = "cuda", seed: int = 0) -> None:
        self.size, self.device = size, device
        self._generator = torch.Generator(device).manual_seed(seed)
        copies = copies_for(size.experts * size.expert_bytes)
        first = [self._weights(n, k) for n, k in size.products]
        self.copies = [first, *([_cloned(weights) for weights in first] for _ in range(copies - 1))]

    def _weights(self, n: int, k: int) -> moe.ExpertWeights:
        experts, g = self.size.experts, self._generator
        tiles = (experts, math.ceil(n / 16), math.ceil(k / 64), 32, 16)
        packed = torch.randint(0, 256, tiles, generator=g, dtype=torch.uint8, device=self.device)
        scales = 0.25 + torch.rand(experts, math.ceil(k / GROUP), n, generator=g, device=self.device)
        scales = (scales / (5 * math.sqrt(k))).to(DTYPE)  # outputs of the size of the input
        return moe.ExpertWeights(packed, scales, group_size=GROUP)

    def codes(self, product: int, expert: int) -> Tensor:
        """uint8 `[N, K]`."""
        n, k = self.size.products[product]
        return qcutlass.unpack_weights(self.copies[0][product].w_packed[expert], BITS, (n, k))

    def dense(self, product: int, expert: int) -> Tensor:
        """The numbers that they stand for, `[N, K]`."""
        k, weights = self.size.products[product][1], self.copies[0][product]
        packed, scales = weights.w_packed[expert], weights.scales[expert]
        return qcutlass.dequantize(packed, scales, k=k, group_size=GROUP, bits=BITS, dtype=DTYPE)

    def routed(self, tokens: int, skew: Skew) -> list[Routed]:
        """As many sets of ids as let other weights than L2 holds pass by before one comes again."""
        found: list[Routed] = []
        passed = 0
        while not found or (passed < 2 * ROTATION_BYTES and len(found) < MOST_ROUTINGS):
            x = torch.randn(tokens, self.size.hidden, generator=self._generator, device=self.device).to(DTYPE)
            ids = router_ids(self.size, tokens, skew, self._generator)
            weights = torch.rand(ids.shape, generator=self._generator, device=self.device).softmax(-1)
            touched = _distinct(ids)
            found.append(Routed(x, ids, weights, moe.route(ids, self.size.experts, weights), touched))
            passed += touched * self.size.expert_bytes
        return found

    def expected(self, routed: Routed, tokens: int) -> Tensor:
        """The first tokens' results in float64, without the roundings between the steps."""
        out = torch.zeros(tokens, self.size.hidden, dtype=torch.float64, device=self.device)
        for expert in sorted(set(routed.ids[:tokens].flatten().tolist())):
            gate_up, down = (self.dense(product, expert).double() for product in (0, 1))
            token, slot = (routed.ids[:tokens] == expert).nonzero(as_tuple=True)
            gate, up = (routed.x[token].double() @ gate_up.T).chunk(2, dim=-1)
            y = (torch.nn.functional.silu(gate) * up) @ down.T
            out.index_add_(0, token, routed.weights[token, slot].double()[:, None] * y)
        return out

    def least_seconds(self, machine: Machine, tokens: int, touched: float) -> float:
        """The least time of a block that reads so many experts: their bytes, or the operations at the rate of the
        largest dense products."""
        rates = machine.rates["16-bit"]
        read = touched * self.size.expert_bytes / machine.bandwidth
        return max(read, self.size.operations(tokens) / (rates.dense or rates.peak))


def _distinct(ids: Tensor) -> int:
    return int((ids.flatten().bincount() > 0).sum())


def _cloned(weights: moe.ExpertWeights) -> moe.ExpertWeights:
    return weights._replace(w_packed=weights.w_packed.clone(), scales=weights.scales.clone())
