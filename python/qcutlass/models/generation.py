"""Text from a prompt, token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import DynamicCache, TextStreamer

from qcutlass.models import stepping
from qcutlass.models.block_modules import FusedBlock
from qcutlass.models.cache_argument import CACHE
from qcutlass.models.compiling import compiled_code
from qcutlass.models.growing_cache import growing_cache
from qcutlass.models.positions import check_length
from qcutlass.models.sampling import Sampling
from qcutlass.products.checks import check_integer

Message: TypeAlias = Mapping[str, str]
"""`role`, that is "user" or "assistant" or "system", and `content`."""


@dataclass(frozen=True)
class Generation:
    """The result of `generate`.

    Attributes:
        text: without the prompt.
        prompt_tokens: how many were read.
        tokens: how many were made.
        first_seconds: until the first one.
        tokens_per_second: of those behind the first; 0 where there are none.
    """

    text: str
    prompt_tokens: int
    tokens: int
    first_seconds: float
    tokens_per_second: float


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a text is made; `generation` is what there is of it."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self.generation = generation


class _Stream(TextStreamer):
    """Hands on text as soon as it is whole characters, and notes when each token comes."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self.text = ""
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self._on_text(text)


def in_template(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The messages as a model reads them; ValueError if the template does not take them."""
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs: they raise what they like
        roles = ", ".join(message["role"] for message in messages)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"chat: the chat template of the tokenizer does not take messages of {roles} ({reason}); leave out the "
            "system message (--system) if there is one, or continue a text without a template"
        ) from error
    return _checked(text)


def _checked(text: str) -> str:
    """The text; ValueError if the terminal gave bytes in it that are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt: expected text in UTF-8, got other bytes at character {error.start}; set a UTF-8 locale "
            "(LC_ALL=C.UTF-8), or pass a file in UTF-8 on stdin"
        ) from error
    return text


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[Message],
    max_new_tokens: int = 128,
    *,
    chat: bool = False,
    sampling: Sampling | None = None,
    eager: bool = False,
    on_text: Callable[[str], None] = lambda text: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Generation:
    """Continues a prompt. On a GPU steps are compiled and captured in a CUDA graph, where the model allows it.

    Args:
        model, tokenizer: as `qcutlass.models.transformers.load_model` gives them.
        prompt: a text with at least one token; or the messages of a chat, the last one the user's.
        max_new_tokens: the model may end earlier.
        chat: the text is the only message of a chat. Messages are put into the tokenizer's chat template.
        sampling: how the next token is chosen; None: the likeliest each time.
        eager: steps are neither compiled nor captured.
        on_text: gets the text piece by piece.
        on_note: told why steps are eager, when they are compiled, which takes some 30 seconds, and why they cannot be.

    Raises:
        Interrupted: the user pressed Ctrl-C after the first token; a KeyboardInterrupt that has the text so far.
        ValueError: the prompt is empty, or has bytes that are no UTF-8; `chat` without a template, or with one that
            refuses the messages; a model with learned positions has none for as long a text.

    Example:
        >>> from qcutlass.models.generation import generate
        >>> def ask(model, tokenizer):
        ...     return generate(model, tokenizer, "What is 2 + 2?", chat=True).text
    """
    check_integer("max_new_tokens", max_new_tokens, minimum=1)
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    is_text = isinstance(prompt, str)
    if not is_text and not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: the tokenizer has no chat template; leave it out")
    text = _checked(prompt) if isinstance(prompt, str) else in_template(tokenizer, prompt)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=is_text).to(model.device)
    count = inputs["input_ids"].shape[1]
    if count == 0:
        raise ValueError("prompt: expected at least one token, got none")
    check_length(
        "prompt",
        model,
        count + max_new_tokens - 1,  # the last one is not read
        f"{count} tokens and {max_new_tokens} new ones (max_new_tokens) make a text of",
        "take a shorter prompt or fewer new tokens (--max-new-tokens)",
    )
    stream = _Stream(tokenizer, on_text)
    chosen = sampling or Sampling()
    begin = time.perf_counter()

    def made() -> Generation:
        times = stream.times
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
        return Generation(stream.text, count, len(times), times[0] - begin, rate)

    try:
        with fast_steps(model, count + max_new_tokens, on_note, eager=eager):
            _run(model, tokenizer, inputs, max_new_tokens, chosen, stream)
    except KeyboardInterrupt as error:
        if not stream.times:
            raise
        stream.end()
        raise Interrupted(made()) from error
    return made()


@contextmanager
def fast_steps(
    model: Any, length: int, on_note: Callable[[str], None] = lambda text: None, *, eager: bool = False
) -> Iterator[None]:
    """Inside, steps of a model on a GPU are compiled once for all texts, where the model allows it; see `in_steps`.

    Args:
        length: tokens of the longest text, prompt included.
        on_note: as for `generate`, of which the calls inside are `eager`.
        eager: it does nothing.
    """
    why = "" if eager or model.device.type != "cuda" else stepping.obstacle(model)
    if why:
        on_note(f"steps are eager, which is slower: {why}")
    if why is not None:
        yield
        return
    note = f"compiling the step of decoding, half a minute or less; kept in {compiled_code()}"
    with stepping.in_steps(model, length, on_first_step=lambda: on_note(note), on_failure=on_note):
        yield


def _run(
    model: Any, tokenizer: Any, inputs: Any, max_new_tokens: int, sampling: Sampling, stream: TextStreamer
) -> None:
    with torch.inference_mode(), sampling.seeded(model.device):
        model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            **sampling.keywords,
            **{CACHE: _cache_for(model)},
            streamer=stream,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )


def _cache_for(model: Any) -> DynamicCache | None:
    """The cache with which a model on the CPU whose blocks are fused decodes; None: its own kind serves better."""
    if model.device.type != "cpu" or not any(isinstance(module, FusedBlock) for module in model.modules()):
        return None
    return growing_cache(model.config)
