"""What a mutant is, and the tests that are to catch it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = REPOSITORY / "cpp" / "src"


class Tests(NamedTuple):
    """GPU tests of a file of tests/python whose names hold all of some words."""

    file: str
    words: tuple[str, ...]

    def among(self, collected: Iterable[str]) -> list[str]:
        """Their ids."""
        begin = f"tests/python/{self.file}::"
        return [i for i in collected if i.startswith(begin) and all(word in i for word in self.words)]


def tests(file: str, *words: str) -> Tests:
    return Tests(file, words)


def tactic(family: str, name: str) -> Tests:
    """Both oracles by one tactic."""
    return tests("test_cuda_cases.py", f"test_every_tactic[{family}", f"_{name}]")


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: what is wrong.
        loop: the kernel or main loop that has it.
        file: below cpp/src.
        text: what stands there, once.
        replacement: what stands there instead.
        unit: the translation unit that is compiled with it, a member of the library without its suffixes.
        tests: some of them must fail.
        traps: compiled so that a wait that never ends becomes an error.
    """

    name: str
    loop: str
    file: str
    text: str
    replacement: str
    unit: str
    tests: tuple[Tests, ...]
    traps: bool = False

    def mutated(self) -> str:
        """The whole file with the fault."""
        source = (SOURCES / self.file).read_text()
        found = source.count(self.text)
        if found != 1:
            raise ValueError(f"{self.name}: {self.file} has {found} times, not once: {self.text}")
        return source.replace(self.text, self.replacement)

    def selected(self, collected: Iterable[str]) -> list[str]:
        """The ids of its tests."""
        known = list(collected)
        return [name for part in self.tests for name in part.among(known)]
