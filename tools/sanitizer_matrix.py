"""Launches every kernel that was built a few times on small, odd shapes, for compute-sanitizer to watch.

Each result is checked against its bound, on the CPU. ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` gives every tensor an
allocation of its own, so that memcheck sees accesses just outside of it:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tools/sanitizer_matrix.py
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

import qcutlass
from qcutlass import testing
from qcutlass.selection import weight_dtype

# (M, N, K): no extent is a multiple of any tile's; the second has whole tiles of every configuration as well, and more
# stages than any pipeline. K % 8 decides how activations are copied.
SHAPES = [(5, 45, 333), (131, 300, 2200)]
# Each kind of scales and zeros has kernels of its own.
SCHEMES: list[dict[str, Any]] = [
    {"group_size": 64, "zeros": "none"},
    {"group_size": 10**6, "zeros": "int"},
    {"group_size": 16, "zeros": "int"},
    {"group_size": 48, "zeros": "none"},
    {"group_size": 32, "zeros": "real"},
    {"group_size": 128, "zeros": "int", "scale_dtype": torch.float32},
]
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]


def cases(shapes: list[tuple[int, int, int]]) -> Iterator[testing.Case]:
    """Every kind of problem; the epilogues take turns."""
    choose = random.Random(1)
    kinds = itertools.product((4, 8), (torch.float16, torch.bfloat16), SCHEMES, shapes)
    for bits, dtype, scheme, (m, n, k) in kinds:
        bias, act_scale, perm = (choose.random() < 0.5 for _ in range(3))
        yield testing.Case(
            m, n, k, bits=bits, dtype=dtype, bias=bias, act_scale=act_scale, perm=perm,
            activation=choose.choice(ACTIVATIONS), **scheme,
        )  # fmt: skip


def on_gpu(problem: testing.Problem) -> testing.Problem:
    values: dict[str, Any] = {}
    for field in fields(problem):
        value = getattr(problem, field.name)
        values[field.name] = value.cuda() if isinstance(value, Tensor) else value
    return testing.Problem(**values)


def check_weights(problem: testing.Problem, gpu: testing.Problem) -> Tensor:
    """Packs, unpacks and dequantises on the GPU, comparing with the CPU; returns the packed codes."""
    n, k = problem.codes.shape
    packed = qcutlass.preprocess_weights(gpu.codes, bits=gpu.bits)
    testing.assert_equal(packed.cpu(), qcutlass.preprocess_weights(problem.codes, bits=problem.bits), label=problem)
    unpacked = qcutlass.unpack_weights(packed, bits=gpu.bits, shape=(n, k))
    testing.assert_equal(unpacked.cpu(), problem.codes, label=problem)
    grouped = {name: value for name, value in gpu.keywords.items() if name == "group_size"}
    weight = qcutlass.dequantize(packed, gpu.scales, gpu.zeros, k=k, **grouped)
    testing.assert_equal(weight.cpu(), problem.weight(problem.scales.dtype), label=problem)
    return packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tactic", default="", help="only kernels whose name contains this")
    parser.add_argument("--split-k", type=int, nargs="+", default=[1, 2], help="split-K of each kernel")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("M", "N", "K"), help="this shape alone")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    shapes = [tuple(arguments.shape)] if arguments.shape else SHAPES
    begin, launches, worst = time.perf_counter(), 0, 0.0
    wanted, launched = set(), set()
    for seed, case in enumerate(cases(shapes), start=arguments.seed):
        problem = case.random(seed=seed)
        references = {dtype: problem.reference(dtype) for dtype in (case.dtype, torch.float32)}
        gpu = on_gpu(problem)
        packed = check_weights(problem, gpu)
        operands = (gpu.a, packed, gpu.scales, gpu.zeros)
        tactics = [name for name in qcutlass.tactics(*operands, **gpu.keywords) if arguments.tactic in name]
        wanted |= set(tactics)
        for tactic in tactics:
            for split_k in arguments.split_k:
                with contextlib.suppress(qcutlass.UnsupportedError):  # too little shared memory, or too short a K
                    options = gpu.keywords | {"tactic": tactic, "split_k": split_k}
                    out, reference = qcutlass.gemm(*operands, **options), references[weight_dtype(*operands, **options)]
                    label = f"{tactic} split {split_k}: {problem}"
                    worst = max(worst, testing.assert_close(out.cpu(), reference, splits=split_k, label=label))
                    launched.add(tactic)
                    launches += 1
    if not launches:
        raise SystemExit(f"no kernel's name contains {arguments.tactic!r}")
    seconds = time.perf_counter() - begin
    print(f"kernels that do not fit this GPU: {', '.join(sorted(wanted - launched)) or 'none'}")
    print(f"{launches} products by {len(launched)} kernels, largest |error| / bound {worst:.3f}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
