"""The run: a row for each size, scheme, skew and number of tokens, and one for each tactic of its products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from bench import limits, origin
from bench.gpu_timing import ROTATION_BYTES, ROUNDS, Contestant, Graph, measure, outputs
from bench.moe.contestants import PEERS, Multiply, Ours, Products, contestant
from bench.moe.problem import Block, Routed, Size, Skew
from bench.peers.base import MAX_ERROR, Skip, reason, relative_error
from bench.report import Column, Report, Row
from bench.schemes import WeightOnly
from qcutlass import _C

_CHECKED: Final = 4  # tokens whose results are compared with float64
_UNKNOWN_LIMIT: Final = 5e-6  # seconds that a launch takes at least, where the GPU's ceilings are unknown
_CLOSE: Final = 1.05  # of the best tactic's time: what the chosen one should not be beyond

MODELS: Final = ["qwen3-30b-a3b", "mixtral-8x7b"]
TOKENS: Final = [1, 4, 16, 64, 256, 1024, 4096]
"""What runs where the command line names nothing else."""

_EVERYONE: Final[tuple[type[Products], ...]] = (Ours, *PEERS)
_LABELS: Final = {products.key: products.label for products in _EVERYONE}
COLUMNS: Final = [
    Column("shape", "model"),
    Column("scheme", "weights"),
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
    Column("product", "product"),
    Column("tactic", "tactic"),
    Column("tactic_us", "tactic us", "{:.1f}"),
    Column("to_chosen", "x chosen", "{:.2f}"),
    Column("tflops", "products, TFLOP/s", "{:.0f}"),
    Column("limit_us", "bound us", "{:.1f}"),
    Column("limit_share", "of it", "{:.2f}"),
    Column("best_ratio", "best peer / ours", "{:.2f}"),
    Column("spread", "spread", "{:.2f}"),
]


_PRODUCTS: Final = ("gate_up", "down")


class Bench:
    """A run with some peers.

    Args:
        tactics: None: the chosen tactics alone; otherwise also every one of both products whose name contains this.
        rounds: replays of each contestant.

    Attributes:
        versions: what each peer that takes part is.
        skipped: why each of the others does not, or not everywhere.
    """

    def __init__(self, peers: Sequence[Products], tactics: str | None = None, rounds: int = ROUNDS) -> None:
        self._tactics, self._rounds = tactics, rounds
        self._words: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.skipped: dict[str, list[str]] = {}
        self._everyone: list[Products] = [Ours()]
        for peer in peers:
            try:
                self.versions[peer.key] = peer.load()
                self._everyone.append(peer)
            except Skip as skip:
                self._skip(peer.key, str(skip))

    def rows(
        self, sizes: Sequence[Size], schemes: Sequence[WeightOnly], tokens: Sequence[int], skews: Sequence[Skew]
    ) -> Iterator[list[Row]]:
        """The rows of each cell as it is measured.

        Raises:
            AssertionError: a result of ours is wrong.
        """
        for size in sizes:
            for scheme in schemes:
                self._words[scheme.name] = scheme.words
                block = Block(size, scheme)
                prepared = self._prepare(block)
                for count in tokens:
                    for skew in skews:
                        yield self._cell(block, prepared, count, skew)
                del block, prepared  # before the next ones take their memory

    def report(self, rows: list[Row]) -> Report:
        facts: Row = {
            "GPU": torch.cuda.get_device_name(),
            **origin.facts(),
            "CUDA": torch.version.cuda,
            "built for": " ".join(_C.cuda_architectures()),
            "weights": [f"{name}: {words}" for name, words in self._words.items()],
            "method": f"microseconds a call in one CUDA graph; ids change from call to call so that weights are cold "
            f"in L2 (> {ROTATION_BYTES >> 20} MB pass by), median of {self._rounds} interleaved replays, each after a "
            "pause; 'after routing': products, gate and sum over slots, others' products between our steps, theirs "
            "without the router's weights where their product has none; 'products': the two alone, ours with the gate, "
            "which their first product has not; 'products, TFLOP/s': operations of both by our time of them; 'tactic "
            "us': of one product alone; 'bound': bytes of "
            "the experts that are touched, or operations at the rate of the largest dense products",
            "peers": self.versions,
            "skipped": self.skipped,
        }
        return Report("Mixtures of experts", facts, COLUMNS, rows, choices(rows))

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
    ) -> list[Row]:
        routed = block.routed(tokens, skew)
        touched = sum(one.touched for one in routed) / len(routed)
        machine = limits.machine(torch.cuda.get_device_name())
        limit = block.least_seconds(machine, tokens, touched) if machine else None
        checked = min(_CHECKED, tokens)
        expected = block.expected(routed[0], checked)
        graphs: dict[str, Graph] = {}

        def enter(key: str, one: Contestant, outs: Sequence[Tensor]) -> None:
            graphs[key] = Graph.of(one, outs, limit or _UNKNOWN_LIMIT)

        outs = outputs(tokens, block.size.hidden, block.dtype)
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
                dtype = products.dtype or block.dtype
                gated = torch.randn(rows, device=block.device).to(dtype)
                outs = outputs(tokens, block.size.hidden, dtype)
                key, launch = products.key, products.block(multiply, orders)
                enter(f"{key}_block", contestant(key, block, routed, launch), outs)
                enter(key, contestant(key, block, routed, products.alone(multiply, gated)), outs)
            except Skip as skip:
                self._skip(products.key, f"{block.size.name} T={tokens}: {skip}")
            except Exception as error:
                if isinstance(products, Ours):
                    raise
                self._skip(products.key, f"{block.size.name} T={tokens}: {reason(error)}")
        samples = dict(zip(graphs, measure(list(graphs.values()), rounds=self._rounds), strict=True))
        cell: Row = {"scheme": block.scheme.name, "shape": block.size.name, "skew": skew, "m": tokens}
        row = cell | {"touched": touched, "spread": samples["whole"].spread}
        row |= {f"{key}_us": 1e6 * sample.median for key, sample in samples.items()}
        row["tflops"] = block.size.operations(tokens) / samples[Ours.key].median / 1e12
        theirs = [row[f"{products.key}_block_us"] for products in PEERS if f"{products.key}_block_us" in row]
        if theirs:
            row["best_ratio"] = min(theirs) / row["qcutlass_block_us"]
        if limit:
            row |= {"limit_us": 1e6 * limit, "limit_share": 1e6 * limit / row["qcutlass_block_us"]}
        if self._tactics is None:
            return [row]
        return [row, *(cell | one for product in (0, 1) for one in self._by_tactic(block, routed, product, limit))]

    def _by_tactic(self, block: Block, routed: Sequence[Routed], product: int, limit: float | None) -> Iterator[Row]:
        """The times of one product by each tactic, the chosen one first."""
        ours, size = Ours(), block.size
        rows, inner = routed[0].routing.rows.shape[0], size.intermediate
        gated = torch.randn((rows, inner), device=block.device).to(block.dtype)
        a = gated if product else routed[0].x
        n, k = size.products[product]
        share = n * k / sum(n * k for n, k in size.products)
        outs = outputs(rows, size.hidden if product else inner, block.dtype)
        names = list(ours.tactics(block, routed[0], product, a, self._tactics or ""))
        graphs, expected = [], None
        for name in names:
            launch = ours.by_tactic(block, product, name, gated)
            found = launch(0, routed[0], outs[0]).double()
            expected = found if expected is None else expected
            error = relative_error(found, expected)
            assert error <= MAX_ERROR, f"{size.name} R={rows}: {name}: relative error {error:.2g}"
            graphs.append(Graph.of(contestant(name, block, routed, launch), outs, share * (limit or _UNKNOWN_LIMIT)))
        samples = measure(graphs, rounds=self._rounds)
        operations = 2 * rows * n * k
        for name, sample in zip(names, samples, strict=True):
            yield {
                "product": _PRODUCTS[product],
                "tactic": name,
                "selected": name == names[0],
                "tactic_us": 1e6 * sample.median,
                "spread": sample.spread,
                "to_chosen": sample.median / samples[0].median,
                "tflops": operations / sample.median / 1e12,
            }


def choices(rows: Sequence[Row]) -> list[str]:
    """What the choice of tactics came to, where others were timed."""
    best: dict[tuple[object, ...], float] = {}
    for row in rows:
        if "tactic" in row:
            key = tuple(row[name] for name in ("scheme", "shape", "skew", "m", "product"))
            best[key] = min(best.get(key, 1.0), row["to_chosen"])
    if not best:
        return []
    close = sum(ratio * _CLOSE >= 1 for ratio in best.values())
    key, least = min(best.items(), key=lambda item: item[1])
    return [
        f"the chosen tactic takes at most {_CLOSE:.2f} of the best one's time in {close} of {len(best)} products",
        f"at worst {1 / least:.2f} of it: {' '.join(map(str, key))}",
    ]
