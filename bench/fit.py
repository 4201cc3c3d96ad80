"""Constants of the cost model from measured tactics.

A prediction follows from the GPU's rates in cpp/src/plan/gpu_class.h and the constants in costs.h. What is fitted are
the numbers that stand there, so that one that several classes of products share is fitted to all of them. The errors of
clocks and of a model are shares of a time, so with p_i the prediction and t_i the time of row i, and y the numbers that
the sources have, where the search starts,

    minimise  sum_i rho(log(p_i(x) / t_i)) + sum_j rho(h log(x_j / y_j))   over log x
    rho(r) = 2 s^2 (sqrt(1 + (r / s)^2) - 1),  s = 10 %,  h = 5 %

Logarithms keep every constant positive, and make one step mean the same share of 1e-4 us and of 500 clocks. rho is
r^2 up to about s and grows like |r| beyond: where the form of the model fails, a row pulls no harder than one that
is off by s. The second sum holds numbers that the rows hardly determine, or only together with others: one moves by a
factor of e if that explains as much as one row's error of h, the model's usual error. Rows whose prediction does not
change when a number is multiplied or divided by 4 do not depend on it, and a number on which no row depends stays as it
is.

A small error is not yet a good choice. What counts is the loss: the time of the candidate that the model puts first,
among those of a cell that were timed, over the best of these times, less 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench import gpu_report, sweep
from bench.cost_lines import CLASSES, CostLines, Number, Values, written
from bench.gpu_report import Choice
from bench.measured import Measured, Measurements
from bench.report import Column, Report, Row
from qcutlass.products.selection import GPUS

SOFT: Final = 0.1
"""Errors beyond this share count less than their squares."""
HOLD: Final = 0.05
"""The error of a row that moves a number by a factor of e, where no other row minds."""
SWEEP: Final = "sweep"
"""Holds out what `bench sweep` judges by."""
_PROBE: Final = 4.0  # changes by this factor show which rows depend on a number
_STEP: Final = 1e-5  # of finite differences, in logarithms

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Judgement:
    """How good predictions are, and the choices that follow from them.

    Attributes:
        errors: |predicted / measured - 1| of each row.
        choices: of each cell where several tactics were timed.
    """

    errors: list[float]
    choices: list[Choice]

    @property
    def mean_loss(self) -> float | None:
        return gpu_report.mean_loss(self.choices)

    @property
    def worst(self) -> Choice | None:
        return max(self.choices, key=lambda one: one.excess, default=None)


def predictions(lines: CostLines, rows: Sequence[Measured], values: Values) -> Array:
    """Microseconds of each row with these values of some numbers."""
    kinds = {(one.cost_class, one.gpu) for one in rows}
    costs = {(name, gpu): lines.costs(name, GPUS[gpu], values) for name, gpu in kinds}
    return np.array([one.predicted(costs[one.cost_class, one.gpu]) for one in rows])


def judge(lines: CostLines, rows: Sequence[Measured], values: Values) -> Judgement:
    """Errors of the rows that constants predict, and the choices of the model in their cells."""
    times = predictions(lines, rows, values)
    pairs = zip(rows, times, strict=True)
    errors = [abs(float(time) / one.microseconds - 1) for one, time in pairs]
    cells: dict[tuple[Path, gpu_report.Cell], list[int]] = {}
    for place, one in enumerate(rows):
        cells.setdefault((one.run, gpu_report.cell_of(one.row)), []).append(place)
    choices = []
    for places in cells.values():
        first = min((i for i in places if rows[i].considered), key=lambda i: times[i], default=None)
        choices += gpu_report.choices([rows[i].row | {"selected": i == first} for i in places])
    return Judgement(errors, choices)


@dataclass(frozen=True)
class Fit:
    """Numbers fitted to rows.

    Attributes:
        values: the new ones, as they are printed.
        unseen: numbers that were wanted but that no row depends on.
    """

    values: dict[Number, float]
    unseen: list[Number]


def wanted(lines: CostLines, rows: Sequence[Measured], fields: Sequence[str]) -> list[Number]:
    """The numbers to fit: those of the classes of these rows, and of what several classes share.

    Args:
        fields: patterns of their fields, "wgmma.*"; none: all of costs.h. "gpu.*" are the rates of the rows' GPUs.

    Raises:
        ValueError: a pattern fits none of them.
    """
    present = {one.cost_class for one in rows}
    seen = {number for one in rows for number in lines.seen(one.cost_class, one.device)}
    others = {f"{name}_costs" for name in CLASSES if name not in present}
    numbers = [one for one in lines.numbers if one in seen and one.place not in others]
    if not fields:
        return [one for one in numbers if not one.field.startswith("gpu.")]
    for pattern in fields:
        if not any(fnmatchcase(one.field, pattern) for one in numbers):
            known = ", ".join(dict.fromkeys(one.field for one in numbers))
            raise ValueError(f"fields {pattern!r}: expected some of {known}")
    return [one for one in numbers if any(fnmatchcase(one.field, pattern) for pattern in fields)]


def fit(lines: CostLines, rows: Sequence[Measured], numbers: Sequence[Number], iterations: int) -> Fit:
    """Fits the numbers to the rows, trying at most so many steps; with none they stay as they are."""
    start = {one: one.value for one in numbers}
    before = predictions(lines, rows, start)
    seen_by = {one: _dependent(lines, rows, one, before) for one in numbers}
    numbers, unseen = [one for one in numbers if seen_by[one]], [one for one in numbers if not seen_by[one]]
    if not numbers or iterations == 0:
        return Fit({one: one.value for one in numbers}, unseen)
    logs, u0 = np.log([one.microseconds for one in rows]), np.log([one.value for one in numbers])

    def values(u: Array) -> dict[Number, float]:
        return dict(zip(numbers, np.exp(u).tolist(), strict=True))

    def errors(u: Array) -> Array:
        return np.log(predictions(lines, rows, values(u))) - logs

    def residuals(u: Array) -> Array:
        return np.concatenate([errors(u), HOLD * (u - u0)])

    def derivatives(u: Array) -> Array:
        here, result = errors(u), np.zeros((len(rows), len(numbers)))
        for column, number in enumerate(numbers):
            places = seen_by[number]
            moved = values(u) | {number: float(np.exp(u[column] + _STEP))}
            there = np.log(predictions(lines, [rows[i] for i in places], moved)) - logs[places]
            result[places, column] = (there - here[places]) / _STEP
        return np.concatenate([result, HOLD * np.eye(len(numbers))])

    from scipy.optimize import least_squares  # which only this bench needs

    solved: Any = least_squares(residuals, u0, derivatives, loss="soft_l1", f_scale=SOFT, max_nfev=iterations)
    return Fit({one: float(written(value)) for one, value in values(solved.x).items()}, unseen)


def _dependent(lines: CostLines, rows: Sequence[Measured], number: Number, before: Array) -> list[int]:
    """Places of the rows whose predictions depend on a number."""
    places = [i for i, one in enumerate(rows) if number in lines.seen(one.cost_class, one.device)]
    some, known = [rows[i] for i in places], before[places]
    more, less = (predictions(lines, some, {number: number.value * by}) for by in (_PROBE, 1 / _PROBE))
    changed = (more != known) | (less != known)
    return [place for place, one in zip(places, changed.tolist(), strict=True) if one]


def held_out(rows: Sequence[Measured], what: str, seed: int) -> set[str]:
    """Shapes that are kept from the fit.

    Args:
        what: a share of the shapes, of which it is at least one and not all, unless it is 0; "sweep": those of
            `sweep.held_out` with this seed.

    Raises:
        ValueError: `what` is something else, there is one shape only, or none of a sweep's.
    """
    every = sorted({one.row["shape"] for one in rows})
    if what == SWEEP:
        if kept := sweep.held_out(seed=seed) & set(every):
            return kept
        raise ValueError(f"hold-out {what}: none of the shapes is among those of a sweep of seed {seed}")
    try:
        share = float(what)
    except ValueError:
        share = -1
    if not 0 <= share <= 1:
        raise ValueError(f"hold-out {what!r}: expected a share from 0 to 1, or {SWEEP}")
    if share == 0:
        return set()
    if len(every) < 2:
        raise ValueError(f"hold-out: expected rows of several shapes, got {', '.join(every)} alone")
    count = min(max(1, round(share * len(every))), len(every) - 1)
    return set(random.Random(seed).sample(every, count))


_COLUMNS: Final = [
    Column("cost_class", "class"),
    Column("part", "rows of"),
    Column("when", "costs"),
    Column("rows", "rows", "{:d}"),
    Column("mean_error", "mean error", "{:.1%}"),
    Column("largest_error", "largest", "{:.1%}"),
    Column("cells", "cells", "{:d}"),
    Column("mean_loss", "mean loss", "{:.2%}"),
    Column("worst_loss", "worst loss", "{:.1%}"),
]


def calibrate(
    measurements: Measurements,
    fields: Sequence[str] = (),
    hold_out: str = "0",
    seed: int = 0,
    iterations: int = 50,
    lines: CostLines | None = None,
) -> Report:
    """Fits, and reports what it comes to for each class of products, and the lines of the sources.

    Args:
        fields: see `wanted`.
        hold_out: the shapes that are judged alone, not fitted: see `held_out`.
        seed: of their choice, or of the sweep.

    Raises:
        ValueError: no row can be fitted; see also `wanted` and `held_out`.
    """
    lines = lines or CostLines()
    everything = measurements.rows
    kept = held_out(everything, hold_out, seed)
    fitted = [one for one in everything if one.row["shape"] not in kept]
    if not fitted:
        raise ValueError(f"no row can be fitted; {'; '.join(_left_out(measurements)) or 'there are none'}")
    numbers = wanted(lines, fitted, fields)
    found = fit(lines, fitted, numbers, iterations)
    rows: list[Row] = []
    summary = _left_out(measurements)
    for name in CLASSES:
        for part, inside in (("fit", False), ("held-out shapes", True)):
            some = [one for one in everything if one.cost_class == name and (one.row["shape"] in kept) == inside]
            for when, values in (("today's", {}), ("fitted", found.values)) if some else ():
                judged = judge(lines, some, values)
                rows.append({"cost_class": name, "part": part, "when": when} | _figures(judged))
                if when == "fitted" and judged.worst is not None and judged.worst.excess > 0:
                    summary += [f"{name}, {part}:", *gpu_report.choice_summary(judged.choices)]
    if kept:
        summary.append(f"Held out: {', '.join(sorted(kept))}")
    if not any(row["cells"] for row in rows):
        summary.append(
            "No cell has several tactics: choices can't be judged, and numbers that fit the chosen tactics alone may "
            "spoil them. Measure with --tactics all."
        )
    summary += _left_alone(lines, everything, found)
    summary += ["", *lines.printed([one.place for one in numbers], found.values)]
    facts = {"GPU": sorted({one.gpu for one in everything}), "fitted": len(found.values)}
    return Report("Constants of the cost model", facts, _COLUMNS, rows, summary)


def _figures(judged: Judgement) -> Row:
    errors, worst = judged.errors, judged.worst
    return {
        "rows": len(errors),
        "mean_error": sum(errors) / len(errors) if errors else None,
        "largest_error": max(errors, default=None),
        "cells": len(judged.choices),
        "mean_loss": judged.mean_loss,
        "worst_loss": None if worst is None else worst.excess,
    }


def _left_out(measurements: Measurements) -> list[str]:
    return [
        f"{scheme}: {count} rows left out: {why}"
        for scheme, reasons in measurements.left_out.items()
        for why, count in reasons.items()
    ]


def _left_alone(lines: CostLines, rows: Sequence[Measured], found: Fit) -> list[str]:
    """In words: which numbers no row sees, and which fitted ones serve products of which there are no rows."""
    result = []
    for place in dict.fromkeys(one.place for one in found.unseen):
        unseen = ", ".join(one.field for one in found.unseen if one.place == place)
        result.append(f"{place}: no row depends on {unseen}: left alone")
    for name in CLASSES:
        if all(one.cost_class != name for one in rows):
            shared = [one.name for one in found.values if one in lines.lines_of[name].values()]
            result += [f"{name} takes these too, and has no rows: {', '.join(shared)}"] if shared else []
    return result
