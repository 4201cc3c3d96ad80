"""All of SmolLM2-135M in vLLM's engine, quantised with act-order and zero points: greedy tokens of five prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.models.padded_heads import with_padded_heads
from tests.python.vllm import test_engine
from tests.python.vllm.engine import DEVICE
from tests.python.vllm.greedy import Reference
from typer.testing import CliRunner

from qcutlass.cli import app
from qcutlass.models.extras import load_tokenizer

pytestmark = test_engine.pytestmark
PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a robot that learns to paint.",
    "Explain to a child why the sky is blue.",
    "List five uses of a paper clip.",
    "def fibonacci(n):",
)
THREE_RANKS = {"tensor_parallel_size": 3}  # nine heads of queries and three of keys have no half
TWO_RANKS = {"tensor_parallel_size": 2}
COMPILED = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 8]}}


def command(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def quantized(model: Path, root: Path) -> dict[str, Path]:
    """The converted folder, and the GPTQ one."""
    from pydoc_data.topics import topics

    text, converted, gptq = root / "topics.txt", root / "converted", root / "gptq"
    text.write_text("".join(f"{topic}\n" for topic in topics.values()), encoding="utf-8")
    options = ["--method", "gptq", "--act-order", "--group-size", 64, "--samples", 32, "--device", DEVICE]
    command("quantize", model, converted, *options, "--calibration", text)
    command("export", converted, gptq)
    return {"converted": converted, "gptq": gptq}


@pytest.fixture(scope="module")
def folders(smol_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return quantized(smol_file, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def padded_folders(smol_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of twelve heads of queries and four of keys."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root = tmp_path_factory.mktemp("padded")
    source = {"pretrained_model_name_or_path": str(smol_file.parent), "gguf_file": smol_file.name}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(**source), AutoTokenizer.from_pretrained(**source)
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    expected = model(ids).logits.argmax(-1)
    with_padded_heads(model, 4).save_pretrained(root / "floats")
    tokenizer.save_pretrained(root / "floats")
    padded = AutoModelForCausalLM.from_pretrained(root / "floats")
    assert padded.config.num_key_value_heads == 4
    assert torch.equal(padded(ids).logits.argmax(-1), expected)
    return quantized(root / "floats", root)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("gptq", {}, id="gptq"),
        pytest.param("gptq", THREE_RANKS, id="gptq, three ranks"),
        pytest.param("converted", {}, id="converted"),
        pytest.param("converted", COMPILED, id="converted, compiled"),
        pytest.param("gptq", COMPILED | THREE_RANKS, id="gptq, compiled, three ranks"),
    ],
)
def test_tokens_are_those_of_transformers(
    kind: str, options: dict[str, Any], folders: dict[str, Path], repository: Path
) -> None:
    assert_tokens_of_transformers(folders[kind], options, repository)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("gptq", TWO_RANKS, id="gptq"),
        pytest.param("converted", COMPILED | TWO_RANKS, id="converted, compiled"),
    ],
)
def test_two_ranks_have_heads_of_zeros_beside(
    kind: str, options: dict[str, Any], padded_folders: dict[str, Path], repository: Path
) -> None:
    """Nine heads of queries and three of keys have no half; with heads that add nothing they have."""
    assert_tokens_of_transformers(padded_folders[kind], options, repository)


def assert_tokens_of_transformers(folder: Path, options: dict[str, Any], repository: Path) -> None:
    """Fails unless the engine's tokens of the prompts are those of transformers."""
    tokenizer = load_tokenizer(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in PROMPTS
    ]
    found = test_engine.served(folder, repository, prompts=prompts, options=options)
    Reference.of_folder(folder).check(found, prompts)
