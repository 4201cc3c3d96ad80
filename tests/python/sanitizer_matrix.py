"""Launches every kernel of products that was built a few times on small, odd shapes, for compute-sanitizer to watch.

Each result is checked against its bound. ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` gives every tensor an allocation of its
own, so that memcheck sees accesses just outside of it:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.python.sanitizer_matrix

What a kind of product is, its kernels and its bound come from the descriptions of the tests. Rows of experts come with
empty experts and with many, with gates, and with indices that are out of range. ``--part 3 16`` runs every
sixteenth task from the fourth on, ``--seconds 300`` begins none after so long and says how many there were: sanitizers
take many times as long as the kernels. ``--state FILE`` keeps what is done after each task, so that the same command
goes on after it was stopped; a file of another part, seed, choice of kernels or GPU is refused. ``--sum FILE...`` says
what the files of all parts of a run hold together, and exits with 1 if tasks or parts are missing, or if there is a
kernel that none of them launched. The kernels between products have tests of their own, which
`tools/gpu_check.sh` runs in the same way, this program too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tests.python import test_grouped, test_grouped_gates
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import ACTIVATIONS, H200, Description, fits

import qcutlass
from qcutlass import _C, testing
from qcutlass.products.selection import configurations, weight_dtype
from qcutlass.testing import Case, GroupedCase, GroupedProblem
from qcutlass.testing.bounds import GATES

# (M, N, K): no extent is a multiple of most tiles'; the second has whole tiles of every configuration as well, and more
# stages than any pipeline; the third has pairs of tiles of 64 and of 128 tokens, and turns of gates. K % 8 decides
# how activations are copied.
SHAPES = [(5, 45, 333), (131, 300, 2200), (200, 160, 400)]
WITH = " with "  # in the names of uses: kernels of experts get gates, or wrong indices
OF_EXPERTS, OF_GATES, OF_WRONG = " of experts", f" of experts{WITH}gates", f" of experts{WITH}wrong indices"
DRAWS = 40  # of a family's cases for a shape, of which few are taken


@dataclass
class Run:
    """The launches so far, and which are wanted.

    Attributes:
        wanted, unwanted: part of the names of the tactics to launch, and parts of those that are left out.
        splits: of K, for each of them.
        device: "cuda", or "cpu" to try this program.
        fitting, launched: names of those that the GPU can run, and of those that it did; what is run by experts has
            their use behind the name, as its kernels are others.
        done, tasks: how many tasks are, of how many of this part.
        file: where `save` leaves what is done; None for nowhere.
        of: by name, all that decides what the tasks are, "part" of "parts" among it: JSON values.
    """

    wanted: str
    splits: list[int]
    device: str = "cuda"
    unwanted: Sequence[str] = ()
    launches: int = 0
    worst: float = 0.0
    fitting: set[str] = field(default_factory=set)
    launched: set[str] = field(default_factory=set)
    done: int = 0
    tasks: int = 0
    file: Path | None = None
    of: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        """Whole or not at all: a sanitizer may end the process at any time."""
        if self.file:
            values = {name: getattr(self, name) for name in ("of", "launches", "worst", "done", "tasks")}
            names = {name: sorted(getattr(self, name)) for name in ("fitting", "launched")}
            partial_file = self.file.with_suffix(".partial")
            partial_file.write_text(json.dumps(values | names))
            partial_file.replace(self.file)

    def add(self, file: Path, but: str = "") -> int:
        """What another run, or this one before, has saved; returns its part.

        Args:
            but: what of `of` may differ.

        Raises:
            SystemExit: the file is of another run; the message says what differs.
        """
        saved: dict[str, Any] = json.loads(file.read_text())
        there = saved.get("of", {})
        compared = {name: value for name, value in self.of.items() if name != but}
        different = [f"{name} {there[name]!r}, not {value!r}" for name, value in compared.items()
                     if there and there[name] != value]  # fmt: skip
        if different or not there:
            raise SystemExit(f"{file} is of another run: {'; '.join(different) or 'it does not say of which'}")
        self.launches += saved["launches"]
        self.worst = max(self.worst, saved["worst"])
        self.done += saved["done"]
        self.tasks += saved["tasks"]
        self.fitting |= set(saved["fitting"])
        self.launched |= set(saved["launched"])
        return int(there["part"])

    def __str__(self) -> str:
        kernels = {name.partition(WITH)[0] for name in self.launched}
        return (
            f"{self.launches} products by {len(kernels)} kernels, largest |error| / bound {self.worst:.3f}, "
            f"{self.done} of {self.tasks} tasks"
        )

    def never_launched(self) -> str:
        """What is wrong with a whole run; nothing of one of a single shape, which may be too small for some."""
        missing = sorted(self.fitting - self.launched)
        if not missing or self.of.get("shape"):
            return ""
        return f"never launched, though the GPU can run them: {', '.join(missing)}"

    def takes(self, name: str) -> bool:
        return self.wanted in name and not any(part in name for part in self.unwanted)

    def expect(self, configurations: Iterable[_C.TacticTraits], use: str = "") -> None:
        """Those that the GPU can run are to be launched by some task."""
        self.fitting |= {t.name + use for t in configurations if fits(t, self.device) and self.takes(t.name)}

    def products(
        self,
        names: list[str],
        check: Callable[[str, int], float],
        splits: Sequence[int] | None = None,
        use: str = "",
    ) -> None:
        """Runs `check` for every tactic and split that this GPU and K allow; it returns |error| / bound."""
        for tactic, split_k in itertools.product(filter(self.takes, names), splits or self.splits):
            # Instructions that are not there, too short a K, or blocks of the output that a tile has not.
            with contextlib.suppress(qcutlass.UnsupportedError):
                self.worst = max(self.worst, check(tactic, split_k))
                self.launched.add(tactic + use)
                self.launches += 1


def print_sum(files: Sequence[Path]) -> None:
    """Of all parts of a run.

    Raises:
        SystemExit: files of several runs, or a part twice; parts, tasks or kernels are missing.
    """
    run = Run("", [], of=json.loads(files[0].read_text()).get("of", {}))
    parts = [run.add(file, but="part") for file in files]
    if len(set(parts)) < len(parts):
        raise SystemExit(f"--sum: expected each part once, got {', '.join(map(str, sorted(parts)))}")
    print(run)
    wrong = [f"{run.tasks - run.done} of {run.tasks} tasks are missing"] if run.done < run.tasks else []
    if missing := sorted(set(range(run.of["parts"])) - set(parts)):
        wrong.append(f"of {run.of['parts']} parts are missing {', '.join(map(str, missing))}")
    wrong += filter(None, [run.never_launched()])
    if wrong:
        raise SystemExit("; ".join(wrong))


Shape: TypeAlias = tuple[int, int, int]
Task: TypeAlias = Callable[[Run, int], None]  # its second argument is a seed


def with_epilogue(kind: Description, case: Any, choose: random.Random) -> Any:
    """Any activation; where the kind has them, residuals and gates too."""
    sums_alone = getattr(case, "out_dtype", None) == torch.int32
    if sums_alone or "residual" not in kind.of_rows:
        return kind.with_activation(case, ACTIVATIONS, choose)
    return replace(
        kind.with_activation(case, [*ACTIVATIONS, *(GATES if case.n % 32 == 0 else ())], choose),
        residual=choose.random() < 0.5,
    )


def of_all_options(kind: Description, shapes: Iterable[Shape], seed: int) -> Iterator[Any]:
    """Cases that are drawn from each family, those that have another kernel or an option which the kind had not yet."""
    options: set[tuple[str, Any]] = set()
    for (family, draw), shape in itertools.product(kind.families.items(), shapes):
        kernels: set[str] = set()
        for number in range(DRAWS):
            case = draw(*shape, random.Random(f"{kind.name} {family} {shape} {seed} {number}"))
            names = {traits.name for traits in kind.traits(case)}
            values = {(member.name, getattr(case, member.name)) for member in fields(case) if member.name not in "mnk"}
            if not names <= kernels or not values <= options:
                kernels |= names
                options |= values
                yield case


def run_kind(kind: Description, case: Any, run: Run, seed: int) -> None:
    choose = random.Random(seed)
    run.expect(kind.traits(case))
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

    run.expect(configurations(qcutlass.gemm, *multiply.args, **multiply.keywords))
    run.products(qcutlass.tactics(qcutlass.gemm, *multiply.args, **multiply.keywords), check)


def run_experts(case: Case, counts: tuple[int, ...], run: Run, seed: int) -> None:
    """Rows by the weights of their experts, within their bound."""
    choose = random.Random(seed)
    case = replace(
        case,
        bias=choose.random() < 0.5,
        perm=case.weight_dtype is None and choose.random() < 0.5,
        activation=choose.choice(ACTIVATIONS),
    )
    grouped = GroupedCase(case, counts, before=3, after=5, gathered=choose.random() < 0.7, scaled=choose.random() < 0.7)
    problem = grouped.random(device=run.device, seed=seed)

    def check(tactic: str, split_k: int) -> float:
        out = test_grouped.product(problem, tactic=tactic)
        ratio = problem.error_ratio(out, test_grouped.weight_dtype(problem, tactic))
        assert ratio <= 1, f"{tactic}: {problem}: {ratio}"
        return ratio

    products_of_experts(problem, check, run, OF_EXPERTS)


def products_of_experts(
    problem: GroupedProblem, check: Callable[[str, int], float], run: Run, use: str, **changes: Any
) -> None:
    """Runs `check` for every tactic of the problem; K is not shared."""
    operands, options = test_grouped.arguments(problem)
    every = configurations(qcutlass.gemm_grouped, *operands, **options | changes)
    run.expect(every, use)
    run.products([traits.name for traits in every], check, [1], use)


def run_gates_of_experts(case: Case, counts: tuple[int, ...], run: Run, seed: int) -> None:
    """A gate at the end of a product gives the bits of separate steps, on the CPU those of float32 alone."""
    case = replace(case, n=96)
    problem, trial = (
        GroupedCase(one, counts, before=3, after=5).random(device=run.device, seed=seed)
        for one in (case, test_grouped_gates.on(case, run.device))
    )
    activation = random.Random(seed).choice(test_grouped_gates.ACTIVATIONS)

    def check(tactic: str, split_k: int) -> float:
        out = test_grouped.product(trial, activation=activation, tactic=tactic)
        expected = test_grouped_gates.separately(trial, activation, tactic)
        testing.assert_equal(out, expected, label=f"{activation}, {tactic}: {trial}")
        return 0.0

    products_of_experts(problem, check, run, OF_GATES, activation=activation)


def run_wrong_indices(case: Case, counts: tuple[int, ...], run: Run, seed: int) -> None:
    """Offsets and rows that are out of range, which kernels clamp: nothing but accesses is right or wrong."""
    problem = GroupedCase(case, counts).random(device=run.device, seed=seed)
    wild = torch.tensor([2**31 - 1, -(2**31), 9, 100], dtype=torch.int32, device=run.device)
    rows = wild.repeat(problem.m)[: problem.m]

    def check(tactic: str, split_k: int) -> float:
        for changes in ({"rows": rows}, {"offsets": wild}, {"offsets": wild.flip(0)}, {"offsets": wild.roll(1)}):
            test_grouped.product(problem, tactic=tactic, **changes)
        return 0.0

    products_of_experts(problem, check, run, OF_WRONG)


def cases_of_experts() -> Iterator[Case]:
    for mode, name in itertools.product(test_grouped.MODES, test_grouped.TYPES):
        yield test_grouped.case_of(mode, name, 72, 520, tokens=40, bias=True)
    for name in test_grouped.CODES:
        yield test_grouped.code_case(name, "cuda")


def tasks(shapes: Sequence[Shape], device: str, seed: int = 1) -> Iterator[Task]:
    gpu = H200 if device == "cpu" else _C.device_traits(torch.cuda.current_device())
    for kind in DESCRIPTIONS.values():
        for case in of_all_options(kind, shapes, seed):
            if kind.serves(gpu, case):
                yield partial(run_kind, kind, case)
    for code, (m, n, k) in itertools.product(test_grouped.CODES, shapes):
        case = test_grouped.code_case(code, "cuda")
        if case.weight_dtype is not None:
            yield partial(run_codes, replace(case, m=m, n=n, k=k))
    several = [test_grouped.COUNTS["empty experts"], (3, 0, 70)]
    for case in cases_of_experts():
        for counts in several:
            yield partial(run_experts, case, counts)
        yield partial(run_gates_of_experts, case, several[1])
        if device == "cuda":  # the CPU refuses them
            yield partial(run_wrong_indices, case, (4, 3, 6))
    for name in test_grouped.TYPES:  # more experts than a warp looks at at once
        case = test_grouped.case_of("native", name, 72, 520, tokens=40, bias=True)
        yield partial(run_experts, case, test_grouped.COUNTS["a row each"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tactic", default="", help="only kernels whose name contains this")
    parser.add_argument("--without", action="append", default=[], help="leaves out kernels with this in their name")
    parser.add_argument("--split-k", type=int, nargs="+", default=[1, 2], help="split-K of each kernel")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("M", "N", "K"), help="this shape alone")
    parser.add_argument("--part", type=int, nargs=2, metavar=("I", "N"), default=[0, 1], help="tasks I, I + N, ...")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no task after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries this program alone")
    parser.add_argument("--state", type=Path, metavar="FILE", help="goes on from what FILE says is done, and keeps it")
    parser.add_argument("--sum", type=Path, nargs="+", metavar="FILE", help="runs nothing; says what these states hold")
    arguments = parser.parse_args(argv)

    first, step = arguments.part
    if not 0 <= first < step:
        parser.error(f"argument --part: expected 0 <= I < N, got {first} {step}")
    if arguments.sum:
        print_sum(arguments.sum)
    else:
        watch(arguments, first, step)


def watch(arguments: argparse.Namespace, first: int, step: int) -> None:
    """Runs the tasks of a part."""
    begin = time.perf_counter()
    run = Run(arguments.tactic, arguments.split_k, arguments.device, arguments.without, file=arguments.state)
    run.of = {"part": first, "parts": step, "kernels": _C.kernel_set_hash()}
    run.of |= {name: getattr(arguments, name) for name in ("seed", "tactic", "without", "split_k", "shape", "device")}
    if run.device == "cuda":
        run.of["device"] = torch.cuda.get_device_name()
    shapes = [tuple(arguments.shape)] if arguments.shape else SHAPES
    part = list(enumerate(tasks(shapes, arguments.device, arguments.seed)))[first::step]
    random.Random(arguments.seed).shuffle(part)  # those that a clock leaves out are of every kind
    if run.file and run.file.exists():
        run.add(run.file)
    run.tasks = len(part)
    run.save()  # that a part was begun counts, whatever ends its first task
    for number, task in part[run.done :]:
        if time.perf_counter() - begin > arguments.seconds:
            break
        task(run, arguments.seed + number)
        run.done += 1
        run.save()
    is_whole = step == 1 and run.done == run.tasks
    if is_whole and not run.launches:
        raise SystemExit(f"no kernel that the GPU can run has {arguments.tactic!r} in its name")
    if is_whole and run.never_launched():
        raise SystemExit(run.never_launched())
    print(f"{run}, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
