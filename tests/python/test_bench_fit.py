"""The fit of the cost model: times made from the model with other constants are fitted back, and printed as costs.h."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench import fit, measured, sweep
from bench.__main__ import app
from bench.cost_lines import CLASSES, PLAN, CostLines, Number, written
from bench.layer import plan_name
from bench.measured import Measured, Measurements
from tests.python.bench_rows import row, write
from typer.testing import CliRunner

import qcutlass
from qcutlass import _C, blockwise
from qcutlass.products import selection

SHAPES = ((4096, 4096), (1024, 8192), (14336, 4096))
MS = (1, 16, 96, 512)
# one of each class
SCHEMES = ("w4a16_g32", "w4a16_g128", "w8a8", "blockwise", "w4a8_g128", "mxfp4", "w4a16_g32_real", "q4_k")
H200 = selection.GPUS["h200"]
NOISE = 0.01
OFF = 1.25  # how far the constants that times are made of are from those of costs.h, up or down


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def product(scheme: str, m: int, n: int, k: int) -> Callable[..., qcutlass.Explanation]:
    """`explain` of the product that the bench measures under this name, written here once more."""
    if scheme in ("w4a16_g32", "w4a16_g128", "w4a16_g32_real", "mxfp4", "q4_k"):
        packed = qcutlass.preprocess_weights(meta(n, k, dtype=torch.uint8), bits=4)
        a = meta(m, k, dtype=torch.float16)
        if scheme == "mxfp4":
            scales = meta(k // 32, n, dtype=torch.float8_e8m0fnu)
            return functools.partial(qcutlass.explain, qcutlass.gemm, a, packed, scales, weight_dtype="e2m1")
        if scheme == "q4_k":
            levels = {f"super_{name}": meta(k // 256, n, dtype=torch.float16) for name in ("scales", "minimums")}
            levels["minimums"] = meta(k // 32, n, dtype=torch.uint8)
            scales = meta(k // 32, n, dtype=torch.int8)
            return functools.partial(qcutlass.explain, qcutlass.gemm, a, packed, scales, **levels)
        if scheme == "w4a16_g32_real":
            scales, zeros = (meta(k // 32, n, dtype=torch.float16) for _ in range(2))
            return functools.partial(qcutlass.explain, qcutlass.gemm, a, packed, scales, zeros)
        groups = k // int(scheme.removeprefix("w4a16_g"))
        return functools.partial(qcutlass.explain, qcutlass.gemm, a, packed, meta(groups, n, dtype=torch.float16))
    f32 = torch.float32
    if scheme == "w4a8_g128":
        packed = qcutlass.preprocess_weights(meta(n, k, dtype=torch.uint8), bits=4, activations="fp8")
        scales, a = meta(k // 128, n, dtype=torch.float16), meta(m, k, dtype=torch.float8_e4m3fn)
        return functools.partial(qcutlass.explain, qcutlass.gemm_w4a8, a, packed, meta(m, dtype=f32), scales)
    packed = qcutlass.preprocess_weights(meta(n, k, dtype=torch.int8), bits=8, activations="int8")
    a = meta(m, k, dtype=torch.int8)
    if scheme == "w8a8":
        options: dict[str, Any] = {"bias": meta(n, dtype=torch.bfloat16), "out_dtype": torch.bfloat16}
        a_scale, w_scale = meta(m, dtype=f32), meta(n, dtype=f32)
        return functools.partial(qcutlass.explain, qcutlass.gemm_w8a8, a, packed, a_scale, w_scale, **options)
    a_s, b_s = meta(m, k // 128, dtype=f32), meta(n // 128, k // 128, dtype=f32)
    return functools.partial(qcutlass.explain, blockwise.int8_gemm, a, a_s, packed, b_s, n=n, out_dtype=torch.float16)


@functools.cache
def untimed(scheme: str) -> list[dict[str, Any]]:
    """Rows of the first and of some other candidates of each cell; their times are what `explain` predicts."""
    rows = []
    for n, k in SHAPES:
        for m in MS:
            candidates = product(scheme, m, n, k)(device="h200").candidates
            some = [one for i, one in enumerate(candidates) if i < 4 or i % 4 == 0 or one.plan.dense]
            for place, one in enumerate(some):
                name, time = plan_name(one.plan.tactic, one.plan.split_k), one.cost.total
                rows.append(row(f"{n}x{k}", m, name, time, scheme, selected=place == 0))
    return rows


@pytest.fixture(scope="module")
def lines() -> CostLines:
    return CostLines()


def read(tmp_path: Path, rows: list[dict[str, Any]], **facts: Any) -> Measurements:
    return measured.read([write(tmp_path / "tactics.json", rows, **facts)])


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Measurements:
    """Rows of every class; their times are today's predictions."""
    rows = [one for scheme in SCHEMES for one in untimed(scheme)]
    return read(tmp_path_factory.mktemp("predicted"), rows)


def timed(lines: CostLines, rows: list[Measured], truth: dict[Number, float], seed: int = 0) -> list[dict[str, Any]]:
    """The rows with the times that other constants predict, and noise."""
    times = fit.predictions(lines, rows, truth) * np.exp(NOISE * np.random.default_rng(seed).standard_normal(len(rows)))
    return [one.row | {"qcutlass_us": float(time)} for one, time in zip(rows, times, strict=True)]


@pytest.fixture(scope="module")
def truth(lines: CostLines) -> dict[Number, float]:
    """Every number of costs.h, off by the same factor up or down."""
    rng = np.random.default_rng(1)
    numbers = [one for one in lines.numbers if not one.field.startswith("gpu.")]
    return {one: one.value * OFF ** rng.choice([-1, 1]) for one in numbers}


@pytest.fixture(scope="module")
def synthetic(
    lines: CostLines, predicted: Measurements, truth: dict[Number, float], tmp_path_factory: pytest.TempPathFactory
) -> Measurements:
    return read(tmp_path_factory.mktemp("synthetic"), timed(lines, predicted.rows, truth))


@pytest.fixture(scope="module")
def fitted(lines: CostLines, synthetic: Measurements) -> fit.Fit:
    return fit.fit(lines, synthetic.rows, fit.wanted(lines, synthetic.rows, []), 50)


def test_lines_are_those_of_the_source(lines: CostLines) -> None:
    source = (PLAN / "costs.h").read_text()
    statements = re.findall(r"^  c\.([\w.]+) = ([^;()]+);$", source, re.MULTILINE)
    numbers = [one for one in lines.numbers if not one.field.startswith("gpu.")]
    assert [one.text for one in numbers] == [text for _, text in statements]
    assert all(one.field.endswith(field) for one, (field, _) in zip(numbers, statements, strict=True))
    assert [written(one.value) for one in numbers] == [one.text for one in numbers]
    for name in CLASSES:
        for values in ({}, {one: one.value for one in lines.numbers}):
            costs = lines.costs(name, H200, values)
            assert {field: cost for field, cost in costs.items() if not field.startswith("gpu.")} == _C.costs(name)
    table = (PLAN / "gpu_class.h").read_text().split("kGpuClasses[] = {")[1].split("};")[0]
    rates = re.findall(r"\.(\w+)\(([.\d]+)\)", table)
    assert len(rates) == 6 * table.count("gpu(")
    assert [(one.field, one.text) for one in lines.numbers[len(numbers) :]] == [(f"gpu.{f}", t) for f, t in rates]


def test_a_number_reaches_every_class_that_does_not_replace_it(lines: CostLines) -> None:
    shared = next(one for one in lines.numbers if one.name == "eight_bit_wgmma_costs: wgmma.clock")
    block = next(one for one in lines.numbers if one.name == "weight_only_costs: block")
    own = next(one for one in lines.numbers if one.name == "weight_only_costs: exposed")
    values = {shared: 1.0, block: 2.0, own: 3.0}
    changed = {name: lines.costs(name, H200, values).items() - lines.costs(name, H200, {}).items() for name in CLASSES}
    assert changed == {
        "weight_only": {("block", 2.0), ("exposed", 3.0)},
        "native_int4": {("block", 2.0), ("exposed", 3.0)},
        "eight_by_eight": {("block", 2.0), ("wgmma.clock", 1.0)},
        "blockwise": {("block", 2.0), ("wgmma.clock", 1.0)},
        "four_by_eight": {("block", 2.0), ("exposed", 3.0)},
        "scaled_groups": {("block", 2.0)},
        "float_scales": set(),
        "minimums": set(),
    }


def test_sources_of_another_build_are_refused(tmp_path: Path) -> None:
    for name in ("costs.h", "gpu_class.h"):
        text = (PLAN / name).read_text()
        (tmp_path / name).write_text(text.replace("c.stream.wait = 350;", "c.stream.wait = 351;"))
    with pytest.raises(ValueError, match=r"costs\.h: weight_only_costs.*stream\.wait.*rebuild"):
        CostLines(tmp_path)


def test_rows_are_predicted_as_explain_does(lines: CostLines, predicted: Measurements) -> None:
    assert {one.cost_class for one in predicted.rows} == set(CLASSES)
    assert not any(predicted.left_out.values())
    dense = [one for one in predicted.rows if one.candidate.plan.dense]
    assert dense
    assert {one.row["m"] for one in dense} == {512}
    assert all(one.considered for one in predicted.rows)
    for one, time in zip(predicted.rows, fit.predictions(lines, predicted.rows, {}), strict=True):
        assert time == one.microseconds, one.row
    judged = fit.judge(lines, predicted.rows, {})
    assert max(judged.errors) == 0
    assert len(judged.choices) == len(CLASSES) * len(SHAPES) * len(MS)
    assert judged.mean_loss == 0


def tolerances(lines: CostLines, rows: list[Measured], truth: dict[Number, float], numbers: list[Number]) -> Any:
    """How far logarithms of fitted numbers may be from the truth, to first order.

    The fit solves H (u - u_true) = J^T e + h^2 (u_start - u_true) with H = J^T J + h^2, where J holds the derivatives
    of the logarithms of predictions and e the noise: a bias, and a deviation whose variance is that of e times the
    diagonal of H^-1 J^T J H^-1. Five deviations; and what three digits lose.
    """
    step = 1e-4

    def logs(number: Number, by: float) -> Any:
        return np.log(fit.predictions(lines, rows, truth | {number: truth[number] * np.exp(by)}))

    j = np.stack([(logs(one, step) - logs(one, -step)) / (2 * step) for one in numbers], axis=1)
    inverse = np.linalg.inv(j.T @ j + fit.HOLD**2 * np.eye(len(numbers)))
    start = np.log([one.value / truth[one] for one in numbers])
    bias = np.abs(fit.HOLD**2 * inverse @ start)
    deviation = NOISE * np.sqrt(np.diag(inverse @ j.T @ j @ inverse))
    return bias + 5 * deviation + 0.005


def test_constants_are_fitted_back(
    lines: CostLines, synthetic: Measurements, truth: dict[Number, float], fitted: fit.Fit
) -> None:
    numbers = list(fitted.values)
    allowed = tolerances(lines, synthetic.rows, truth, numbers)
    off = np.abs(np.log([fitted.values[one] / truth[one] for one in numbers]))
    too_far = [f"{numbers[i].name}: {off[i]:.3f} > {allowed[i]:.3f}" for i in np.flatnonzero(off > allowed)]
    assert too_far == []
    assert (allowed < np.log(OFF) / 2).sum() > 20  # the tolerances say something
    assert {one.field for one in fitted.unseen} >= {"float8_mma"}


def test_errors_and_losses_come_down_to_the_noise(
    lines: CostLines, synthetic: Measurements, truth: dict[Number, float], fitted: fit.Fit
) -> None:
    lost = []
    for name in CLASSES:
        rows = [one for one in synthetic.rows if one.cost_class == name]
        before, after, best = (fit.judge(lines, rows, values) for values in ({}, fitted.values, truth))
        assert np.mean(before.errors) > 5 * NOISE
        assert np.mean(after.errors) < 1.1 * np.mean(best.errors)
        assert max(after.errors) < 5 * NOISE
        assert before.mean_loss is not None
        assert after.mean_loss is not None
        assert best.mean_loss is not None
        assert after.mean_loss < best.mean_loss + NOISE / 4
        lost.append((before.mean_loss, after.mean_loss))
        assert after.worst is not None
        assert after.worst.excess < 6 * NOISE  # of two times that differ by their noise
    before_all, after_all = np.mean(lost, axis=0)
    assert before_all > NOISE / 2
    assert after_all < before_all / 3


def test_printed_lines_are_the_fitted_ones(lines: CostLines, synthetic: Measurements) -> None:
    some = Measurements(synthetic.rows[::3], {})
    wanted = fit.wanted(lines, some.rows, [])
    fitted = fit.fit(lines, some.rows, wanted, 4)
    printed = fit.calibrate(some, iterations=4, lines=lines).summary
    code = list(printed[list(printed).index("") + 1 :])
    function, found = "", {}
    for line in code:
        if named := re.fullmatch(r"constexpr \w+ (\w+)\(\) \{", line):
            function = named[1]
        elif number := re.fullmatch(r"  c\.([\w.]+) = ([^()]+);", line):
            found[function, number[1]] = float(number[2])
    expected = {
        (one.place, one.field.removeprefix("wgmma." if "wgmma" in one.place else "")): fitted.values.get(one, one.value)
        for one in lines.numbers
        if one.place in {number.place for number in wanted} and not one.field.startswith("gpu.")
    }
    assert found == expected
    assert sum(fitted.values[one] != one.value for one in fitted.values) > 40


def test_without_iterations_the_lines_are_those_of_today(lines: CostLines, synthetic: Measurements) -> None:
    report = fit.calibrate(Measurements(synthetic.rows[::3], {}), iterations=0, lines=lines)
    code = "\n".join(report.summary[list(report.summary).index("") + 1 :])
    source = (PLAN / "costs.h").read_text()
    assert all(f"{function}\n}}\n" in source for function in code.removesuffix("\n}").split("\n}\n\n"))
    assert code.count("constexpr") == len(CLASSES) + 1  # and of wgmma with 8 bits
    for today, after in zip(report.rows[::2], report.rows[1::2], strict=True):
        assert today | {"when": ""} == after | {"when": ""}


def test_fields_that_no_row_sees_are_left_alone(lines: CostLines, synthetic: Measurements, tmp_path: Path) -> None:
    eight_bit = [one.row for one in synthetic.rows if one.cost_class == "eight_by_eight"]
    rows = [one for one in eight_bit if "_stream_" in one["tactic"]]
    report = fit.calibrate(read(tmp_path, rows), ["stream.*", "wgmma.*"], iterations=5, lines=lines)
    text = "\n".join(report.summary)
    of_wgmma = [one.field for one in lines.numbers if one.place == "eight_bit_wgmma_costs"]
    assert f"eight_bit_wgmma_costs: no row depends on {', '.join(of_wgmma)}: left alone" in text
    assert "and has no rows" not in text
    assert "weight_only_costs" not in text.replace("ProductCosts c = weight_only_costs();", "")
    assert "c.exposed = 0.313;" in text  # not asked for
    assert "c.stream.kernel = 1.26;" not in text
    assert {row["cost_class"] for row in report.rows} == {"eight_by_eight"}
    others = fit.calibrate(read(tmp_path, eight_bit), ["wgmma.clock"], iterations=1, lines=lines).summary
    assert "blockwise takes these too, and has no rows: eight_bit_wgmma_costs: wgmma.clock" in others


def test_rates_are_fitted_as_a_row_of_gpu_classes(lines: CostLines, predicted: Measurements, tmp_path: Path) -> None:
    true = {one: one.value * 1.2 for one in lines.numbers if one.name == "gpu(90, 132): gpu.dram"}
    [dram] = true
    report = fit.calibrate(read(tmp_path, timed(lines, predicted.rows, true)), ["gpu.*"], lines=lines)
    (_, line) = report.summary[-2:]
    assert line.strip().startswith("gpu(90, 132).dram(")
    rates = [float(text) for text in re.findall(r"\.\w+\(([.\d]+)\)", line)]
    today = [one.value for one in lines.of_gpu(H200)]
    assert max(abs(np.log(np.divide(rates, [true[dram], *today[1:]])))) < 2 * NOISE
    assert not any("constexpr" in line for line in report.summary)


def with_rates_of(row: str, other: str, folder: Path) -> CostLines:
    """The sources, in which a row of gpu_class.h has the rates of another one."""
    text = (PLAN / "gpu_class.h").read_text()
    rates = {place: re.escape(place) + r"((?:\.\w+\([.\d]+\))+)" for place in (row, other)}
    found = re.search(rates[other], text)
    assert found is not None
    (folder / "gpu_class.h").write_text(re.sub(rates[row], row + found[1], text))
    (folder / "costs.h").write_text((PLAN / "costs.h").read_text())
    return CostLines(folder)


def test_rates_of_another_gpu_are_fitted_to_those_of_this_one(
    lines: CostLines, predicted: Measurements, tmp_path: Path
) -> None:
    """From an A100's rates on, times of two shapes on an H200 bring choices at a third one back to within 3 %."""
    start = with_rates_of("gpu(90, 132)", "gpu(80, 108)", tmp_path)
    kept = fit.held_out(predicted.rows, "0.34", seed=0)
    seen, unseen = ([one for one in predicted.rows if (one.row["shape"] in kept) == out] for out in (False, True))
    rows = read(tmp_path, timed(lines, seen, {})).rows
    found = fit.fit(start, rows, fit.wanted(start, rows, ["gpu.*"]), 50)
    assert found.unseen == []
    true = dict(zip(start.of_gpu(H200), (one.value for one in lines.of_gpu(H200)), strict=True))
    assert set(found.values) == set(true)
    assert len(true) == 6
    off = np.abs(np.log([found.values[one] / true[one] for one in true]))
    allowed = tolerances(start, rows, true, list(true))
    assert (off < allowed).all(), (off, allowed)
    assert (allowed < np.abs(np.log([one.value / true[one] for one in true])) / 3).all()
    before, after = (fit.judge(start, unseen, values) for values in ({}, found.values))
    assert before.worst is not None
    assert after.worst is not None
    assert before.worst.excess > 0.1
    assert after.worst.excess < 0.03
    assert len(after.choices) == len(CLASSES) * len(MS)


def test_held_out_shapes_are_judged_and_not_fitted(lines: CostLines, synthetic: Measurements, tmp_path: Path) -> None:
    rows = [one.row for one in synthetic.rows if one.cost_class == "blockwise"]
    kept = fit.held_out(synthetic.rows, "0.34", seed=3)
    assert len(kept) == 1
    assert {tuple(fit.held_out(synthetic.rows, "0.34", seed)) for seed in range(20)} > {tuple(kept)}
    slow = [one | {"qcutlass_us": 3 * one["qcutlass_us"]} if one["shape"] in kept else one for one in rows]
    options: dict[str, Any] = {"hold_out": "0.34", "seed": 3, "iterations": 20, "lines": lines}
    report, other = (fit.calibrate(read(tmp_path, some), **options) for some in (rows, slow))
    assert report.summary[-30:] == other.summary[-30:]
    parts = [(one["part"], one["when"], one["cells"]) for one in report.rows]
    assert parts == [
        (part, when, cells)
        for part, cells in (("fit", 2 * len(MS)), ("held-out shapes", len(MS)))
        for when in ("today's", "fitted")
    ]
    for part in (0, 2):
        assert report.rows[part + 1]["mean_error"] < report.rows[part]["mean_error"] / 2
    assert other.rows[2]["mean_error"] > 0.5
    with pytest.raises(ValueError, match="several shapes"):
        fit.held_out([one for one in synthetic.rows if one.row["shape"] in kept], "0.5", 0)


def test_half_of_the_random_layers_of_a_sweep_is_held_out(predicted: Measurements, tmp_path: Path) -> None:
    of_sweep = [f"{n}x{k}" for n, k in sweep.random_layers(seed=5)]
    some = [one.row for one in predicted.rows if one.cost_class == "eight_by_eight" and one.row["shape"] == "4096x4096"]
    rows = [*some, *(one | {"shape": shape} for shape in of_sweep[:4] for one in some[:1])]
    found = read(tmp_path, rows)
    assert fit.held_out(found.rows, "sweep", 5) == {of_sweep[1], of_sweep[3]} < sweep.held_out(seed=5)
    parts = [one["part"] for one in fit.calibrate(found, hold_out="sweep", seed=5, iterations=0).rows]
    assert parts == ["fit", "fit", "held-out shapes", "held-out shapes"]
    with pytest.raises(ValueError, match=r"hold-out sweep: none of the shapes .* seed 6"):
        fit.held_out(found.rows, "sweep", 6)
    for what in ("half", "1.5", "-1", "nan"):
        with pytest.raises(ValueError, match=rf"hold-out '{what}': expected a share from 0 to 1, or sweep"):
            fit.held_out(found.rows, what, 0)


def test_the_loss_is_that_of_the_candidate_that_selection_would_choose(
    lines: CostLines, predicted: Measurements, tmp_path: Path
) -> None:
    cell = [one.row for one in predicted.rows if one.row["shape"] == "4096x4096" and one.row["m"] == 16][:4]
    times = [10.0, 12.0, 8.0, 9.0]  # the model puts the first one first
    rows = [one | {"qcutlass_us": time, "selected": False} for one, time in zip(cell, times, strict=True)]
    [choice] = fit.judge(lines, read(tmp_path, rows).rows, {}).choices
    assert choice.excess == 10 / 8 - 1
    assert (choice.chosen, choice.best) == (rows[0]["tactic"], rows[2]["tactic"])
    # A split that would make more blocks than the GPU holds is timed if forced, but is no candidate.
    forced = row("14336x4096", 512, "w4a16_f16_native_sm80_stream_n64m16k1024w8_s2 split 4", 1.0)
    assert not read(tmp_path, [forced]).rows[0].considered


def test_rows_that_say_nothing_are_counted(tmp_path: Path) -> None:
    good = untimed("w4a16_g128")[0]
    rows = [
        good,
        good | {"tactic": "w4a16_f16_other"},
        good | {"tactic": good["tactic"] + " split 4096"},
        good | {"scheme": "w4a16_g128_f32"},
    ]
    found = read(tmp_path, rows)
    assert len(found.rows) == 1
    assert found.left_out["w4a16_g128"] == {"no such tactic in this build": 2}
    assert sum(found.left_out["w4a16_g128_f32"].values()) == 1
    report = fit.calibrate(found, iterations=0)
    assert "w4a16_g128: 2 rows left out: no such tactic in this build" in report.summary
    assert any("choices can't be judged" in line for line in report.summary)
    with pytest.raises(ValueError, match=r"no row can be fitted; w4a16_g128: 1 rows left out"):
        fit.calibrate(read(tmp_path, rows[1:2]))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_gpus_are_known_by_a_part_of_their_names(name: str, known: str) -> None:
    assert measured.gpu_named(name) == known


def test_unknown_gpus_are_named_by_the_option(tmp_path: Path) -> None:
    path = write(tmp_path / "tactics.json", untimed("w4a16_g128")[:1], GPU="NVIDIA RTX A1000")
    with pytest.raises(ValueError, match=r"tactics\.json: GPU 'NVIDIA RTX A1000'.*--device"):
        measured.read([path])
    assert measured.read([path], "h100").rows[0].gpu == "h100"


def damaged() -> dict[str, str]:
    good = untimed("w4a16_g128")[0]

    def file(*rows: Any, **more: Any) -> str:
        return json.dumps({"title": "GPU kernels", "facts": {"GPU": "NVIDIA H200"}, "rows": list(rows)} | more)

    return {
        "half a file": file(good)[:-40],
        "no JSON": "M = 1",
        "another bench": json.dumps({"title": "Quality", "rows": []}),
        "a list": "[]",
        "no GPU": file(good, facts={}),
        "rows that are none": file(good, rows=7),
        "a row that is none": file("row"),
        "no m": file({key: value for key, value in good.items() if key != "m"}),
        "m of a text": file(good | {"m": "16"}),
        "m of 0": file(good | {"m": 0}),
        "a huge m": file(good | {"m": 10**30}),
        "a time of 0": file(good | {"qcutlass_us": 0}),
        "no number": file(good | {"qcutlass_us": float("nan")}),
        "a shape in words": file(good | {"shape": "big"}),
        "a huge shape": file(good | {"shape": f"{10**30}x16"}),
        "an unknown scheme": file(good | {"scheme": "w3a16"}),
        "a split in words": file(good | {"tactic": good["tactic"] + " split two"}),
        "no rows": file(),
    }


@pytest.mark.parametrize("what", damaged())
def test_damaged_and_foreign_files_give_one_message(what: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(damaged()[what])
    done = CliRunner().invoke(app, ["fit", str(path)])
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 2
    assert "Invalid value" in done.output


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"rows\.json: expected JSON"):
        measured.read([path])


def test_command(tmp_path: Path) -> None:
    path = write(tmp_path / "tactics.json", untimed("w8a8")[:40])
    done = CliRunner().invoke(app, ["fit", str(path), "--fields", "stream.kernel", "--iterations", "3"])
    assert done.exit_code == 0, done.output
    assert "constexpr ProductCosts eight_by_eight_costs() {\n  ProductCosts c = weight_only_costs();\n" in done.output
    assert "  c.stream.kernel = 1.26;\n" in done.output  # times are what it predicts
    done = CliRunner().invoke(app, ["fit", str(path), "--fields", "strem.*"])
    assert done.exit_code == 2
    assert "strem" in done.output
