"""Configuration of the documentation: `python -m sphinx -n -W --keep-going -b html docs build/docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains import Domain

import qcutlass

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]  # pages, and the bench's words for schemes
import pages  # noqa: E402  # beside this file

project = "qcutlass"
author = "the authors of qcutlass"
version = release = qcutlass.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon", "myst_nb"]
html_theme = "furo"
html_title = f"qcutlass {release}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["wide.css", "code.css"]

# Docstrings put names and formulas alike between single backticks: what names an object becomes a link.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
napoleon_use_rtype = False
# The build needs no network, so the pages of other projects are not linked.
nitpick_ignore_regex = [
    ("py:obj", "(?s).*"),
    ("py:.*", r"(torch|collections|pathlib|os|typing)\..*"),
    ("py:class", "Tensor"),  # fields of named tuples have the names of their types as they are written
]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_show_tb = True  # a failure is a warning, which -W makes an error
nb_execution_timeout = 60


GENERATED = """
```{toctree}
:hidden:
:glob:
:caption: Reference

generated/commands
generated/formats
generated/api/*
generated/results/figures
generated/third_party
```
"""


def write_generated(app: Sphinx) -> None:
    """Writes the pages that follow from the tree, before Sphinx looks for pages."""
    pages.write(DOCS / "generated", DOCS.parent)


def prepare_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Makes a page of the manual from plain Markdown; the start page also lists what is generated."""
    if not docname.startswith("generated/"):
        page = f"docs/{docname}.md"
        source[0] = pages.manual_page(source[0], page, page) + (GENERATED if docname == "index" else "")


def prepare_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Takes out of docstrings what reStructuredText would misread: bars of |x|, several names in one row of a list."""
    for i, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...")):
            continue
        parts = line.split("`")
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[i] = "`".join(parts)
    if "Attributes:" in lines:
        for i in range(lines.index("Attributes:"), len(lines)):
            lines[i] = re.sub(r"^ +\w+(, \w+)+:", lambda names: "    " + names[0].replace(" ", ""), lines[i])


def is_internal(app: Sphinx, domain: Domain, node: pending_xref) -> bool | None:
    """Whether a name that has no page is one of qcutlass's own that is there but not public: no cause for a warning."""
    target = str(node["reftarget"])
    return True if node["reftype"] == "class" and pages.exists(target) else None


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_generated)
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)  # before napoleon
    app.connect("warn-missing-reference", is_internal)
