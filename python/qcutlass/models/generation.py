"""Text from a prompt, token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TextStreamer

from qcutlass.models.growing_cache import cache_for
from qcutlass.products.checks import check_integer


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


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int = 128,
    *,
    chat: bool = False,
    on_text: Callable[[str], None] = lambda text: None,
) -> Generation:
    """Continues a prompt with the likeliest token each time.

    Args:
        model, tokenizer: as `qcutlass.models.transformers.load_model` gives them.
        prompt: with at least one token.
        max_new_tokens: the model may end earlier.
        chat: puts the prompt into the tokenizer's chat template.
        on_text: gets the text piece by piece.

    Raises:
        ValueError: the prompt is empty, or `chat` without a template.

    Example:
        >>> from qcutlass.models.generation import generate
        >>> def ask(model, tokenizer):
        ...     return generate(model, tokenizer, "What is 2 + 2?", chat=True).text
    """
    check_integer("max_new_tokens", max_new_tokens, minimum=1)
    if chat and not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: the tokenizer has no chat template; leave it out")
    if chat:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat).to(model.device)
    count = inputs["input_ids"].shape[1]
    if count == 0:
        raise ValueError("prompt: expected at least one token, got none")
    stream = _Stream(tokenizer, on_text)
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=stream,
            past_key_values=cache_for(model),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    times = stream.times
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return Generation(stream.text, count, len(times), times[0] - begin, rate)
