"""A conversion that does not end well leaves what was there, and nothing else."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from tests.python.models.conversions import limited

from qcutlass.models.gguf import GGUFModel

KILLS = int(os.environ.get("QCUTLASS_KILLS", 5))


@pytest.mark.parametrize("kind", ["convert", "quantize"])
def test_killed_at_any_moment(kind: str, process: Any, seed: int) -> None:
    """Run again, it ends with the bytes of a run that nothing disturbed."""
    if kind == "quantize":
        pytest.importorskip("transformers", reason="needs transformers")
    found = process("interruptions", kind, KILLS, seed)
    assert found["broken"] == [], found
    assert sum(found[outcome] for outcome in ("absent", "old", "whole")) == KILLS
    assert found["left"] > 0, "no kill came while a folder was being written"
    assert kind == "convert" or found["resumed"] > 0, "no kill came after a block was finished"


@pytest.mark.parametrize("kind", ["convert", "quantize"])
def test_ctrl_c_at_any_moment(kind: str, process: Any, seed: int) -> None:
    """The folder is absent, the older one or whole; run again, it has the bytes of a run that nothing disturbed."""
    if kind == "quantize":
        pytest.importorskip("transformers", reason="needs transformers")
    found = process("interruptions", kind, KILLS, seed, "--ctrl-c")
    assert found["broken"] == [], found
    assert sum(found[outcome] for outcome in ("absent", "old", "whole")) == KILLS
    assert found["ended"] > 0, "no run was ended by KeyboardInterrupt"
    assert kind == "convert" or found["resumed"] > 0, "no Ctrl-C came after a block was finished"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "the following arguments are required: action, FOLDER, COUNT"),
        (("convert", "new", "many"), "argument COUNT: expected a number of at least 1, got 'many'"),
        (("convert", "new", "0"), "argument COUNT: expected a number of at least 1, got '0'"),
        (("convert", "new", "5", "x"), "argument SEED: invalid int value: 'x'"),
        (("kill", "new", "5"), "argument action: invalid choice: 'kill'"),
        (("convert", ".", "5"), "FOLDER: expected a new or an empty folder, got ."),
        (("writers", "new", "5", "--ctrl-c"), "--ctrl-c: expected convert or quantize, got writers"),
    ],
)
def test_wrong_words_are_told(
    words: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from tests.python.models import interruptions

    (tmp_path / "something").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        interruptions.main(words)
    assert told in capsys.readouterr().err


def test_two_writers(process: Any, seed: int) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    found = process("interruptions", "writers", 4, seed)
    assert found["broken"] == [], found


def test_a_disk_that_is_full_at_any_moment(process: Any, seed: int) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    found = process("interruptions", "full_disk", 6, seed)
    assert found["broken"] == [], found
    assert found["full"] > 0


def test_a_disk_that_cannot_be_written(process: Any, seed: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from tests.python.models.interruptions import can_mount

    if not can_mount(tmp_path):
        pytest.skip("may not mount a file system")
    assert process("interruptions", "read_only", 1, seed)["broken"] == []


def test_a_full_disk(process: Any, seed: int) -> None:
    found = process("conversions", "fill_disk", seed)
    assert found == {"errors": ["OSError", "OSError"], "intact": True, "absent": True, "left": []}


@pytest.mark.parametrize("size", [50, 300, 1000])
def test_a_full_disk_while_a_tokenizer_is_written(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that a GGUF file holds, by the library of tokenizers, whose errors have no type."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({str(i): i for i in range(1000)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    monkeypatch.setattr(GGUFModel, "tokenizer", lambda _: tokenizer)
    with limited(resource.RLIMIT_FSIZE, size), pytest.raises(OSError, match="File too large"):
        GGUFModel.write_files(GGUFModel.__new__(GGUFModel), tmp_path)


def test_too_little_memory(process: Any) -> None:
    """One error, wherever it shows: opening a file, reading, quantising, verifying."""
    found = process("conversions", "starve")
    *short, enough = found["errors"]
    assert len(short) > 2, found
    assert enough == ""
    for error in short:
        assert error.startswith("MemoryError: ")
        assert "source: the memory does not suffice (" in error
    code, shown = found["command"]
    assert code == 2
    assert shown.strip().startswith("error: ")
    assert "large: the memory does not suffice" in shown
    assert "\n" not in shown.strip()
    assert found["same"]
    assert found["left"] == []


def test_memory_is_that_of_one_layer(process: Any) -> None:
    """A layer is 4 MB of floats, 1 MB packed."""
    found = process("conversions", "watch_memory")
    assert len(found["used"]) == 13
    assert max(found["used"]) - found["used"][0] < 4, found
    assert found["size"] > 12


def test_loading_makes_no_float_model(process: Any) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    found = process("conversions", "watch_loading")
    assert found["layers"] == 3 * 7
    assert found["floats"] > 90
    assert found["peak"] < 0.5 * found["floats"], found
