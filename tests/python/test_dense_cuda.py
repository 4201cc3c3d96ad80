"""Dense plans: dequantised slices multiplied by torch keep the promises of the fused kernels."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.python.running import captured, in_threads
from torch import Tensor

import qcutlass
from qcutlass import testing
from qcutlass.products import dense
from qcutlass.products.product import Product
from qcutlass.products.weight_only import WEIGHT_ONLY, GemmCall

pytestmark = pytest.mark.gpu

Multiply = Callable[..., Tensor]
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}
FLAGS = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}
SCHEMES: dict[str, dict[str, Any]] = {
    "per channel": {"group_size": 10**6, "zeros": "none"},
    "groups": {"group_size": 128},
    "small groups": {"group_size": 48},
    "real zeros": {"group_size": 64, "zeros": "real"},
    "mixed types": {"group_size": 32, "scale_dtype": torch.float32, "zero_dtype": torch.int32},
}
EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "activation": {"activation": "gelu"},
    "everything": {"bias": True, "activation": "silu", "act_scale": True, "perm": True},
}


def tactic(case: testing.Case) -> str:
    return f"w{case.bits}a16_{NAMES[case.dtype]}_dequantize_dense"


def run_in_slices(problem: testing.Problem, width: int, out: Tensor) -> None:
    """The dense plan with slices of `width` rows; `out` is `[M, N]`."""
    packed = qcutlass.preprocess_weights(problem.codes, bits=problem.bits)
    call = GemmCall(problem.a, packed, problem.scales, problem.zeros, **problem.keywords)
    product = Product(WEIGHT_ONLY, call, call.check(out), out)
    plan: Any = SimpleNamespace(slice=width)
    dense.run(product.arguments, plan, product.a, out)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_scheme(
    dtype: torch.dtype, bits: int, scheme: str, epilogue: str, multiply: Multiply, seeds: Iterator[int], ledger: Any
) -> None:
    for m, n, k in [(1, 100, 200), (200, 712, 1024), (129, 1000, 333)]:
        case = testing.Case(m, n, k, bits, dtype=dtype, **SCHEMES[scheme], **EPILOGUES[epilogue])
        problem = case.random(device="cuda", seed=next(seeds))
        ledger.close(multiply(problem, tactic=tactic(case)), problem.reference(dtype), problem)
        exact = replace(case, activation=None if case.activation is None else "relu")
        problem, expected = exact.exact(device="cuda", seed=next(seeds))
        ledger.equal(multiply(problem, tactic=tactic(case)), expected, problem)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slices_of_any_width(dtype: torch.dtype, epilogue: str, seeds: Iterator[int], ledger: Any) -> None:
    choose = random.Random(next(seeds))
    for width in (1, 16, 37, 128, 1000):
        m, n, k = choose.randrange(1, 200), choose.randrange(1, 400), choose.randrange(33, 400)
        case = testing.Case(m, n, k, 4, 64, dtype=dtype, **EPILOGUES[epilogue])
        problem = case.random(device="cuda", seed=next(seeds))
        box = testing.Poisoned((m, n), dtype, "cuda", offset=choose.choice([0, 1, 8]), padding=choose.choice([0, 3, 8]))
        run_in_slices(problem, width, box.tensor)
        box.check(problem)
        ledger.close(box.tensor, problem.reference(dtype), f"slices of {width}: {problem}")


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_fp32_whatever_torch_is_allowed(dtype: torch.dtype, allowed: bool, seed: int, ledger: Any) -> None:
    """A long K and few outputs have cuBLAS split K. What users allow holds for their own products, before and after."""
    flags: Any = torch.backends.cuda.matmul
    names = [FLAGS[dtype], *(["allow_fp16_accumulation"] if hasattr(flags, "allow_fp16_accumulation") else [])]
    before = {name: dense._get_flag(name) for name in names}
    problem, expected = testing.exact_problem(64, 128, 32768, dtype=dtype, device="cuda", seed=seed)
    out = torch.empty_like(expected)
    try:
        for name in names:
            setattr(flags, name, allowed)
        run_in_slices(problem, 128, out)
        assert {name: getattr(flags, name) for name in names} == dict.fromkeys(names, allowed)
    finally:
        for name, value in before.items():
            setattr(flags, name, value)
    assert {name: dense._get_flag(name) for name in names} == before
    ledger.equal(out, expected, problem)


def test_an_error_leaves_the_settings_of_torch() -> None:
    before = dense._get_flag(FLAGS[torch.float16])
    with pytest.raises(RuntimeError, match="on purpose"), dense._full_precision(torch.float16):
        raise RuntimeError("on purpose")
    assert dense._get_flag(FLAGS[torch.float16]) == before


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_graph_capture_and_replay_with_new_contents(epilogue: str, seeds: Iterator[int], ledger: Any) -> None:
    options = EPILOGUES[epilogue] | ({"activation": "relu"} if "activation" in EPILOGUES[epilogue] else {})
    case = testing.Case(200, 520, 1024, **options)
    problem, _ = case.exact(device="cuda", seed=next(seeds))
    weights = qcutlass.preprocess_weights(problem.codes, bits=4)
    operands = (problem.a, weights, problem.scales, problem.zeros)
    torch.mm(problem.a, problem.a.T)  # cuBLAS itself cannot start under capture
    torch.cuda.synchronize()
    out, replay = captured(lambda: qcutlass.gemm(*operands, tactic=tactic(case), **problem.keywords))
    for _ in range(3):
        new, expected = case.exact(device="cuda", seed=next(seeds))
        for name in ("a", "scales", "zeros", "bias", "act_scale", "perm"):
            if getattr(new, name) is not None:
                getattr(problem, name).copy_(getattr(new, name))
        weights.copy_(qcutlass.preprocess_weights(new.codes, bits=4))
        out.fill_(torch.nan)
        replay()
        ledger.equal(out, expected, new)


def test_its_output_may_be_the_scales_of_the_next_product(seeds: Iterator[int], ledger: Any) -> None:
    """The kernel that finishes it lets that one start early, which may not read them then."""
    case = testing.Case(128, 512, 1024, bias=True)  # 128 groups of 32 columns
    problems = [case.exact(device="cuda", seed=next(seeds)) for _ in range(3)]
    problem = problems[0][0]
    weights = qcutlass.preprocess_weights(problem.codes, bits=4)
    layer = testing.Case(4, 512, 128 * 32, group_size=32, zeros="none").exact(device="cuda", seed=next(seeds))[0]
    packed = qcutlass.preprocess_weights(layer.codes, bits=4)
    torch.mm(problem.a, problem.a.T)  # cuBLAS itself cannot start under capture
    torch.cuda.synchronize()

    def both() -> Tensor:
        scales = qcutlass.gemm(
            problem.a, weights, problem.scales, problem.zeros, tactic=tactic(case), **problem.keywords
        )
        return qcutlass.gemm(layer.a, packed, scales)

    out, replay = captured(both)
    for new, scales in problems:
        for name in ("a", "scales", "zeros", "bias"):
            getattr(problem, name).copy_(getattr(new, name))
        weights.copy_(qcutlass.preprocess_weights(new.codes, bits=4))
        expected = qcutlass.gemm(layer.a, packed, scales)
        torch.cuda.synchronize()
        replay()
        ledger.equal(out, expected, new)


def test_a_thread_that_never_used_cublas_may_capture(seeds: Iterator[int], ledger: Any) -> None:
    """cuBLAS cannot start under capture; what was planned outside of it must not be run there blindly."""
    case = testing.Case(2048, 1024, 1024)
    problem, expected = case.exact(device="cuda", seed=next(seeds))
    weights = qcutlass.preprocess_weights(problem.codes, bits=4)
    ledger.equal(qcutlass.gemm(problem.a, weights, problem.scales, problem.zeros), expected, problem)
    torch.cuda.synchronize()
    outs: list[Tensor] = []

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(qcutlass.gemm(problem.a, weights, problem.scales, problem.zeros))
        outs[0].fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        outs[0] = outs[0].clone()

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    (out,) = outs
    ledger.equal(out, expected, problem)


def test_repeats_bit_for_bit_on_any_view(seed: int, multiply: Multiply, ledger: Any) -> None:
    case = testing.Case(130, 264, 512)
    problem = case.random(device="cuda", seed=seed)
    first = multiply(problem, tactic=tactic(case))
    wide = torch.zeros(130, 600, dtype=torch.float16, device="cuda")
    views = [wide[:, 1:265], wide[:, :264], wide[:, :528:2], torch.zeros_like(first).T.contiguous().T]
    for out in views:
        assert multiply(problem, tactic=tactic(case), out=out) is out
        ledger.equal(out, first, problem)
    strided = wide[:, :512].copy_(problem.a)
    ledger.equal(multiply(replace(problem, a=strided), tactic=tactic(case)), first, problem)
    batch = problem.a.view(2, 65, 512)
    ledger.equal(multiply(replace(problem, a=batch), tactic=tactic(case)).view(130, 264), first, problem)
    with torch.inference_mode():
        inside = multiply(problem, tactic=tactic(case))
    multiply(problem, tactic=tactic(case), out=inside)  # an inference tensor, written outside inference mode
    ledger.equal(inside.clone(), first, problem)


def test_compiles_in_one_graph(seed: int, ledger: Any) -> None:
    case = testing.Case(130, 256, 512, bias=True, activation="relu")
    problem = case.random(device="cuda", seed=seed)
    weights = qcutlass.preprocess_weights(problem.codes, bits=4)

    def layer(a: Tensor) -> Tensor:
        return qcutlass.gemm(a * 2, weights, problem.scales, problem.zeros, tactic=tactic(case), **problem.keywords)

    out = torch.compile(layer, fullgraph=True)(problem.a)
    ledger.close(out, replace(problem, a=problem.a * 2).reference(out.dtype), problem)


def test_two_threads_on_two_streams(seeds: Iterator[int], ledger: Any) -> None:
    case = testing.Case(160, 640, 2048, bias=True)
    work = [case.exact(device="cuda", seed=next(seeds)) for _ in range(2)]
    before = dense._get_flag(FLAGS[torch.float16])
    torch.cuda.synchronize()

    def loop(problem: testing.Problem, expected: Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            weights = qcutlass.preprocess_weights(problem.codes, bits=4)
            for _ in range(20):
                out = qcutlass.gemm(
                    problem.a, weights, problem.scales, problem.zeros, tactic=tactic(case), **problem.keywords
                )
                ledger.equal(out, expected, problem)

    in_threads(loop, work)
    assert dense._get_flag(FLAGS[torch.float16]) == before
