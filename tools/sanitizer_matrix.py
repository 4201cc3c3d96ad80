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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

import qcutlass
from qcutlass import blockwise, testing
from qcutlass.products.selection import weight_dtype

# (M, N, K): no extent is a multiple of most tiles'; the second has whole tiles of every configuration as well, and more
# stages than any pipeline; the third has pairs of tiles of 64 and of 128 tokens, and turns of gates. K % 8 decides
# how activations are copied.
SHAPES = [(5, 45, 333), (131, 300, 2200), (200, 160, 400)]
# Each kind of scales and zeros has kernels of its own.
SCHEMES: list[dict[str, Any]] = [
    {"group_size": 64, "zeros": "none"},
    {"group_size": 10**6, "zeros": "int"},
    {"group_size": 16, "zeros": "int"},
    {"group_size": 48, "zeros": "none"},
    {"group_size": 32, "zeros": "real"},
    {"group_size": 128, "zeros": "int", "scale_dtype": torch.float32},
    {"group_size": 16, "zeros": "minimum", "scale_dtype": torch.float32},
]
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]
GATES = list(testing.bounds.GATES)

_Problem = TypeVar("_Problem", testing.Problem, testing.EightBitProblem, testing.BlockwiseProblem)


def cases(shapes: list[tuple[int, int, int]]) -> Iterator[testing.Case]:
    """Every kind of problem; the epilogues take turns."""
    choose = random.Random(1)
    kinds = itertools.product((4, 8), (torch.float16, torch.bfloat16), SCHEMES, shapes)
    for bits, dtype, scheme, (m, n, k) in kinds:
        bias, act_scale, perm, residual = (choose.random() < 0.5 for _ in range(4))
        yield testing.Case(
            m, n, k, bits=bits, dtype=dtype, bias=bias, act_scale=act_scale, perm=perm, residual=residual,
            activation=choose.choice(GATES if n % 32 == 0 else ACTIVATIONS), **scheme,
        )  # fmt: skip


def rounded_between(reference: testing.Reference) -> testing.Reference:
    """Kernels for GPUs round before gates and residuals."""
    follows = reference.activation in GATES or reference.residual is not None
    return replace(reference, rounds_between=follows)


def on_gpu(problem: _Problem) -> _Problem:
    values: dict[str, Any] = {}
    for member in fields(problem):
        value = getattr(problem, member.name)
        values[member.name] = value.cuda() if isinstance(value, Tensor) else value
    return type(problem)(**values)


def check_weights(problem: testing.Problem, gpu: testing.Problem) -> Tensor:
    """Packs, unpacks and dequantises on the GPU, comparing with the CPU; returns the packed codes."""
    n, k = problem.codes.shape
    packed = qcutlass.preprocess_weights(gpu.codes, bits=gpu.bits)
    testing.assert_equal(packed.cpu(), qcutlass.preprocess_weights(problem.codes, bits=problem.bits), label=problem)
    unpacked = qcutlass.unpack_weights(packed, bits=gpu.bits, shape=(n, k))
    testing.assert_equal(unpacked.cpu(), problem.codes, label=problem)
    grouped = {name: value for name, value in gpu.keywords.items() if name == "group_size"}
    weight = qcutlass.dequantize(packed, gpu.scales, gpu.zeros, k=k, minimums=gpu.minimums, **grouped)
    testing.assert_equal(weight.cpu(), problem.weight(problem.scales.dtype), label=problem)
    return packed


@dataclass
class Run:
    """The launches so far, and which are wanted.

    Attributes:
        wanted: part of the names of the tactics to launch.
        splits: of K, for each of them.
    """

    wanted: str
    splits: list[int]
    launches: int = 0
    worst: float = 0.0
    known: set[str] = field(default_factory=set)
    launched: set[str] = field(default_factory=set)

    def tactics(self, names: list[str]) -> list[str]:
        return [name for name in names if self.wanted in name]

    def products(self, names: list[str], check: Callable[[str, int], float]) -> None:
        """Runs `check` for every tactic and split that this GPU and K allow; it returns |error| / bound."""
        tactics = self.tactics(names)
        self.known |= set(tactics)
        for tactic, split_k in itertools.product(tactics, self.splits):
            with contextlib.suppress(qcutlass.UnsupportedError):  # too little shared memory, or too short a K
                self.worst = max(self.worst, check(tactic, split_k))
                self.launched.add(tactic)
                self.launches += 1


def run_weight_only(run: Run, case: testing.Case, seed: int) -> None:
    problem = case.random(seed=seed)
    on_cpu = qcutlass.preprocess_weights(problem.codes, bits=problem.bits)
    names = qcutlass.tactics(qcutlass.gemm, problem.a, on_cpu, problem.scales, problem.zeros, **problem.keywords)
    if not run.tactics(names):
        return
    references = {dtype: rounded_between(problem.reference(dtype)) for dtype in (case.dtype, torch.float32)}
    gpu = on_gpu(problem)
    operands = (gpu.a, check_weights(problem, gpu), gpu.scales, gpu.zeros)

    def check(tactic: str, split_k: int) -> float:
        options = gpu.keywords | {"tactic": tactic, "split_k": split_k}
        out, reference = qcutlass.gemm(*operands, **options), references[weight_dtype(*operands, **options)]
        label = f"{tactic} split {split_k}: {problem}"
        return testing.assert_close(out.cpu(), reference, splits=split_k, label=label)

    run.products(names, check)


def eight_bit_cases(shapes: list[tuple[int, int, int]]) -> Iterator[testing.EightBitCase]:
    """Both kinds of 8-by-8-bit products; outputs and epilogues take turns."""
    outputs = itertools.cycle([torch.float16, torch.bfloat16, torch.float32])
    for (m, n, k), dtype in itertools.product(shapes, (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)):
        azp: testing.Scope = "each" if dtype == torch.int8 else "none"
        activation = GATES[0] if n % 32 == 0 else "silu"
        yield testing.EightBitCase(
            m, n, k, dtype=dtype, out_dtype=next(outputs), azp=azp, bias=True, activation=activation, residual=True
        )  # fmt: skip


def run_eight_bit(run: Run, case: testing.EightBitCase, seed: int) -> None:
    """Quantises activations on the GPU too, which is compared with the CPU."""
    problem = case.random(seed=seed)
    is_int8 = case.dtype == torch.int8
    on_cpu = qcutlass.preprocess_weights(problem.w, bits=8, activations="int8" if is_int8 else "fp8")
    multiply = qcutlass.gemm_w8a8 if is_int8 else qcutlass.gemm_fp8
    names = qcutlass.tactics(multiply, problem.a, on_cpu, problem.a_scale, problem.w_scale, **problem.keywords)
    if not run.tactics(names):
        return
    references = {aligned: rounded_between(problem.reference(aligned=aligned)) for aligned in (False, True)}
    gpu = on_gpu(problem)
    packed = qcutlass.preprocess_weights(gpu.w, bits=8, activations="int8" if is_int8 else "fp8")
    operands: tuple[Any, ...] = (gpu.a, packed, gpu.a_scale, gpu.w_scale)

    def check(tactic: str, split_k: int) -> float:
        out = multiply(*operands, **gpu.keywords, tactic=tactic, split_k=split_k)
        label = f"{tactic} split {split_k}: {problem}"
        reference = references["_sm90a_" in tactic]  # fp8 there has a bound of its own
        return testing.assert_close(out.cpu(), reference, splits=split_k, label=label)

    run.products(names, check)
    floats = torch.randn(case.m, case.k, dtype=torch.float16)
    kinds: list[dict[str, Any]] = (
        [{}, {"per_tensor": True}, {"asymmetric": True}] if is_int8 else [{"dtype": case.dtype}]
    )
    for options in kinds:
        ours = qcutlass.quantize_activations(floats.cuda(), **options)
        for on_device, expected in zip(ours, qcutlass.quantize_activations(floats, **options), strict=True):
            testing.assert_equal(on_device.cpu().float(), expected.float(), label=(options, case))


def blockwise_cases(shapes: list[tuple[int, int, int]]) -> Iterator[testing.BlockwiseCase]:
    """Every size of blocks; outputs take turns."""
    outputs = itertools.cycle([torch.float16, torch.bfloat16, torch.float32])
    for (m, n, k), size in itertools.product(shapes, (32, 64, 128)):
        yield testing.BlockwiseCase(m, n, k, size, next(outputs), bias=True, activation="silu")


def run_blockwise(run: Run, case: testing.BlockwiseCase, seed: int) -> None:
    """Products with floating and quantised outputs, and the quantisers."""
    problem, size = case.random(seed=seed), case.block_size
    on_cpu = qcutlass.preprocess_weights(problem.b, bits=8, activations="int8")
    operands = (problem.a, problem.a_s, on_cpu, problem.b_s)
    if not run.tactics(qcutlass.tactics(blockwise.int8_addmm, *operands, block_size=size)):
        return
    floating, quantized = problem.reference(), problem.reference(torch.float32)
    gpu = on_gpu(problem)
    packed = qcutlass.preprocess_weights(gpu.b, bits=8, activations="int8")
    operands = (gpu.a, gpu.a_s, packed, gpu.b_s)
    options: dict[str, Any] = {"bias": gpu.bias, "activation": case.activation, "block_size": size}

    def check(tactic: str, split_k: int) -> float:
        out = blockwise.int8_addmm(*operands, **options, out_dtype=case.out_dtype, tactic=tactic, split_k=split_k)
        label = f"{tactic} split {split_k}: {problem}"
        return testing.assert_close(out.cpu(), floating, splits=split_k, label=label)

    def check_quantized(tactic: str, split_k: int) -> float:
        codes, scales = blockwise.int8_addmm_quant(
            *operands, **options, out_block_size=size, tactic=tactic, split_k=split_k
        )
        label = f"{tactic} split {split_k}, quantised: {problem}"
        return testing.assert_quantized(codes.cpu(), scales.cpu(), quantized, size, splits=split_k, label=label)

    run.products(qcutlass.tactics(blockwise.int8_addmm, *operands, **options, out_dtype=case.out_dtype), check)
    run.products(
        qcutlass.tactics(blockwise.int8_addmm_quant, *operands, **options, out_block_size=size), check_quantized
    )
    floats = torch.randn(case.m, case.k, dtype=case.out_dtype)
    for quantize, dequantize in (
        (blockwise.act_quant, blockwise.act_dequant),
        (blockwise.weight_quant, blockwise.weight_dequant),
    ):
        codes, scales = quantize(floats.cuda(), size)
        for on_device, expected in zip((codes, scales), quantize(floats, size), strict=True):
            testing.assert_equal(on_device.cpu(), expected, label=case)
        numbers = dequantize(codes, scales, size, case.out_dtype).cpu()
        testing.assert_equal(numbers, dequantize(codes.cpu(), scales.cpu(), size, case.out_dtype), label=case)
    codes, scales = blockwise.act_quant(floats.cuda(), size)
    gelu, gelu_scales = blockwise.int8_gelu(codes, scales, size)
    testing.assert_gelu(gelu.cpu(), gelu_scales.cpu(), codes.cpu(), scales.cpu(), size, label=case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tactic", default="", help="only kernels whose name contains this")
    parser.add_argument("--split-k", type=int, nargs="+", default=[1, 2], help="split-K of each kernel")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("M", "N", "K"), help="this shape alone")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    shapes = [tuple(arguments.shape)] if arguments.shape else SHAPES
    begin, run = time.perf_counter(), Run(arguments.tactic, arguments.split_k)
    for seed, case in enumerate(cases(shapes), start=arguments.seed):
        run_weight_only(run, case, seed)
    for seed, eight_bits in enumerate(eight_bit_cases(shapes), start=arguments.seed):
        run_eight_bit(run, eight_bits, seed)
    for seed, in_blocks in enumerate(blockwise_cases(shapes), start=arguments.seed):
        run_blockwise(run, in_blocks, seed)
    if not run.launches:
        raise SystemExit(f"no kernel's name contains {arguments.tactic!r}")
    seconds = time.perf_counter() - begin
    print(f"kernels that do not fit this GPU: {', '.join(sorted(run.known - run.launched)) or 'none'}")
    print(f"{run.launches} products by {len(run.launched)} kernels, largest |error| / bound {run.worst:.3f}, ", end="")
    print(f"{seconds:.0f} s")


if __name__ == "__main__":
    main()
