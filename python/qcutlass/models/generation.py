"""Texts from prompts, token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, TextStreamer

from qcutlass.models import stepping
from qcutlass.models.block_modules import FusedBlock
from qcutlass.models.cache_argument import CACHE
from qcutlass.models.compiling import compiled_code
from qcutlass.models.growing_cache import growing_cache
from qcutlass.models.positions import check_length
from qcutlass.models.sampling import Sampling
from qcutlass.products.checks import check_callable, check_flag, check_integer

Message: TypeAlias = Mapping[str, str]
"""`role`, that is "user" or "assistant" or "system", and `content`."""


@dataclass(frozen=True)
class Generation:
    """The result of `generate` for a prompt.

    Attributes:
        text: without the prompt.
        prompt_tokens: how many were read, padding aside.
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
    """Ctrl-C while texts are made; `generations` are what there is of them, `generation` is the first."""

    def __init__(self, *generations: Generation) -> None:
        super().__init__()
        self.generations = generations
        self.generation = generations[0]


class _Stream(TextStreamer):
    """Notes tokens and when they come; hands on the text of a single prompt as soon as it is whole characters."""

    def __init__(self, tokenizer: Any, ends: frozenset[int], on_text: Callable[[str], None] | None) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._ends, self._on_text = ends, on_text
        self._has_prompt = False  # which comes first
        self._text = ""
        self._tokens: list[list[int]] = []  # those of all prompts that came together
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._tokens.append(value.tolist())
        self.times.append(time.perf_counter())  # last: where there is a time, there is its token
        if len(value) == 1:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._text += text
        if self._on_text is not None:
            self._on_text(text)

    def made(self, counts: Sequence[int], begin: float) -> list[Generation]:
        """What there is for prompts of so many tokens."""
        return [self._of_row(row, count, begin) for row, count in enumerate(counts)]

    def _of_row(self, row: int, count: int, begin: float) -> Generation:
        tokens = [together[row] for together in self._tokens[: len(self.times)]]
        made = next((place + 1 for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        alone = len(self._tokens[0]) == 1
        text = self._text if alone else self.tokenizer.decode(tokens[:made], skip_special_tokens=True)
        rate = (made - 1) / (self.times[made - 1] - self.times[0]) if made > 1 else 0.0
        return Generation(text, count, made, self.times[0] - begin, rate)


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


@overload
def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[Message],
    max_new_tokens: int = ...,
    *,
    chat: bool = ...,
    sampling: Sampling | None = ...,
    eager: bool = ...,
    on_text: Callable[[str], None] | None = ...,
    on_note: Callable[[str], None] = ...,
) -> Generation: ...


@overload
def generate(
    model: Any,
    tokenizer: Any,
    prompt: list[str] | tuple[str, ...],
    max_new_tokens: int = ...,
    *,
    chat: bool = ...,
    sampling: Sampling | None = ...,
    eager: bool = ...,
    on_text: Callable[[str], None] | None = ...,
    on_note: Callable[[str], None] = ...,
) -> list[Generation]: ...


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[Message] | list[str] | tuple[str, ...],
    max_new_tokens: int = 128,
    *,
    chat: bool = False,
    sampling: Sampling | None = None,
    eager: bool = False,
    on_text: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Generation | list[Generation]:
    """Continues prompts. On a GPU steps are compiled and captured in a CUDA graph, where the model allows it.

    Args:
        model, tokenizer: as `qcutlass.models.transformers.load_model` gives them.
        prompt: a text with at least one token; or the messages of a chat, the last one the user's; or a list of texts,
            which are continued together, padded on the left.
        max_new_tokens: the model may end earlier.
        chat: each text is the only message of a chat. Messages are put into the tokenizer's chat template.
        sampling: how the next token is chosen; None: the likeliest each time. What is drawn for texts that are
            continued together is another than for each alone.
        eager: steps are neither compiled nor captured.
        on_text: gets the text of a single prompt piece by piece.
        on_note: told why steps are eager, when they are compiled, which takes some 30 seconds, and why they cannot be.

    Returns:
        For a list of texts a list, one of each.

    Raises:
        Interrupted: the user pressed Ctrl-C after the first token; a KeyboardInterrupt that has the texts so far.
        TypeError: `prompt` is neither of these, or another argument not as described.
        ValueError: a prompt is empty, or has bytes that are no UTF-8; there is none; `on_text` for several; `chat`
            without a template, or with one that refuses the messages; a model with learned positions has none for as
            long a text.

    Example:
        >>> from qcutlass.models.generation import generate
        >>> def ask(model, tokenizer):
        ...     return generate(model, tokenizer, "What is 2 + 2?", chat=True).text
        >>> def continued(model, tokenizer, texts):
        ...     return [found.text for found in generate(model, tokenizer, texts, max_new_tokens=32)]
    """
    check_integer("max_new_tokens", max_new_tokens, minimum=1)
    check_flag("chat", chat)
    check_flag("eager", eager)
    check_callable("on_text", on_text)
    if not isinstance(sampling, Sampling | None):
        raise TypeError(f"sampling: expected a Sampling or None, got {type(sampling).__name__}")
    prompts = _prompts(prompt)
    if on_text is not None and len(prompts) > 1:
        raise ValueError(f"on_text: expected a single prompt, got {len(prompts)}; leave it out, or take them in turn")
    rows = [_tokens_of(tokenizer, each, chat) for each in prompts]
    counts = [len(row) for row in rows]
    if 0 in counts:
        where = f" ({counts.index(0) + 1} of {len(counts)})" if len(counts) > 1 else ""
        raise ValueError(f"prompt: expected at least one token, got none{where}")
    count = max(counts)
    check_length(
        "prompt",
        model,
        count + max_new_tokens - 1,  # the last one is not read
        f"{count} tokens and {max_new_tokens} new ones (max_new_tokens) make a text of",
        "take a shorter prompt or fewer new tokens (--max-new-tokens)",
    )
    stream = _Stream(tokenizer, _ends(model), on_text)
    begin = time.perf_counter()
    try:
        with fast_steps(model, count + max_new_tokens, on_note, eager=eager):
            _run(model, tokenizer, rows, max_new_tokens, sampling or Sampling(), stream)
    except KeyboardInterrupt as error:
        if not stream.times:
            raise
        stream.end()
        raise Interrupted(*stream.made(counts, begin)) from error
    made = stream.made(counts, begin)
    return made if _is_batch(prompt) else made[0]


def _is_batch(prompt: object) -> bool:
    return isinstance(prompt, (list, tuple)) and all(isinstance(each, str) for each in prompt)


def _prompts(prompt: Any) -> list[Any]:
    prompts = list(prompt) if _is_batch(prompt) else [prompt]
    expected = "expected a text, the messages of a chat (mappings with role and content) or a list of texts"
    if not prompts:
        raise ValueError(f"prompt: {expected}, got an empty list")
    if not isinstance(prompt, (str, list, tuple)):
        raise TypeError(f"prompt: {expected}, got {type(prompt).__name__}")
    if not _is_batch(prompts) and not all(isinstance(message, Mapping) for message in prompt):
        kinds = sorted({type(message).__name__ for message in prompt})
        raise TypeError(f"prompt: {expected}, got a list of {', '.join(kinds)}")
    return prompts


def _tokens_of(tokenizer: Any, prompt: str | Sequence[Message], chat: bool) -> torch.Tensor:
    """The tokens of a prompt, int64 `[count]`."""
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    is_text = isinstance(prompt, str)
    if not is_text and not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: the tokenizer has no chat template; leave it out")
    text = _checked(prompt) if isinstance(prompt, str) else in_template(tokenizer, prompt)
    tokens: torch.Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=is_text)["input_ids"][0].long()
    return tokens


def _ends(model: Any) -> frozenset[int]:
    """The tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)


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
    why = "" if eager or not _is_on_gpu(model) else stepping.obstacle(model, length)
    if why:
        on_note(f"steps are eager, which is slower: {why}")
    if why is not None:
        yield
        return
    note = f"compiling the step of decoding, half a minute or less; kept in {compiled_code()}"
    with stepping.in_steps(model, length, on_first_step=lambda: on_note(note), on_failure=on_note):
        yield


def _is_on_gpu(model: Any) -> bool:
    return bool(model.device.type == "cuda")


def _run(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    stream: TextStreamer,
) -> None:
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = _padded(prompts, padding or 0).to(model.device)
    mask = _padded([torch.ones_like(row) for row in prompts], 0).to(model.device)
    with torch.inference_mode(), sampling.seeded(model.device):
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            **sampling.keywords,
            **{CACHE: _cache_for(model)},
            streamer=stream,
            pad_token_id=padding,
        )


def _padded(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
    """Rows `[count]` as `[rows, longest]`, padded on the left."""
    return pad_sequence([row.flip(0) for row in rows], batch_first=True, padding_value=value).flip(1)


def _cache_for(model: Any) -> DynamicCache | None:
    """The cache with which a model on the CPU whose blocks are fused decodes; None: its own kind serves better."""
    if model.device.type != "cpu" or not any(isinstance(module, FusedBlock) for module in model.modules()):
        return None
    return growing_cache(model.config)
