"""Pages of results: what makes them, that their files are of one run, and that the documentation says what they say."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import typer
from bench import extracts, origin, pages
from bench.__main__ import app
from bench.pages import PAGES, Page, Run
from bench.report import _text
from typer.testing import CliRunner

COMMIT: Final = "1234567"
TIMES: Final = {"qcutlass_us": 4.04, "cublas_us": 12.25, "humming_us": 999.96}


def row(m: int, scheme: str = "w4a16_g128", shape: str = "64x128", **more: Any) -> dict[str, Any]:
    return {"scheme": scheme, "shape": shape, "m": m, "selected": True, **TIMES, **more}


def write(folder: Path, page: Page, commit: str = COMMIT) -> None:
    facts = {"commit": commit, "command": page.command}
    (folder / f"{page.name}.json").write_text(json.dumps({"facts": facts, "rows": []}))
    (folder / f"{page.name}.md").write_text("### It\n")


@dataclass
class Launches:
    """Commands that were started in place of running; each writes the files that it is asked for.

    Attributes:
        ends: exit statuses by module or command; 0 where nothing is said.
        empty: commands that write nothing.
    """

    ends: dict[str, int] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)
    seen: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, words: Sequence[str], environment: dict[str, str], log: Path) -> int:
        assert words[0] == "-m"
        with self.lock:
            self.seen.append((" ".join(words[1:]).partition(" --json")[0], environment["CUDA_VISIBLE_DEVICES"]))
        assert log.parent.is_dir()
        name = words[1] if words[1] != "bench" else words[2]
        if "--json" in words and name not in self.empty:
            for option in ("--json", "--markdown"):
                Path(words[words.index(option) + 1]).write_text(name)
        return self.ends.get(name, 0)


SOME: Final = (
    Page("short", "gpu --m 1", 1),
    Page("long", "step --m 1 --m 8", 9, compiles=True),
    Page("host", ".host", 5, promises=True),
)


COMMANDS: Final = [page for page in PAGES if not page.arguments.startswith(".")]


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_commands_are_understood(page: Page) -> None:
    group: Any = typer.main.get_command(app)
    name, *words = page.words[2:]
    found = group.commands[name]
    found.make_context(name, [*words, "--json", "a.json", "--markdown", "a.md"])
    assert found.make_context(name, list(words)).params["json_path"] is None
    parts = [part.words[2:] for part in page.parts()] if page.compiles else []
    if parts:
        assert all(found.make_context(name, list(words)).params["rounds"] == 1 for _, *words in parts)
        numbers = [found.make_context(name, list(words)).params["m"] for _, *words in parts]
        assert [m for (m,) in numbers] == list(found.make_context(name, list(words)).params["m"])


def test_pages_have_names_of_their_own() -> None:
    assert len({page.name for page in PAGES}) == len({page.command for page in PAGES}) == len(PAGES)
    assert [page.command for page in PAGES if page not in COMMANDS] == ["python -m bench.host"]
    assert [page.words[2] for page in PAGES if page.promises] == ["quantize"]


def test_the_longest_come_first_and_files_into_place(tmp_path: Path) -> None:
    launches = Launches({"bench.host": 1})
    assert Run(tmp_path, ["3"], 100, launches).make(SOME) == []
    assert launches.seen == [("bench step --m 1 --m 8", "3"), ("bench.host", "3"), ("bench gpu --m 1", "3")]
    assert sorted(path.name for path in tmp_path.glob("*.*")) == [
        f"{name}.{end}" for name in ("host", "long", "short") for end in ("json", "md")
    ]
    assert list((tmp_path / "unfinished").iterdir()) == []


@pytest.mark.parametrize("launches", [Launches({"step": 1}), Launches(empty={"step"})], ids=["status", "no files"])
def test_what_failed_leaves_a_page_as_it_was(launches: Launches, tmp_path: Path) -> None:
    (tmp_path / "long.md").write_text("earlier")
    assert Run(tmp_path, ["0", "1"], 100, launches).make(SOME) == ["long"]
    assert (tmp_path / "long.md").read_text() == "earlier"
    assert not (tmp_path / "long.json").exists()
    assert (tmp_path / "short.md").read_text() == "gpu"
    assert {device for _, device in launches.seen} <= {"0", "1"}


def test_no_page_is_begun_that_may_take_longer(tmp_path: Path) -> None:
    launches = Launches()
    assert Run(tmp_path, ["0"], 6, launches).make(SOME) == ["long"]
    assert [command for command, _ in launches.seen] == ["bench.host", "bench gpu --m 1"]


def test_a_broken_gpu_leaves_pages_to_others(tmp_path: Path) -> None:
    """It takes two at most; alone it gives up."""
    many = [Page(str(number), f"step --m {number}", 1) for number in range(1, 9)]
    launches = Launches({"step": 1})
    assert len(Run(tmp_path, ["0"], 100, launches).make(many)) == 8
    assert len(launches.seen) == 2


def test_an_interrupted_run_begins_nothing_more(tmp_path: Path) -> None:
    begun: list[str] = []

    def interrupted(words: Sequence[str], environment: dict[str, str], log: Path) -> int:
        begun.append(words[2])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path, ["0"], 100, interrupted).make(SOME)
    assert begun == ["step"]


def test_a_table_comes_before_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows say that a page is done."""
    move = Path.replace

    def once(path: Path, target: Path) -> Path:
        assert path.suffix == ".md"
        monkeypatch.setattr(Path, "replace", move)
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", once)
    with pytest.raises(OSError, match="no space"):
        Run(tmp_path, ["0"], 100, Launches()).make(SOME[:1])
    assert list(tmp_path.glob("*.json")) == []


def test_numbers_of_rows_are_compiled_one_by_one(tmp_path: Path) -> None:
    launches = Launches()
    for _ in range(2):  # what has run does not run again
        Run(tmp_path, ["0", "1"], 100, launches).compile(SOME, 2)
    assert sorted(command for command, _ in launches.seen) == [
        "bench step --m 1 --rounds 1",
        "bench step --m 8 --rounds 1",
    ]
    assert list(tmp_path.glob("*.*")) == []


def test_pages_of_this_tree_are_not_made_again(tmp_path: Path) -> None:
    page = SOME[0]
    assert not pages.is_done(page, tmp_path, COMMIT)
    write(tmp_path, page)
    assert pages.is_done(page, tmp_path, COMMIT)
    assert not pages.is_done(page, tmp_path, "7654321")
    assert not pages.is_done(page, tmp_path, None)
    assert not pages.is_done(Page(page.name, "gpu --m 2", 1), tmp_path, COMMIT)
    write(tmp_path, page, COMMIT + "+")
    assert not pages.is_done(page, tmp_path, COMMIT + "+")  # the tree may have changed again
    write(tmp_path, page)
    (tmp_path / "short.json").write_text("{")
    assert not pages.is_done(page, tmp_path, COMMIT)
    write(tmp_path, page)
    (tmp_path / "short.md").unlink()
    assert not pages.is_done(page, tmp_path, COMMIT)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(origin.ENVIRONMENT_VARIABLE, COMMIT)
    write(tmp_path, PAGES[0])
    folder = ["--folder", str(tmp_path)]
    listed = CliRunner().invoke(app, ["pages", "--list", *folder])
    assert listed.exit_code == 0, listed.output
    lines = listed.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [page.name for page in PAGES]
    assert [line.split()[1] == "done" for line in lines] == [True, *(False for _ in PAGES[1:])]
    assert "one of int4" in CliRunner().invoke(app, ["pages", "int5", *folder]).output
    if not torch.cuda.is_available():
        assert "no CUDA device" in CliRunner().invoke(app, ["pages", "int4", *folder]).output
    launches = Launches()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(Run.__init__, "__defaults__", (launches,))
    some = ["pages", "int4", "host", "w4a8", *folder]
    made = CliRunner().invoke(app, some)
    assert made.exit_code == 0, made.output
    assert sorted(command.split(" --")[0] for command, _ in launches.seen) == ["bench gpu", "bench.host"]
    late = CliRunner().invoke(app, [*some, "--seconds", "1", "--gpu", "1", "--compilers", "1"])
    assert late.exit_code == 1
    assert "not made: w4a8, host" in late.stdout
    with pages.alone(tmp_path / "unfinished" / "lock"):
        assert CliRunner().invoke(app, some).exit_code == 2
        with pytest.raises(ValueError, match="another run makes pages there"):
            pages.alone(tmp_path / "unfinished" / "lock")


def test_a_process_says_its_command() -> None:
    program = str(Path(origin.__file__).parent / "__main__.py")
    words = ["gpu", "--m", "1", "--json", "a.json", "--markdown=a.md", "--part", "1", "2", "--shapes", "8x8"]
    assert origin.command([program, *words]) == "python -m bench gpu --m 1 --shapes 8x8"
    assert origin.command([str(Path(program).with_name("host.py")), "--json", "a"]) == "python -m bench.host"
    assert origin.command([program, "gpu", "--json=", "--m", "1"]) == "python -m bench gpu --m 1"
    assert origin.command([program, "sweep", "--part=0", "2"]) == "python -m bench sweep"
    assert origin.command([pytest.__file__, "--json"]) is None
    assert origin.command([str(Path(program).with_name("moe"))]) is None
    assert origin.command([]) is None


# Extracts


def test_tables_of_times(tmp_path: Path) -> None:
    rows = [row(1), row(1, "fp8", qcutlass_us=2.0), row(8, shape="8x8"), row(8, "fp8", selected=False)]
    (tmp_path / "page.json").write_text(json.dumps({"rows": rows}))
    of = "w4a16_g128.qcutlass / fp8.qcutlass / w4a16_g128.humming"
    begin, end = f"# A\n<!-- table page: {of} -->\n", "<!-- /table -->\nb\n"
    table = (
        "| M | 64x128 | 8x8 |\n|---:|---:|---:|\n"
        "| 1 | 4.0 / **2.0** / 1000 | - / - / - |\n| 8 | - / - / - | **4.0** / - / 1000 |\n"
    )
    assert extracts.filled(f"{begin}old\n{end}{begin}{end}", tmp_path) == f"{begin}{table}{end}{begin}{table}{end}"
    first = begin.replace(" -->", "; m 1 -->")
    assert extracts.filled(f"{first}{end}", tmp_path).count("\n| ") == 2
    page = tmp_path / "docs.md"
    page.write_text(f"{begin}{end}")
    for printed in (f"{page}: brought up to date", ""):
        result = CliRunner().invoke(app, ["extracts", str(page), "--folder", str(tmp_path)])
        assert (result.exit_code, result.stdout.replace("\n", "")) == (0, printed)
    assert page.read_text() == f"{begin}{table}{end}"


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("table other: a.b", "expected a page"),
        ("table page: w4a16_g128.cutlass", "no row has cutlass_us of w4a16_g128"),
        ("table page: fp8.qcutlass", "no row has qcutlass_us of fp8"),
        ("table page: w4a16_g128.qcutlass; m 1 2 3", "no row has M of 2, 3"),
        ("experts page: humming", "no row of a block has limit_us"),
    ],
)
def test_extracts_of_nothing(of: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "page.json").write_text(json.dumps({"rows": [row(1)]}))
    with pytest.raises(ValueError, match=message):
        extracts.filled(f"<!-- {of} -->\n<!-- /{of.split()[0]} -->", tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table page: w4a16_g128.qcutlass -->\n",
        "<!-- table page: w4a16_g128.qcutlass -->\nwords\n<!-- table page: w4a16_g128.qcutlass -->\n<!-- /table -->",
        "<!-- table page: w4a16_g128.qcutlass -->\n<!-- /experts -->",
        "<!-- tabel page: w4a16_g128.qcutlass -->\n<!-- /table -->",
        "<!-- table my-page: w4a16_g128.qcutlass -->\n<!-- /table -->",
    ],
    ids=["no end", "words between", "another end", "misspelt", "no name"],
)
def test_places_that_are_not_whole(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.json").write_text(json.dumps({"rows": [row(1)]}))
    with pytest.raises(ValueError, match="expected pairs"):
        extracts.filled(text, tmp_path)


def test_tables_of_experts(tmp_path: Path) -> None:
    block = {"shape": "tiny", "skew": "uniform", "m": 1, "whole_us": 20.0, "limit_us": 5.0, "qcutlass_block_us": 19.0}
    rows = [block, {**block, "skew": "zipf", "humming_block_us": 18.5}, {"tactic": "one", "shape": "tiny", "m": 1}]
    (tmp_path / "moe.json").write_text(json.dumps({"rows": rows}))
    found = extracts.filled("<!-- experts moe: humming -->\n<!-- /experts -->", tmp_path)
    assert "| model | tokens | uniform | zipf |\n" in found
    assert "| tiny | 1 | 20.0 (25%), **19.0** / - | 20.0 (25%), 19.0 / **18.5** |\n" in found


def test_the_documentation_says_what_the_pages_say(repository: Path) -> None:
    texts = {page: page.read_text() for page in (repository / "docs").glob("*.md")}
    assert sum(text.count("<!-- /table -->") for text in texts.values()) >= 8
    for page, text in texts.items():
        assert extracts.filled(text, repository / "bench" / "results") == text, f"{page.name}: python -m bench extracts"


def test_tables_are_of_the_runs_of_their_rows(repository: Path) -> None:
    """A page and its rows are written together: rows of another run would be taken for what the table shows."""
    results = repository / "bench" / "results"
    found = sorted(path for path in results.glob("*.json") if path.stem != "quality")
    assert found != []
    for path in found:
        facts = json.loads(path.read_text())["facts"]
        lines = [f"- {key}: {_text(value)}" for key, value in facts.items() if value not in ({}, [])]
        assert "\n".join(lines) in path.with_suffix(".md").read_text(), path.name
