"""Launches every kernel of products that was built a few times on small, odd shapes, for compute-sanitizer to watch.

Each result is checked against its bound. ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` gives every tensor an allocation of its
own, so that memcheck sees accesses just outside of it:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.python.sanitizer_matrix

What a kind of product is, its kernels and its bound come from the descriptions of the tests. ``--part 3 16`` runs every
sixteenth task from the fourth on. The kernels between products have tests of their own, which `tools/gpu_check.sh`
runs in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from tests.python import test_grouped
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import ACTIVATIONS, H200, Description, Draw

import qcutlass
from qcutlass import _C, testing
from qcutlass.products.selection import weight_dtype
from qcutlass.testing import Case, GroupedCase
from qcutlass.testing.bounds import GATES

# (M, N, K): no extent is a multiple of most tiles'; the second has whole tiles of every configuration as well, and more
# stages than any pipeline; the third has pairs of tiles of 64 and of 128 tokens, and turns of gates. K % 8 decides
# how activations are copied.
SHAPES = [(5, 45, 333), (131, 300, 2200), (200, 160, 400)]
DRAWS = 24


@dataclass
class Run:
    """The launches so far, and which are wanted.

    Attributes:
        wanted, unwanted: part of the names of the tactics to launch, and of those that are left out.
        splits: of K, for each of them.
        device: "cuda", or "cpu" to try this program.
    """

    wanted: str
    splits: list[int]
    device: str = "cuda"
    unwanted: str | None = None
    launches: int = 0
    worst: float = 0.0
    known: set[str] = field(default_factory=set)
    launched: set[str] = field(default_factory=set)

    def products(
        self, names: list[str], check: Callable[[str, int], float], splits: Sequence[int] | None = None
    ) -> None:
        """Runs `check` for every tactic and split that this GPU and K allow; it returns |error| / bound."""
        tactics = [
            name for name in names if self.wanted in name and (self.unwanted is None or self.unwanted not in name)
        ]
        self.known |= set(tactics)
        for tactic, split_k in itertools.product(tactics, splits or self.splits):
            # Instructions that are not there, too short a K, or blocks of the output that a tile has not.
            with contextlib.suppress(qcutlass.UnsupportedError):
                self.worst = max(self.worst, check(tactic, split_k))
                self.launched.add(tactic)
                self.launches += 1


Task: TypeAlias = Callable[[Run, int], None]  # its second argument is a seed


def with_epilogue(kind: Description, case: Any, choose: random.Random) -> Any:
    """Any activation; where the kind has them, residuals and gates too."""
    sums_alone = getattr(case, "out_dtype", None) == torch.int32
    if sums_alone or "residual" not in {member.name for member in fields(case)}:
        return kind.with_activation(case, ACTIVATIONS, choose)
    return replace(
        kind.with_activation(case, [*ACTIVATIONS, *(GATES if case.n % 32 == 0 else ())], choose),
        residual=choose.random() < 0.5,
    )


def of_all_kernels(kind: Description, draw: Draw, shape: tuple[int, int, int]) -> Iterator[Any]:
    """A case of a family for each set of kernels that its scales and zeros may have: they are drawn."""
    seen: set[str] = set()
    for seed in range(DRAWS):
        case = draw(*shape, random.Random(seed))
        names = {traits.name for traits in kind.traits(case)}
        if not names <= seen:
            seen |= names
            yield case


def run_kind(kind: Description, case: Any, run: Run, seed: int) -> None:
    choose = random.Random(seed)
    product = kind.random(with_epilogue(kind, case, choose), run.device, seed)

    def check(tactic: str, split_k: int) -> float:
        forced = {"tactic": tactic, "split_k": split_k}
        return kind.assert_correct(product.outs(**forced), product.problem, **forced)

    run.products(product.tactics(), check)


def run_codes(case: Case, run: Run, seed: int) -> None:
    """Weights whose codes are floats, by `gemm`."""
    problem = with_epilogue(DESCRIPTIONS["gemm"], case, random.Random(seed)).random(device=run.device, seed=seed)
    packed = qcutlass.preprocess_weights(problem.codes, bits=problem.bits)
    multiply = partial(qcutlass.gemm, problem.a, packed, problem.scales, **problem.keywords)

    def check(tactic: str, split_k: int) -> float:
        forced = {"tactic": tactic, "split_k": split_k}
        rounded = weight_dtype(*multiply.args, **multiply.keywords | forced) if problem.a.is_cuda else None
        return testing.assert_close(multiply(**forced), problem.reference(rounded), splits=split_k, label=problem)

    run.products(qcutlass.tactics(qcutlass.gemm, *multiply.args, **multiply.keywords), check)


def run_experts(case: Any, counts: tuple[int, ...], run: Run, seed: int) -> None:
    """Rows gathered and scaled, rows of nobody before and behind."""
    problem = GroupedCase(case, counts, 3, 5, True, True).random(device=run.device, seed=seed)
    operands, options = test_grouped.arguments(problem)

    def check(tactic: str, split_k: int) -> float:
        out = test_grouped.product(problem, tactic=tactic)
        ratio = problem.error_ratio(out, test_grouped.weight_dtype(problem, tactic))
        assert ratio <= 1, f"{tactic}: {problem}: {ratio}"
        return ratio

    run.products(qcutlass.tactics(qcutlass.gemm_grouped, *operands, **options), check, splits=[1])


def tasks(shapes: list[tuple[int, int, int]], device: str) -> Iterator[Task]:
    gpu = H200 if device == "cpu" else _C.device_traits(torch.cuda.current_device())
    for kind in DESCRIPTIONS.values():
        if kind.serves(gpu):
            for draw, shape in itertools.product(kind.families.values(), shapes):
                for case in of_all_kernels(kind, draw, shape):
                    yield partial(run_kind, kind, case)
    for code, (m, n, k) in itertools.product(test_grouped.CODES, shapes):
        case = test_grouped.code_case(code, "cuda")
        if case.weight_dtype is not None:
            yield partial(run_codes, replace(case, m=m, n=n, k=k))
    several = [test_grouped.COUNTS["empty experts"], (3, 0, 70)]
    for mode, name, counts in itertools.product(test_grouped.MODES, test_grouped.TYPES, several):
        yield partial(run_experts, test_grouped.case_of(mode, name, 72, 520, tokens=40, bias=True), counts)
    for name, counts in itertools.product(test_grouped.CODES, several):
        yield partial(run_experts, test_grouped.code_case(name, "cuda"), counts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tactic", default="", help="only kernels whose name contains this")
    parser.add_argument("--without", help="leaves out kernels whose name contains this")
    parser.add_argument("--split-k", type=int, nargs="+", default=[1, 2], help="split-K of each kernel")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("M", "N", "K"), help="this shape alone")
    parser.add_argument("--part", type=int, nargs=2, metavar=("I", "N"), default=[0, 1], help="tasks I, I + N, ...")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries this program alone")
    arguments = parser.parse_args(argv)

    begin, run = time.perf_counter(), Run(arguments.tactic, arguments.split_k, arguments.device, arguments.without)
    first, step = arguments.part
    every = tasks([tuple(arguments.shape)] if arguments.shape else SHAPES, arguments.device)
    for number, task in itertools.islice(enumerate(every), first, None, step):
        task(run, arguments.seed + number)
    if not run.launches:
        raise SystemExit(f"no kernel's name contains {arguments.tactic!r}")
    seconds = time.perf_counter() - begin
    print(f"kernels that do not fit this GPU: {', '.join(sorted(run.known - run.launched)) or 'none'}")
    print(f"{run.launches} products by {len(run.launched)} kernels, largest |error| / bound {run.worst:.3f}, ", end="")
    print(f"{seconds:.0f} s")


if __name__ == "__main__":
    main()
