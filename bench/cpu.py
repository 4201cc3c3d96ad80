"""CPU backend: `qcutlass.gemm` against torch's fp32 product with dequantised weights and a copy of the packed codes."""

from __future__ import annotations

import ctypes
import functools
import gc
import multiprocessing
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

import qcutlass
from bench import origin
from bench.cpu_timing import LEAST_ROUNDS, MOST_ROUNDS, copy_rate, measure
from bench.report import Column, Report, Row
from bench.schemes import WeightOnly, parse_weight_only
from bench.shapes import Shape
from bench.timing import Sample, interleave, wall_time
from qcutlass import testing

MAX_RATIO: Final = 1.5  # time against torch's fp32 product
MAX_EXTRA_MB: Final = 64.0  # memory beyond the arguments and the output
MAX_PACK_SECONDS: Final = 0.5
PACK_SHAPE: Final = (28672, 4096)
SCALING_SHAPE: Final = (2048, 2048)  # a product of one row takes a few 100 us

_SCALING_CALLS: Final = 10

COLUMNS: Final = [
    Column("scheme", "scheme"),
    Column("activations", "activations"),
    Column("shape", "N x K"),
    Column("m", "M", "{:d}"),
    Column("qcutlass_ms", "qcutlass ms", "{:.3f}"),
    Column("gbytes", "weights GB/s", "{:.1f}"),
    Column("dense_ms", "torch fp32 ms", "{:.3f}"),
    Column("ratio", "ratio", "{:.2f}"),
    Column("ratio_of_best", "of best", "{:.2f}"),
    Column("spread", "spread", "{:.0%}"),
    Column("ratio_ok", f"<= {MAX_RATIO}"),
    Column("extra_mb", "extra MB", "{:.1f}"),
    Column("memory_ok", f"< {MAX_EXTRA_MB:.0f} MB"),
    Column("error", "error / bound", "{:.3f}"),
]


def memory_kb(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1])


def _release_free_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _extra_memory(
    scheme: WeightOnly, shape: Shape, ms: Sequence[int], dtype: torch.dtype, threads: int
) -> dict[int, float]:
    """Peak resident memory (MB) that calls add to a fresh process which holds the arguments and the output.

    The baseline is taken before the first call, so buffers that libraries keep count too.
    """
    torch.set_num_threads(threads)
    case = scheme.case(max(ms), *shape, dtype)
    problem = case.random(seed=1)
    packed = qcutlass.preprocess_weights(problem.codes, bits=case.bits)
    a, scales, zeros, keywords = problem.a, problem.scales, problem.zeros, problem.keywords
    out = torch.zeros(case.m, case.n, dtype=a.dtype)
    del problem
    _release_free_memory()
    baseline = memory_kb("VmRSS")
    extra = {}
    for m in ms:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        qcutlass.gemm(a[:m], packed, scales, zeros, out=out[:m], **keywords)
        extra[m] = (memory_kb("VmHWM") - baseline) / 1024
        _release_free_memory()
    return extra


def extra_memory(scheme: WeightOnly, shape: Shape, ms: Sequence[int], dtype: torch.dtype) -> dict[int, float]:
    """`_extra_memory` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(_extra_memory, scheme, shape, ms, dtype, torch.get_num_threads()).result()


def run_layer(
    scheme: WeightOnly, shape: Shape, ms: Sequence[int], dtype: torch.dtype, activations: str | None = None
) -> list[Row]:
    """One row for each number of activation rows in `ms`."""
    extra = extra_memory(scheme, shape, ms, dtype)
    case = scheme.case(max(ms), *shape, dtype)
    problem = case.random(seed=1)
    packed = qcutlass.preprocess_weights(problem.codes, bits=case.bits)
    weight = problem.weight()  # fp32, as the CPU backend computes
    dense_a = problem.a.float()
    rows: list[Row] = []
    for m in ms:
        a, dense = problem.a[:m], dense_a[:m]
        out, dense_out = torch.empty(m, case.n, dtype=a.dtype), torch.empty(m, case.n)
        options = problem.keywords | {"out": out, "activations": activations}
        ours = functools.partial(qcutlass.gemm, a, packed, problem.scales, problem.zeros, **options)
        torchs = functools.partial(torch.mm, dense, weight.T, out=dense_out)

        ours()
        sample = slice(0, m, max(1, m // 16))  # the float64 reference is slow: 16 rows of the launch that is timed
        if activations is None:
            reference = testing.reference(a[sample], weight)
        else:
            reference = testing.int8_activations_reference(replace(problem, a=a[sample]))
        error = testing.assert_close(out[sample], reference, label=(scheme.name, shape, m))
        measured = measure(ours, torchs)
        rows.append(
            {
                "scheme": scheme.name,
                "shape": "{}x{}".format(*shape),
                "m": m,
                "activations": activations,
                "qcutlass_ms": 1e3 * measured.ours.median,
                "gbytes": packed.nbytes / measured.ours.best / 1e9,
                "dense_ms": 1e3 * measured.other.median,
                "ratio": measured.ratio,
                "ratio_of_best": measured.ratio_of_best,
                "spread": measured.spread,
                "ratio_ok": measured.ratio <= MAX_RATIO,
                "extra_mb": extra[m],
                "memory_ok": extra[m] < MAX_EXTRA_MB,
                "error": error,
            }
        )
    return rows


def pack_seconds(shape: Shape = PACK_SHAPE) -> float:
    """Median time of packing 4-bit codes of a large layer."""
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    pack = functools.partial(qcutlass.preprocess_weights, codes, bits=4)
    (sample,) = interleave([functools.partial(wall_time, pack)], LEAST_ROUNDS)
    return sample.median


def scaling(shape: Shape = SCALING_SHAPE) -> dict[int, Sample]:
    """Times of a product with one row on one, two, four threads, and so on, up to torch's number."""
    problem = parse_weight_only("w4a16_g128").case(1, *shape, torch.float32).random(seed=1)
    packed = qcutlass.preprocess_weights(problem.codes, bits=4)
    product = functools.partial(qcutlass.gemm, problem.a, packed, problem.scales, problem.zeros, **problem.keywords)
    most = torch.get_num_threads()

    def measure(threads: int) -> float:
        torch.set_num_threads(threads)
        try:
            product()  # wakes the threads
            return wall_time(product, _SCALING_CALLS)
        finally:
            torch.set_num_threads(most)

    counts = [2**i for i in range(most.bit_length())]
    samples = interleave([functools.partial(measure, threads) for threads in counts], MOST_ROUNDS)
    return dict(zip(counts, samples, strict=True))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def run(
    schemes: Sequence[WeightOnly],
    shapes: Sequence[Shape],
    ms: Sequence[int],
    dtype: torch.dtype,
    activations: str | None = None,
) -> Iterator[Row]:
    """Rows as they are measured: schemes, then shapes, then M."""
    for scheme in schemes:
        for shape in shapes:
            yield from run_layer(scheme, shape, ms, scheme.dtype or dtype, activations)


def failures(rows: Sequence[Row], seconds: float) -> int:
    """How many promises are broken: ratio and memory of each row, and the packing time."""
    broken = [not row["ratio_ok"] for row in rows] + [not row["memory_ok"] for row in rows]
    return sum(broken) + (seconds >= MAX_PACK_SECONDS)


def _speed_ups(times: Mapping[int, Sample]) -> str:
    """Of the best times: on a busy machine the others say what the neighbours did."""
    return "; ".join(
        f"{threads}: {1e6 * sample.best:.0f} us ({times[1].best / sample.best:.2f} times as fast)"
        for threads, sample in times.items()
    )


def machine() -> Row:
    """Facts of the machine, as it is now, and of the tree."""
    return {
        "processor": f"{_processor()}, {torch.get_num_threads()} threads",
        "load average": f"{os.getloadavg()[0]:.1f}",
        "copy": f"{copy_rate():.1f} GB/s",
        **origin.facts(),
    }


def report(rows: list[Row], seconds: float, times: Mapping[int, Sample]) -> Report:
    """`seconds` is what packing took (`pack_seconds`), `times` those by numbers of threads (`scaling`)."""
    n, k = PACK_SHAPE
    verdict = "PASS" if seconds < MAX_PACK_SECONDS else "FAIL"
    facts = machine() | {
        "threads, M = 1, {}x{}".format(*SCALING_SHAPE): _speed_ups(times),
        f"packing {n}x{k}, 4 bits": f"{seconds:.3f} s ({verdict}: < {MAX_PACK_SECONDS} s)",
        "failures": failures(rows, seconds),
        "method": f"median of {LEAST_ROUNDS} to {MOST_ROUNDS} interleaved rounds, spread = (max - min) / median; "
        "GB/s of the best round: of the product's packed codes, and of a copy of them; memory in a fresh process",
    }
    return Report("CPU backend", facts, COLUMNS, rows)
