"""`qcutlass generate` and `eval` as newcomers call them: GGUF files, pipes, sampling, Ctrl-C."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.models.folders import RandomCut
from tests.python.models.test_gguf_models import write_gguf
from typer.testing import CliRunner

import qcutlass
from qcutlass.cli import app, places
from qcutlass.models.sampling import Sampling

pytest.importorskip("transformers", reason="needs transformers")

LINEARS = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output", "token_embd"


def command(*arguments: object, **options: Any) -> Any:
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner(env=environment).invoke(app, [str(argument) for argument in arguments], **options)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QCUTLASS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_gguf_file_is_converted_once(
    as_folder: bool, cache: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    path = write_gguf(tmp_path / "model" / "tiny.gguf", "llama", seed)
    words = ("generate", path.parent if as_folder else path, "--prompt", "ab", "--max-new-tokens", 2)
    first = command(*words)
    assert first.exit_code == 0, first.output
    (folder,) = (cache / "models").iterdir()
    assert f"tiny.gguf: converted into {folder}" in first.stderr
    text = tmp_path / "text.txt"
    text.write_text("ab" * 20)
    with monkeypatch.context() as context:
        context.setattr(places, "convert", lambda *_, **__: pytest.fail("it is converted again"))
        second = command(*words)
        assert (second.exit_code, second.stdout) == (0, first.stdout)
        assert command("eval", path, "--text", text, "--window", 4).exit_code == 0
    write_gguf(path, "llama", seed + 1)
    assert command(*words).exit_code == 0
    assert len(list((cache / "models").iterdir())) == 2  # another file has another place


def test_a_gguf_file_of_floats_is_rounded_when_that_is_asked_for(cache: Path, tmp_path: Path, seed: int) -> None:
    for kind in ("F16", "BF16"):
        path = write_gguf(tmp_path / f"{kind}.gguf", "llama", seed, types=dict.fromkeys(LINEARS, kind))
        run = command("generate", path, "--prompt", "ab")
        assert run.exit_code == 2
        assert "its weights are floats, which are not rounded without being asked to; convert it first" in run.stderr
        assert "converted into" not in run.stderr
        assert not cache.exists()
        unasked = command("convert", path, tmp_path / kind)
        assert unasked.exit_code == 2
        assert "its weights are floats; qcutlass quantize --calibration TEXT loses least, convert" in unasked.stderr
        done = command("convert", path, tmp_path / kind, "--bits", 8, "--group-size", 32, "--verify")
        assert done.exit_code == 0, done.output
        assert "gguf: 14 layers" in done.stdout
        assert "note: rounded to the nearest int8 in groups of 32" in done.stderr
        assert command("generate", tmp_path / kind, "--prompt", "ab", "--max-new-tokens", 2).exit_code == 0


def test_a_file_that_cannot_be_converted_leaves_nothing(cache: Path, tmp_path: Path, seed: int) -> None:
    for names in ((), LINEARS):
        path = write_gguf(tmp_path / "tiny.gguf", "falcon", seed, types=dict.fromkeys(names, "F16"))
        result = command("generate", path, "--prompt", "ab")
        assert result.exit_code == 2
        assert "got a model of 'falcon'" in result.stderr  # of floats, too, which no option rounds
    assert not cache.exists() or not list((cache / "models").iterdir())


def test_a_prompt_from_a_pipe(random_cut: RandomCut) -> None:
    folder = random_cut.floats().folder
    named = command("generate", folder, "--prompt", "5 6 7", "--max-new-tokens", 3)
    piped = command("generate", folder, "--max-new-tokens", 3, input="5 6 7\n")
    assert (piped.exit_code, piped.stdout) == (0, named.stdout)
    assert piped.stderr.startswith("3 tokens of prompt")
    empty = command("generate", folder, input="")
    assert empty.exit_code == 2
    assert "--prompt: it was left out, and stdin is empty" in empty.stderr
    binary = command("generate", folder, input=b"\xff\xfe")
    assert binary.exit_code == 2
    assert "stdin: expected a text file in UTF-8" in binary.stderr


def test_a_prompt_from_no_pipe(random_cut: RandomCut, monkeypatch: pytest.MonkeyPatch) -> None:
    from qcutlass.cli import running

    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

    monkeypatch.setattr(running.sys, "stdin", Terminal())
    with pytest.raises(ValueError, match=r'--prompt: expected a text, or one from a pipe: echo "Hello" \| qcutlass'):
        running._standard_input()


def test_sampling_repeats_with_a_seed(random_cut: RandomCut) -> None:
    def text(*options: object) -> str:
        words = ("generate", random_cut.floats().folder, "--prompt", "5 6", "--max-new-tokens", 8, *options)
        result = command(*words)
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    state = torch.random.get_rng_state()
    drawn = [text("--temperature", 5, "--seed", seed) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1
    assert torch.equal(torch.random.get_rng_state(), state)  # others draw as before
    assert text("--temperature", 5, "--top-p", 1e-6, "--seed", 1) == text()  # the likeliest alone is left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", 0.5), "top_p: nothing is drawn at temperature 0"),
        (("--seed", 3), "seed: nothing is drawn at temperature 0"),
        (("--temperature", "inf"), "temperature: expected a finite number"),
        (("--temperature", 1, "--top-p", 0), "top_p: expected a probability in (0, 1], got 0.0"),
        (("--temperature", 1, "--seed", -1), "seed"),
        (("--temperature", 1, "--seed", 2**64), "seed: expected an integer of 64 bits, less than 2**64"),
    ],
)
def test_sampling_that_makes_no_sense(options: tuple[object, ...], message: str, tmp_path: Path) -> None:
    result = command("generate", tmp_path, "--prompt", "x", *options)
    assert result.exit_code == 2
    assert message in result.output


def test_keywords_of_sampling() -> None:
    assert Sampling().keywords == {"do_sample": False}
    assert Sampling(0.5, 0.9, 7).keywords == {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 0}


def test_a_chat_template_is_pointed_out(random_cut: RandomCut, tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(random_cut.floats().folder, folder)
    assert "--chat" not in command("generate", folder, "--prompt", "5", "--max-new-tokens", 1).stderr
    path = folder / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message['content'] }} 9{% endfor %}"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    plain = command("generate", folder, "--prompt", "5", "--max-new-tokens", 1)
    assert plain.stderr.startswith("note: this model has a chat template; --chat puts the prompt into it\n")
    assert "note:" not in command("generate", folder, "--prompt", "5", "--max-new-tokens", 1, "--chat").stderr


@pytest.mark.parametrize("template", ["{{ raise_exception('no system role') }}", "{% for m in messages %}{{ m"])
def test_a_template_that_raises_is_an_error_of_one_line(template: str, random_cut: RandomCut, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(random_cut.floats().folder, tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    told = r"error: chat: the chat template of the tokenizer does not take messages of (system, )?user \(.*--system"
    shown = command("generate", folder, "--prompt", "1 2", "--chat")
    assert (shown.exit_code, bool(re.search(told, shown.stderr))) == (2, True)
    shown = command("chat", folder, "--system", "7", input="5\n")
    assert (shown.exit_code, bool(re.search(told, shown.stderr))) == (2, True)


def test_a_prompt_of_other_bytes_than_utf_8(random_cut: RandomCut) -> None:
    """As Python hands on bytes of a command line that its locale does not have."""
    shown = command("generate", random_cut.floats().folder, "--prompt", b"1 \xe9".decode(errors="surrogateescape"))
    assert shown.exit_code == 2
    assert "prompt: expected text in UTF-8, got other bytes at character 2" in shown.stderr


def test_a_faster_way_is_pointed_out(random_cut: RandomCut, tmp_path: Path) -> None:
    """Where there is one: models of floats have none."""
    note = "note: --activations int8 is faster, and less exact: it rounds activations as llama.cpp does\n"
    run = ("--prompt", "5", "--max-new-tokens", 1)
    qcutlass.models.convert(random_cut.awq().folder, tmp_path / "converted")
    plain = command("generate", tmp_path / "converted", *run)
    faster = command("generate", tmp_path / "converted", *run, "--activations", "int8")
    floats = command("generate", random_cut.floats().folder, *run)
    assert [result.exit_code for result in (plain, faster, floats)] == [0, 0, 0]
    assert [note in result.stderr for result in (plain, faster, floats)] == [True, False, False]


def test_ctrl_c_keeps_what_there_is(random_cut: RandomCut, monkeypatch: pytest.MonkeyPatch) -> None:
    from qcutlass.models.generation import _Stream

    whole = command("generate", random_cut.floats().folder, "--prompt", "5 6", "--max-new-tokens", 8)
    put, calls = _Stream.put, []

    def interrupted(self: _Stream, value: torch.Tensor) -> None:
        calls.append(value)
        if len(calls) == 5:  # the prompt, and three tokens
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(_Stream, "put", interrupted)
    result = command("generate", random_cut.floats().folder, "--prompt", "5 6", "--max-new-tokens", 8)
    assert result.exit_code == 130
    assert result.stdout.endswith("\n")
    assert whole.stdout.startswith(result.stdout.rstrip())
    assert re.fullmatch(
        r"2 tokens of prompt, the first new one after \d+ ms, then [\d.]+ tokens/s; 3 in all\n", result.stderr
    )
    calls[:] = [torch.empty(0)] * 4
    early = command("generate", random_cut.floats().folder, "--prompt", "5 6", "--max-new-tokens", 8)
    assert (early.exit_code, early.output) == (130, "")  # nothing was made
