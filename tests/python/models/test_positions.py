"""Models with learned positions: texts that are longer are refused before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.models.folders import write_tokenizer
from tests.python.models.quantizations import VOCABULARY, make
from tests.python.models.test_running import command

transformers = pytest.importorskip("transformers", reason="needs transformers")
from qcutlass.models.evaluation import perplexity  # noqa: E402
from qcutlass.models.positions import positions_of  # noqa: E402

LONGEST = 32


def model_of(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = {"max_position_embeddings": LONGEST, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **sizes, **options)
    ).eval()


@pytest.mark.parametrize(("kind", "longest"), [("opt", LONGEST), ("gpt2", LONGEST), ("llama", None)])
def test_learned_positions_are_told(kind: str, longest: int | None, seed: int) -> None:
    assert positions_of(model_of(kind, seed)) == longest
    assert positions_of(None) is None


@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_longer_texts_are_refused(kind: str, tmp_path: Path, seed: int) -> None:
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    model_of(kind, seed).save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    text.write_text("5 6 7 8 " * 20)
    words = ("generate", folder, "--prompt", "5 6 7", "--max-new-tokens")
    longest = command(*words, LONGEST - 2)  # the last token is not read
    assert longest.exit_code == 0, longest.output
    longer = command(*words, LONGEST - 1)
    assert longer.exit_code == 2
    assert f"prompt: 3 tokens and {LONGEST - 1} new ones (max_new_tokens) make a text of {LONGEST + 1}" in longer.stderr
    assert command("eval", folder, "--text", text, "--window", LONGEST).exit_code == 0
    wider = command("eval", folder, "--text", text, "--window", LONGEST + 1)
    assert wider.exit_code == 2
    assert f"window: it has {LONGEST + 1} tokens, but the model has learned positions for {LONGEST}" in wider.stderr


def test_other_models_read_longer_texts(seed: int) -> None:
    model = make("llama", seed, max_position_embeddings=8)
    assert perplexity(model, torch.arange(32) % VOCABULARY, window=32).tokens == 31


def test_a_conversation_is_as_long_as_there_are_positions(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "model"
    model_of("opt", seed).save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one['content'] }} {% endfor %}")
    result = command("chat", folder, input="5 6 7\n")
    assert result.exit_code == 0, result.output
    assert f"note: the context is {LONGEST} tokens" in result.stderr
    assert f"[{LONGEST - 3} tokens" in result.stderr
