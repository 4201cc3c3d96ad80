"""Which commit a report says it ran from."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from bench import cpu, gpu, gpu_report, origin, timing
from tests.python.bench_rows import row

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs the program git")


def git(tree: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    run = subprocess.run(["git", *who, *arguments], cwd=tree, capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    git(tree, "init")
    (tree / "kernel.cu").write_text("1\n")
    git(tree, "add", "kernel.cu")
    git(tree, "commit", "-m", "One")
    git(tree, "tag", "-a", "v1", "-m", "Tags are no hashes")
    return tree


def commit_of(tree: Path) -> str | None:
    origin.commit.cache_clear()
    return origin.commit(tree)


@needs_git
def test_the_commit_of_a_checkout_with_a_mark_where_tracked_files_differ(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "--short", "HEAD")
    assert commit_of(checkout) == head
    (checkout / "bench.json").write_text("{}")  # what a run writes is not tracked
    assert commit_of(checkout) == head
    (checkout / "kernel.cu").write_text("2\n")
    assert commit_of(checkout) == f"{head}+"
    git(checkout, "add", "kernel.cu")
    assert commit_of(checkout) == f"{head}+"


@needs_git
def test_no_commit_of_what_is_no_checkout(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = checkout / "build" / "copy"
    inside.mkdir(parents=True)
    assert commit_of(inside) is None
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init")
    assert commit_of(empty) is None  # nothing is committed
    monkeypatch.setenv("PATH", "")
    assert commit_of(checkout) is None  # there is no git


def test_the_environment_names_the_commit_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "commit", lambda tree: None)
    monkeypatch.delenv(origin.ENVIRONMENT_VARIABLE, raising=False)
    assert list(origin.facts()) == ["date", "torch"]
    monkeypatch.setenv(origin.ENVIRONMENT_VARIABLE, "1234567+")
    assert origin.facts()["commit"] == "1234567+"
    monkeypatch.setattr(origin, "commit", lambda tree: "89abcde")
    assert origin.facts()["commit"] == "1234567+"


def test_pages_show_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(origin.ENVIRONMENT_VARIABLE, "1234567+")
    monkeypatch.setattr(cpu, "copy_rate", lambda: 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    sample = timing.Sample([1.0])
    reports = [
        cpu.report([], 0.1, {1: sample}),
        gpu.Bench([], gpu.Options()).report([row("64x64", 1, "stream", 2.0)]),
    ]
    assert reports[1].title == gpu_report.TITLE
    for report in reports:
        assert "- commit: 1234567+\n" in report.markdown()
