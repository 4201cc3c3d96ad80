"""`qcutlass chat` at a terminal: answers, what was said before, /reset, /exit, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.python.models.folders import RandomCut

from qcutlass.cli.chatting import _Talk
from qcutlass.models.generation import Generation

pytest.importorskip("transformers", reason="needs transformers")

TEMPLATE = (
    "{% for one in messages %}{{ '1 ' if one['role'] == 'user' else '2 ' }}{{ one['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}3 {% endif %}"
)


@pytest.fixture
def folder(random_cut: RandomCut) -> Path:
    folder = random_cut.floats().folder
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._own, theirs = pty.openpty()
        environment = os.environ | {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "qcutlass", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """What was printed up to `text`; it is not seen again."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            left = end - time.monotonic()
            assert left > 0, f"{text!r} did not come: {self.seen!r}"
            if select.select([self._own], [], [], left)[0]:
                try:
                    self.seen += os.read(self._own, 4096).decode(errors="replace")
                except OSError:  # the other side is closed
                    assert text in self.seen, f"{text!r} did not come: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt(self) -> int | None:
        """The exit status after Ctrl-C; one that comes before readline waits for the terminal is seen with the next."""
        for _ in range(6):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(20)
        return None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.fixture
def terminal(folder: Path) -> Iterator[Terminal]:
    found = Terminal("chat", str(folder), "--max-new-tokens", "4")
    yield found
    found.close()


def test_a_conversation_at_a_terminal(terminal: Terminal) -> None:
    terminal.wait_for("/reset forgets")
    terminal.wait_for("> ")
    terminal.type("5 6\n")
    terminal.wait_for("tokens/s]")
    terminal.wait_for("> ")
    terminal.type("/what\n")
    terminal.wait_for("/what: no such command")
    terminal.type("/reset\n")
    terminal.wait_for("forgotten")
    terminal.type("5 6\n")
    terminal.wait_for("tokens/s]")
    terminal.type("/exit\n")
    assert terminal.process.wait(60) == 0


def test_the_end_of_the_input_ends_it(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def test_ctrl_c_at_the_prompt_ends_it(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    assert terminal.interrupt() == 130


class _Tokenizer:
    """A token a word; every message has one for its role."""

    chat_template = TEMPLATE

    def apply_chat_template(self, messages: list[Any], **_: Any) -> str:
        return " ".join(f"{message['role']} {message['content']}" for message in messages)

    def __call__(self, text: str, **_: Any) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


def test_what_was_said_before_is_part_of_a_message_until_the_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from qcutlass.models import generation

    prompts: list[list[str]] = []

    def answer(model: Any, tokenizer: Any, messages: Any, most: int, **_: Any) -> Generation:
        prompts.append([message["content"] for message in messages])
        return Generation(f"answer {len(prompts)}", 1, 2, 0.1, 1.0)

    monkeypatch.setattr(generation, "generate", answer)
    talk = _Talk(None, _Tokenizer(), "be brief", context=20, max_new_tokens=5, sampling=None)
    for question in ("one", "two", "three", "four"):
        talk.say(question)
    assert prompts[0] == ["be brief", "one"]
    assert prompts[1] == ["be brief", "one", "answer 1", "two"]
    assert prompts[3] == ["be brief", "two", "answer 2", "three", "answer 3", "four"], "the oldest are left out"
    talk.reset()
    talk.say("five")
    assert prompts[-1] == ["be brief", "five"]
    talk.say("word " * 30)
    assert len(prompts) == 5, "it is longer than the context"
    talk.say("six")
    assert prompts[-1] == ["be brief", "five", "answer 5", "six"]


def test_a_model_without_a_chat_template(random_cut: RandomCut) -> None:
    found = Terminal("chat", str(random_cut.floats().folder))
    try:
        found.wait_for("its tokenizer has no chat template; qcutlass generate continues texts")
        assert found.process.wait(60) == 2
    finally:
        found.close()
