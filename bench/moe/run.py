"""The run: a row for each size, skew and number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from bench import limits, origin
from bench.gpu_timing import ROTATION_BYTES, ROUNDS, Contestant, Graph, measure, outputs
from bench.moe.contestants import PEERS, Multiply, Ours, Products, contestant
from bench.moe.problem import BITS, DTYPE, GROUP, Block, Routed, Size, Skew
from bench.peers.base import MAX_ERROR, Skip, reason, relative_error
from bench.report import Column, Report, Row
from qcutlass import _C

_CHECKED: Final = 4  # tokens whose results are compared with float64
_UNKNOWN_LIMIT: Final = 5e-6  # seconds that a launch takes at least, where the GPU's ceilings are unknown

_EVERYONE: Final[tuple[type[Products], ...]] = (Ours, *PEERS)
_LABELS: Final = {products.key: products.label for products in _EVERYONE}
COLUMNS: Final = [
    Column("shape", "model"),
    Column("skew", "ids"),
    Column("m", "T", "{:d}"),
    Column("touched", "experts", "{:.0f}"),
    Column("whole_us", "block us", "{:.1f}"),
    *(
        column
        for key, label in _LABELS.items()
        for column in (
            Column(f"{key}_block_us", f"{label}, after routing", "{:.1f}"),
            Column(f"{key}_us", f"{label}, products", "{:.1f}"),
        )
    ),
    Column("limit_us", "bound us", "{:.1f}"),
    Column("limit_share", "of it", "{:.2f}"),
    Column("best_ratio", "best peer / ours", "{:.2f}"),
    Column("spread", "spread", "{:.2f}"),
]


class Bench:
    """A run with some peers.

    Attributes:
        versions: what each peer that takes part is.
        skipped: why each of the others does not, or not everywhere.
    """

    def __init__(self, peers: Sequence[Products]) -> None:
        self.versions: dict[str, str] = {}
        self.skipped: dict[str, list[str]] = {}
        self._everyone: list[Products] = [Ours()]
        for peer in peers:
            try:
                self.versions[peer.key] = peer.load()
                self._everyone.append(peer)
            except Skip as skip:
                self._skip(peer.key, str(skip))

    def rows(self, sizes: Sequence[Size], tokens: Sequence[int], skews: Sequence[Skew]) -> Iterator[list[Row]]:
        """The row of each cell as it is measured.

        Raises:
            AssertionError: a result of ours is wrong.
        """
        for size in sizes:
            block = Block(size)
            prepared = self._prepare(block)
            for count in tokens:
                for skew in skews:
                    yield [self._cell(block, prepared, count, skew)]
            del block, prepared  # before the next ones take their memory

    def report(self, rows: list[Row]) -> Report:
        facts: Row = {
            "GPU": torch.cuda.get_device_name(),
            **origin.facts(),
            "CUDA": torch.version.cuda,
            "built for": " ".join(_C.cuda_architectures()),
            "weights": f"int{BITS}, groups of {GROUP}, {str(DTYPE).removeprefix('torch.')} scales",
            "method": f"microseconds a call in one CUDA graph; ids change from call to call so that weights are cold "
            f"in L2 (> {ROTATION_BYTES >> 20} MB pass by), median of {ROUNDS} interleaved replays, each after a "
            "pause; 'after routing': products, gate and sum over slots, others' products between our steps, theirs "
            "without the router's weights where their product has none; 'products': the two alone, ours with the gate, "
            "which their first product has not; 'bound': bytes of "
            "the experts that are touched, or operations at the rate of the largest dense products",
            "peers": self.versions,
            "skipped": self.skipped,
        }
        return Report("Mixtures of experts", facts, COLUMNS, rows)

    def _skip(self, key: str, why: str) -> None:
        reasons = self.skipped.setdefault(key, [])
        if why not in reasons:
            reasons.append(why)

    def _prepare(self, block: Block) -> list[tuple[Products, Callable[[Sequence[Routed]], Multiply]]]:
        found = []
        for products in self._everyone:
            try:
                found.append((products, products.prepare(block)))
            except Skip as skip:
                self._skip(products.key, f"{block.size.name}: {skip}")
            except Exception as error:  # a library of others may raise anything, which must not end the run
                if isinstance(products, Ours):
                    raise
                self._skip(products.key, f"{block.size.name}: {reason(error)}")
        return found

    def _cell(
        self,
        block: Block,
        prepared: Sequence[tuple[Products, Callable[[Sequence[Routed]], Multiply]]],
        tokens: int,
        skew: Skew,
    ) -> Row:
        routed = block.routed(tokens, skew)
        touched = sum(one.touched for one in routed) / len(routed)
        machine = limits.machine(torch.cuda.get_device_name())
        limit = block.least_seconds(machine, tokens, touched) if machine else None
        checked = min(_CHECKED, tokens)
        expected = block.expected(routed[0], checked)
        graphs: dict[str, Graph] = {}

        def enter(key: str, one: Contestant, outs: Sequence[Tensor]) -> None:
            graphs[key] = Graph.of(one, outs, limit or _UNKNOWN_LIMIT)

        outs = outputs(tokens, block.size.hidden, DTYPE)
        whole = Ours.whole(block)
        error = relative_error(whole(0, routed[0], outs[0])[:checked], expected)
        assert error <= MAX_ERROR, f"{block.size.name} T={tokens}: relative error {error:.2g}"
        enter("whole", contestant("whole", block, routed, whole), outs)
        for products, of in prepared:
            try:
                multiply = of(routed)
                error = relative_error(products.result(multiply, routed[0])[:checked], expected)
                if not error <= MAX_ERROR:  # NaN too
                    raise Skip(f"wrong result: relative error {error:.2g}")
                orders = {id(one): products.order(one) for one in routed}
                rows = (tokens * block.size.slots, block.size.intermediate)
                gated = torch.randn(rows, device=block.device).to(products.dtype)
                outs = outputs(tokens, block.size.hidden, products.dtype)
                key, launch = products.key, products.block(multiply, orders)
                enter(f"{key}_block", contestant(key, block, routed, launch), outs)
                enter(key, contestant(key, block, routed, products.alone(multiply, gated)), outs)
            except Skip as skip:
                self._skip(products.key, f"{block.size.name} T={tokens}: {skip}")
            except Exception as error:
                if isinstance(products, Ours):
                    raise
                self._skip(products.key, f"{block.size.name} T={tokens}: {reason(error)}")
        samples = dict(zip(graphs, measure(list(graphs.values())), strict=True))
        row: Row = {"scheme": "moe", "shape": block.size.name, "skew": skew, "m": tokens, "touched": touched}
        row |= {f"{key}_us": 1e6 * sample.median for key, sample in samples.items()}
        row["spread"] = samples["whole"].spread
        theirs = [row[f"{products.key}_block_us"] for products in PEERS if f"{products.key}_block_us" in row]
        if theirs:
            row["best_ratio"] = min(theirs) / row["qcutlass_block_us"]
        if limit:
            row |= {"limit_us": 1e6 * limit, "limit_share": 1e6 * limit / row["qcutlass_block_us"]}
        return row
