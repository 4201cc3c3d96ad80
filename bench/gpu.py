"""GPU kernels against dense fp16 products in the same run: one harness for every contestant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bench.dense import DenseLibrary
from bench.gpu_timing import ROTATION_BYTES, ROUNDS, Contestant, eager_seconds, measure, outputs
from bench.layer import Layer
from bench.report import Column, Report, Row
from bench.schemes import Scheme
from bench.shapes import Shape
from bench.timing import Sample
from qcutlass import _C, testing

COLUMNS: Final = [
    Column("scheme", "scheme"),
    Column("shape", "N x K"),
    Column("m", "M", "{:d}"),
    Column("qcutlass_us", "qcutlass us", "{:.2f}"),
    Column("spread", "spread", "{:.0%}"),
    Column("cublas_us", "cuBLAS fp16 us", "{:.2f}"),
    Column("cutlass_us", "CUTLASS fp16 us", "{:.2f}"),
    Column("int4pack_us", "int4pack us", "{:.2f}"),
    Column("speedup", "cuBLAS / qcutlass", "{:.2f}"),
    Column("cutlass_ratio", "CUTLASS / qcutlass", "{:.2f}"),
    Column("limit_share", "of limit", "{:.0%}"),
    Column("error", "error / bound", "{:.3f}"),
    Column("eager_us", "eager us", "{:.1f}"),
    Column("cublas_eager_us", "torch.mm eager us", "{:.1f}"),
    Column("tactic", "tactic"),
]
_UNKNOWN_LIMIT: Final = 5e-6  # seconds that a launch takes at least, where the GPU's ceilings are unknown


@dataclass(frozen=True)
class Options:
    """What to run beside the selected kernel.

    Attributes:
        tactics: None: the selected tactic alone; otherwise also every one whose name contains this.
        splits: split-K of each of these; 0 leaves it to selection.
        dense: stock CUTLASS, if it was built.
        peers: whether to run torch.mm, stock CUTLASS and int4pack.
        eager: whether to measure the host time of an eager call.
    """

    tactics: str | None = None
    splits: Sequence[int] = (0,)
    dense: DenseLibrary | None = None
    peers: bool = True
    eager: bool = False


def run_rows(layer: Layer, m: int, options: Options) -> list[Row]:
    """Times everyone at M = m: one row for the selected tactic, one for each forced one."""
    a, reference = layer.problem.a[:m], layer.reference.rows(0, m)
    selected = layer.qcutlass_contestant(a)
    forced = [] if options.tactics is None else list(layer.forced_contestants(a, options.tactics, options.splits))
    peers: dict[str, list[Contestant]] = {}
    if options.peers:
        peers["cublas"] = [layer.cublas_contestant(a)]
        peers["cutlass"] = layer.cutlass_contestants(a, options.dense) if options.dense else []
        peers["int4pack"] = layer.int4pack_contestants(a)
    errors: dict[str, float] = {}

    def check(contestant: Contestant, out: Tensor) -> None:
        if contestant.name in ("cublas", "int4pack"):  # they may accumulate or round in other ways: recorded only
            errors[contestant.name] = testing.error_ratio(out, reference)
        else:
            errors[contestant.name] = testing.assert_close(out, reference, label=(contestant.name, layer.case))

    limit = layer.limit_seconds(m)
    outs = outputs(m, layer.case.n, layer.case.dtype)
    everyone = [selected, *forced, *(contestant for group in peers.values() for contestant in group)]
    samples = measure(everyone, outs, limit or _UNKNOWN_LIMIT, check)
    ours, theirs = samples[: 1 + len(forced)], iter(samples[1 + len(forced) :])
    best = {key: min(next(theirs).median for _ in group) for key, group in peers.items() if group}
    common: Row = {"scheme": layer.scheme.name, "shape": f"{layer.case.n}x{layer.case.k}", "m": m}
    common |= {f"{key}_us": 1e6 * seconds for key, seconds in best.items()}
    common |= {f"{key}_error": errors[key] for key in ("cublas", "int4pack") if key in errors}

    def row(contestant: Contestant, sample: Sample) -> Row:
        return common | {
            "tactic": contestant.name,
            "qcutlass_us": 1e6 * sample.median,
            "spread": sample.spread,
            "speedup": best["cublas"] / sample.median if "cublas" in best else None,
            "cutlass_ratio": best["cutlass"] / sample.median if "cutlass" in best else None,
            "limit_share": limit / sample.median if limit else None,
            "error": errors[contestant.name],
        }

    rows = [row(*pair) for pair in zip([selected, *forced], ours, strict=True)]
    if options.eager:
        rows[0]["eager_us"] = 1e6 * eager_seconds(selected, outs[0])
        rows[0]["cublas_eager_us"] = 1e6 * eager_seconds(layer.cublas_contestant(a), outs[0])
    return rows


def run(schemes: Sequence[Scheme], shapes: Sequence[Shape], ms: Sequence[int], options: Options) -> Iterator[Row]:
    """Rows as they are measured: schemes, then shapes, then M.

    Raises:
        AssertionError: a kernel's result is out of its bound.
    """
    for scheme in schemes:
        for shape in shapes:
            layer = Layer(scheme, shape, max(ms))
            for m in ms:
                yield from run_rows(layer, m, options)
            del layer  # before the next one takes its memory


def report(rows: list[Row]) -> Report:
    facts = {
        "GPU": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "built for": " ".join(_C.cuda_architectures()),
        "method": f"microseconds a call in one CUDA graph, weights cold in L2 (rotation > {ROTATION_BYTES >> 20} MB), "
        f"median of {ROUNDS} interleaved replays, spread = (max - min) / median",
    }
    return Report("GPU kernels", facts, COLUMNS, rows)
