"""Mixtures of experts in vLLM's engine: greedy tokens are those of transformers with qcutlass's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.models.mixtures import VOCABULARY, MixtureCut
from tests.python.vllm import test_engine
from tests.python.vllm.greedy import Reference

from qcutlass import models

pytestmark = test_engine.pytestmark
TWO_RANKS = test_engine.TWO_RANKS
REROUTED = 0.02
"""The largest share of tokens; in float16 on a CPU it was 2 of 1600, of five such models."""


def prompts() -> list[list[int]]:
    return [[token % (VOCABULARY - 2) + 2 for token in prompt] for prompt in test_engine.prompts()]


@pytest.mark.parametrize(
    ("kind", "form", "is_converted", "options"),
    [
        pytest.param("qwen3_moe", "gptq", False, {}, id="gptq"),
        pytest.param("qwen3_moe", "act_order", False, TWO_RANKS, id="gptq, act-order, two ranks"),
        pytest.param("mixtral", "awq", False, TWO_RANKS | {"enable_expert_parallel": True}, id="awq, expert parallel"),
        pytest.param("olmoe", "compressed", False, {}, id="compressed-tensors"),
        pytest.param("qwen2_moe", "act_order", True, {}, id="converted, act-order, shared experts"),
        pytest.param("qwen3_moe", "fp8", False, test_engine.OURS, id="fp8 in blocks"),
        pytest.param("mixtral", "nvfp4", False, {}, id="nvfp4 of compressed-tensors"),
        pytest.param("qwen3_moe", "fp8", True, {}, id="converted, fp8 in blocks"),
        pytest.param("mixtral", "nvfp4", True, TWO_RANKS, id="converted, nvfp4, two ranks"),
    ],
)
def test_tokens_are_those_of_transformers(
    kind: str, form: str, is_converted: bool, options: dict[str, Any], tmp_path: Path, repository: Path
) -> None:
    folder = getattr(MixtureCut(tmp_path, kind), form)().folder
    if is_converted:
        models.convert(folder, tmp_path / "converted")
        folder = tmp_path / "converted"
    found = test_engine.served(folder, repository, prompts=prompts(), options=options)
    Reference.of_folder(folder).check(found, prompts(), REROUTED)


def test_experts_in_floats_are_vllms_own(tmp_path: Path, repository: Path) -> None:
    """Dense layers are quantised, experts are not: the tokens of transformers' own layers."""
    cut = MixtureCut(tmp_path, "mixtral")
    dense = [name for name in cut.names if name not in cut.experts]
    cut.rest |= {f"{name}.weight": cut.weight(name) for name in cut.experts}
    cut.names = dense
    found = test_engine.served(cut.gptq().folder, repository, prompts=prompts())
    Reference.of_model(cut.dense(cut.gptq(), torch.float32)).check(found, prompts(), REROUTED)
