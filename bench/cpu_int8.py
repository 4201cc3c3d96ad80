"""CPU backend: int8 by int8, `qcutlass.gemm_w8a8`, against torch's own int8 product, which gives the sums alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final

import torch

import qcutlass
from bench.cpu_timing import measure
from bench.report import Column, Report, Row
from bench.schemes import EightBit
from bench.shapes import Shape
from qcutlass import testing

COLUMNS: Final = [
    Column("scheme", "scheme"),
    Column("shape", "N x K"),
    Column("m", "M", "{:d}"),
    Column("qcutlass_ms", "qcutlass ms", "{:.3f}"),
    Column("gbytes", "weights GB/s", "{:.1f}"),
    Column("torch_ms", "torch._int_mm ms", "{:.3f}"),
    Column("ratio", "ratio", "{:.2f}"),
    Column("ratio_of_best", "of best", "{:.2f}"),
    Column("spread", "spread", "{:.0%}"),
    Column("error", "error / bound", "{:.3f}"),
]


def run(schemes: Sequence[EightBit], shapes: Sequence[Shape], ms: Sequence[int]) -> Iterator[Row]:
    """Rows as they are measured: schemes, then shapes, then M."""
    for scheme in schemes:
        for shape in shapes:
            yield from run_layer(scheme, shape, ms)


def run_layer(scheme: EightBit, shape: Shape, ms: Sequence[int]) -> list[Row]:
    """One row for each number of activation rows in `ms`; ValueError for other types than int8."""
    if scheme.a_dtype != torch.int8:
        raise ValueError(f"scheme {scheme.name!r}: on the CPU torch has a product of int8 alone, say w8a8")
    rows: list[Row] = []
    for m in ms:
        problem = scheme.case(m, *shape).random(seed=1)
        packed = qcutlass.preprocess_weights(problem.w, bits=8, activations="int8")
        w_sums = None if problem.azp is None else qcutlass.weight_sums(packed, n=shape[0])
        out = torch.empty(m, shape[0], dtype=problem.out_dtype)
        operands = problem.a, packed, problem.a_scale, problem.w_scale
        ours = functools.partial(qcutlass.gemm_w8a8, *operands, out=out, w_sums=w_sums, **problem.keywords)
        ours()
        error = testing.assert_close(out, problem.reference(), label=problem)
        measured = measure(ours, functools.partial(torch._int_mm, problem.a, problem.w.T))
        rows.append(
            {
                "scheme": scheme.name,
                "shape": "{}x{}".format(*shape),
                "m": m,
                "qcutlass_ms": 1e3 * measured.ours.median,
                "gbytes": packed.nbytes / measured.ours.best / 1e9,
                "torch_ms": 1e3 * measured.other.median,
                "ratio": measured.ratio,
                "ratio_of_best": measured.ratio_of_best,
                "spread": measured.spread,
                "error": error,
            }
        )
    return rows


def report(rows: list[Row], facts: Row) -> Report:
    """`facts`: those of the machine."""
    method = {"method": "a scale a row and a channel, a bias; torch._int_mm computes the int32 sums alone"}
    return Report("CPU backend, int8 by int8", facts | method, COLUMNS, rows)
