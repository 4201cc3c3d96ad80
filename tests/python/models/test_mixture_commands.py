"""The commands with mixtures of experts: floats and folders of several formats, as they are, converted and exported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.python.models.mixtures import KINDS, VOCABULARY, MixtureCut
from tests.python.models.test_commands import command
from tests.python.models.test_mixtures import FLOATING, IDS

QUANTISED = [
    *(
        pytest.param(kind, form, "w4 channel int zeros", id=f"{form}-{kind}")
        for kind in ("mixtral", "qwen3_moe", "deepseek_v3")
        for form in ("gptq", "awq", "compressed")
    ),
    *(
        pytest.param(*each.values, {"fp8": "e4m3 g32", "nvfp4": "e2m1 g16 e4m3 scales"}[each.values[1]], id=each.id)
        for each in FLOATING
    ),
]
"""Kinds and forms of folders, and what `inspect` says of their experts."""
EXPORTED = {
    ("mixtral", "gptq"): "compressed-tensors",
    ("deepseek_v3", "awq"): "gptq",
    ("qwen3_moe", "compressed"): "gptq",
    ("qwen3_moe", "fp8"): "compressed-tensors",
    ("mixtral", "nvfp4"): "compressed-tensors",
}
"""What some of them are exported to."""


@pytest.mark.parametrize(("kind", "form", "words"), QUANTISED)
def test_commands_of_quantised_folders(
    kind: str, form: str, words: str, cuts: dict[str, MixtureCut], tmp_path: Path
) -> None:
    """As they are, converted and exported."""
    (tmp_path / "text.txt").write_text(" ".join(str(token) for token in IDS[0].repeat(4).tolist()))
    source = getattr(cuts[kind], form)().folder
    made = command("convert", source, tmp_path / "new", "--verify")
    assert made.exit_code == 0, made.output
    folders, to = [source, tmp_path / "new"], EXPORTED.get((kind, form))
    if to is not None:
        written = command("export", tmp_path / "new", tmp_path / "out", "--to", to)
        count = len(cuts[kind].names)
        assert (written.exit_code, written.stdout) == (0, f"{to}: {count} layers in {tmp_path / 'out'}\n"), (
            written.output
        )
        folders.append(tmp_path / "out")
    said = []
    for folder in folders:
        assert re.search(rf"experts\.\*\.\w+ .*{words}", command("inspect", folder).stdout)
        text = command("generate", folder, "--prompt", "5 6 7", "--max-new-tokens", 4)
        assert text.exit_code == 0, text.output
        score = command("eval", folder, "--text", tmp_path / "text.txt", "--window", 32)
        assert score.exit_code == 0, score.output
        (perplexity,) = re.findall(r"perplexity (\d+\.\d+) of 93 tokens", score.stdout)
        said.append((text.stdout, perplexity))
    assert len(set(said)) == 1, said


@pytest.mark.parametrize("kind", KINDS)
def test_the_commands(kind: str, cuts: dict[str, MixtureCut], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(str(token) for token in (IDS[0] % VOCABULARY).repeat(4).tolist()))
    folder = tmp_path / "new"
    made = command("convert", cuts[kind].floats().folder, folder, "--bits", 4, "--group-size", 32, "--verify")
    assert made.exit_code == 0, made.output
    table = command("inspect", folder)
    assert "experts.*." in table.stdout
    text = command("generate", folder, "--prompt", "5 6 7", "--max-new-tokens", 4)
    assert text.exit_code == 0, text.output
    again = command("generate", folder, "--prompt", "5 6 7", "--max-new-tokens", 4, "--no-fuse")
    assert again.stdout == text.stdout
    score = command("eval", folder, "--text", tmp_path / "text.txt", "--window", 32)
    assert score.exit_code == 0, score.output
    assert re.search(r"perplexity", score.output)
