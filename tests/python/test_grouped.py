"""gemm_grouped: rows by the weights of their experts, on the CPU and by every tactic on CUDA."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.python.kinds.description import tactics_here
from tests.python.running import captured
from torch import Tensor

import qcutlass
from qcutlass import testing
from qcutlass.products import selection
from qcutlass.products.checks import E8M0
from qcutlass.testing import Case, GroupedCase, GroupedProblem

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ONE = 10**6  # one group a channel
MODES: dict[str, dict[str, Any]] = {
    "native": {"group_size": 64, "zeros": "int"},
    "native, symmetric": {"group_size": 128, "zeros": "none"},
    "native, one group": {"group_size": ONE, "zeros": "int"},
    "fine": {"group_size": 32, "zeros": "int"},
    "float": {"group_size": 64, "zeros": "real", "scale_dtype": torch.float32},
}
TYPES = {
    f"w{bits} {dtype}".replace("torch.", ""): (bits, dtype)
    for bits in (4, 8)
    for dtype in (torch.float16, torch.bfloat16)
}
COUNTS: dict[str, tuple[int, ...]] = {
    "empty experts": (0, 3, 0, 1, 17, 0),
    "one expert has all": (0, 0, 70, 0),
    "one expert": (5,),
    "a row each": (1,) * 40,
    "many rows": (130, 0, 64, 65, 257),
}
modes = pytest.mark.parametrize("mode", MODES)
types = pytest.mark.parametrize("name", TYPES)


POWERS = E8M0[0] if E8M0 else torch.float32
CODES: dict[str, Case] = {
    "minimums": Case(9, 72, 256, 4, 32, "minimum", torch.float16, bias=True),
    "minimums, float32": Case(9, 40, 200, 4, 40, "minimum", torch.float32, torch.bfloat16, torch.float32),
    "minimums, 8 bits": Case(9, 129, 520, 8, 16, "minimum", torch.bfloat16, torch.float32),
    "two levels": Case(9, 72, 256, 4, 32, "minimum", torch.float16, bias=True, super_groups=4),
    "two levels, 8 bits": Case(9, 129, 512, 8, 16, "none", torch.bfloat16, super_groups=8),
    "MXFP4": Case(9, 96, 192, 4, 32, "none", torch.bfloat16, POWERS, bias=True, weight_dtype="e2m1"),
    "NVFP4": Case(9, 72, 256, 4, 16, "none", torch.float16, torch.float8_e4m3fn, weight_dtype="e2m1"),
    "e2m1, float scales": Case(9, 40, 100, 4, 24, "none", torch.float32, torch.float16, weight_dtype="e2m1"),
    "fp8, a channel": Case(9, 40, 200, 8, ONE, "none", torch.float16, torch.float32, weight_dtype="e4m3"),
    "fp8, blocks": Case(9, 192, 300, 8, 128, "none", torch.bfloat16, torch.float32, weight_dtype="e4m3", bias=True),
}
"""Floating codes, and codes with minimums."""
codes = pytest.mark.parametrize("name", CODES)


def code_case(name: str, device: str) -> Case:
    """Of activations, and of groups, that the device takes."""
    case = CODES[name]
    if device == "cpu":
        return case
    dtype = torch.float16 if case.dtype == torch.float32 else case.dtype
    return replace(case, dtype=dtype, group_size=case.group_size if case.group_size % 16 == 0 else 48)


def case_of(mode: str, name: str, n: int, k: int, tokens: int = 9, **options: Any) -> Case:
    bits, dtype = TYPES[name]
    return Case(tokens, n, k, bits, dtype=dtype, **MODES[mode], **options)


def arguments(problem: GroupedProblem) -> tuple[tuple[Any, ...], dict[str, Any]]:
    first = problem.experts[0]
    codes = problem.stacked("codes")
    assert codes is not None
    operands = (
        problem.a,
        qcutlass.preprocess_weights(codes, first.bits),
        problem.stacked("scales"),
        problem.stacked("zeros"),
    )
    options: dict[str, Any] = {name: getattr(problem, name) for name in ("offsets", "rows", "row_scale")}
    names = "bias", "minimums", "global_scale", "perm", "super_scales", "super_minimums"
    options |= {name: problem.stacked(name) for name in names}
    return operands, options | {name: getattr(first, name) for name in ("activation", "weight_dtype")} | first.ambiguous


def product(problem: GroupedProblem, **changes: Any) -> Tensor:
    operands, options = arguments(problem)
    return qcutlass.gemm_grouped(*operands, **options | changes)


def tactics(problem: GroupedProblem, **changes: Any) -> list[str | None]:
    """All that may run on the problem's device."""
    operands, options = arguments(problem)
    if problem.a.is_cpu:
        return [None]
    return [None, *tactics_here(qcutlass.gemm_grouped, *operands, **options | changes)]


def weight_dtype(problem: GroupedProblem, tactic: str | None) -> torch.dtype | None:
    """What the weights are rounded to."""
    if problem.a.is_cpu:
        return None
    operands, options = arguments(problem)
    if options["global_scale"] is not None:  # which is applied to the sums of exact products
        return None
    plan = qcutlass.plan(qcutlass.gemm_grouped, *operands, **options, tactic=tactic)
    return problem.a.dtype if plan.rounds_weights else None


def assert_right(case: GroupedCase, device: str, seed: int) -> None:
    """Both oracles, by every tactic."""
    exact, expected = replace(case, case=replace(case.case, activation="relu")).exact(device=device, seed=seed)
    for tactic in tactics(exact):
        testing.assert_equal(product(exact, tactic=tactic), expected, label=f"{tactic}: {exact}")
    problem = case.random(device=device, seed=seed)
    for tactic in tactics(problem):
        out = product(problem, tactic=tactic)
        ratio = problem.error_ratio(out, weight_dtype(problem, tactic))
        assert ratio <= 1, f"{tactic}: {problem}: {ratio}"


@devices
@types
@modes
def test_both_oracles(mode: str, name: str, device: str, seed: int) -> None:
    choose = random.Random(seed)
    for counts in COUNTS.values() if device == "cuda" else [COUNTS["empty experts"], (9, 1)]:
        n, k = choose.choice([(72, 256), (40, 200), (200, 136), (129, 520)])
        case = case_of(
            mode, name, n, k, tokens=choose.choice([1, 9, 40]), bias=choose.random() < 0.5, activation="silu"
        )
        before, after = choose.choice([(0, 0), (3, 0), (0, 70), (2, 5)])
        assert_right(
            GroupedCase(case, counts, before, after, choose.random() < 0.7, choose.random() < 0.7), device, seed
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4 bfloat16", "w8 float16"])
def test_blocks_take_tile_after_tile(name: str, seed: int) -> None:
    """More of them than a block is told of at once, and more experts than a warp looks at at once."""
    choose = random.Random(seed)
    counts = tuple(choose.choice((0, 1, 20, 64, 90)) for _ in range(300))
    case = GroupedCase(case_of("native", name, 1040, 256, tokens=50), counts, 3, 9, gathered=True, scaled=True)
    problem, expected = case.exact(device="cuda", seed=seed)
    for tactic in tactics(problem):
        testing.assert_equal(product(problem, tactic=tactic), expected, label=f"{tactic}: {problem}")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [40, 24, 100, ONE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_that_only_the_cpu_has(bits: int, group_size: int, dtype: torch.dtype, seed: int) -> None:
    case = Case(7, 40, 200, bits, group_size, "int", dtype, bias=True)
    assert_right(GroupedCase(case, (2, 0, 11), 1, 1, scaled=True), "cpu", seed)


@devices
@codes
def test_both_oracles_of_codes(name: str, device: str, seed: int) -> None:
    choose = random.Random(seed)
    case = replace(code_case(name, device), activation="silu")
    several = COUNTS.values() if device == "cuda" else (COUNTS["empty experts"], (9, 1), COUNTS["a row each"])
    for counts in several:
        before, after = choose.choice([(0, 0), (3, 0), (2, 5)])
        gathered, scaled = choose.random() < 0.7, choose.random() < 0.7
        assert_right(GroupedCase(case, counts, before, after, gathered, scaled), device, seed)


@devices
@codes
def test_a_row_of_such_codes_does_not_depend_on_the_others(name: str, device: str, seed: int) -> None:
    assert_rows_are_independent(code_case(name, device), device, seed)


@devices
@types
@modes
def test_a_row_does_not_depend_on_the_others(mode: str, name: str, device: str, seed: int) -> None:
    assert_rows_are_independent(case_of(mode, name, 72, 520, bias=True), device, seed)


def assert_rows_are_independent(case: Case, device: str, seed: int) -> None:
    """Bit for bit, for each tactic: the rows of each expert permuted, some between tiles, and some of them alone."""
    problem = GroupedCase(case, (3, 0, 9, 40, 300), scaled=True).random(device=device, seed=seed)
    ends = problem.offsets.tolist()
    assert problem.rows is not None
    assert problem.row_scale is not None
    for tactic in tactics(problem):
        whole = product(problem, tactic=tactic)
        new = torch.cat([torch.randperm(end - begin) + begin for begin, end in pairwise(ends)]).to(device)
        permuted = replace(problem, rows=problem.rows[new], row_scale=problem.row_scale[new])
        testing.assert_equal(product(permuted, tactic=tactic), whole[new], label=f"{tactic}: {problem}")
        if tactic is None and device == "cuda":
            continue  # the choice is by the number of rows
        for row in (0, 2, 3, 11, 12, 51, problem.m // 2, problem.m - 1):
            alone = replace(
                problem,
                offsets=(problem.offsets.clamp(row, row + 1) - row).int(),
                rows=problem.rows[row : row + 1],
                row_scale=problem.row_scale[row : row + 1],
                m=1,
            )
            testing.assert_equal(product(alone, tactic=tactic)[0], whole[row], label=f"{tactic}: row {row}: {problem}")


@devices
def test_nothing_else_is_written(device: str, seed: int) -> None:
    problem, expected = GroupedCase(case_of("native", "w4 float16", 70, 256), (5, 0, 20), 3, 9).exact(
        device=device, seed=seed
    )
    for tactic in tactics(problem):
        box = testing.Poisoned(tuple(expected.shape), expected.dtype, torch.device(device), padding=3)
        product(problem, out=box.tensor, tactic=tactic)
        box.check(f"{tactic}: {problem}")
        testing.assert_equal(box.tensor, expected)


def wrong_expert(p: GroupedProblem) -> GroupedProblem:
    return replace(p, experts=(*p.experts[1:], p.experts[0]))


def stale_offset(p: GroupedProblem) -> GroupedProblem:
    offsets = p.offsets.clone()
    offsets[1] += 1
    return replace(p, offsets=offsets)


def dropped_row(p: GroupedProblem) -> GroupedProblem:
    offsets = p.offsets.clone()
    offsets[-1] -= 1
    return replace(p, offsets=offsets)


def scale_of_another_row(p: GroupedProblem) -> GroupedProblem:
    assert p.row_scale is not None
    return replace(p, row_scale=p.row_scale.roll(1))


def row_of_another_token(p: GroupedProblem) -> GroupedProblem:
    assert p.rows is not None
    rows = p.rows.clone()
    rows[0] = (rows[0] + 1) % p.a.shape[0]
    return replace(p, rows=rows)


FAULTS = (wrong_expert, stale_offset, dropped_row, scale_of_another_row, row_of_another_token)


def of_another_expert(name: str) -> Callable[[GroupedProblem], GroupedProblem]:
    """One part of the weights is that of the expert before."""

    def change(p: GroupedProblem) -> GroupedProblem:
        parts = [getattr(expert, name) for expert in p.experts]
        moved = [parts[-1], *parts[:-1]]
        experts = [replace(expert, **{name: part}) for expert, part in zip(p.experts, moved, strict=True)]
        return replace(p, experts=tuple(experts))

    return change


def of_integers(p: GroupedProblem) -> GroupedProblem:
    return replace(p, experts=tuple(replace(each, weight_dtype=None, global_scale=None) for each in p.experts))


def minimum_ignored(p: GroupedProblem) -> GroupedProblem:
    return replace(p, experts=tuple(replace(each, minimums=torch.zeros_like(each.scales)) for each in p.experts))


FAULTS_OF_CODES = {
    "scales": ("MXFP4", of_another_expert("scales")),
    "minimums": ("minimums", of_another_expert("minimums")),
    "minimums, 8 bits": ("minimums, 8 bits", of_another_expert("minimums")),
    "no minimums": ("minimums", minimum_ignored),
    "integers": ("fp8, blocks", of_integers),
}


@pytest.mark.parametrize("fault", FAULTS_OF_CODES)
def test_faults_of_codes_are_rejected(fault: str, seed: int) -> None:
    name, change = FAULTS_OF_CODES[fault]
    case = GroupedCase(CODES[name], (4, 3, 6), scaled=True)
    exact, expected = case.exact(seed=seed)
    assert torch.equal(product(exact), expected)
    assert not torch.equal(product(change(exact)), expected)
    problem = case.random(seed=seed)
    assert problem.error_ratio(product(problem)) <= 1
    assert problem.error_ratio(product(change(problem))) > 1


@devices
@pytest.mark.parametrize("form", [(-1,), (-1, 1)])
def test_each_expert_has_a_global_scale(form: tuple[int, ...], device: str, seed: int) -> None:
    problem = GroupedCase(CODES["NVFP4"], (4, 3, 6)).random(device=device, seed=seed)
    wholes = (1.0, 0.5, 3.0)
    experts = zip(problem.experts, wholes, strict=True)
    problem = replace(problem, experts=tuple(replace(p, global_scale=p.global_scale * by) for p, by in experts))
    given = problem.stacked("global_scale")
    assert given is not None
    rounded = weight_dtype(problem, None)
    assert problem.error_ratio(product(problem, global_scale=given.reshape(form)), rounded) <= 1
    assert problem.error_ratio(product(problem, global_scale=given.reshape(form).flip(0)), rounded) > 1


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_rejected(fault: Callable[[GroupedProblem], GroupedProblem], seed: int) -> None:
    case = GroupedCase(case_of("native", "w4 float16", 72, 256), (4, 3, 6), scaled=True)
    exact, expected = case.exact(seed=seed)
    assert torch.equal(product(exact), expected)
    assert not torch.equal(product(fault(exact)), expected)
    problem = case.random(seed=seed)
    assert problem.error_ratio(product(problem)) <= 1
    assert problem.error_ratio(product(fault(problem))) > 1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(3, 40, 200), (1, 16, 64), (2, 48, 70)])
def test_codes_of_experts_are_packed_one_after_the_other(bits: int, shape: tuple[int, int, int]) -> None:
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    packed = qcutlass.preprocess_weights(codes, bits)
    for expert, matrix in zip(packed, codes, strict=True):
        assert torch.equal(expert, qcutlass.preprocess_weights(matrix, bits))
    assert torch.equal(qcutlass.unpack_weights(packed, bits, shape[1:]), codes)
    assert qcutlass.preprocess_weights(codes.to("meta"), bits).shape == packed.shape
    assert qcutlass.unpack_weights(packed.to("meta"), bits, shape[1:]).shape == codes.shape


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG: list[tuple[str, Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    ("offsets", lambda v: int32(0, 5, 4, 6), ValueError, r"offsets\[2\] must be in \[5, 6\]"),
    ("offsets", lambda v: int32(0, 1, 2, 7), ValueError, r"offsets\[3\] must be in \[2, 6\].* got 7"),
    ("offsets", lambda v: int32(-1, 1, 2, 3), ValueError, r"offsets\[0\] must be .* got -1"),
    ("offsets", lambda v: int32(0, 1, 6), ValueError, r"offsets: expected shape \[E \+ 1\] = \[4\], got \[3\]"),
    ("offsets", lambda v: v["offsets"].long(), TypeError, "offsets: expected a tensor of int32"),
    ("rows", lambda v: v["rows"] * 0 + 4, ValueError, r"rows\[0\] must be in \[0, 4\), got 4"),
    ("rows", lambda v: v["rows"] * 0 - 1, ValueError, r"rows\[0\] must be in \[0, 4\), got -1"),
    ("rows", lambda v: v["rows"][None], ValueError, r"rows: expected shape \[R\]"),
    ("row_scale", lambda v: v["row_scale"].half(), TypeError, "row_scale: expected a tensor of float32"),
    ("row_scale", lambda v: v["row_scale"][1:], ValueError, r"row_scale: expected shape \[R\] = \[6\]"),
    ("bias", lambda v: v["bias"][0], ValueError, r"bias: expected shape \[E, N\] = \[3, 48\], got \[48\]"),
    ("w_packed", lambda v: v["w_packed"][0], ValueError, r"w_packed: expected shape \[E, "),
    ("w_packed", lambda v: v["w_packed"].view(torch.int8), ValueError, "w_packed was packed for int8 activations"),
    ("w_packed", lambda v: [1], TypeError, "w_packed: expected a torch.Tensor"),
    ("scales", lambda v: v["scales"][:2], ValueError, "scales: expected those of E = 3 experts"),
    ("zeros", lambda v: v["zeros"][:2], ValueError, "zeros: expected those of E = 3 experts"),
    ("minimums", lambda v: v["scales"], ValueError, "minimums: expected zeros or minimums, got both"),
    ("minimums", lambda v: v["scales"][0, 0], ValueError, r"minimums: expected shape \[E, G, N\] or \[E, N\]"),
    ("minimums", lambda v: 1.0, TypeError, "minimums: expected a torch.Tensor"),
    ("weight_dtype", lambda v: "e2m1", ValueError, "zeros: e2m1 codes have signs and no zero points"),
    ("weight_dtype", lambda v: "e5m2", ValueError, "weight_dtype: expected 'e2m1', 'e4m3' or None"),
    ("global_scale", lambda v: torch.ones(3), ValueError, "global_scale: stands beside scales of float8_e4m3fn"),
    ("perm", lambda v: v["perm"][0], ValueError, r"perm: expected shape \[E, K\] = \[3, 128\], got \[128\]"),
    ("perm", lambda v: v["perm"][1:], ValueError, r"perm: expected shape \[E, K\] = \[3, 128\], got \[2, 128\]"),
    ("perm", lambda v: v["perm"].long(), TypeError, "perm: expected a tensor of int32"),
    ("perm", lambda v: v["perm"] + 1, ValueError, r"perm\[0, \d+\] must be in \[0, 128\), got 128"),
    ("perm", lambda v: v["perm"] - 1, ValueError, r"perm\[0, \d+\] must be in \[0, 128\), got -1"),
    ("a", lambda v: v["a"][None], ValueError, r"a: expected shape \[T, K\]"),
    ("out", lambda v: torch.zeros(5, 48).half(), ValueError, r"out: expected shape \[6, 48\], got \[5, 48\]"),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), WRONG)
def test_wrong_arguments_are_refused(
    name: str, change: Callable[[dict[str, Any]], Any], error: type[Exception], message: str
) -> None:
    problem = GroupedCase(
        case_of("native", "w4 float16", 48, 128, tokens=4, bias=True, perm=True), (1, 2, 3), scaled=True
    ).random()
    operands, options = arguments(problem)
    values = dict(zip(("a", "w_packed", "scales", "zeros"), operands, strict=True)) | options
    box = testing.Poisoned((6, 48), torch.float16)
    values["out"] = box.tensor
    qcutlass.gemm_grouped(**values | {"out": None})
    values[name] = change(values)
    with pytest.raises(error, match=message):
        qcutlass.gemm_grouped(**values)
    assert box.is_untouched()


def checks_of(arguments: Iterable[object]) -> tuple[str, ...]:
    """Those of opcheck: its comparison of arguments before and after has no arithmetic for numbers of 8 bits."""
    tensors = [value for value in arguments if isinstance(value, Tensor) and value.is_floating_point()]
    every = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    return every[1:] if any(tensor.element_size() == 1 for tensor in tensors) else every


@devices
@pytest.mark.parametrize("name", ["zeros", "perm", *CODES])
def test_the_operator_is_checked_and_compiles(name: str, device: str, seed: int) -> None:
    plain = case_of("native", "w4 float16", 48, 128, bias=True, perm=name == "perm")
    case = code_case(name, device) if name in CODES else plain
    problem = GroupedCase(case, (2, 0, 3), 1, 1, scaled=True).random(device=device)
    operands, options = arguments(problem)
    call = qcutlass.products.kind.FUNCTIONS[qcutlass.gemm_grouped].call(*operands, **options)
    torch.library.opcheck(torch.ops.qcutlass.gemm_grouped.default, tuple(call), test_utils=checks_of(call))

    def experts(a: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
        return qcutlass.gemm_grouped(a, *operands[1:], **options | {"rows": rows, "row_scale": scale}) + 1

    torch.compiler.reset()  # what other cases compiled of the same function counts, and is limited
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    assert problem.rows is not None
    assert problem.row_scale is not None
    for extra in (0, 3, 8):  # rows of nobody
        rows, scale = (torch.cat([t, t.new_zeros(extra)]) for t in (problem.rows, problem.row_scale))
        a = torch.cat([problem.a, problem.a[:extra]])
        testing.assert_equal(compiled(a, rows, scale), experts(a, rows, scale))


def test_weights_are_described() -> None:
    """The words of `explain`, which a GPU is needed for where kernels are."""
    described = {}
    for name in ("minimums", "NVFP4", "fp8, blocks"):
        operands, options = arguments(GroupedCase(CODES[name], (2, 0, 3), gathered=False).random())
        call = qcutlass.products.kind.FUNCTIONS[qcutlass.gemm_grouped].call(*operands, **options)
        weights, parts = call.describe(call.check(None))
        described[name] = [weights, *parts]
    grouped = "grouped, 3 experts"
    assert described == {
        "minimums": ["4-bit weights", grouped, "groups of 32", "float16 scales", "float16 minimums", "bias"],
        "NVFP4": ["e2m1 weights", grouped, "groups of 16", "float8_e4m3fn scales", "global_scale"],
        "fp8, blocks": ["e4m3 weights", grouped, "groups of 128", "float32 scales", "bias"],
    }


def test_choices_are_explained() -> None:
    problem = GroupedCase(Case(16, 512, 1024, dtype=torch.bfloat16), (2,) * 16).random(seed=1)
    operands, options = arguments(problem)
    why = qcutlass.explain(qcutlass.gemm_grouped, *operands, **options, device="h200")
    assert why.problem == (
        "32 x 1024 bfloat16 activations by 512 x 1024 4-bit weights, grouped, 16 experts, groups of 128, bfloat16 "
        "scales, uint8 zeros, rows gathered"
    )
    every = selection.configurations(qcutlass.gemm_grouped, *operands, **options)
    assert {candidate.plan.tactic for candidate in why.candidates} == {t.name for t in every if not t.superseded}
    assert {candidate.plan.split_k for candidate in why.candidates} == {1}
    many = GroupedCase(Case(16, 512, 1024, dtype=torch.bfloat16), (400,) * 16).random(seed=1)
    operands, options = arguments(many)
    assert "stream" in why.plan.tactic
    assert "stream" not in qcutlass.explain(qcutlass.gemm_grouped, *operands, **options, device="h200").plan.tactic
    with pytest.raises(ValueError, match="tactic: 'no_such'"):
        qcutlass.explain(qcutlass.gemm_grouped, *operands, **options, device="h200", tactic="no_such")


@pytest.mark.parametrize("name", [*MODES, *CODES])
def test_weights_that_wgmma_multiplies(name: str) -> None:
    """All but integers that are scaled in fp32 or have minimums."""
    case = code_case(name, "cuda") if name in CODES else case_of(name, "w4 float16", 72, 256)
    operands, options = arguments(GroupedCase(case, (2, 0, 3)).random())
    every = [traits.name for traits in selection.configurations(qcutlass.gemm_grouped, *operands, **options)]
    in_fp32 = name == "float" or name.startswith(("minimums", "two levels"))
    assert any("_sm90a_" in tactic for tactic in every) == (not in_fp32)


@pytest.mark.gpu
def test_a_captured_graph_multiplies_what_offsets_say_when_it_runs(seed: int) -> None:
    case = GroupedCase(case_of("native", "w4 float16", 256, 512), (4, 3, 6, 0), 0, 7)
    first, second = (
        replace(case, counts=counts).exact(device="cuda", seed=seed)[0] for counts in (case.counts, (0, 11, 0, 2))
    )
    operands, options = arguments(first)
    rows = {name: options[name].clone() for name in ("offsets", "rows")}
    multiply = partial(qcutlass.gemm_grouped, *operands, **options | rows)
    for tactic in tactics(first):
        multiply(tactic=tactic)
        out, replay = captured(partial(multiply, tactic=tactic))
        for problem in (second, first):
            rows["offsets"].copy_(problem.offsets)
            rows["rows"].copy_(problem.rows)
            replay()
            expected = replace(first, offsets=problem.offsets, rows=problem.rows).expected()
            testing.assert_equal(out, expected, label=tactic)


@pytest.mark.gpu
def test_wrong_indices_touch_no_other_memory(seed: int) -> None:
    """Rows and offsets out of range are clamped: what is written stays within the output."""
    problem = GroupedCase(case_of("native", "w4 float16", 72, 256), (4, 3, 6)).random(device="cuda", seed=seed)
    wild = torch.tensor([2**31 - 1, -(2**31), 9, 100], device="cuda", dtype=torch.int32)
    for tactic in tactics(problem):
        box = testing.Poisoned((13, 72), torch.float16, torch.device("cuda"), padding=3)
        box.tensor.zero_()
        product(problem, out=box.tensor, rows=wild.repeat(4)[:13], tactic=tactic)
        for offsets in (wild, wild.flip(0), wild.roll(1)):
            product(problem, out=box.tensor, offsets=offsets, tactic=tactic)
        torch.cuda.synchronize()
        box.check(f"{tactic}: {problem}")
