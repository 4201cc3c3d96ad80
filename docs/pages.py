"""Pages that follow from the tree: public modules, results of the benches, sections of README.md."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import typer
from typer.testing import CliRunner

import qcutlass
from qcutlass.cli import app
from qcutlass.formats import FORMATS

# Classes of the extension that functions of the package return or take, shown as gemm.h describes them.
_EXTENSION: Final = ("Plan", "Candidate", "Cost", "DeviceTraits")


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
    """Files by name.

    api/<module>.md, results/<table>.md, results/figures.md and commands.md are pages; sections/formats.md and
    sections/<heading>.md, those of README.md, are for pages of `docs` to include.
    """
    files = {f"api/{module.__name__}.md": module_page(module) for module in public_modules()}
    results = repository / "bench" / "results"
    files |= {f"results/{table.name}": result_page(table) for table in sorted(results.glob("*.md"))}
    files["results/figures.md"] = figure_page(sorted(results.glob("*.png")))
    for heading, text in sections((repository / "README.md").read_text()).items():
        name = re.sub(r"\W+", "-", heading.lower()).strip("-")
        files[f"sections/{name}.md"] = relinked(text)
    return files | {"sections/formats.md": format_sections(), "commands.md": command_page()}


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


def format_sections() -> str:
    """A section for each format that can be read: its bytes, as its loader describes them."""
    lines = []
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


def result_page(table: Path) -> str:
    """A table of the benches."""
    title, _, rest = table.read_text().lstrip("# ").partition("\n")
    return f"# {title}: {table.stem}\n{rest}"


def figure_page(figures: list[Path]) -> str:
    """Every figure of the benches."""
    lines = ["# Figures", ""]
    for figure in figures:
        lines += [f"## {figure.stem}", "", f"![{figure.stem}](../../../bench/results/{figure.name})", ""]
    return "\n".join(lines)


def sections(text: str) -> dict[str, str]:
    """The text below each heading of a document, by heading, what is below it one level up."""
    found: dict[str, str] = {}
    heading, fenced = "", False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        level = 0 if fenced else len(line) - len(line.lstrip("#"))
        if level in (1, 2):
            heading = line.lstrip("# ")
        else:
            found[heading] = found.get(heading, "") + line[level > 0 :] + "\n"
    return found


def relinked(text: str) -> str:
    """The text with its links, relative to the repository, made relative to `docs`."""

    def relink(link: re.Match[str]) -> str:
        target = link[1]
        if target.startswith("bench/results/") and target.endswith(".md"):
            return f"](generated/{target.removeprefix('bench/')})"
        return f"]({target.lower()})" if target == "CONTRIBUTING.md" else f"](../{target})"

    return re.sub(r"\]\((?!https?:|#)([^()\s]+)\)", relink, text)
