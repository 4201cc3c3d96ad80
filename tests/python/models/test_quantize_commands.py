"""`qcutlass quantize` with 8-bit activations and 4-bit floats, and what the other commands do with its folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.python.models.folders import write_tokenizer
from tests.python.models.test_commands import command

from qcutlass.products.checks import E8M0

pytest.importorskip("transformers", reason="needs transformers")
from tests.python.models.quantizations import VOCABULARY, make

CHANGE = 0.15
"""The largest relative difference of perplexities: 0.004 (blockwise) to 0.08 (nvfp4) of this model."""


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one random block, with a tokenizer of numbers and a text of them."""
    folder = tmp_path_factory.mktemp("floats")
    make("llama", 0, num_hidden_layers=1, eos_token_id=None).save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    (folder / "text.txt").write_text(" ".join(map(str, range(5, 69))))
    return folder


def perplexity(folder: Path, text: Path, *options: str) -> float:
    score = command("eval", folder, "--text", text, "--window", 32, *options)
    assert score.exit_code == 0, score.output
    return float(score.stdout.split()[1])


def continuation(folder: Path, *options: str) -> str:
    more = command("generate", folder, "--prompt", "5 6 7", "--max-new-tokens", 4, *options)
    assert more.exit_code == 0, more.output
    assert "; 4 in all" in more.stderr
    return str(more.stdout)


@pytest.mark.parametrize(
    ("options", "words", "exported"),
    [
        (("--method", "fp8"), "fp8 channel dynamic", ()),
        (("--method", "blockwise"), "w8a8 blocks of 128", None),
        (("--method", "blockwise-fp8"), "fp8 blocks of 128", ("--activations", "fp8")),
        (("--method", "rtn", "--format", "nvfp4"), "e2m1 g16 e4m3 scales", ()),
        pytest.param(
            ("--method", "rtn", "--format", "mxfp4"),
            "e2m1 g32 e8m0 scales",
            (),
            marks=pytest.mark.skipif(not E8M0, reason="this torch has no type for the scales"),
        ),
    ],
)
def test_from_floats_to_text(
    options: tuple[str, ...], words: str, exported: tuple[str, ...] | None, floats: Path, tmp_path: Path
) -> None:
    """`exported`: options with which the exported folder does the same; None: no format of export holds it."""
    new, out, text = tmp_path / "new", tmp_path / "out", floats / "text.txt"
    made = command("quantize", floats, new, *options)
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith(f"{options[1]}: 7 layers of 0.0 M weights; ")
    assert command("inspect", new).stdout.count(words) == 7
    found, said = perplexity(new, text), continuation(new)
    assert 0 < abs(found / perplexity(floats, text) - 1) < CHANGE
    written = command("export", new, out, "--to", "compressed-tensors")
    if exported is None:
        assert (written.exit_code, out.exists()) == (2, False)
        assert "compressed-tensors: layers of kind blockwise are not exported" in written.output
    else:
        assert (written.exit_code, written.stdout) == (0, f"compressed-tensors: 7 layers in {out}\n")
        assert (perplexity(out, text, *exported), continuation(out, *exported)) == (found, said)
