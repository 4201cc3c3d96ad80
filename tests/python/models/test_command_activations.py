"""`--activations int8` and `fp8` of the commands, of 4-bit folders and files that others have made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.python.models.folders import RandomCut
from tests.python.models.test_commands import command

from qcutlass.testing.models import INT8_ACTIVATIONS

pytest.importorskip("transformers", reason="needs transformers")

LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
CHANGE = {"int8": INT8_ACTIVATIONS, "fp8": 0.05}
"""The largest relative difference of perplexities; of fp8 it is 0.0002 to 0.013 here."""


def source(form: str, random_cut: RandomCut, place: Path) -> tuple[Path, str]:
    """A folder or a file, and a text that its tokenizer knows."""
    if form != "gguf":
        return getattr(random_cut, form)().folder, " ".join(map(str, range(5, 69)))
    pytest.importorskip("gguf", reason="needs gguf")
    from tests.python.models.test_gguf_models import write_gguf

    return write_gguf(place / "tiny.gguf", "llama", 0, types=dict.fromkeys(LAYERS, "Q4_0")), "0123456789" * 7


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed", "gguf"])
def test_what_others_made_quantises_its_activations(
    form: str, random_cut: RandomCut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`convert` writes what `eval` and `generate` do with fp8; with int8 on the CPU these have a product of blocks."""
    monkeypatch.setenv("QCUTLASS_CACHE_DIR", str(tmp_path / "cache"))
    folder, text = source(form, random_cut, tmp_path)
    (tmp_path / "text").write_text(text)

    def perplexity(place: Path, *options: str) -> float:
        score = command("eval", place, "--text", tmp_path / "text", "--window", 32, *options)
        assert score.exit_code == 0, score.output
        return float(score.stdout.split()[1])

    def continuation(place: Path, *options: str) -> str:
        more = command("generate", place, "--prompt", text[:9], "--max-new-tokens", 2, *options)
        assert more.exit_code == 0, more.output
        return str(more.stdout)

    plain = perplexity(folder)
    for activations, change in CHANGE.items():
        new, options = tmp_path / activations, ("--activations", activations)
        made = command("convert", folder, new, *options, "--verify")
        assert made.exit_code == 0, made.output
        assert re.search(rf"down_proj .*, {activations} activations", command("inspect", new).stdout)
        asked, written = perplexity(folder, *options), perplexity(new)
        for found in {asked, written}:
            assert 0 < abs(found / plain - 1) < change
        text_asked = continuation(folder, *options)
        if activations == "fp8":
            assert (asked, text_asked) == (written, continuation(new))
        else:
            assert asked != written
    assert perplexity(new, "--activations", "none") == plain
