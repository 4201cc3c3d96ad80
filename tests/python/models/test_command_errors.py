"""Commands end with a line, never with a traceback: every command, at every place that cannot be read or written.

The commands and their options are those that the application lists, so that a new one is walked by itself.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from tests.python.models.folders import RandomCut, write_model
from typer.models import ArgumentInfo
from typer.testing import CliRunner

import qcutlass
from qcutlass import models
from qcutlass.cli import app
from qcutlass.cli.terminal import printable, steps

pytest.importorskip("transformers", reason="needs transformers")

COMMANDS = {info.name or info.callback.__name__: info.callback for info in app.registered_commands if info.callback}
MADE = ("destination", "out")  # places that a command makes; it reads all others
OPTIONS: dict[str, list[str]] = {
    "convert": ["--bits", "4"],
    "eval": ["--window", "2"],
    "generate": ["--prompt", "5 6"],
    "quantize": ["--samples", "1", "--seqlen", "4"],
}
"""With which a command that is given good places ends well."""


def is_place(hint: Any) -> bool:
    return hint is Path or any(is_place(part) for part in get_args(hint))


def places_of(command: str) -> list[str]:
    """The parameters that are places."""
    return [name for name, hint in get_type_hints(COMMANDS[command], include_extras=True).items() if is_place(hint)]


CASES = [(command, name) for command in COMMANDS for name in places_of(command)]


class Places:
    """Good places for each parameter, and bad ones."""

    def __init__(self, root: Path, cut: RandomCut) -> None:
        self.root = root
        self.floats = root / "floats"
        shutil.copytree(cut.floats().folder, self.floats)
        self.converted = root / "converted"
        models.convert(cut.gptq().folder, self.converted)
        self.text = root / "text.txt"
        self.text.write_text("5 6 7 8 " * 20)
        self.made = root / "made"

    def add_chat_template(self) -> None:
        path = self.converted / "tokenizer_config.json"
        template = {"chat_template": "{% for one in messages %}{{ one['content'] }} {% endfor %}"}
        path.write_text(json.dumps(json.loads(path.read_text()) | template))

    def good(self, command: str, name: str) -> Path:
        if name in ("text", "calibration"):
            return self.text
        if name in MADE:
            return self.made
        return self.floats if command in ("convert", "quantize", "quickstart") else self.converted

    def bad(self, kind: str, name: str) -> Path:
        return Path(getattr(self, f"_{kind}")(name))

    def _absent(self, name: str) -> Path:
        return self.text / "inside" if name in MADE else self.root / "absent"

    def _foreign(self, name: str) -> Path:
        if name in ("text", "calibration", *MADE):
            path = self.root / "random.txt"
            path.write_bytes(b"\xff" + os.urandom(4096))
            return path
        folder = self.root / "foreign"
        folder.mkdir()
        for file in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
            (folder / file).write_bytes(b"\xff" + os.urandom(4096))
        return folder

    def _foreign_json(self, name: str) -> Path:
        """Whole files with values of other types."""
        folder = self.root / "foreign_json"
        if name in ("text", "calibration", *MADE):
            return self._foreign(name)
        shutil.copytree(self.floats, folder)
        (folder / "config.json").write_text('{"quantization_config": {"quant_method": 4}}')
        return folder

    def _empty(self, name: str) -> Path:
        path = self.root / ("empty.txt" if name in ("text", "calibration") else "empty")
        path.write_bytes(b"") if path.suffix or name in MADE else path.mkdir()
        return path

    def _folder(self, name: str) -> Path:
        """In place of a file; for what reads folders, with folders in place of its files; one that is there."""
        folder = self.root / "folder"
        for file in ("config.json", "model.safetensors", "model.safetensors.index.json"):
            (folder / file).mkdir(parents=True)
        return folder

    def _index_is_a_folder(self, name: str) -> Path:
        folder = self.root / "indexed"
        shutil.copytree(self.floats, folder)
        (folder / "model.safetensors.index.json").mkdir()
        return folder

    def _fifo(self, name: str) -> Path:
        os.mkfifo(self.root / "fifo")
        return self.root / "fifo"

    def _fifo_named_as_weights(self, name: str) -> Path:
        path = self.root / ("fifo.txt" if name in ("text", "calibration") else "fifo.safetensors")
        os.mkfifo(path)
        return path

    def _memory(self, name: str) -> str:
        return "/proc/self/mem"

    def _full(self, name: str) -> str:
        return "/dev/full" if name in MADE else "/dev/zero"

    def _long(self, name: str) -> str:
        return str(self.root / ("x" * 300))


KINDS = [name[1:] for name in vars(Places) if name.startswith("_") and not name.startswith("__")]


@pytest.fixture
def places(tmp_path: Path, random_cut: RandomCut) -> Places:
    return Places(tmp_path, random_cut)


def arguments(command: str, place: Callable[[str], Path]) -> list[str]:
    """A command line in which each place is `place` of its name, and all else that must be given is some word."""
    words = [command, *OPTIONS.get(command, [])]
    for name, parameter in inspect.signature(COMMANDS[command], eval_str=True).parameters.items():
        described = get_args(parameter.annotation)[1:]
        if name in places_of(command) or (described and parameter.default is parameter.empty):
            value = str(place(name)) if name in places_of(command) else "5x6"
            is_argument = isinstance(described[-1], ArgumentInfo)
            words += [value] if is_argument else [f"--{name.replace('_', '-')}", value]
    return words


def invoke(words: list[str], **environment: str) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", **environment}).invoke(app, words)


def assert_line(status: int, stderr: str, label: object) -> None:
    assert status == 2, (label, stderr)
    lines = [line for line in stderr.splitlines() if not line.startswith("calibration: ")]
    assert len(lines) == 1, (label, stderr)
    assert lines[0].startswith("error: "), (label, lines)
    assert len(lines[0]) > len("error: "), label


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("command", "name"), CASES)
def test_bad_places(command: str, name: str, kind: str, places: Places) -> None:
    bad = places.bad(kind, name)
    before = sorted(places.root.iterdir())
    words = arguments(command, lambda each: bad if each == name else places.good(command, each))
    result = invoke(words)
    assert_line(result.exit_code, result.stderr, (command, name, kind, result.exception))
    assert sorted(places.root.iterdir()) == before  # nothing half-written is left


@pytest.mark.parametrize("command", ["eval", "generate", "quantize"])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"model_type": "llama", "num_hidden_layers": [], "vocab_size": "x"}'),
        ("config.json", '{"model_type": "llama", "hidden_size": 0}'),
        ("config.json", '{"model_type": ["llama"]}'),
        ("config.json", "{}"),
        ("tokenizer.json", '{"model": 4}'),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_values_that_transformers_stumbles_over(command: str, file: str, content: str, places: Places) -> None:
    (places.floats / file).write_text(content)
    words = arguments(
        command, lambda name: places.floats if name in ("folder", "model") else places.good(command, name)
    )
    result = invoke(words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert not places.made.exists()


@pytest.mark.parametrize("command", [command for command in COMMANDS if places_of(command)])
def test_good_places(command: str, places: Places) -> None:
    """Else the bad ones would not be what is refused."""
    if command == "chat":
        places.add_chat_template()
    result = invoke(arguments(command, lambda each: places.good(command, each)))
    assert result.exit_code == 0, result.output


def in_process(words: list[str], prepare: str = "pass", **options: Any) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from qcutlass.cli import app; {prepare}; app(sys.argv[1:], prog_name='qcutlass')"
    return subprocess.run(
        [sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True, check=False, **options
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_behind_stdout(command: str, places: Places) -> None:
    words = arguments(command, lambda each: places.good(command, each))
    with open("/dev/full", "w") as full:
        result = in_process(words, stdout=full)
    assert_line(result.returncode, result.stderr, command)


@pytest.mark.parametrize("command", [command for command, name in CASES if name in MADE])
def test_files_that_may_not_grow(command: str, places: Places) -> None:
    """As where the disk is full."""
    words = arguments(command, lambda each: places.good(command, each))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))"
    result = in_process(words, limit, stdout=subprocess.PIPE)
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr
    assert not places.made.exists()


@pytest.mark.parametrize("megabytes", [10, 90])
@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_memory_that_is_not_there(command: str, megabytes: int, tmp_path: Path) -> None:
    """So little that the file of 64 MB cannot be mapped, or not be read."""
    folder = tmp_path / "model"
    write_model(folder, {"up.weight": torch.zeros(4096, 4096)}, {"model_type": "x"}, None)
    limit = (
        "import resource, qcutlass.models; pages = int(open('/proc/self/statm').read().split()[0]); "
        f"resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + ({megabytes} << 20),) * 2)"
    )
    words = [command, str(folder), *([str(tmp_path / "new"), "--bits", "4"] if command == "convert" else [])]
    result = in_process(words, limit, stdout=subprocess.PIPE)
    assert_line(result.returncode, result.stderr, (command, megabytes))
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), 2),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2),
        (RuntimeError("unable to mmap 4096 bytes from file <x>: Cannot allocate memory (12)"), 2),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"), 2),
        (OSError(28, "No space left on device"), 2),
        (qcutlass.UnsupportedError("two\nlines"), 2),
        (KeyboardInterrupt(), 130),
        (RuntimeError("a fault of ours"), 1),
    ],
    ids=repr,
)
def test_each_error(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("qcutlass.cli.info.collect", fail)
    result = invoke(["info"])
    assert result.exit_code == status
    if status == 2:
        assert_line(result.exit_code, result.stderr, error)
    elif status == 1:
        assert result.exception is error  # is not hidden
    else:
        assert result.output == ""


def test_a_reader_that_leaves_is_no_error(places: Places) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        result = in_process(["inspect", str(places.converted)], stdout=pipe)
    assert result.stderr == ""


ODD = "a\x1b]0;t\x07b\x1b[2J\u202ec[red]d[/x]\x9b"
SHOWN = r"a\x1b]0;t\x07b\x1b[2J\u202ec[red]d[/x]\x9b"


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    folder = tmp_path / ODD.replace("/", "")
    folder.mkdir()
    save_file(
        {f"{ODD}.weight": torch.randn(32, 64), f"{ODD}.b.weight": torch.ones(4, 4).double()}, folder / "m.safetensors"
    )
    (folder / "config.json").write_text('{"model_type": "x", "quantization_config": {"quant_method": "gptq"}}')
    return folder


def test_names_are_escaped_wherever_they_are_shown(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, absent = tmp_path / f"{odd.name}-new", tmp_path / f"{odd.name}-absent"
    runs = [
        (["inspect", odd], 0),
        (["inspect", odd, "--json"], 0),
        (["quickstart", odd, "--device", "cpu", "--all"], 0),
        (["convert", odd, made], 2),
        (["convert", odd / "m.safetensors", made, "--from", ODD], 2),
        (["export", odd, made], 2),
        (["eval", odd, "--text", absent], 2),
        (["eval", odd, "--text", odd / "config.json"], 2),
        (["generate", odd, "--prompt", ODD], 2),
        (["quantize", odd, made, "--method", ODD], 2),
        (["tune", ODD], 2),
        (["inspect", absent], 2),
        (["inspect", odd, f"--{ODD}"], 2),
        (["inspect", odd, ODD], 2),
        ([ODD], 2),
    ]
    for words, status in runs:
        result = invoke([str(word) for word in words], TERM="xterm")
        assert result.exit_code == status, (words, result.output)
        for character in ("\x1b", "\x07", "\x9b", "\u202e"):
            assert character not in result.output, (words, result.output)
    assert printable(ODD) in invoke(["inspect", str(odd)]).stdout
    assert SHOWN.replace("/", "") in invoke(["inspect", str(absent)]).stderr
    assert "warning: " in invoke(["inspect", str(odd)]).stderr  # the label lies


def test_what_a_model_says_does_not_reach_the_terminal_raw() -> None:
    assert (
        printable("a\x1b[2Jb\n\tc\u202e👨\u200d👩 é\udc80", keep="\n\t") == "a\\x1b[2Jb\n\tc\\u202e👨\u200d👩 é\\udc80"
    )
    assert printable("a\nb") == r"a\nb"


def test_commands_print_through_one_function() -> None:
    """`typer.echo` and rich's `escape` are called there alone."""
    for path in Path(qcutlass.__file__).parent.rglob("*cli*.py"):
        source = path.read_text()
        assert "typer.echo" not in source
        assert "rich.markup" not in source
        assert "print(" not in source.replace("onsole.print(", "").replace("_console().print(", "")


def test_progress_shows_names_escaped() -> None:
    from rich.console import Console

    stream = io.StringIO()
    with steps(Console(file=stream, force_terminal=True, width=200), "reading") as report:
        report(ODD, 1, 2)
    assert "\x1b]0;t" not in stream.getvalue()
    assert SHOWN in stream.getvalue()
