"""The documentation: drawings against packed tensors, messages against the source, cells against the linter."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import qcutlass
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


def test_every_packing_is_drawn(drawings: ModuleType, tmp_path: Path) -> None:
    assert set(drawings.PACKINGS) == set(map(_C.Packing, range(len(_C.Packing.__members__))))
    drawings.write(tmp_path)
    for packing in PACKINGS:
        drawn = re.findall(r">(\d+)</text>", (tmp_path / f"tile_{packing.name.lower()}.svg").read_text())
        if packing == _C.Packing.W8A8:
            columns = [str(k) for lane in range(32) for _, k in drawings.stored(packing, lane)]
            assert "-".join(columns) in "-".join(drawn)
            continue
        lanes = [str(drawings.lane_of(packing, n, k)) for n in range(16) for k in range(_C.tile_k(packing))]
        assert "-".join(lanes) in "-".join(drawn)
    for path in drawings.write(tmp_path / "again", [_C.Packing.W8A8]):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


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
    """What a source file throws, with … for all that is no literal."""
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


def test_sections_of_a_document(pages: ModuleType) -> None:
    text = "# A\n\nfirst\n\n## B\n\n```bash\n# no heading\n```\n\n### C\n\nlast\n"
    assert pages.sections(text) == {"A": "\nfirst\n\n", "B": "\n```bash\n# no heading\n```\n\n## C\n\nlast\n"}


def test_links_of_sections_lead_from_docs(pages: ModuleType) -> None:
    text = "[a](bench/results/gpu.md) ![b](bench/results/x.png) [c](CONTRIBUTING.md) [d](https://d.org) [e](#e)"
    assert pages.relinked(text) == (
        "[a](generated/results/gpu.md) ![b](../bench/results/x.png) [c](contributing.md) [d](https://d.org) [e](#e)"
    )


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
    for command in ("quickstart", "info", "tune", "convert", "inspect", "eval", "generate"):
        assert f"## qcutlass {command}\n\n```text\nUsage: qcutlass {command} [OPTIONS]" in page
