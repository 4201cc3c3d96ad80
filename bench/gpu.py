"""GPU kernels against their peers in the same run: one harness for every contestant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bench import gpu_report, limits, origin
from bench.gpu_timing import (
    FAR_ROUNDS,
    ROTATION_BYTES,
    ROUNDS,
    Contestant,
    Graph,
    eager_seconds,
    in_situ,
    measure,
    outputs,
)
from bench.layer import Layer, WeightOnlyLayer
from bench.layer_blockwise import BlockwiseLayer
from bench.layer_w4a8 import FourByEightLayer
from bench.layer_w8a8 import EightBitLayer
from bench.peers.base import MAX_ERROR, Peer, Product, Skip, reason, relative_error
from bench.peers.cublas import Cublas
from bench.report import Report, Row
from bench.schemes import Blockwise, FourByEight, Scheme, WeightOnly
from bench.shapes import Shape
from qcutlass import _C

_WHOLE = "with_quantizer"  # of the contestants beside peers
_UNKNOWN_LIMIT = 5e-6  # seconds that a launch takes at least, where the GPU's ceilings are unknown


@dataclass(frozen=True)
class Options:
    """Contestants beside the selected kernel.

    Attributes:
        tactics: None: the selected tactic alone; otherwise also every one whose name contains this.
        splits: split-K of each of these; 0 leaves it to selection.
        within: of these only what is predicted to take at most so many times the least time, with any split-K; None:
            all, with `splits`.
        eager: whether to measure the host time of an eager call.
        batch_invariant: whether to measure also the kernel of the batch-invariant product: a row of its own, whose time
            relative to the selected one's is what that costs.
        in_situ: whether to measure also with an ordinary kernel before each product, its own time taken off.
        rounds: replays of each contestant.
    """

    tactics: str | None = None
    splits: Sequence[int] = (0,)
    within: float | None = None
    eager: bool = False
    in_situ: bool = False
    batch_invariant: bool = False
    rounds: int = ROUNDS


@dataclass(frozen=True)
class _Entry:
    """A graph whose result was checked: `error` is a share of the bound (ours) or relative (a peer's)."""

    name: str
    graph: Graph
    error: float


def layer_of(scheme: Scheme, shape: Shape, most_rows: int, device: str = "cuda") -> Layer:
    """A layer of this scheme and shape, with activations for `most_rows` rows."""
    if isinstance(scheme, WeightOnly):
        return WeightOnlyLayer(scheme, shape, most_rows, device)
    if isinstance(scheme, Blockwise):
        return BlockwiseLayer(scheme, shape, most_rows, device)
    if isinstance(scheme, FourByEight):
        return FourByEightLayer(scheme, shape, most_rows, device)
    return EightBitLayer(scheme, shape, most_rows, device)


class Bench:
    """A run with some peers.

    Attributes:
        versions: what each peer that takes part is.
        skipped: why each of the others does not, or not everywhere.
    """

    def __init__(self, peers: Sequence[Peer], options: Options) -> None:
        self.versions: dict[str, str] = {}
        self.skipped: dict[str, list[str]] = {}
        self._options = options
        self._peers: list[Peer] = []
        for peer in peers:
            try:
                self.versions[peer.key] = peer.load()
                self._peers.append(peer)
            except Skip as skip:
                self._skip(peer.key, str(skip))

    def rows(self, schemes: Sequence[Scheme], shapes: Sequence[Shape], ms: Sequence[int]) -> Iterator[list[Row]]:
        """The rows of each cell as it is measured: shapes, then M, then schemes, so that those of a product come one
        after the other, whatever the clocks do.

        Raises:
            AssertionError: one of our kernels' results is out of its bound, or two launches differ.
        """
        for shape in shapes:
            layers = [layer_of(scheme, shape, max(ms)) for scheme in schemes]
            products = [self._prepare(layer) for layer in layers]
            for m in ms:
                for i, layer in enumerate(layers):
                    yield self._cell(layer, products[i], m)
            del layer, layers, products  # before the next ones take their memory

    def report(self, rows: list[Row]) -> Report:
        facts: Row = {
            "GPU": torch.cuda.get_device_name(),
            **origin.facts(),
            "CUDA": torch.version.cuda,
            "built for": " ".join(_C.cuda_architectures()),
            "method": f"microseconds a call in one CUDA graph, random data, weights cold in L2 (rotation > "
            f"{ROTATION_BYTES >> 20} MB), median of {self._options.rounds} interleaved replays in changing order, each "
            f"after a pause ({FAR_ROUNDS} of contestants that are far behind), spread = (max - min) / median",
            "peers": self.versions,
            "skipped": self.skipped,
        }
        schemes = list(dict.fromkeys(row["scheme"] for row in rows))
        return gpu_report.report(facts, sorted(rows, key=lambda row: schemes.index(row["scheme"])))

    def _skip(self, key: str, why: str) -> None:
        reasons = self.skipped.setdefault(key, [])
        if why not in reasons:
            reasons.append(why)

    def _prepare(self, layer: Layer) -> dict[str, Product]:
        products = {}
        for peer in self._peers:
            try:
                products[peer.key] = peer.prepare(layer)
            except Skip as skip:
                self._skip(peer.key, f"{layer.scheme.name}: {skip}")
            except Exception as error:  # a library of others may raise anything, which must not end the run
                self._skip(peer.key, f"{layer.name}: {reason(error)}")
        return products

    def _cell(self, layer: Layer, products: dict[str, Product], m: int) -> list[Row]:
        """One row for the selected tactic, with the peers, and one for each forced tactic."""
        options = self._options
        expected = layer.expected(m)
        machine = limits.machine(torch.cuda.get_device_name())
        moved = layer.moved_bytes(m)
        limit = machine.seconds(moved, layer.operations(m), layer.scheme.operands) if machine else None
        outs = outputs(m, layer.n, layer.dtype)

        def ours(contestant: Contestant) -> _Entry:
            graph = Graph.of(contestant, outs, limit or _UNKNOWN_LIMIT)
            first, *others = graph.run()
            error = layer.check(contestant, first)
            assert all(torch.equal(first, other) for other in others), f"{contestant.name}: two launches differ"
            return _Entry(contestant.name, graph, error)

        def close(contestant: Contestant, failure: Callable[[str], Exception]) -> _Entry:
            graph = Graph.of(contestant, outs, limit or _UNKNOWN_LIMIT)
            error = relative_error(contestant.completed(graph.run()[0]), expected)
            if not error <= MAX_ERROR:  # NaN too
                raise failure(f"wrong result: relative error {error:.2g}")
            return _Entry(contestant.name, graph, error)

        selected = layer.plan(m)
        wanted = [] if options.tactics is None else layer.forced(m, options.tactics, options.splits, options.within)
        wanted = [*wanted, layer.invariant(m)] if options.batch_invariant else wanted
        everyone = {selected.name: selected} | {one.name: one for one in wanted if one.name != selected.name}
        entries = {"": [ours(contestant) for contestant in everyone.values()]}
        whole = layer.with_quantizer(m)
        if whole is not None:
            entries[_WHOLE] = [close(whole, AssertionError)]
        for key, product in products.items():
            try:
                entries[key] = [close(contestant, Skip) for contestant in product(m)]
            except Skip as skip:
                self._skip(key, f"{layer.scheme.name}: {skip}")
            except Exception as error:
                self._skip(key, f"{layer.name}, some or all M: {reason(error)}")
        graphs = [entry.graph for group in entries.values() for entry in group]
        samples = iter(measure(graphs, rounds=options.rounds))
        timed = {key: [(entry, next(samples)) for entry in group] for key, group in entries.items()}
        quantised = timed.pop(_WHOLE, None)

        cell: Row = {"scheme": layer.scheme.name, "shape": layer.shape, "m": m}
        rows: list[Row] = []
        for entry, sample in timed.pop(""):
            seconds = sample.median
            rows.append(
                cell
                | {
                    "tactic": entry.name,
                    "selected": not rows,
                    "qcutlass_us": 1e6 * seconds,
                    "spread": sample.spread,
                    "limit_share": limit / seconds if limit else None,
                    "bandwidth_share": moved / machine.bandwidth / seconds if machine else None,
                    "error": entry.error,
                    "to_chosen": 1e6 * seconds / rows[0]["qcutlass_us"] if rows else None,
                }
            )
        rows[0] |= {"moved_bytes": moved, "limit_us": 1e6 * limit if limit else None}
        if quantised is not None:
            rows[0] |= gpu_report.with_quantizer(rows[0], quantised[0][1])
        for key, group in timed.items():
            entry, sample = min(group, key=lambda pair: pair[1].median)
            rows[0] |= {f"{key}_us": 1e6 * sample.median, f"{key}_spread": sample.spread, f"{key}_error": entry.error}
            rows[0][f"{key}_kernel"] = entry.name
        rows[0] |= gpu_report.comparison(rows[0], list(timed))
        if options.in_situ:
            winners = {"": entries[""][0]} | {
                key: next(entry for entry in entries[key] if entry.name == rows[0][f"{key}_kernel"]) for key in timed
            }
            contestants = [entry.graph.contestant for entry in winners.values()]
            alone = in_situ(contestants, layer.dense_rows(m), outs, limit or _UNKNOWN_LIMIT)
            for key, each in zip(winners, alone, strict=True):
                rows[0][f"{key}_in_situ_us".lstrip("_")] = 1e6 * each
        if options.eager:
            rows[0]["eager_us"] = 1e6 * eager_seconds(selected, outs[0])
            rows[0]["cublas_eager_us"] = 1e6 * eager_seconds(Cublas().prepare(layer)(m)[0], outs[0])
        return rows
