"""The rules of the source tree that reviewers should not have to remember."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qcutlass import _C

SOURCE_SUFFIXES = {".h", ".cc", ".cpp", ".cu", ".cuh", ".in", ".py", ".pyi", ".cmake", ".toml", ".md", ".yml", ".yaml"}
CXX_SUFFIXES = {".h", ".cc", ".cpp", ".cu", ".cuh"}

# Checks of runtime calls, the registry of kernel families, attributes that compilers spell differently.
MACRO_LIMIT = 12


def sources(repository: Path, *folders: str, suffixes: set[str]) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((repository / folder).rglob("*")):
            if path.is_file() and path.suffix in suffixes and "build" not in path.relative_to(repository).parts:
                yield path


def code(repository: Path) -> list[Path]:
    found = [
        *sources(
            repository, "cpp", "python", "tests", "bench", "docs", "tools", "third_party", suffixes=SOURCE_SUFFIXES
        )
    ]
    found += [path for path in sorted(repository.iterdir()) if path.is_file() and path.suffix in SOURCE_SUFFIXES]
    assert len(found) > 20, "the source tree was not found"
    return found


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), flags=re.MULTILINE)


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def offenders(paths: Iterator[Path] | list[Path], pattern: str, root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(pattern, line)
    ]


def test_no_file_is_over_500_lines(repository: Path) -> None:
    lengths = {str(path.relative_to(repository)): len(path.read_text().splitlines()) for path in code(repository)}
    assert {path: length for path, length in lengths.items() if length > 500} == {}


def test_public_headers_include_the_standard_library_and_each_other_only(repository: Path) -> None:
    for path in sources(repository, "cpp/include", suffixes=CXX_SUFFIXES):
        for name in includes(path):
            assert re.fullmatch(r"qcutlass/\w+\.h|[a-z_]+", name), f"{path.name} includes {name}"


ROOMS = {  # folder of cpp/src: the folders it includes, beside itself and the public headers
    "plan": set(),
    "host": {"plan"},
    "cutlass_ext": {"plan"},
    "cuda": {"plan", "cutlass_ext"},
    "python": {"plan"},
}
LIBRARIES = {"cutlass": {"cutlass_ext", "cuda"}, "cute": {"cutlass_ext", "cuda"}, "pybind11": {"python"}}


def test_rooms_of_the_core_include_those_below_them_only(repository: Path) -> None:
    source = repository / "cpp/src"
    folders = {path.name for path in source.iterdir() if path.is_dir()}
    assert folders == set(ROOMS)
    found, seen = [], set()
    for path in sources(repository, "cpp/src", suffixes=CXX_SUFFIXES):
        room = path.relative_to(source).parts[0]
        for name in includes(path):
            first, _, rest = name.partition("/")
            if first in ROOMS and rest and (source / name).exists():
                seen.add((room, first))
                allowed = first == room or first in ROOMS[room]
            else:
                allowed = room in LIBRARIES.get(first, {room}) and first not in {"torch", "ATen", "c10"}
                allowed = allowed and (not name.startswith("cuda_") or room in {"cutlass_ext", "cuda"})
            if not allowed:
                found.append(f"{path.relative_to(repository)} includes {name}")
    assert found == []
    assert {(room, below) for room, rooms in ROOMS.items() for below in rooms} <= seen, "a direction nobody takes"


PACKAGE_ROOMS = {  # file or folder of the package: those that it imports beside itself
    "_main_interpreter": set(),
    "version": {"_C"},
    "errors": {"_C"},
    "defaults": set(),
    "quantized": {"products"},
    "testing": set(),
    "products": {"_C", "errors"},
    "schemes": {"defaults", "errors", "products"},
    "algorithms": {"defaults", "products", "quantized", "schemes"},
    "blockwise": {"algorithms", "products"},
    "moe": {"products"},
    "formats": {"errors", "products", "quantized", "version"},
    "layers": {
        "algorithms", "defaults", "errors", "formats", "moe", "products", "quantized", "schemes",
        "version",
    },
    "models": {"algorithms", "defaults", "errors", "formats", "layers", "products", "schemes", "version"},
    "tuning": {"_C", "errors", "layers", "products", "schemes"},
    "cli": {
        "_C", "algorithms", "defaults", "errors", "formats", "layers", "models", "products", "quantized", "schemes",
        "testing", "tuning", "version",
    },
    "vllm": {"errors", "formats", "layers", "products", "quantized"},
    "_registration": {"models", "products"},
    "_public": {"algorithms", "layers", "models", "products", "quantized", "schemes", "tuning"},
    "__init__": {"_main_interpreter", "_public", "_registration", "blockwise", "errors", "moe", "version"},
    "__main__": {"cli"},
}  # fmt: skip


def module_imports(package: Path, path: Path) -> set[str]:
    """Files of the package, without their suffix, that a file imports anywhere: in functions and for types, too."""

    def place(*names: str) -> str | None:
        found = package.parent.joinpath(*names)
        for file in (found / "__init__.py", found.with_name(f"{found.name}.py"), found.with_name(f"{found.name}.pyi")):
            if file.is_file():
                return str(file.relative_to(package).with_suffix(""))
        return None

    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports name their modules in full"
            modules |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            modules |= {name.value for name in node.args if isinstance(name, ast.Constant)}
    parts = [name.split(".") for name in modules if name.partition(".")[0] == package.name]
    return {place(*names) or place(*names[:-1]) or ".".join(names) for names in parts}


@pytest.fixture(scope="module")
def imports(repository: Path) -> dict[str, set[str]]:
    package = repository / "python/qcutlass"
    paths = sorted(package.rglob("*.py"))
    assert len(paths) > 80
    return {str(path.relative_to(package).with_suffix("")): module_imports(package, path) for path in paths}


def test_rooms_of_the_package_import_those_below_them_only(imports: dict[str, set[str]]) -> None:
    arrows = [(name.partition("/")[0], to.partition("/")[0]) for name, found in imports.items() for to in found]
    assert {name.partition("/")[0] for name in imports} == set(PACKAGE_ROOMS)
    taken = {(room, other) for room, other in arrows if room != other}
    allowed = {(name, below) for name, rooms in PACKAGE_ROOMS.items() for below in rooms}
    assert sorted(taken - allowed) == []
    assert sorted(allowed - taken) == [], "directions nobody takes"
    left = {name: rooms - {"_C"} for name, rooms in PACKAGE_ROOMS.items()}
    assert circle(left) == []


def test_files_of_the_package_import_each_other_in_no_circle(imports: dict[str, set[str]]) -> None:
    assert circle({name: found & set(imports) for name, found in imports.items()}) == []


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """The nodes that are left when those without arrows to others are taken away, again and again."""
    left = dict(arrows)
    while done := {name for name, others in left.items() if not others & (set(left) - {name})}:
        left = {name: others for name, others in left.items() if name not in done}
    return sorted(left)


def test_no_function_tells_kinds_of_layers_apart(repository: Path) -> None:
    """One question may refuse a kind; two make a ladder, where a method of the classes or a table belongs."""
    kinds = re.compile(r"\b(\w+Linear|CanonicalInt8|WeightOnly|W8A8|FP8|Blockwise)\b")
    found = []
    for path in sources(repository, "python", suffixes={".py"}):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            tests = [
                ast.unparse(node)
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
            ]
            tests = [test for test in tests if kinds.search(test)]
            if len(tests) > 1:
                found.append(f"{path.name}: {function.name}: {tests}")
    assert found == []


def test_only_the_bindings_include_pybind11(repository: Path) -> None:
    users = {path for path in sources(repository, "cpp", suffixes=CXX_SUFFIXES) if "pybind11" in path.read_text()}
    assert users
    assert all(path.is_relative_to(repository / "cpp/src/python") for path in users), users


def test_kernels_use_nothing_that_traps_on_older_gpus(repository: Path) -> None:
    """CUTLASS's barrier wrappers compile for any architecture, but to a trap below sm_90; one header is for sm_90a."""
    every = sources(repository, "cpp/src", suffixes=CXX_SUFFIXES)
    paths = [path for path in every if path.name != "mbarrier.h"]
    assert offenders(paths, r"cutlass/arch/barrier\.h|\bNamedBarrier::", repository) == []


def test_devices_are_queried_for_the_table_of_their_traits_alone(repository: Path) -> None:
    """Queries take microseconds, and some are not allowed under graph capture: no launch makes one."""
    every = sources(repository, "cpp/src", suffixes=CXX_SUFFIXES)
    paths = [path for path in every if path.name not in {"device.h", "device.cu"}]
    query = r"\bcuda(GetDevice|DeviceGet|Occupancy)\w*\s*\("
    assert offenders(paths, query, repository) == []


def test_the_library_takes_no_memory_of_a_device(repository: Path) -> None:
    """Workspaces are its callers' tensors: no product allocates, waits for an allocator, or leaks."""
    paths = list(sources(repository, "cpp", suffixes=CXX_SUFFIXES))
    assert len(paths) > 50
    pattern = r"\b(cuda(Malloc|Free|MemPool|HostAlloc|HostRegister)|cuMem(Alloc|Free|Create|Pool|Host))\w*"
    assert re.search(pattern, "  cudaMallocAsync(&p, 8, stream);")
    assert offenders(paths, pattern, repository) == []


def test_no_code_is_switched_off(repository: Path) -> None:
    paths = list(sources(repository, "cpp", "tests/cpp", suffixes=CXX_SUFFIXES))
    assert offenders(paths, r"^\s*#\s*if\s+0\b", repository) == []


def test_macros_are_few(repository: Path) -> None:
    names = [
        f"{path.relative_to(repository)}: {name}"
        for path in sources(repository, "cpp", suffixes=CXX_SUFFIXES)
        for name in re.findall(r"^\s*#\s*define\s+(\w+)", without_comments(path.read_text()), flags=re.MULTILINE)
    ]
    assert len(names) <= MACRO_LIMIT, names


def test_generated_files_are_not_committed(repository: Path) -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=repository, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip(f"needs a git checkout: {listing.stderr.strip()}")
    assert [name for name in listing.stdout.split() if name.endswith((".so", ".o", ".a", ".pyc", ".whl"))] == []


def test_tolerances_live_in_one_module(repository: Path) -> None:
    this = Path(__file__)
    paths = [path for path in sources(repository, "python", "tests/python", "bench", suffixes={".py"}) if path != this]
    pattern = r"\b(rtol|atol|rel_tol|abs_tol)\b|allclose|isclose|torch\.testing|pytest\.approx"
    assert offenders(paths, pattern, repository) == []
    assert (
        offenders(
            [*sources(repository, "tests/cpp", suffixes=CXX_SUFFIXES)], r"_NEAR\(|_(FLOAT|DOUBLE)_EQ\(", repository
        )
        == []
    )


def test_nothing_names_a_machine_or_its_paths(repository: Path) -> None:
    this = Path(__file__)
    paths = [path for path in code(repository) if path != this]
    assert offenders(paths, r"(?<![\w.])/(work|home|root|tmp|mnt|Users)/\w", repository) == []


def functions_of(path: Path) -> list[ast.FunctionDef]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function, nested functions left out."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def test_no_test_returns_early(repository: Path) -> None:
    paths = list(sources(repository, "tests/python", suffixes={".py"}))
    assert len(paths) > 8
    found = [
        f"{path.name}: {function.name}"
        for path in paths
        for function in functions_of(path)
        if any(isinstance(node, ast.Return) for node in own_nodes(function))
    ]
    assert found == []


def test_every_skip_says_why(repository: Path) -> None:
    paths = list(sources(repository, "tests/python", suffixes={".py"}))
    assert offenders(paths, r"pytest\.skip\(\s*\)|mark\.skip\s*$|mark\.skip\(\s*\)|mark\.xfail", repository) == []


def test_every_test_asserts(repository: Path) -> None:
    checks = re.compile(
        r"\bassert|pytest\.raises|pytest\.warns|\.(close|equal|identity|check|opcheck)\(|\bassert_\w+\(|opcheck\("
    )
    found = [
        f"{path.name}: {function.name}"
        for path in sources(repository, "tests/python", suffixes={".py"})
        for function in functions_of(path)
        if not checks.search(ast.unparse(function))
    ]
    assert found == []


@pytest.fixture(scope="module")
def extension() -> Path:
    assert _C.__file__ is not None
    return Path(_C.__file__)


def tool_output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip(f"needs the program {command[0]}")


@pytest.mark.skipif(sys.platform != "linux", reason="needs ELF tools")
def test_extension_needs_no_torch_symbol(extension: Path) -> None:
    symbols = tool_output("nm", "--dynamic", "--undefined-only", str(extension))
    assert "PyObject" in symbols or "Py_" in symbols
    assert [line for line in symbols.splitlines() if re.search(r"c10|at\d*::|_ZN2at|torch|_ZN3c10", line)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs ELF tools")
def test_extension_exports_its_entry_point_alone(extension: Path) -> None:
    symbols = tool_output("nm", "--dynamic", "--defined-only", str(extension))
    exported = [line.split()[-1] for line in symbols.splitlines() if line.split()[-2] in "TDB"]
    assert "PyInit__C" in exported
    assert [name for name in exported if "qcutlass" in name] == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs ELF tools")
def test_extension_links_no_torch_python_or_cuda_runtime(extension: Path) -> None:
    libraries = tool_output("ldd", str(extension))
    assert "libc" in libraries
    assert [
        line for line in libraries.splitlines() if re.search(r"torch|libc10|libpython|libcudart|not found", line)
    ] == []
