"""The manual: drawings against packed tensors, messages against the source, snippets and command lines that run."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import io
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from tests.python import manual
from tests.python.device_mutants.table import MUTANTS
from tests.python.formats.fuzz_corpus import subjects
from tests.python.formats.readers import readers

import qcutlass.cli
from qcutlass import _C

PACKINGS = {_C.Packing.W4A16: (4, "16bit"), _C.Packing.W8A16: (8, "16bit"), _C.Packing.W8A8: (8, "int8")}


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawings(repository: Path) -> ModuleType:
    return module_of(repository / "docs" / "layout_drawings.py")


@pytest.fixture(scope="module")
def drawn(drawings: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all drawings, made anew."""
    folder = tmp_path_factory.mktemp("drawn")
    drawings.write(folder)
    return folder


@pytest.fixture(scope="module")
def pages(repository: Path) -> ModuleType:
    return module_of(repository / "docs" / "pages.py")


def packed_tile(packing: _C.Packing, codes: torch.Tensor) -> torch.Tensor:
    """The bytes of a tile, uint8 `[32, 16]`, as users get them."""
    bits, activations = PACKINGS[packing]
    dtype = torch.int8 if activations == "int8" else torch.uint8
    packed = qcutlass.preprocess_weights(codes.to(torch.uint8).view(dtype), bits, activations)
    return packed.view(torch.uint8)[0, 0]


def stored_codes(packing: _C.Packing, codes: torch.Tensor, lane: int) -> list[int]:
    """The codes in a lane's bytes, from low bits to high."""
    lane_bytes = packed_tile(packing, codes)[lane].tolist()
    if PACKINGS[packing][0] == 8:
        return list(lane_bytes)
    return [nibble for byte in lane_bytes for nibble in (byte & 15, byte >> 4)]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("lane", [0, 5, 31])
def test_drawn_lanes_are_those_of_packed_tensors(packing: _C.Packing, lane: int, drawings: ModuleType) -> None:
    row, k = torch.meshgrid(torch.arange(16), torch.arange(_C.tile_k(packing)), indexing="ij")
    found = (stored_codes(packing, codes, lane) for codes in (row, k % 16, k // 16))  # numbers that codes can hold
    assert drawings.stored(packing, lane) == [(n, low + 16 * high) for n, low, high in zip(*found, strict=True)]
    assert all(drawings.lane_of(packing, n, column) == lane for n, column in drawings.stored(packing, lane))


def test_drawn_masks_keep_pairs_of_a_row(drawings: ModuleType) -> None:
    for lane in range(32):
        g, t = divmod(lane, 4)
        pairs = [drawings.masked(_C.Packing.W4A16, lane, shift, mask) for shift, mask in drawings.MASKS]
        corners = [(g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8)]  # of m16n8k16's four registers
        assert pairs == [[(n, k), (n, k + 1)] for n, k in corners]


def texts_of(path: Path) -> list[str]:
    return re.findall(r">([^<>]+)</text>", path.read_text())


def test_every_packing_is_drawn(drawings: ModuleType, drawn: Path, tmp_path: Path) -> None:
    floats = {_C.Packing.E2M1A16, _C.Packing.E4M3A16}  # in the orders of integers of as many bits
    assert set(drawings.PACKINGS) == set(map(_C.Packing, range(len(_C.Packing.__members__)))) - floats
    for packing in PACKINGS:
        numbers = [text for text in texts_of(drawn / f"tile_{packing.name.lower()}.svg") if text.isdigit()]
        if packing == _C.Packing.W8A8:
            columns = [str(k) for lane in range(32) for _, k in drawings.stored(packing, lane)]
            assert "-".join(columns) in "-".join(numbers)
            continue
        lanes = [str(drawings.lane_of(packing, n, k)) for n in range(16) for k in range(_C.tile_k(packing))]
        assert "-".join(lanes) in "-".join(numbers)
    for path in drawings.write(tmp_path, [_C.Packing.W8A8]):
        assert path.read_bytes() == (drawn / path.name).read_bytes()


def test_committed_drawings_are_those_of_the_map(repository: Path, drawn: Path) -> None:
    fresh = {path.name: texts_of(path) for path in drawn.iterdir()}
    assert {path.name: texts_of(path) for path in (repository / "docs/layout").iterdir()} == fresh
    assert all(len(texts) > 8 for texts in fresh.values())


def messages(page: Path) -> list[str]:
    return re.findall(r"^```text\n(.*?)\n```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def python_texts(path: Path) -> list[str]:
    """The strings of a module, with … for the fields of f-strings."""
    return [
        "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


def cxx_texts(path: Path) -> list[str]:
    """The messages that a source file throws, with … for all that is no literal."""
    statements = re.findall(r"""throw \w+\(((?:"[^"]*"|[^"])*?)\);""", path.read_text())
    return ["…".join(re.findall(r'"([^"]*)"', re.sub(r'"\s+"', "", statement))) for statement in statements]


def test_messages_of_troubleshooting_are_those_of_the_source(repository: Path) -> None:
    texts = [text for path in (repository / "python").rglob("*.py") for text in python_texts(path)]
    texts += [text for path in (repository / "cpp" / "src").rglob("*.c[cu]") for text in cxx_texts(path)]
    page = messages(repository / "docs" / "troubleshooting.md")
    assert len(page) > 20
    lost = [message for message in page if not any(says(text, message) for text in texts)]
    assert lost == []


def says(text: str, message: str) -> bool:
    """Whether the fixed parts of a message are in a text, in their order, with something else between them."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip(" .,:(")]
    return re.search(".*?….*?".join(parts), text, flags=re.DOTALL) is not None


def test_lost_messages_are_found() -> None:
    assert says("K = … is odd: pass an even one", "K = … is odd")
    assert not says("K = … is odd: pass an even one", "K = … is even")
    assert not says("K = … is odd: pass an even one", "is odd … K =")
    assert not says("K = … is odd: pass an even one", "K = … is odd … pass an even one")


def notebooks(repository: Path) -> list[Path]:
    return [page for page in (repository / "docs").glob("*.md") if "file_format: mystnb" in page.read_text()]


def test_cells_of_notebooks_are_linted_and_formatted(repository: Path, tmp_path: Path) -> None:
    found = notebooks(repository)
    assert found
    for page in found:
        options_and_cells = re.findall(r"^```\{code-cell\}.*?\n((?::.*\n)*)((?s:.*?))\n```$", page.read_text(), re.M)
        cells = [
            {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": cell}
            for _, cell in options_and_cells
        ]
        assert len(cells) == page.read_text().count("```{code-cell}")
        notebook = tmp_path / f"{page.stem}.ipynb"
        notebook.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}))
        for command in (["check"], ["format", "--diff"]):
            ruff = [sys.executable, "-m", "ruff", *command, "--config", "pyproject.toml", str(notebook)]
            done = subprocess.run(ruff, cwd=repository, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{page.name}: {done.stdout}{done.stderr}"


def test_readme_is_short(repository: Path) -> None:
    assert len((repository / "README.md").read_text().splitlines()) <= 150


def test_every_snippet_is_run(repository: Path) -> None:
    """By .ci/run, by the test that its mark names, or by the tests below."""
    steps = (repository / ".ci/run").read_text()
    for page in manual.pages(repository):
        for snippet in manual.snippets(page):
            mark = snippet.mark
            if mark.startswith("run by "):
                text = (repository / mark.removeprefix("run by ")).read_text()
                assert "run_by(" in text, f"{page.name}: {mark}"
                assert f'"docs/{page.name}"' in text, f"{page.name}: {mark}"
            elif mark and snippet.language in ("bash", "python") and not mark.startswith("not run: "):
                assert re.search(rf"\bcommands {mark}\b", steps), f"{page.name}: .ci/run has no step {mark}"


def runnable(repository: Path) -> list[Path]:
    return [page for page in manual.pages(repository) if any(python_without_mark(s) for s in manual.snippets(page))]


def python_without_mark(snippet: manual.Snippet) -> bool:
    return snippet.language == "python" and not snippet.mark


def test_snippets_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a page in their order, one after the other; what follows one as text is what it prints."""
    monkeypatch.chdir(tmp_path)
    assert len(runnable(repository)) >= 3
    for page in runnable(repository):
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for snippet in filter(python_without_mark, manual.snippets(page)):
            exec(compile(snippet.text, page.name, "exec"), namespace)
            printed = capsys.readouterr().out.splitlines()
            shown = [line for line in snippet.output.splitlines() if line.strip() != "..."]
            assert [line for line in shown if line not in printed] == [], f"{page.name} prints: {printed}"


def test_calls_in_snippets_that_are_not_run_fit(repository: Path) -> None:
    """Their functions of the package exist and take those arguments."""
    for page in manual.pages(repository):
        for snippet in manual.snippets(page):
            if snippet.language == "python" and snippet.mark.startswith("not run: "):
                calls = [node for node in ast.walk(ast.parse(snippet.text)) if isinstance(node, ast.Call)]
                names = [ast.unparse(call.func) for call in calls]
                assert all(name.startswith("qcutlass.") for name in names), names
                for name, call in zip(names, calls, strict=True):
                    function = getattr(qcutlass, name.removeprefix("qcutlass."))
                    keywords = {str(keyword.arg): None for keyword in call.keywords}
                    inspect.signature(function).bind(*call.args, **keywords)


def command_lines(repository: Path) -> list[tuple[str, list[str]]]:
    """The program and the arguments of each command line of ours in the manual."""
    lines = [
        line
        for page in manual.pages(repository)
        for snippet in manual.snippets(page)
        if snippet.language == "bash"
        for line in snippet.text.splitlines()
    ]
    found = re.findall(r"^(qcutlass|python -m bench) (.*?)(?: &&| *$)", "\n".join(lines), flags=re.MULTILINE)
    return [(program, shlex.split(arguments, comments=True)) for program, arguments in found]


def test_command_lines_are_understood(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command, option and number of arguments; nothing is run."""
    monkeypatch.chdir(tmp_path)
    programs = {
        "qcutlass": typer.main.get_group(qcutlass.cli.app),
        "python -m bench": typer.main.get_group(importlib.import_module("bench.__main__").app),
    }
    lines = command_lines(repository)
    assert {program for program, _ in lines} == set(programs)
    for program, (command, *arguments) in lines:
        for argument in arguments:  # some take files or folders that exist
            place = tmp_path / argument
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch() if place.suffix else place.mkdir(exist_ok=True)
        programs[program].commands[command].make_context(command, list(arguments))


PROGRAM = r"(?:python -m (?:tests\.python\.|pytest\b)|tools/\w+\.sh\b)"
LAUNCHER = r"(?:\w+=(?:\"[^\"]*\"|\S+) |nice (?:-n \d+ )?|compute-sanitizer (?:--\S+ \S+ )*)*"
PYTEST = {"-m": 1, "-k": 1, "-n": 1, "--dist": 1, "-q": 0, "-x": 0}
"""Options of pytest in the docs, and the words that each takes."""


def quoted_commands(text: str) -> list[str]:
    """Those of tests and tools between backticks, on one line, by themselves or behind what starts them."""
    return re.findall(rf"(?<!`)`({LAUNCHER}{PROGRAM}[^`\n]*)`(?!`)", text)


class Understood(Exception):
    """A program has taken its words, and is not to run."""


def refused_words(module: str, words: list[str]) -> str:
    """What the parser of a module of tests says of its words; empty where it takes them. Nothing is run."""
    if importlib.util.find_spec(module) is None:
        return f"there is no module {module}"
    parse, said = argparse.ArgumentParser.parse_args, io.StringIO()

    def parse_alone(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        raise Understood(parse(parser, args, namespace))

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runpy's, of modules that are there already
        patch.setattr(sys, "argv", [module, *words])
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
        try:
            runpy.run_module(module, run_name="__main__")
        except Understood:
            return nothing_chosen(module, words)
        except SystemExit:
            return said.getvalue().strip().rpartition("error: ")[2]
    return f"{module} has no parser of its words"


def nothing_chosen(module: str, words: list[str]) -> str:
    """Of words behind --only: that nothing has them in its name."""
    names = {
        "tests.python.device_mutants": lambda: [f"{m.loop}: {m.name} {m.unit}" for m in MUTANTS],
        "tests.python.formats.fuzzing": lambda: [*subjects(), *readers()],
    }
    only = words[words.index("--only") + 1] if "--only" in words else ""
    found = any(only in name for name in names[module]()) if module in names else True
    return "" if found else f"--only {only!r} chooses nothing"


def refused_tests(repository: Path, words: list[str]) -> str:
    """What is wrong with arguments of pytest: files, options, markers, or words that no test's name can have."""
    options: dict[str, str] = {}
    paths = []
    given = iter(words)
    for word in given:
        if not word.startswith("-"):
            paths.append(repository / word.partition("::")[0])
        elif word not in PYTEST:
            return f"{word} is no option of pytest that this test knows"
        elif PYTEST[word]:
            options[word] = next(given, "")
    lost = [str(path.relative_to(repository)) for path in paths if not path.exists()]
    if lost:
        return f"there is no {', '.join(lost)}"
    strange = {*re.findall(r"\w+", options.get("-m", ""))} - {"gpu", "slow", "not", "and", "or"}
    if strange:
        return f"there is no marker {', '.join(sorted(strange))}"
    named = [path for folder in paths or [repository / "tests/python"] for path in [folder, *folder.rglob("test_*.py")]]
    named += (repository / "tests/python/kinds").glob("*.py")  # whose names are in those of tests
    text = "".join(f"{path.name}{path.read_text()}" for path in named if path.is_file()).lower()
    wanted = re.findall(r"(?<![\w.-])(not )?(?!(?:and|or|not)\b)([\w.\[\]-]+)", options.get("-k", ""))
    parts = [word.lower().rstrip("-") for negated, word in wanted if not negated]  # of ids, which hyphens join
    lost = [part for part in parts if part not in text]
    return f"-k: {', '.join(lost)} is in none of these files" if lost else ""


def refused_tool(repository: Path, path: str, words: list[str], environment: list[str]) -> str:
    """What is wrong with a call of a shell script: that it is absent, or has not these words and variables."""
    if not os.access(repository / path, os.X_OK):
        return f"there is no program {path}"
    text = (repository / path).read_text()
    known = {*re.findall(r"[A-Za-z_]\w*", text)}
    lost = [word for word in [*words, *environment] if word not in known and not word.isdecimal()]
    return f"{path} knows no {', '.join(lost)}" if lost else ""


def refused(repository: Path, command: str) -> str:
    """What is wrong with a command of tests or tools; empty if nothing is."""
    words = shlex.split(command)
    environment = [word.partition("=")[0] for word in itertools.takewhile(lambda word: "=" in word, words)]
    if "-m" in words[: len(words) - 1] and "python" in words:
        module, *rest = words[words.index("-m") + 1 :]
        return refused_tests(repository, rest) if module == "pytest" else refused_words(module, rest)
    at = next(at for at, word in enumerate(words) if word.startswith("tools/"))
    return refused_tool(repository, words[at], words[at + 1 :], environment)


@pytest.mark.parametrize("page", ["docs/reliability.md", "tests/README.md"])
def test_commands_of_tests_and_tools_are_understood(page: str, repository: Path) -> None:
    """Programs and files are there, options are known, and what chooses finds something; nothing is run."""
    commands = quoted_commands((repository / page).read_text())
    assert commands
    found = {command: refused(repository, command) for command in dict.fromkeys(commands)}
    assert [f"`{command}`: {reason}" for command, reason in found.items() if reason] == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("python -m tests.python.nothing --cases 3", "there is no module tests.python.nothing"),
        ("python -m tests.python.manual", "tests.python.manual has no parser of its words"),
        ("python -m tests.python.soak --case-count 3", "unrecognized arguments: --case-count 3"),
        ("nice -n 19 python -m tests.python.soak --minutes few", "argument --minutes: invalid float value: 'few'"),
        ("python -m tests.python.device_mutants --only rubbish", "--only 'rubbish' chooses nothing"),
        ("python -m tests.python.formats.fuzzing --only 'gguf: rubbish'", "--only 'gguf: rubbish' chooses nothing"),
        ("python -m pytest tests/python/test_nothing.py", "there is no tests/python/test_nothing.py"),
        ("python -m pytest --fast", "--fast is no option of pytest that this test knows"),
        ("python -m pytest -m quick", "there is no marker quick"),
        ("python -m pytest tests/python/test_soak.py -k 'soak or rubbish'", "-k: rubbish is in none of these files"),
        ("tools/nothing.sh", "there is no program tools/nothing.sh"),
        ("SANITIZER=memcheck tools/gpu_check.sh LOGDIR sanitize", "tools/gpu_check.sh knows no SANITIZER"),
        ("tools/gpu_check.sh LOGDIR rubbish", "tools/gpu_check.sh knows no rubbish"),
        ("A=1 python -m pytest -m 'gpu and not slow' -n 2 tests/python/test_soak.py -k 'not rubbish and soak'", ""),
        ("compute-sanitizer --tool memcheck python -m tests.python.soak --device cuda --cases 3", ""),
        ("python -m tests.python.models.interruptions convert FOLDER 500 20261123", ""),
        ("tools/sanitize.sh 20000", ""),
    ],
)
def test_wrong_commands_are_found(command: str, reason: str, repository: Path) -> None:
    assert quoted_commands(f"| a | `{command}` and `... --rest`, ``{command}`` |") == [command]
    assert refused(repository, command) == reason


def test_links_lead_to_files(repository: Path) -> None:
    pages = [*manual.pages(repository), repository / "CONTRIBUTING.md", repository / "tests/README.md"]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|#)([^()\s#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_read_as_plain_markdown(repository: Path) -> None:
    """But for the cells of notebooks: no directives, roles or links without a text."""
    for page in manual.pages(repository):
        text = page.read_text()
        assert re.findall(r"^```\{(?!code-cell\}).*|\{[\w:]+\}`|\[\]\(.*", text, flags=re.MULTILINE) == [], page.name


def test_pages_of_the_manual(pages: ModuleType) -> None:
    text = (
        "[a](../bench/results/gpu.md#x) ![b](../bench/results/x.png) [c](../CONTRIBUTING.md) [d](https://d.org)\n"
        "[e](#e) `qcutlass.gemm` ``[`qcutlass.gemm`](f.md)``\n```python\nf[0](x)\n```\n"
    )
    assert pages.manual_page(text, "docs/a.md", "docs/a.md") == (
        "[a](generated/results/gpu.md#x) ![b](../bench/results/x.png) [c](generated/contributing.md) [d](https://d.org)\n"
        "[e](#e) {py:obj}`qcutlass.gemm` ``[`qcutlass.gemm`](f.md)``\n```python\nf[0](x)\n```\n"
    )
    assert pages.manual_page("[a](docs/a.md) [b](LICENSE)", "README.md", "docs/generated/readme.md") == (
        "[a](../a.md) [b](../../LICENSE)"
    )


def test_contents_of_the_manual(pages: ModuleType) -> None:
    text = (
        "# A\n\n- [no](no.md)\n\n## B\n\ntext\n\n<!-- contents -->\n\n- [C c](c.md): it\n- [R](../README.md)\n\n- end\n"
    )
    page = pages.manual_page(text, "docs/index.md", "docs/index.md")
    assert page.endswith("```{toctree}\n:hidden:\n:caption: B\n\nC c <c>\nR <generated/readme>\n```\n")
    assert page.count("toctree") == 1


def test_lines_of_code_need_no_scrolling(repository: Path) -> None:
    """88 columns are what the pages show; wide.css has room for more on wide screens alone."""
    blocks = r"^```(?:python|bash|\{code-cell\}.*)\n(.*?)^```$"
    long = [
        f"{page.name}: {line}"
        for page in sorted((repository / "docs").glob("*.md"))
        for block in re.findall(blocks, page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if len(line) > 88
    ]
    assert long == []


@pytest.mark.parametrize(
    ("stem", "title"),
    [
        ("w4a16_g128_8192x8192", "Int4 weights (groups of 128), fp16 activations: N = K = 8192"),
        ("fp8_roofline", "Fp8 e4m3 activations by fp8 e4m3 weights, bf16 output: roofline"),
        ("quality", "Quality of quantised models"),
    ],
)
def test_figures_are_titled_by_their_contents(stem: str, title: str, pages: ModuleType) -> None:
    assert pages.figure_title(stem) == title
    assert f"## {title}\n\n![{title}]" in pages.figure_page([Path(f"{stem}.png")])


def test_results_are_titled_by_contents_and_date(pages: ModuleType, repository: Path) -> None:
    titles = pages.result_titles((repository / "docs" / "performance.md").read_text())
    assert set(titles) == {path.name for path in (repository / "bench" / "results").glob("*.md")}
    assert [title for title in titles.values() if not re.search(r" \(\d{4}-\d\d\)$", title)] == []


def test_public_names_have_a_page(pages: ModuleType) -> None:
    found = {module.__name__: module for module in pages.public_modules()}
    assert {"qcutlass", "qcutlass.layers", "qcutlass.formats", "qcutlass.testing"} <= set(found)
    assert "qcutlass.models.transformers" not in found
    page = pages.module_page(found["qcutlass.layers"])
    assert "QuantLinear" in page.partition(":exclude-members:")[2].partition("\n")[0]
    assert "Int8Linear" not in page


def test_internal_names_are_told_from_mistaken_ones(pages: ModuleType) -> None:
    assert pages.exists("qcutlass.formats.config.Config")
    assert not pages.exists("qcutlass.formats.config.Confug")
    assert not pages.exists("qcutlass.formts.config.Config")
    assert not pages.exists("torch.Tensor")


def test_every_command_is_described(pages: ModuleType) -> None:
    page = pages.command_page()
    names = ("quickstart", "inspect", "convert", "quantize", "eval", "generate", "chat", "export", "tune", "info")
    assert re.findall(r"^## qcutlass (\w+)$", page, flags=re.MULTILINE) == list(names)
    for command in names:
        assert f"## qcutlass {command}\n\n```text\nUsage: qcutlass {command} [OPTIONS]" in page
