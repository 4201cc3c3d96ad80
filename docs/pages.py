"""Pages for Sphinx: those that follow from the tree, and what makes plain Markdown of `docs` a manual with links."""

from __future__ import annotations

import importlib
import os.path
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Final

import typer
from bench import schemes
from typer.testing import CliRunner

import qcutlass
from qcutlass.cli import app
from qcutlass.formats import FORMATS

# Classes of the extension that functions of the package return or take, shown as gemm.h describes them.
_EXTENSION: Final = ("Plan", "Candidate", "Cost", "DeviceTraits")

# Texts of the repository outside `docs` that are pages, too, and folders that have a page about their files.
_COPIES: Final = {
    "README.md": "readme",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "tests/README.md": "tests",
    "third_party/README.md": "third_party",
}
_FOLDERS: Final = {"bench/results": "results/figures", "python/qcutlass/formats": "formats"}


def write(folder: Path, repository: Path) -> None:
    """Writes all of them below `folder`, `docs/generated` of the repository; removes those that follow no more."""
    files = {folder / name: text for name, text in generated(repository).items()}
    for stale in set(folder.rglob("*.md")) - set(files):
        stale.unlink()
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # an unchanged page is not built again
            path.write_text(text)


def generated(repository: Path) -> dict[str, str]:
    """The generated pages by name: public modules, results of the benches, commands, formats, texts beside `docs`."""
    files = {f"api/{module.__name__}.md": module_page(module) for module in public_modules()}
    results = repository / "bench" / "results"
    titles = result_titles((repository / "docs" / "performance.md").read_text())
    files |= {f"results/{path.name}": result_page(path, titles[path.name]) for path in sorted(results.glob("*.md"))}
    files["results/figures.md"] = figure_page(sorted(results.glob("*.png")))
    for source, name in _COPIES.items():
        text = (repository / source).read_text()
        files[f"{name}.md"] = manual_page(text, source, f"docs/generated/{name}.md")
    return files | {"formats.md": format_page(), "commands.md": command_page()}


def public_modules() -> Iterator[ModuleType]:
    """The package, and the modules below it that say what is public in them; no other is imported."""
    root = Path(qcutlass.__path__[0])
    for path in sorted(root.rglob("*.py")):
        if "\n__all__ = [" in path.read_text():
            place = path.parent if path.stem == "__init__" else path.with_suffix("")
            yield importlib.import_module(".".join(place.relative_to(root.parent).parts))


def exists(name: str) -> bool:
    """Whether there is such an object, public or not, in a module of the package."""
    module, _, attribute = name.rpartition(".")
    if module.partition(".")[0] != "qcutlass":
        return False
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def module_page(module: ModuleType) -> str:
    """The public names of a module; those that `qcutlass` itself has are documented there."""
    names: list[str] = module.__all__
    short = [] if module is qcutlass else [n for n in names if n in qcutlass.__all__]
    lines = [f"# {module.__name__}", "", "```{eval-rst}", f".. automodule:: {module.__name__}", "   :members:"]
    lines += [f"   :exclude-members: {', '.join(short)}"] if short else []
    lines += ["```", ""]
    if short:
        links = ", ".join(f"{{py:obj}}`qcutlass.{name}`" for name in short)
        lines += [f"Also in this module: {links}.", ""]
    if module is qcutlass:
        lines += ["## Types of the extension", "", "```{eval-rst}"]
        for name in _EXTENSION:
            lines += [f".. autoclass:: qcutlass._C.{name}", ""]
            lines += ["   .. literalinclude:: /../cpp/include/qcutlass/gemm.h", "      :language: cpp"]
            lines += [f"      :start-at: struct {name} {{", "      :end-at: };", ""]
        lines += ["```", ""]
    return "\n".join(lines)


def format_page() -> str:
    """A section for each format that can be read: its bytes, as its loader describes them."""
    lines = ["# Bytes of the checkpoint formats", ""]
    for name, row in FORMATS.items():
        lines += [f"## {name}", "", "```{eval-rst}"]
        lines += [f".. automodule:: {row.load.__module__}", "   :no-index:", "```", ""]
    return "\n".join(lines)


def command_page() -> str:
    """The help of every command."""
    lines = ["# Commands", ""]
    for name in typer.main.get_group(app).commands:
        help = (
            CliRunner()
            .invoke(app, [name, "--help"], prog_name="qcutlass", env={"TERM": "dumb", "COLUMNS": "100"})
            .output
        )
        lines += [
            f"## qcutlass {name}",
            "",
            "```text",
            *(line.rstrip() for line in help.strip().splitlines()),
            "```",
            "",
        ]
    return "\n".join(lines)


def result_titles(performance: str) -> dict[str, str]:
    """The title of each table of the benches by its file's name, as the list in performance.md calls it."""
    return {
        name: title for title, name in re.findall(r"^- \[(.*)\]\(\.\./bench/results/(.*)\)", performance, re.MULTILINE)
    }


def result_page(table: Path, title: str) -> str:
    """A table of the benches under a title of its own."""
    return f"# {title}\n{table.read_text().partition(chr(10))[2]}"


def figure_page(figures: list[Path]) -> str:
    """Every figure of the benches."""
    lines = ["# Figures", ""]
    for figure in figures:
        title = figure_title(figure.stem)
        lines += [f"## {title}", "", f"![{title}](../../../bench/results/{figure.name})", ""]
    return "\n".join(lines)


def figure_title(stem: str) -> str:
    """The contents of a figure of the benches in words, by the name of its file."""
    found = re.fullmatch(r"(?:wgmma_)?(.+)_(\d+x\d+|roofline)", stem)
    if found is None:
        return f"{stem.capitalize()} of quantised models"
    what = "roofline" if found[2] == "roofline" else schemes.shape_words(found[2])
    words = schemes.parse(found[1]).words
    return f"{words[0].upper()}{words[1:]}: {what}"


def manual_page(text: str, source: str, page: str) -> str:
    """The text of the file `source` as Sphinx is to read it at `page` (paths from the repository's root).

    Links to files that have a page lead to it, names of the package in code become links, and a list of links behind
    the line `<!-- contents -->` becomes a part of the table of contents as well.
    """
    text = outside_code(text, lambda prose: _with_references(_relinked(prose, source, page)))
    return text + "".join(_contents(text))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with what lies outside of its fenced blocks changed."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = map(change, parts[::2])
    return "".join(parts)


def page_of(path: str) -> str:
    """Where Sphinx has the contents of a file, both as paths from the repository's root: itself if it has no page."""
    if path.startswith("bench/results/") and path.endswith(".md"):
        return f"docs/generated/results/{PurePosixPath(path).name}"
    name = (_COPIES | _FOLDERS).get(path)
    return path if name is None else f"docs/generated/{name}.md"


def _relinked(text: str, source: str, page: str) -> str:
    def relink(link: re.Match[str]) -> str:
        target, hash, anchor = link[1].partition("#")
        path = os.path.normpath(PurePosixPath(source).parent / target)
        return f"]({os.path.relpath(page_of(path), PurePosixPath(page).parent)}{hash}{anchor})"

    return re.sub(r"\]\((?!https?:|#)([^()\s]+)\)", relink, text)


def _with_references(text: str) -> str:
    return re.sub(r"(?<![`\[}])`(qcutlass(?:\.\w+)+)`(?![`\]])", r"{py:obj}`\1`", text)


def _contents(text: str) -> Iterator[str]:
    marked = r"^#+ (.*)\n(?:(?!#).*\n)*?<!-- contents -->\n+((?:- .*\n)+)"
    for caption, links in re.findall(marked, text, flags=re.MULTILINE):
        pages = re.findall(r"^- \[(.*?)\]\((.*?)\.md\)", links, flags=re.MULTILINE)
        entries = "".join(f"{title} <{page}>\n" for title, page in pages)
        yield f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}```\n"
