"""Measured tactics as the cost model sees them: rows of `python -m bench gpu --tactics all --json`, without a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import gpu_report, schemes, shapes
from bench.gpu import layer_of
from bench.layer import Call, plan_name
from bench.report import Row
from qcutlass import _C
from qcutlass.products import selection

_MOST: Final = 1 << 24  # rows, channels, columns: sizes of what is no tensor yet must not overflow


@dataclass(frozen=True)
class Measured:
    """A tactic with its split, timed.

    Attributes:
        row: of the file.
        run: the file: only times of one run are compared with each other.
        gpu: name of its GPU among those that selection knows.
        cost_class: whose constants its prediction takes.
        considered: whether selection, left to itself, would have it among its candidates.
        candidate: its plan, and what the extension's own constants predict.
    """

    row: Row
    run: Path
    gpu: str
    cost_class: str
    arguments: _C.GemmArguments
    candidate: _C.Candidate
    considered: bool

    @property
    def microseconds(self) -> float:
        return float(self.row["qcutlass_us"])

    @property
    def device(self) -> _C.DeviceTraits:
        return selection.GPUS[self.gpu]

    def predicted(self, costs: Mapping[str, float]) -> float:
        """Microseconds that the model predicts with these constants and rates."""
        return _C.predict(self.arguments, self.device, self.candidate.plan, costs).total


@dataclass(frozen=True)
class Measurements:
    """All rows of some files.

    Attributes:
        left_out: why rows say nothing to the model, and how many, for each scheme.
    """

    rows: list[Measured]
    left_out: dict[str, Counter[str]]


def gpu_named(name: str) -> str:
    """The GPU that selection knows under a part of this name, say "h200" for "NVIDIA H200".

    Raises:
        ValueError: there is none.
    """
    for known in selection.GPUS:
        letters = r"[\s_-]*".join(known)
        if re.search(rf"{letters}(?!\d)", name.lower()):
            return known
    raise ValueError(
        f"GPU {name!r}: expected one of {', '.join(selection.GPUS)}; name one with --device, or add a row to GPUS in "
        f"{Path(selection.__file__).name}"
    )


def read(paths: Sequence[Path], device: str | None = None) -> Measurements:
    """The rows of files that `python -m bench gpu --json` wrote.

    Args:
        device: the GPU, as `gpu_named` takes it; None: the one that each file names.

    Raises:
        ValueError: a file is something else, is damaged, or its GPU is not known.
    """
    found = Measurements([], {})
    for path in paths:
        content = gpu_report.read(path)
        try:
            gpu = gpu_named(device or content["facts"]["GPU"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        layers: dict[tuple[str, str], list[Row]] = {}
        for row in content["rows"]:
            layers.setdefault((row["scheme"], row["shape"]), []).append(row)
        for (scheme, shape), rows in layers.items():
            try:
                _add(found, path, gpu, rows)
            except ValueError as error:
                raise ValueError(f"{path}: {scheme} {shape}: {error}") from error
    return found


def _add(found: Measurements, path: Path, gpu: str, rows: Sequence[Row]) -> None:
    """Adds the rows of a layer."""
    [shape], scheme = shapes.parse([rows[0]["shape"]]), schemes.parse(rows[0]["scheme"])
    ms = dict.fromkeys(row["m"] for row in rows)
    if max(*shape, *ms) > _MOST:
        raise ValueError(f"expected sizes up to {_MOST}, got M = {max(ms)}")
    without_values = FakeTensorMode()
    with without_values:
        layer = layer_of(scheme, shape, max(ms), "cpu")
    left_out = found.left_out.setdefault(scheme.name, Counter())
    for m in ms:
        of_m = [row for row in rows if row["m"] == m]
        try:
            with without_values:
                call = layer.call(m)
            arguments = _arguments(call)
            every = {_name(one.plan) for one in _C.candidates(arguments, selection.GPUS[gpu], dense=True)}
        except (NotImplementedError, ValueError) as error:
            left_out[str(error)] += len(of_m)
            continue
        for row in of_m:
            tactic, _, split = row["tactic"].partition(" split ")
            try:
                candidates = _C.candidates(arguments, selection.GPUS[gpu], tactic, int(split or 1), dense=True)
            except (NotImplementedError, ValueError):
                left_out["no such tactic in this build"] += 1
                continue
            one = candidates[0]
            if _name(one.plan) != row["tactic"]:
                left_out["another split than the plan has now"] += 1
                continue
            cost_class = _C.cost_class(arguments)
            found.rows.append(Measured(row, path, gpu, cost_class, arguments, one, row["tactic"] in every))


def _name(plan: _C.Plan) -> str:
    return plan_name(plan.tactic, plan.split_k)


def _arguments(call: Call) -> _C.GemmArguments:
    """Those of a call whose tensors have shapes and types alone."""

    def described(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    options = {name: described(value) for name, value in call.options.items()}
    return selection.arguments_of(call.function, *map(described, call.operands), **options)
