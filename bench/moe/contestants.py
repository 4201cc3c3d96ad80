"""Ways to compute a block, all timed alike: ours, and others' grouped products between our steps."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor

import qcutlass
from bench.gpu_timing import ROTATION_BYTES, Contestant
from bench.moe.problem import Block, Routed
from bench.peers.base import Skip, import_library
from bench.peers.humming import weight_config, weight_scales
from qcutlass import UnsupportedError, moe
from qcutlass.products.moe_operators import gate_rows, sum_slots_into

Multiply: TypeAlias = Callable[[int, Tensor, Routed, int], Tensor]
"""A grouped product: of copy i of the weights, by rows `[T, H]` or `[R, I]`, for a routing; 0 is gate and up, 1 down.
"""

Launch: TypeAlias = Callable[[int, Routed, Tensor], Tensor]


def contestant(name: str, block: Block, routed: Sequence[Routed], launch: Launch) -> Contestant:
    """One whose launches take copies of the weights and sets of ids in turn."""
    count = max(len(block.copies), len(routed))
    return Contestant(name, lambda index, out: launch(index, routed[index % len(routed)], out), count)


class Products(ABC):
    """Grouped products, and what can be made of them.

    Attributes:
        key: of the columns that have its times.
        label: in words.
        by_slot: whether rows of its results are in the order of slots; if not, of experts.
        weighted: whether its second product multiplies rows by the router's weights.
        gates: whether its first product computes the gate.
        dtype: of its operands; None: that of the block's activations.
    """

    key: ClassVar[str]
    label: ClassVar[str]
    by_slot: ClassVar[bool] = False
    weighted: ClassVar[bool] = False
    gates: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype | None] = None

    @abstractmethod
    def load(self) -> str:
        """What it is; raises `Skip` where it is absent."""

    @abstractmethod
    def prepare(self, block: Block) -> Callable[[Sequence[Routed]], Multiply]:
        """Its products for sets of ids; raises `Skip` where it does not take the size."""

    def order(self, routed: Routed) -> Tensor:
        """The row of each slot in its results."""
        order = routed.routing.order
        return (
            torch.arange(order.numel(), dtype=torch.int32, device=order.device).view_as(order)
            if self.by_slot
            else order
        )

    def block(self, multiply: Multiply, orders: dict[int, Tensor]) -> Launch:
        """All behind the routing, with our steps between the products; without the router's weights where the second
        product does not have them."""

        def launch(index: int, routed: Routed, out: Tensor) -> Tensor:
            gated = self._gated(multiply(index, routed.x, routed, 0))
            sum_slots_into(multiply(index, gated, routed, 1), orders[id(routed)], out)
            return out

        return launch

    def _gated(self, first: Tensor) -> Tensor:
        return first if self.gates else gate_rows(first)

    def alone(self, multiply: Multiply, gated: Tensor) -> Launch:
        """The two products; what the second one multiplies is not the first one's result."""

        def launch(index: int, routed: Routed, out: Tensor) -> Tensor:
            multiply(index, routed.x, routed, 0)
            return multiply(index, gated, routed, 1)

        return launch

    def result(self, multiply: Multiply, routed: Routed) -> Tensor:
        """What a block of its products gives, in float32, the router's weights included; not to be timed."""
        y = multiply(0, self._gated(multiply(0, routed.x, routed, 0)), routed, 1).float()
        order = self.order(routed).long()
        weights = torch.ones_like(routed.weights) if self.weighted else routed.weights
        return (y[order] * weights[..., None]).sum(1)


class Ours(Products):
    """qcutlass."""

    key = "qcutlass"
    label = "qcutlass"
    weighted = True
    gates = True

    def load(self) -> str:
        return qcutlass.__version__

    def prepare(self, block: Block) -> Callable[[Sequence[Routed]], Multiply]:
        def multiply(index: int, a: Tensor, routed: Routed, product: int) -> Tensor:
            return qcutlass.gemm_grouped(a, **self._arguments(block, index, routed, product))

        return lambda routed: multiply

    @staticmethod
    def _arguments(block: Block, index: int, routed: Routed, product: int) -> dict[str, Any]:
        """Those of a product but the activations and `out`."""
        weights, routing = block.copies[index % len(block.copies)][product], routed.routing
        found: dict[str, Any] = {name: part for name, part in weights._asdict().items() if name != "interleaved"}
        found["offsets"] = routing.offsets
        if product == 0:
            return found | {"rows": routing.rows, "activation": "silu_mul"}
        return found | {"row_scale": routing.row_scale}

    def tactics(self, block: Block, routed: Routed, product: int, a: Tensor, wanted: str) -> Iterator[str]:
        """Those of a product by `a` that run here: the chosen one, then all others whose names contain `wanted`."""
        arguments = self._arguments(block, 0, routed, product)
        chosen = qcutlass.plan(qcutlass.gemm_grouped, a, **arguments).tactic
        yield chosen
        for name in qcutlass.tactics(qcutlass.gemm_grouped, a, **arguments):
            with contextlib.suppress(UnsupportedError):
                if name != chosen and wanted in name:
                    yield qcutlass.plan(qcutlass.gemm_grouped, a, **arguments, tactic=name).tactic

    def by_tactic(self, block: Block, product: int, tactic: str, gated: Tensor) -> Launch:
        """One of the products by a tactic of this name; `gated`: what the second one multiplies."""

        def launch(index: int, routed: Routed, out: Tensor) -> Tensor:
            arguments = self._arguments(block, index, routed, product)
            return qcutlass.gemm_grouped(gated if product else routed.x, **arguments, tactic=tactic, out=out)

        return launch

    @staticmethod
    def whole(block: Block) -> Launch:
        """The block with its routing, one call."""

        def launch(index: int, routed: Routed, out: Tensor) -> Tensor:
            gate_up, down = block.copies[index % len(block.copies)]
            return moe.experts(routed.x, gate_up, down, routed.ids, routed.weights, out=out)

        return launch


def sorted_ids(routing: moe.Routing, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots by expert, each expert's part filled up to a multiple of `size` with R; the experts of these blocks of
    `size` slots; how many slots there are with the filling. All int32."""
    offsets, count = routing.offsets.tolist(), routing.rows.shape[0]
    order = routing.order.flatten().long()
    slots = torch.empty_like(order)
    slots[order] = torch.arange(count, device=order.device)
    parts, experts = [], []
    for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
        filling = -(end - begin) % size
        parts.append(torch.nn.functional.pad(slots[begin:end], (0, filling), value=count))
        experts += [expert] * ((end - begin + filling) // size)
    found = torch.cat(parts).int()
    device = found.device
    total = torch.tensor([len(found)], dtype=torch.int32, device=device)
    return found, torch.tensor(experts, dtype=torch.int32, device=device), total


class Humming(Products):
    """humming-kernels' indexed products, with the kernels that its own heuristics choose."""

    key = "humming"
    label = "humming"
    by_slot = True

    def load(self) -> str:
        version: str = import_library("humming", "humming-kernels").__version__
        return version

    def prepare(self, block: Block) -> Callable[[Sequence[Routed]], Multiply]:
        first = [self._layer(block, product) for product in (0, 1)]
        layers = [first, *(copy.deepcopy(first) for _ in range(len(block.copies) - 1))]
        heuristics = import_library("humming.tune", "humming-kernels").get_heuristics_config

        def of(routed: Sequence[Routed]) -> Multiply:
            rows = routed[0].routing.rows.shape[0]
            tuned = [heuristics(layer.humming_config, shape_m=rows, gemm_type="indexed") for layer in layers[0]]
            laid_out = [[sorted_ids(one.routing, config["block_shape"][0]) for config in tuned] for one in routed]
            places = {id(one): number for number, one in enumerate(routed)}

            def multiply(index: int, a: Tensor, one: Routed, product: int) -> Tensor:
                slots, experts, total = laid_out[places[id(one)]][product]
                layer = layers[index % len(layers)][product]
                out = a.new_empty((rows, layer.shape_n))
                layer(
                    a,
                    outputs=out,
                    sorted_ids=slots,
                    expert_ids=experts,
                    num_tokens_padded=total,
                    top_k=block.size.slots if product == 0 else 1,
                    compute_config={"gemm_type": "indexed"},
                    tuning_config=tuned[product],
                )
                return out

            return multiply

        return of

    @staticmethod
    def _layer(block: Block, product: int) -> Any:
        weights, case = block.copies[0][product], block.cases[product]
        if weights.minimums is not None or weights.super_scales is not None:
            raise Skip("takes zeros, not minimums, and scales of one level")
        if weights.global_scale is not None:
            raise Skip("is given no global scales of experts here")
        humming = import_library("humming.layer", "humming-kernels")
        pack = import_library("humming.ops", "humming-kernels").pack_weight
        experts = range(block.size.experts)
        codes = [pack(block.codes(product, expert).int().contiguous(), case.bits) for expert in experts]
        scales = weight_scales(weights.scales, block.dtype).transpose(1, 2).contiguous()
        tensors = {"weight": torch.stack(codes), "weight_scale": scales}
        if case.zeros == "int":
            assert weights.zeros is not None
            zeros = [pack(each.int().contiguous(), case.bits).T for each in weights.zeros]
            tensors["zero_point"] = torch.stack(zeros).contiguous()
        elif weights.zeros is not None:
            tensors["zero_point"] = weights.zeros.transpose(1, 2).to(block.dtype).contiguous()
        layer = humming.HummingLayer(
            shape_n=case.n,
            shape_k=case.k,
            num_experts=len(experts),
            weight_config=weight_config(case),
            torch_dtype=block.dtype,
        ).cuda()
        layer.load_from_tensors(tensors)
        layer.transform()
        return layer


class Triton(Products):
    """A plain Triton kernel, `triton_kernel.py`, which dequantises each tile of weights before it multiplies it."""

    key = "triton"
    label = "Triton"
    by_slot = True
    weighted = True
    BLOCKS: Final = (16, 32, 64, 128)
    COLUMNS: Final = 64

    def load(self) -> str:
        version: str = import_library("triton", "triton").__version__
        return f"triton {version}"

    def prepare(self, block: Block) -> Callable[[Sequence[Routed]], Multiply]:
        scheme, group = block.scheme, block.cases[0].group_size
        plain_codes = scheme.bits == 4 and scheme.zeros == "none" and scheme.weight_dtype is None
        if not plain_codes or scheme.super_groups or block.dtype != torch.float16 or group % self.COLUMNS:
            raise Skip(f"takes int4 codes without zeros, in groups of multiples of {self.COLUMNS}, and float16 alone")
        kernel = importlib.import_module("bench.moe.triton_kernel").multiply
        first = [self._plain(block, product) for product in (0, 1)]
        plain = [first, *(copy.deepcopy(first) for _ in range(len(block.copies) - 1))]

        def of(routed: Sequence[Routed]) -> Multiply:
            rows = routed[0].routing.rows.shape[0]
            per_expert = rows / max(1.0, sum(one.touched for one in routed) / len(routed))
            tile = next((size for size in self.BLOCKS if per_expert <= size), self.BLOCKS[-1])
            laid_out = [sorted_ids(one.routing, tile) for one in routed]
            places = {id(one): number for number, one in enumerate(routed)}

            def multiply(index: int, a: Tensor, one: Routed, product: int) -> Tensor:
                slots, experts, _ = laid_out[places[id(one)]]
                codes, scales = plain[index % len(plain)][product]
                n, k = block.size.products[product]
                out = a.new_empty((rows, n))
                grid = (len(experts) * -(-n // 128),)
                top_k = block.size.slots if product == 0 else 1
                sizes = {"ROWS": tile, "CHANNELS": 128, "COLUMNS": self.COLUMNS}
                options = sizes | {"GROUP": block.cases[product].group_size, "num_stages": 4}
                weights = one.weights if product == 1 else a
                kernel[grid](a, codes, scales, out, slots, experts, weights, n, k, rows, top_k, product == 1, **options)
                return out

            return multiply

        return of

    @staticmethod
    def _plain(block: Block, product: int) -> tuple[Tensor, Tensor]:
        """Two codes a byte, neighbours along K, `[E, N, K / 2]`; scales `[E, N, G]`."""
        packed = []
        for expert in range(block.size.experts):
            codes = block.codes(product, expert)
            packed.append(codes[:, ::2] | codes[:, 1::2] << 4)
        return torch.stack(packed), block.copies[0][product].scales.transpose(1, 2).contiguous()


class GroupedMm(Products):
    """`torch._grouped_mm` of bfloat16 weights, its rows gathered before it is timed."""

    key = "grouped_mm"
    label = "torch._grouped_mm, bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def load(self) -> str:
        if not hasattr(torch, "_grouped_mm"):
            raise Skip("this torch has no _grouped_mm")
        return f"torch {torch.__version__}"

    def prepare(self, block: Block) -> Callable[[Sequence[Routed]], Multiply]:
        size = block.size
        dense = [
            torch.stack([block.dense(product, expert).to(self.dtype) for expert in range(size.experts)]).transpose(1, 2)
            for product in (0, 1)
        ]
        if sum(weights.nbytes for weights in dense) < ROTATION_BYTES:
            raise Skip("its weights stay in L2 at this size")

        def of(routed: Sequence[Routed]) -> Multiply:
            gathered = {id(one): one.x[one.routing.rows.long()].to(self.dtype) for one in routed}
            ends = {id(one): one.routing.offsets[1:].clone() for one in routed}

            def multiply(index: int, a: Tensor, one: Routed, product: int) -> Tensor:
                rows = gathered[id(one)] if product == 0 else a
                found: Tensor = torch._grouped_mm(rows, dense[product], offs=ends[id(one)])
                return found

            return multiply

        return of


PEERS: Final[tuple[type[Products], ...]] = (Humming, Triton, GroupedMm)
