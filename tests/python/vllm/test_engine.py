"""The plug-in in vLLM's engine, on the CPU or a GPU: greedy tokens are those of transformers with qcutlass's layers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.python.models.folders import Cut, RandomCut
from tests.python.vllm.engine import DEVICE, RECORD
from tests.python.vllm.greedy import Reference
from torch import Tensor

from qcutlass import models

PROMPTS, TOKENS, RANK = 5, 64, 8
OPERATORS = {"cpu": ["_C", "_C_AVX512", "_C_AVX2"], "cuda": ["_C_stable_libtorch"]}
TWO_RANKS = {"tensor_parallel_size": 2}
OURS = {"quantization": "qcutlass"}
"""Where a GPU that multiplies fp8 would have vLLM's own kernels for it."""


def _obstacle() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    if not any(importlib.util.find_spec(f"vllm.{name}") for name in OPERATORS[DEVICE]):
        return f"vllm has no operators for this machine's device, {DEVICE}"
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="qcutlass"):
        return "qcutlass is importable, but not installed: vLLM does not find its entry point"
    return None


_OBSTACLE = _obstacle()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_OBSTACLE is not None, reason=f"needs vLLM's engine: {_OBSTACLE}"),
]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> RandomCut:
    return RandomCut(tmp_path_factory.mktemp("served"), seed=0)


def folder_of(cut: RandomCut, kind: str, place: Path) -> Path:
    if kind == "converted":
        models.convert(cut.gptq().folder, place / "converted")
        return place / "converted"
    made: Any = getattr(cut, kind)()
    return Path(made.folder)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, RandomCut.VOCABULARY, (3 + 7 * i,), generator=generator).tolist() for i in range(PROMPTS)]


def served(folder: Path, repository: Path, **asked: Any) -> list[list[int]]:
    found: list[list[int]] = run(folder, repository, **asked)["tokens"]
    return found


def run(folder: Path, repository: Path, told: str = "quantization=qcutlass", **asked: Any) -> dict[str, Any]:
    """What an engine finds that says what is `told`."""
    asked = {"prompts": prompts(), "tokens": TOKENS, **asked}
    if DEVICE == "cuda" and asked.get("options", {}).get("tensor_parallel_size", 1) > torch.cuda.device_count():
        pytest.skip("needs as many GPUs as ranks")
    command = [sys.executable, "-m", "tests.python.vllm.engine", str(folder), json.dumps(asked)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=repository, check=False)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    assert told in process.stdout + process.stderr
    (record,) = [line for line in process.stdout.splitlines() if line.startswith(RECORD)]
    found: dict[str, Any] = json.loads(record.removeprefix(RECORD))
    return found


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed", "converted"])
def test_tokens_are_those_of_transformers(kind: str, cut: RandomCut, tmp_path: Path, repository: Path) -> None:
    """GPTQ with act-order and zero points, and others; requests are aborted first."""
    folder = folder_of(cut, kind, tmp_path)
    Reference.of_folder(folder).check(served(folder, repository, aborted=3), prompts())


def test_two_ranks(cut: RandomCut, repository: Path) -> None:
    folder = cut.gptq().folder
    Reference.of_folder(folder).check(served(folder, repository, options=TWO_RANKS), prompts())


@pytest.mark.skipif(DEVICE == "cpu", reason="vLLM's own batch-invariant kernels need Triton, hence a GPU")
def test_a_prompt_gets_the_same_bits_in_any_batch(
    cut: RandomCut, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    folder = cut.gptq().folder
    together, alone = (run(folder, repository, logprobs=True, alone=is_alone) for is_alone in (False, True))
    assert [len(each) for each in alone["logprobs"]] == [TOKENS] * PROMPTS
    assert together["logprobs"] == alone["logprobs"]
    assert together["tokens"] == alone["tokens"]
    Reference.of_folder(folder).check(alone["tokens"], prompts())


@pytest.mark.skipif(DEVICE == "cpu", reason="of vLLM's engine for GPUs, whose methods ask kernels")
def test_the_kernel_of_a_method_of_vllm(cut: RandomCut, repository: Path) -> None:
    """A user who names vLLM's own method gets qcutlass's kernel all the same."""
    folder = cut.compressed().folder
    found = run(folder, repository, "QCutlassLinearKernel", options={"quantization": "compressed-tensors"})
    Reference.of_folder(folder).check(found["tokens"], prompts())


def test_prefixes_are_cached_and_prefills_cut(cut: RandomCut, repository: Path) -> None:
    """Prompts of a common prefix, longer than a block of the cache and than one step takes."""
    folder, common = cut.gptq().folder, [*range(2, 102)]
    asked = [[*common, i] for i in range(2, 6)] * 2
    plain = run(folder, repository, prompts=asked, tokens=16, alone=True, options={"enable_prefix_caching": False})
    options = {
        "enable_prefix_caching": True, "block_size": 32, "enable_chunked_prefill": True, "max_num_batched_tokens": 48,
    }  # fmt: skip
    cut_up = run(folder, repository, prompts=asked, tokens=16, options=options)
    reference = Reference.of_folder(folder)
    for found in (plain, cut_up):
        reference.check(found["tokens"], asked)
    assert max(plain["cached"]) == 0
    assert max(cut_up["cached"]) >= 32  # a block


def write_adapter(cut: RandomCut, folder: Path) -> dict[str, Tensor]:
    """An adapter with random numbers in every layer, as peft writes it; what it adds to the weights, by layer."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    added: dict[str, Tensor] = {}
    for name in cut.names:
        n, k = cut.weight(name).shape
        a, b = torch.randn(RANK, k, generator=generator) / k**0.5, torch.randn(n, RANK, generator=generator) / RANK
        tensors |= {f"base_model.model.{name}.lora_{part}.weight": tensor for part, tensor in (("A", a), ("B", b))}
        added[name] = 2 * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rsplit(".", 1)[1] for name in cut.names})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


def test_adapters_of_lora(cut: RandomCut, tmp_path: Path, repository: Path) -> None:
    """Beside quantised layers: the tokens of transformers' own layers with dequantised weights, the adapter merged."""
    base = cut.gptq()
    added = write_adapter(cut, tmp_path / "adapter")
    merged = Cut(base.folder, {name: weight.float() + added[name] for name, weight in base.weights.items()})
    options = {"enable_lora": True, "max_lora_rank": RANK}
    found = served(base.folder, repository, adapter=str(tmp_path / "adapter"), options=options)
    Reference.of_model(cut.dense(merged, torch.float32)).check(found, prompts())
    plain = served(base.folder, repository, options=options)
    Reference.of_folder(base.folder).check(plain, prompts())
    assert all(one != other for one, other in zip(found, plain, strict=True))
