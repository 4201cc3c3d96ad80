"""An engine under requests that arrive and are aborted at random: how many were served, and what memory did."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.cpu import memory_kb

PROMPTS: Final = 16
MOST_PROMPT: Final = 64
MOST_TOKENS: Final = 64
MOST_RUNNING: Final = 8
ARRIVAL: Final = 0.15
"""The chance that a request arrives before a step of the engine: it takes 33 steps on average, so about 5 run."""
ABORT: Final = 0.2
"""The share of requests that are aborted, after some of their tokens."""


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        done, aborted: how many.
        others: those with tokens other than the prompt's own ones when it was alone in the engine: a batch may round
            otherwise, so that they are no errors.
        errors: what went wrong.
        memory: resident megabytes of the process after the prompts ran alone, halfway, and at the end.
    """

    done: int = 0
    aborted: int = 0
    others: int = 0
    errors: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def line(self, seconds: float) -> str:
        """For people, with every number."""
        memory = " -> ".join(f"{megabytes:.1f}" for megabytes in self.memory)
        return (
            f"soak of {seconds:.0f} s: {self.done} requests done, {self.aborted} aborted, {self.others} with other "
            f"tokens than alone, {len(self.errors)} errors, memory {memory} MB (begin, half, end)"
        )


@dataclass
class Running:
    """A request: the number of its prompt, the tokens asked for, and the step after which it is aborted, if it is."""

    prompt: int
    tokens: int
    abort_at: int | None
    steps: int = 0


class Soak:
    """Requests for an engine, drawn at random.

    Args:
        engine: has `add_request`, `step`, `abort_request` and `has_unfinished_requests`, as vLLM's has.
        params: makes the parameters of a request for so many greedy tokens.
        vocabulary: of the model.
        seed: of everything that is drawn.
    """

    def __init__(self, engine: Any, params: Callable[[int], Any], vocabulary: int, seed: int = 0) -> None:
        self._engine, self._params = engine, params
        self._choose = random.Random(seed)
        lengths = [self._choose.randint(1, MOST_PROMPT) for _ in range(PROMPTS)]
        self._prompts = [[self._choose.randrange(2, vocabulary) for _ in range(length)] for length in lengths]
        self._running: dict[str, Running] = {}
        self._alone: dict[int, list[int]] = {}
        self._count = 0
        self.tally = Tally()

    def run(self, seconds: float) -> Tally:
        """Each prompt alone; then requests that come and go until the time is over; then those that still run."""
        for prompt in range(PROMPTS):
            self._add(Running(prompt, MOST_TOKENS, None))
            self._drain()
        self.tally = Tally(errors=self.tally.errors)
        self._remember()
        begin, half = time.monotonic(), False
        while (passed := time.monotonic() - begin) < seconds:
            if not half and passed > seconds / 2:
                half = True
                self._remember()
            if len(self._running) < MOST_RUNNING and (not self._running or self._choose.random() < ARRIVAL):
                self._add(self._drawn())
            self._step()
        self._drain()
        self._remember()
        return self.tally

    def _drawn(self) -> Running:
        tokens = self._choose.randint(2, MOST_TOKENS)
        abort_at = self._choose.randint(1, tokens - 1) if self._choose.random() < ABORT else None
        return Running(self._choose.randrange(PROMPTS), tokens, abort_at)

    def _add(self, request: Running) -> None:
        name = f"request-{self._count}"
        self._count += 1
        prompt = {"prompt_token_ids": self._prompts[request.prompt]}
        self._engine.add_request(name, prompt, self._params(request.tokens))
        self._running[name] = request

    def _step(self) -> None:
        for output in self._engine.step():
            if output.request_id not in self._running:
                if output.outputs[0].finish_reason != "abort":
                    self.tally.errors.append(f"{output.request_id}: runs on behind its abort")
            elif output.finished:
                self._finish(self._running.pop(output.request_id), output.outputs[0])
        for name, request in list(self._running.items()):
            request.steps += 1
            if request.abort_at is not None and request.steps >= request.abort_at:
                self._engine.abort_request([name])
                del self._running[name]
                self.tally.aborted += 1

    def _drain(self) -> None:
        while self._running:
            if not self._engine.has_unfinished_requests():
                self.tally.errors += [f"{name}: the engine knows nothing of it" for name in self._running]
                self._running.clear()
                return
            self._step()
        if self._engine.has_unfinished_requests():
            self.tally.errors.append("a request runs on behind its abort")

    def _finish(self, request: Running, output: Any) -> None:
        found = list(output.token_ids)
        if output.finish_reason != "length" or len(found) != request.tokens:
            self.tally.errors.append(
                f"prompt {request.prompt}: expected {request.tokens} tokens, got {len(found)} ({output.finish_reason})"
            )
            return
        self.tally.done += 1
        self.tally.others += found != self._alone.setdefault(request.prompt, found)[: request.tokens]

    def _remember(self) -> None:
        self.tally.memory.append(memory_kb("VmRSS") / 1024)


def soak(folder: Path, seconds: float, options: dict[str, Any]) -> Tally:
    """The tally of an engine in this very process, whose memory is the engine's."""
    from vllm import LLM, SamplingParams

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    llm = LLM(str(folder), max_model_len=2 * MOST_TOKENS + MOST_PROMPT, max_num_seqs=MOST_RUNNING, **options)

    def params(tokens: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    return Soak(llm.llm_engine, params, vocabulary).run(seconds)
