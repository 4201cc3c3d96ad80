"""Dense folders of more kinds in vLLM's engine: K-quants with packed embeddings, floats, blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.formats.stored import as_fp8, as_nvfp4, named
from tests.python.models.folders import Cut, RandomCut, write_model, write_tokenizer
from tests.python.models.test_gguf_models import write_gguf
from tests.python.vllm import test_engine
from tests.python.vllm.greedy import Reference

from qcutlass import models
from qcutlass.models.gguf import GGUFModel

pytestmark = test_engine.pytestmark
RANKS = pytest.mark.parametrize("options", [{}, test_engine.TWO_RANKS], ids=["one rank", "two ranks"])
VOCABULARY = 64


def prompts() -> list[list[int]]:
    return [[token % (VOCABULARY - 4) + 4 for token in prompt] for prompt in test_engine.prompts()]


@RANKS
@pytest.mark.parametrize("is_tied", [False, True], ids=["a head of its own", "a tied head"])
def test_k_quants_with_packed_embeddings(
    is_tied: bool, options: dict[str, Any], tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GGUFModel, "write_files", lambda self, folder: None)  # its tokenizer is none
    path = write_gguf(tmp_path / "tiny.gguf", "llama", 0, mix="Q4_K_M", tied=is_tied)
    folder = tmp_path / "converted"
    models.convert(path, folder)
    write_tokenizer(folder, VOCABULARY)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    found = test_engine.served(folder, repository, prompts=prompts(), options=options)
    Reference.of_folder(folder).check(found, prompts())


FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
FLOATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8 of channels, fp8 activations": (
        lambda weight: as_fp8(weight),
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": FP8, "input_activations": {**FP8, "dynamic": True}}
            },
        },
    ),
    "fp8 in blocks": (
        lambda weight: as_fp8(weight, (128, 128), "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "nvfp4 of modelopt": (
        lambda weight: of_modelopt(*as_nvfp4(weight)),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    ),
}


def of_modelopt(stored: dict[str, Any], exact: Any) -> tuple[dict[str, Any], Any]:
    scale = 1 / stored["weight_global_scale"]  # a power of two
    found = {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"], "weight_scale_2": scale[0]}
    return found, exact


@RANKS
@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_other_makers(name: str, options: dict[str, Any], tmp_path: Path, repository: Path) -> None:
    """The tokens of transformers' own layers of dequantised weights: activations are not quantised."""
    cut, (write, described) = RandomCut(tmp_path, seed=0), FLOATS[name]
    made = {layer: write(cut.weight(layer)) for layer in cut.names}
    tensors = dict(cut.rest)
    for layer, (stored, _) in made.items():
        tensors |= named(stored, layer)
    folder = write_model(tmp_path / "folder", tensors, cut.config, described)
    asked = test_engine.prompts()
    found = test_engine.served(folder, repository, prompts=asked, options=options | test_engine.OURS)
    exact = Cut(cut.root, {layer: weight for layer, (_, weight) in made.items()})
    Reference.of_model(cut.dense(exact, torch.float32)).check(found, asked)


@pytest.mark.parametrize("method", ["w8a8", "fp8", "blockwise"])
def test_quantised_activations(method: str, tmp_path: Path, repository: Path) -> None:
    """Of a folder that qcutlass quantised: the tokens of its own layers, whose activations are quantised alike."""
    folder = tmp_path / "quantised"
    models.quantize_model(RandomCut(tmp_path, seed=0).floats().folder, folder, method)
    Reference.of_folder(folder).check(test_engine.served(folder, repository), test_engine.prompts())
