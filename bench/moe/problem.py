"""Blocks of public models with random weights: sizes, ids of the router, bytes that a block must read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor

import qcutlass
from bench.gpu_timing import ROTATION_BYTES, copies_for
from bench.limits import Machine
from bench.schemes import WeightOnly, parse_weight_only
from qcutlass import moe, testing

Skew: TypeAlias = Literal["uniform", "zipf"]
SKEWS: Final[tuple[Skew, ...]] = get_args(Skew)

DTYPE: Final = torch.float16
"""Of activations, where a scheme names no other."""
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


def parse_scheme(name: str) -> WeightOnly:
    """A scheme of weights from its name, as `bench gpu` has it.

    Raises:
        ValueError: it is none, or its activations have 32 bits.

    Example:
        >>> parse_scheme("w8a16_g64_int").bits
        8
    """
    scheme = parse_weight_only(name)
    if scheme.dtype == torch.float32:
        raise ValueError(f"scheme {name!r}: expected activations of 16 bits, as GPUs multiply them; say f16 or bf16")
    return scheme


def skews(names: list[str]) -> list[Skew]:
    """Kinds of ids from their names, each once.

    Raises:
        ValueError: there is no such kind.
    """
    unknown = [name for name in names if name not in SKEWS]
    if unknown:
        raise ValueError(f"--skew: expected {', '.join(SKEWS)}, got {unknown[0]!r}")
    return [kind for kind in SKEWS if kind in names]


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


_PARTS: Final = ("scales", "zeros", "minimums", "super_scales", "super_minimums", "global_scale")
"""What belongs to the codes of weights, where there is such."""


class Block:
    """Random weights of a size and scheme, in our form and, an expert at a time, as codes and numbers.

    Attributes:
        dtype: of the activations.
        cases: of both products: what weights are like.
        copies: of the weights of both products, so many that each is cold in L2 when its turn comes.
        expert_bytes: of the weights of one expert.
    """

    def __init__(self, size: Size, scheme: WeightOnly, device: str = "cuda", seed: int = 0) -> None:
        self.size, self.scheme, self.device = size, scheme, device
        self.cases = [scheme.case(0, n, k, DTYPE) for n, k in size.products]
        self.dtype = self.cases[0].dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        first = [self._weights(case, seed + number) for number, case in enumerate(self.cases)]
        self.expert_bytes = sum(part.nbytes for weights in first for part in _tensors(weights).values()) // size.experts
        copies = copies_for(size.experts * self.expert_bytes)
        self.copies = [first, *([_cloned(weights) for weights in first] for _ in range(copies - 1))]

    def _weights(self, case: testing.Case, seed: int) -> moe.ExpertWeights:
        """One expert after the other, as the codes of all would take twice the memory."""
        parts: dict[str, list[Tensor]] = {}
        for expert in range(self.size.experts):
            problem = case.random(device=self.device, seed=1000 * seed + expert)
            found = {"w_packed": qcutlass.preprocess_weights(problem.codes, bits=case.bits)}
            found |= {name: getattr(problem, name) for name in _PARTS if getattr(problem, name) is not None}
            for name, part in found.items():
                parts.setdefault(name, []).append(part)
        stacked: dict[str, Any] = {name: _stacked(each) for name, each in parts.items()}
        numbers: dict[str, Any] = {"group_size": case.group_size, "bits": case.bits, "weight_dtype": case.weight_dtype}
        return moe.ExpertWeights(**stacked, **numbers)

    def codes(self, product: int, expert: int) -> Tensor:
        """uint8 `[N, K]`."""
        w_packed = self.copies[0][product].w_packed[expert]
        return qcutlass.unpack_weights(w_packed, self.scheme.bits, self.size.products[product])

    def dense(self, product: int, expert: int) -> Tensor:
        """The numbers that they stand for, `[N, K]`."""
        weights, case = self.copies[0][product], self.cases[product]
        parts: dict[str, Any] = {name: part[expert] for name, part in _tensors(weights).items()}
        numbers: dict[str, Any] = {"group_size": case.group_size, "bits": case.bits, "weight_dtype": case.weight_dtype}
        return qcutlass.dequantize(**parts, k=case.k, dtype=self.dtype, **numbers)

    def routed(self, tokens: int, skew: Skew) -> list[Routed]:
        """As many sets of ids as let other weights than L2 holds pass by before one comes again."""
        found: list[Routed] = []
        passed = 0
        while not found or (passed < 2 * ROTATION_BYTES and len(found) < MOST_ROUTINGS):
            x = torch.randn(tokens, self.size.hidden, generator=self._generator, device=self.device).to(self.dtype)
            ids = router_ids(self.size, tokens, skew, self._generator)
            weights = torch.rand(ids.shape, generator=self._generator, device=self.device).softmax(-1)
            touched = _distinct(ids)
            found.append(Routed(x, ids, weights, moe.route(ids, self.size.experts, weights), touched))
            passed += touched * self.expert_bytes
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
        read = touched * self.expert_bytes / machine.bandwidth
        return max(read, self.size.operations(tokens) / (rates.dense or rates.peak))


def _distinct(ids: Tensor) -> int:
    return int((ids.flatten().bincount() > 0).sum())


def _tensors(weights: moe.ExpertWeights) -> dict[str, Tensor]:
    return {name: part for name, part in weights._asdict().items() if isinstance(part, Tensor)}


def _cloned(weights: moe.ExpertWeights) -> moe.ExpertWeights:
    cloned: dict[str, Any] = {name: part.clone() for name, part in _tensors(weights).items()}
    return weights._replace(**cloned)


def _stacked(parts: list[Tensor]) -> Tensor:
    """Tensors of one type; torch stacks none of some types of 8 bits."""
    dtype = parts[0].dtype
    return (
        torch.stack([part.view(torch.uint8) for part in parts]).view(dtype)
        if dtype.itemsize == 1
        else torch.stack(parts)
    )
