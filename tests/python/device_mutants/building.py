"""Compiles the extension from the commands that CMake writes down, whole or with a fault in one unit of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.python.device_mutants.mutant import REPOSITORY, Mutant

HOST = ("qcutlass_host", "_C")
DEVICE = ("qcutlass_cuda", "qcutlass_wgmma")
DEPENDENCIES = {"-MD": 1, "-MT": 2, "-MF": 2}  # options that write them, and how many words each takes


def output_of(*command: str, cwd: Path | None = None) -> str:
    """What a program prints; RuntimeError with all of it if it fails."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)[:2000]}\n{result.stdout}{result.stderr}")
    return result.stdout


@dataclass(frozen=True)
class Unit:
    """A translation unit.

    Attributes:
        target: of CMake, that it belongs to.
        name: of its source, without the suffix.
        words: its compile command.
    """

    target: str
    name: str
    directory: Path
    words: tuple[str, ...]

    @classmethod
    def of(cls, entry: dict[str, str]) -> Unit:
        """From an entry of compile_commands.json."""
        target = entry["output"].partition("CMakeFiles/")[2].partition(".dir/")[0]
        return cls(target, Path(entry["file"]).stem, Path(entry["directory"]), tuple(shlex.split(entry["command"])))

    def command(self, out: Path, sources: Path | None = None, traps: bool = False) -> list[str]:
        """Compiles to `out`, from another copy of `cpp` if it is given."""
        words: list[str] = []
        left = iter(self.words)
        for word in left:
            if word in DEPENDENCIES:
                for _ in range(DEPENDENCIES[word] - 1):
                    next(left)
            elif word == "-o":
                next(left)
                words += ["-o", str(out)]
            elif not (traps and word == "-DNDEBUG"):
                words.append(word)
        if sources is None:
            return words
        return [word.replace(str(REPOSITORY / "cpp"), str(sources)) for word in words]

    def compile(self, out: Path, sources: Path | None = None, traps: bool = False) -> Path:
        output_of(*self.command(out, sources, traps), cwd=self.directory)
        return out


@dataclass
class Build:
    """A configured build, and what all extensions share.

    Attributes:
        folder: where everything is written.
        library: libqcutlass_cuda.a of the same sources; None: it is compiled.
        pool: where compilers run.
        objects: where units with faults are kept, for other runs and other machines.
    """

    folder: Path
    library: Path | None
    pool: ThreadPoolExecutor
    objects: Path
    linked: Future[list[str]] = field(init=False)

    @cached_property
    def units(self) -> list[Unit]:
        """Those of all targets."""
        tree = self.folder / "cmake"
        command = ["cmake", "-S", str(REPOSITORY), "-B", str(tree), "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
        command += [
            "-DQCUTLASS_CUDA=ON",
            "-DQCUTLASS_CUDA_ARCHITECTURES=90a-real",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DQCUTLASS_CUTLASS_DIR={os.environ.get('QCUTLASS_CUTLASS_DIR', '')}",
        ]
        output_of(*command, *(["-G", "Ninja"] if shutil.which("ninja") else []))
        return [Unit.of(entry) for entry in json.loads((tree / "compile_commands.json").read_text())]

    def begin(self) -> None:
        """Starts what every extension is linked from."""
        targets = HOST if self.library is not None else HOST + DEVICE
        newest = max(path.stat().st_mtime for path in (REPOSITORY / "cpp").rglob("*"))
        wanted = [unit for unit in self.units if unit.target in targets]
        objects: dict[str, list[Future[Path]]] = {target: [] for target in targets}
        for unit in sorted(wanted, key=lambda unit: unit.target not in DEVICE):  # kernels take longest
            out = self.folder / "objects" / unit.target / f"{unit.name}{'.cu' if unit.target in DEVICE else ''}.o"
            out.parent.mkdir(parents=True, exist_ok=True)
            kept = out.exists() and out.stat().st_mtime > newest  # of a run before
            objects[unit.target].append(self.pool.submit(Path, out) if kept else self.pool.submit(unit.compile, out))
        self.linked = self.pool.submit(self.link_inputs, objects)  # behind them all: it finds a thread to wait in

    def link_inputs(self, objects: dict[str, list[Future[Path]]]) -> list[str]:
        """The objects and libraries of an extension."""
        paths = {target: [str(future.result()) for future in futures] for target, futures in objects.items()}
        library = self.library
        if library is None:
            library = self.folder / "libqcutlass_cuda.a"
            library.unlink(missing_ok=True)
            output_of("ar", "rcs", str(library), *(path for target in DEVICE for path in paths[target]))
        return [*paths["_C"], str(library), *paths["qcutlass_host"]]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of the library's members by their names: large ones take long to compile."""
        if self.library is None:
            return {}
        lines = [line.split() for line in output_of("ar", "tv", str(self.library)).splitlines()]
        return {words[-1].partition(".")[0]: int(words[2]) for words in lines}

    @cached_property
    def runtime(self) -> list[str]:
        """Where CMake found the CUDA runtime."""
        (found,) = (self.folder / "cmake" / "CMakeFiles").glob("*/CMakeCUDACompiler.cmake")
        lists = re.findall(r'^set\(CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES "(.*)"\)', found.read_text(), re.MULTILINE)
        return [f"-L{folder}" for folders in lists for folder in folders.split(";") if folder]

    def link(self, site: Path, mutant: Path | None = None) -> str:
        """Makes the extension in a folder of its own with the package; returns what the linker read.

        The object `mutant` stands before the library, whose member of the same unit is then not taken."""
        package = site / "qcutlass"
        package.mkdir(parents=True)
        for source in (REPOSITORY / "python" / "qcutlass").iterdir():
            if source.suffix != ".so":
                (package / source.name).symlink_to(source)
        inputs = [*([] if mutant is None else [str(mutant)]), *self.linked.result()]
        return output_of(
            os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-Wl,--exclude-libs,ALL", "-Wl,--trace,--trace",
            "-o", str(extension_of(site)), *inputs, *self.runtime, "-lcudart_static", "-lrt", "-lpthread", "-ldl",
        )  # fmt: skip

    def build(self, mutant: Mutant | None) -> Path:
        """The extension with a fault, or without one."""
        folder = self.folder / ("control" if mutant is None else slug(mutant))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        site = folder / "site"
        if mutant is None:
            self.link(site)
            return extension_of(site)
        read = self.link(site, self.compiled(mutant, folder))
        if re.search(rf"(?<!\w){mutant.unit}\.cu\.o", read):
            raise RuntimeError(f"{mutant.unit} was linked twice, with the fault and without it")
        return extension_of(site)

    def compiled(self, mutant: Mutant, folder: Path) -> Path:
        """The unit with the fault, as it was compiled from the same text with the same options, or anew."""
        (unit,) = (unit for unit in self.units if unit.name == mutant.unit and unit.target in DEVICE)
        command = unit.command(folder, traps=mutant.traps)
        options = [word for word in command if word.startswith("-") and "/" not in word]  # paths are the machine's
        parts = (self.digest, mutant.mutated().encode(), " ".join(options).encode())
        out = self.objects / f"{slug(mutant)}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.o"
        if not out.exists():
            sources = folder / "cpp"
            shutil.copytree(REPOSITORY / "cpp", sources)
            (sources / "src" / mutant.file).write_text(mutant.mutated())
            self.objects.mkdir(parents=True, exist_ok=True)
            whole = out.with_suffix(f".{os.getpid()}")  # which may be on another disk than the folder
            shutil.move(unit.compile(folder / "mutant.o", sources, mutant.traps), whole)
            whole.replace(out)
        return out

    @cached_property
    def digest(self) -> bytes:
        """Of all sources, by their names, and of the compiler."""
        files = sorted(path for path in (REPOSITORY / "cpp").rglob("*") if path.is_file())
        found = hashlib.sha256(output_of("nvcc", "--version").encode())
        for path in files:
            found.update(f"{path.relative_to(REPOSITORY)} {path.stat().st_size}\n".encode() + path.read_bytes())
        return found.digest()

    def start(self, mutant: Mutant | None) -> Future[Path]:
        return self.pool.submit(self.build, mutant)


def extension_of(site: Path) -> Path:
    return site / "qcutlass" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def slug(mutant: Mutant) -> str:
    """A folder's name."""
    return "_".join("".join(c if c.isalnum() else " " for c in f"{mutant.loop} {mutant.name}").split())


def by_time(build: Build) -> Callable[[Mutant], Any]:
    """An order of mutants in which those that take longest to compile come first."""
    return lambda mutant: -build.sizes.get(mutant.unit, 0)
