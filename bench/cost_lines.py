"""The numbers in the sources of the cost model, by name: which product sees which, and the lines with other ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from qcutlass import _C

PLAN: Final = Path(__file__).parents[1] / "cpp" / "src" / "plan"
"""The folder of costs.h and gpu_class.h."""
CLASSES: Final = (
    "weight_only", "native_int4", "eight_by_eight", "blockwise",
    "four_by_eight", "scaled_groups", "float_scales", "minimums",
)  # fmt: skip
"""Classes of products; the costs of each are what the function `<class>_costs` of costs.h returns."""
RATES: Final = ("dram", "l2", "clock", "mma", "dense", "dequantize")
"""The rates of a row of gpu_class.h."""

Values: TypeAlias = Mapping["Number", float]

_FUNCTION: Final = re.compile(r"^constexpr (\w+)Costs (\w+_costs)\(\) \{\n(.*?)^\}\n", re.MULTILINE | re.DOTALL)
_PREFIXES: Final = {"Product": "", "Wgmma": "wgmma"}
_STATEMENT: Final = re.compile(
    r"^  (?:\w+ )?c(?:\.([\w.]+))? = (?:(\w+)\(\)(?:\.([\w.]+))?|([-+.\de]+));", re.MULTILINE
)
_ROW: Final = re.compile(r"^ +(gpu\(\d+, \d+\)).*$", re.MULTILINE)


@dataclass(frozen=True)
class Number:
    """A number in a source.

    Attributes:
        place: where it stands: a function of costs.h, or a row of gpu_class.h, "gpu(90, 132)".
        field: what it is, by the names of `_C.costs`; a rate as "gpu.dram".
        text: as it is written.
        start: of the text in its source.
    """

    place: str
    field: str
    text: str
    start: int

    @property
    def value(self) -> float:
        return float(self.text)

    @property
    def name(self) -> str:
        return f"{self.place}: {self.field}"


def written(value: float) -> str:
    """A number as costs.h has it: three digits.

    Example:
        >>> [written(value) for value in (0.7318, 126.0, 1.4803e-4, 0.0064712, 3.0, 1234.5)]
        ['0.732', '126', '1.48e-4', '0.00647', '3', '1230']
    """
    digits, exponent = f"{value:.2e}".split("e")
    if int(exponent) >= -3:
        return f"{float(f'{digits}e{exponent}'):.9g}"
    return f"{float(digits):g}e{int(exponent)}"


class CostLines:
    """The numbers of costs.h and gpu_class.h.

    A class's function may begin with another one's costs, and take its wgmma costs, or a field, from a third: a number
    is seen by every class that does not replace it.

    Attributes:
        numbers: those of costs.h in its order, then the rates in each row of gpu_class.h.
        lines_of: for each class, the fields that a number of costs.h gives, and which one.
    """

    def __init__(self, folder: Path = PLAN) -> None:
        """Raises ValueError if costs.h has not the form that this reads, or is not what the extension was built of."""
        self._costs: Final = (folder / "costs.h").read_text()
        self._gpus: Final = (folder / "gpu_class.h").read_text()
        self.numbers: Final[list[Number]] = []
        self._functions: Final[dict[str, tuple[int, int]]] = {}
        fields: dict[str, dict[str, Number]] = {}
        prefixes: dict[str, str] = {}
        for function in _FUNCTION.finditer(self._costs):
            kind, name, _ = function.groups()
            self._functions[name] = function.span()
            prefixes[name] = _PREFIXES[kind]
            found: dict[str, Number] = {}
            for line in _STATEMENT.finditer(self._costs, function.start(3), function.end(3)):
                field, base, member, text = line.groups()
                to = _path(prefixes[name], field)
                if base is not None:  # replaces all, all of a main loop, or one
                    found = {f: one for f, one in found.items() if not _within(f, to)}
                    source = _path(prefixes[base], member)
                    found |= {to + f[len(source) :]: one for f, one in fields[base].items() if _within(f, source)}
                else:
                    found[to] = Number(name, to, text, line.start(4))
                    self.numbers.append(found[to])
            fields[name] = found
        self.lines_of: Final = {name: fields.get(f"{name}_costs", {}) for name in CLASSES}
        self._bases: Final = {name: _C.costs(name) for name in CLASSES}
        for name in CLASSES:
            stale = [f for f, one in self.lines_of[name].items() if self._bases[name].get(f) != one.value]
            if stale or not self.lines_of[name]:
                raise ValueError(
                    f"{folder / 'costs.h'}: {name}_costs: expected what the extension was built of, which has another "
                    f"{', '.join(stale) or 'form'}; rebuild it"
                )
        for row in _ROW.finditer(self._gpus):
            for rate in RATES:
                found_rate = re.compile(rf"\.{rate}\(([.\d]+)\)").search(self._gpus, row.start(), row.end())
                if found_rate is None:
                    raise ValueError(f"{folder / 'gpu_class.h'}: {row[1]}: expected a rate {rate}")
                self.numbers.append(Number(row[1], f"gpu.{rate}", found_rate[1], found_rate.start(1)))

    def of_gpu(self, device: _C.DeviceTraits) -> list[Number]:
        """The rates of the row that a GPU has."""
        row = "gpu({}, {})".format(*_C.gpu_class(device))
        return [one for one in self.numbers if one.place == row]

    def seen(self, cost_class: str, device: _C.DeviceTraits) -> set[Number]:
        """The numbers that the times of such products on such a GPU may depend on."""
        return {*self.lines_of[cost_class].values(), *self.of_gpu(device)}

    def costs(self, cost_class: str, device: _C.DeviceTraits, values: Values) -> dict[str, float]:
        """The costs of a class and the rates of a GPU, as `_C.predict` takes them, with other values of some."""
        result = dict(self._bases[cost_class])
        result |= {field: values[one] for field, one in self.lines_of[cost_class].items() if one in values}
        return result | {one.field: values.get(one, one.value) for one in self.of_gpu(device)}

    def printed(self, places: Sequence[str], values: Values) -> list[str]:
        """The functions and rows of these names with other values of some numbers, in the order of the sources."""
        parts = [
            _replaced(self._costs, span, [one for one in self.numbers if one.place == name], values)
            for name, span in self._functions.items()
            if name in places
        ]
        for row in _ROW.finditer(self._gpus):
            if row[1] in places:
                inside = [one for one in self.numbers if one.place == row[1]]
                parts.append(_replaced(self._gpus, row.span(), inside, values))
        return "\n".join(parts).splitlines()


def _path(*names: str | None) -> str:
    return ".".join(name for name in names if name)


def _within(field: str, path: str) -> bool:
    """Whether a field is what a path names, or in it; all fields are in the empty one."""
    return not path or field == path or field.startswith(f"{path}.")


def _replaced(source: str, span: tuple[int, int], numbers: Sequence[Number], values: Values) -> str:
    """A part of a source, where numbers that have other values are written anew."""
    start, end = span
    text = ""
    for one in sorted(numbers, key=lambda one: one.start):
        value = values.get(one, one.value)
        text += source[start : one.start] + (one.text if value == one.value else written(value))
        start = one.start + len(one.text)
    return text + source[start:end]
