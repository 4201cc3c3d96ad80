"""The command that talks: `qcutlass chat`."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from qcutlass.cli.running import (
    Device,
    Eager,
    Folder,
    Fuse,
    Quantized,
    Seed,
    Temperature,
    Threads,
    TopP,
    Type,
    load,
    note_faster,
)
from qcutlass.cli.terminal import console, echo, say, steps

_HELP = "/reset forgets what was said, /exit or Ctrl-D ends; Ctrl-C ends an answer."


def chat(
    folder: Folder,
    system: Annotated[
        str | None,
        typer.Option(help="What the model is told before the first message, if its template allows it."),
    ] = None,
    context: Annotated[
        int, typer.Option(min=16, help="The tokens of a conversation. The oldest messages are left out beyond them.")
    ] = 4096,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The largest number of tokens of an answer.")] = 1024,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    device: Device = "cpu",
    dtype: Type = None,
    fuse: Fuse = None,
    activations: Quantized = None,
    eager: Eager = False,
    threads: Threads = None,
) -> None:
    """Talk with a model that was trained to answer; what was said before is part of each message.

    /reset forgets what was said, /exit or Ctrl-D ends. Ctrl-C ends an answer.
    """
    from qcutlass.models.sampling import Sampling

    sampling = Sampling(temperature, top_p, seed)
    with steps(console(stderr=True), "loading") as report:
        model, tokenizer = load(folder, device, dtype, fuse, activations, threads, report, eager)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{folder}: its tokenizer has no chat template; qcutlass generate continues texts")
    from qcutlass.models.generation import fast_steps
    from qcutlass.models.positions import positions_of

    longest = positions_of(model) or context
    if longest < context:
        say(f"note: the context is {longest} tokens, for which the model has learned positions")
        context = longest

    with suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines, and remembers them

    note_faster(model, activations)
    talk = _Talk(model, tokenizer, system, context, max_new_tokens, sampling)
    say(_HELP)
    with fast_steps(model, context, say, eager=eager):
        while (line := _line()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                talk.reset()
                say("forgotten")
            elif line.startswith("/"):
                say(f"{line.split()[0]}: no such command. {_HELP}")
            elif line:
                talk.say(line)


def _line() -> str | None:
    """What the user types; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        echo("")
        return None


class _Talk:
    """A conversation, of which messages are left out where it gets longer than the context."""

    def __init__(
        self, model: Any, tokenizer: Any, system: str | None, context: int, max_new_tokens: int, sampling: Any
    ) -> None:
        self._model, self._tokenizer, self._sampling = model, tokenizer, sampling
        self._context, self._most = context, max_new_tokens
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = []

    def reset(self) -> None:
        self._messages = []

    def say(self, text: str) -> None:
        """Prints the answer to a message as it comes; after Ctrl-C it is remembered as far as it got."""
        from qcutlass.models.generation import Interrupted, generate

        before = list(self._messages)
        self._messages.append({"role": "user", "content": text})
        room = self._room()
        if room < 1:
            self._messages = before
            say(f"the message is longer than the context of {self._context} tokens; pass a larger --context")
            return
        try:
            found = generate(
                self._model,
                self._tokenizer,
                [*self._system, *self._messages],
                min(self._most, room),
                sampling=self._sampling,
                eager=True,  # fast_steps is around all messages
                on_text=lambda piece: echo(piece, end="", keep="\n\t"),
            )
        except Interrupted as error:
            found = error.generation
        except KeyboardInterrupt:
            self._messages = before
            echo("")
            return
        echo("")
        self._messages.append({"role": "assistant", "content": found.text})
        say(f"[{found.tokens} tokens, {found.tokens_per_second:.1f} tokens/s]")

    def _room(self) -> int:
        """Tokens that are left for the answer, once the oldest messages are left out that do not fit."""
        from qcutlass.models.generation import in_template

        while True:
            messages = [*self._system, *self._messages]
            text = in_template(self._tokenizer, messages)
            room = self._context - len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            if room >= min(self._most, self._context // 4) or len(self._messages) < 2:
                return room
            del self._messages[:2]  # a question and its answer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(chat)
