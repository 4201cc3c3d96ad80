"""Texts of one prompt and of several, and the steps that they are made in: compiled, eager, in spite of failures."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.manual import run_by
from tests.python.models.folders import RandomCut
from tests.python.models.test_running import command

import qcutlass
from qcutlass.cli import running
from qcutlass.models.sampling import Sampling

pytest.importorskip("transformers", reason="needs transformers")
from qcutlass.models import generation, stepping, transformers
from qcutlass.models.block_modules import FusedBlock
from qcutlass.models.generation import Generation, generate
from qcutlass.models.transformers import load_model

THIS = "tests/python/models/test_generation.py"
PROMPTS = ["5 6", "7", "8 9 20 23 3", "5 6 7"]
COUNT = 8
FEW = "--max-new-tokens", 4
COMPILING = "compiling the step of decoding, half a minute or less; kept in "


@pytest.fixture
def loaded(random_cut: RandomCut) -> tuple[Any, Any]:
    return load_model(random_cut.awq().folder, torch.device("cpu"), torch.float32)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What chooses takes the CPU for a GPU, and steps are traced but not compiled."""
    monkeypatch.setattr(generation, "_is_on_gpu", lambda model: True)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def told(found: Generation) -> tuple[str, int, int]:
    return found.text, found.prompt_tokens, found.tokens


@pytest.mark.parametrize("fused", [False, True], ids=["as it is", "fused"])
def test_texts_of_a_batch_are_those_of_each_alone(fused: bool, loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    if fused:
        qcutlass.fuse_block(model)
    alone = [generate(model, tokenizer, prompt, COUNT) for prompt in PROMPTS]
    together = generate(model, tokenizer, PROMPTS, COUNT)
    assert list(map(told, together)) == list(map(told, alone))
    assert [found.prompt_tokens for found in together] == [2, 1, 5, 3]
    assert all(found.tokens_per_second > 0 and found.first_seconds > 0 for found in together)
    pieces: list[str] = []
    (single,) = generate(model, tokenizer, PROMPTS[:1], COUNT, on_text=pieces.append)
    assert told(single) == told(alone[0])
    assert "".join(pieces) == single.text


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_batch_is_made_in_steps(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    expected = [generate(model, tokenizer, prompt, COUNT, eager=True) for prompt in PROMPTS]
    rows, step = list[int](), stepping.Decoder.step
    monkeypatch.setattr(stepping.Decoder, "step", lambda self: rows.append(len(self.tokens)) or step(self))  # type: ignore[func-returns-value]
    notes: list[str] = []
    found = generate(model, tokenizer, PROMPTS, COUNT, on_note=notes.append)
    assert list(map(told, found)) == list(map(told, expected))
    assert rows == [len(PROMPTS)] * (COUNT - 1)
    assert [note.startswith(COMPILING) for note in notes] == [True]


def test_texts_end_where_each_ends(loaded: tuple[Any, Any]) -> None:
    """One before the others, which go on; what pads it then is no part of its text."""
    model, tokenizer = loaded
    whole = [generate(model, tokenizer, prompt, COUNT) for prompt in PROMPTS]
    end = int(whole[1].text.split()[3])
    model.generation_config.eos_token_id = [end]
    alone = [generate(model, tokenizer, prompt, COUNT) for prompt in PROMPTS]
    assert alone[1].tokens <= 4
    assert list(map(told, generate(model, tokenizer, PROMPTS, COUNT))) == list(map(told, alone))


def test_texts_of_a_batch_are_drawn_alike_from_a_seed(loaded: tuple[Any, Any]) -> None:
    drawn = [generate(*loaded, PROMPTS, COUNT, sampling=Sampling(5.0, seed=seed)) for seed in (1, 1, 2)]
    texts = [[found.text for found in each] for each in drawn]
    assert texts[0] == texts[1] != texts[2]


def test_messages_of_a_batch(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    with pytest.raises(ValueError, match="no chat template"):
        generate(model, tokenizer, PROMPTS, chat=True)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} 9{% endfor %}"
    found = generate(model, tokenizer, PROMPTS, 2, chat=True)
    assert [each.prompt_tokens for each in found] == [3, 2, 6, 4]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([], {}, ValueError, "expected a text, .* or a list of texts, got an empty list"),
        (None, {}, TypeError, "prompt: expected a text, .* got NoneType"),
        (["5", ""], {}, ValueError, r"prompt: expected at least one token, got none \(2 of 2\)"),
        (("5", "6"), {"on_text": print}, ValueError, "on_text: expected a single prompt, got 2"),
        (["5", {"role": "user", "content": "6"}], {}, TypeError, "prompt: expected .*, got a list of dict, str"),
    ],
)
def test_batches_that_are_none(
    prompt: Any, options: Any, error: type[Exception], words: str, loaded: tuple[Any, Any]
) -> None:
    with pytest.raises(error, match=words):
        generate(*loaded, prompt, **options)


def test_the_command_continues_all_prompts(random_cut: RandomCut, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompts = random_cut.awq().folder, [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    count = "--max-new-tokens", COUNT
    alone = [command("generate", folder, "--prompt", prompt, *count).stdout for prompt in PROMPTS]
    together = command("generate", folder, *prompts, *count)
    assert together.exit_code == 0, together.output
    assert together.stdout == "".join(alone)
    told = r"prompt 1 of 4:\n.*prompt 4 of 4:\n11 tokens of 4 prompts, the first new ones after \d+ ms, then "
    assert re.fullmatch(told + r"[\d.]+ tokens/s of all; 32 in all\n.*", together.stderr, re.DOTALL)
    put, calls = generation._Stream.put, []

    def interrupted(self: Any, value: torch.Tensor) -> None:
        calls.append(value)
        if len(calls) == 5:  # the prompts, and three tokens of each
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(generation._Stream, "put", interrupted)
    early = command("generate", folder, *prompts, *count)
    assert early.exit_code == 130
    assert [len(line.split()) for line in early.stdout.splitlines()] == [3] * 4
    assert "tokens/s of all; 12 in all" in early.stderr


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_steps_of_the_command(random_cut: RandomCut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled; eager where that is asked for, or the model is none for steps; without a compiler."""
    words = "generate", random_cut.awq().folder, "--prompt", "5 6", "--max-new-tokens", 4
    compiled = command(*words)
    assert (compiled.exit_code, compiled.stderr.count(COMPILING)) == (0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(stepping, "in_steps", lambda *_, **__: pytest.fail("it is in steps"))
        eager = command(*words, "--eager")
        patch.setattr(stepping, "obstacle", lambda *_: "it is as it is")
        other = command(*words)
    assert (eager.exit_code, eager.stdout) == (0, compiled.stdout)
    assert "steps" not in eager.stderr
    assert (other.exit_code, other.stdout) == (0, compiled.stdout)
    assert "steps are eager, which is slower: it is as it is\n" in other.stderr

    def broken(*arguments: Any, **options: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile.func, backend=broken))  # type: ignore[attr-defined]
    failed = command(*words)
    assert (failed.exit_code, failed.stdout) == (0, compiled.stdout)
    assert "steps are not compiled, which is slower: backend='broken' raised: OSError: no compiler\n" in failed.stderr


@pytest.mark.parametrize("name", ["eval", "generate"])
def test_blocks_are_fused_on_a_gpu(
    name: str, random_cut: RandomCut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both commands, unless that is switched off; the device that the command means is the CPU."""
    (tmp_path / "text.txt").write_text("5 6 7 8 9 20 23 3 " * 4)
    more = {"eval": ("--text", tmp_path / "text.txt", "--window", 8), "generate": ("--prompt", "5", *FEW)}[name]
    cpu, float32, loading = torch.device("cpu"), torch.float32, load_model
    seen: list[Any] = []

    def on_the_cpu(folder: Path, device: torch.device, dtype: Any, activations: Any) -> tuple[Any, Any]:
        assert device.type == "cuda"
        found = loading(folder, cpu, float32, activations)
        seen.append(found[0])
        return found

    monkeypatch.setattr(running, "chosen_device", torch.device)
    monkeypatch.setattr(transformers, "load_model", on_the_cpu)
    results = [
        command(name, random_cut.awq().folder, *more, "--device", "cuda", *options)
        for options in ((), ("--eager",), ("--no-fuse",), ("--eager", "--fuse"))
    ]
    assert [result.exit_code for result in results] == [0] * 4, results[0].output
    fused = [any(isinstance(module, FusedBlock) for module in model.modules()) for model in seen]
    assert fused == [True, False, False, True]
    assert len({result.stdout for result in results}) == 1 or name == "eval"  # which prints seconds


def test_the_recipe_of_the_manual(loaded: tuple[Any, Any], repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model, tokenizer = loaded
    model.generation_config.eos_token_id = list(range(0, 128, 2))  # texts end soon
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    names: dict[str, Any] = {}
    exec(run_by(repository / "docs/models.md", THIS).text, names)
    steps, step = list[int](), stepping.Decoder.step
    monkeypatch.setattr(stepping.Decoder, "step", lambda self: steps.append(1) or step(self))  # type: ignore[func-returns-value]
    found = names["continued"](model, inputs)
    assert steps
    expected = model.generate(**inputs, max_new_tokens=256)
    assert torch.equal(found, expected)
