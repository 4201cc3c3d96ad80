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
    """Of twelve heads of queries and four of keys, which have halves: those that were added add nothing."""
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
    ("made", "kind", "options"),
    [
        pytest.param("folders", "gptq", {}, id="gptq"),
        pytest.param("folders", "gptq", THREE_RANKS, id="three_ranks, gptq"),
        pytest.param("folders", "converted", {}, id="converted"),
        pytest.param("folders", "converted", COMPILED, id="converted, compiled"),
        pytest.param("folders", "gptq", COMPILED | THREE_RANKS, id="three_ranks, gptq, compiled"),
        pytest.param("padded_folders", "gptq", TWO_RANKS, id="two_ranks, gptq"),
        pytest.param("padded_folders", "converted", COMPILED | TWO_RANKS, id="two_ranks, converted, compiled"),
    ],
)
def test_tokens_are_those_of_transformers(
    made: str, kind: str, options: dict[str, Any], request: pytest.FixtureRequest, repository: Path
) -> None:
    folder = request.getfixturevalue(made)[kind]
    tokenizer = load_tokenizer(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in PROMPTS
    ]
    found = test_engine.served(folder, repository, prompts=prompts, options=options)
    Reference.of_folder(folder).check(found, prompts)
