"""Rules of single layers that the engine calls otherwise than the checkpoint does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.python.formats.stored import as_compressed, as_gptq, stored

import qcutlass
from qcutlass.vllm.naming import with_names
from qcutlass.vllm.stored import layer_of
from qcutlass.vllm.waiting import WaitingExperts

CPU = torch.device("cpu")
GPTQ: dict[str, Any] = {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": 32}
IN_FILE, IN_ENGINE = "model.layers.0.mlp.down_proj", "language_model.model.layers.0.mlp.down_proj"
PATTERN = r"model\.layers\.0\.mlp\.down_proj"
RULES = [
    {"dynamic": {f"+:{PATTERN}": {"bits": 8}}},
    {"dynamic": {f"+:^{PATTERN}$": {"bits": 8}, "-:lm_head": {}}},
    {"extra_config": {IN_FILE: {"bits": 8}}},
    {"extra_config": {f"^{PATTERN}$": {"bits": 8}}},
]
TWO_SIZES = {"w1": {"group_size": 48}, "w2": {"group_size": 64}}
"""Two groups each for 96 columns."""


def mapped(names: list[str]) -> list[str]:
    """As a mapper of vLLM's for a model with a language model in it."""
    return [f"language_model.{name}" if name.startswith("model.") else name for name in names]


def compressed(*groups: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    described = {
        f"group_{index}": {"targets": targets, "weights": {"type": "int", "num_bits": 4, "group_size": 32, **weights}}
        for index, (targets, weights) in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "config_groups": described}


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_that_no_rule_matches(rules: dict[str, Any], bits: int) -> None:
    """What is said of all layers describes it, or what is said of one, whichever its tensors fit."""
    layer = stored(32, 128, 32, bits, seed=0)
    found = layer_of(as_gptq(layer), GPTQ | rules, IN_ENGINE, CPU)
    assert torch.equal(found.effective_weight(), layer.weight)


def test_sizes_of_groups_are_those_of_a_rule() -> None:
    """Groups that do not divide the columns cannot be told by the tensors alone."""
    layer = stored(32, 96, 64, seed=0)
    found = layer_of(as_gptq(layer), GPTQ | {"dynamic": {"+:model.*down": {"group_size": 64}}}, IN_ENGINE, CPU)
    assert torch.equal(found.effective_weight(), layer.weight)


def test_rules_that_fit_and_contradict_each_other_are_refused() -> None:
    tensors = as_gptq(stored(32, 96, 64, seed=0), g_idx=False)
    with pytest.raises(qcutlass.CheckpointError, match=r"experts\.3\.down_proj.*contradict each other"):
        layer_of(tensors, GPTQ | {"extra_config": TWO_SIZES}, "experts.3.down_proj", CPU)


def test_a_layer_that_a_rule_matches_is_as_it_says() -> None:
    tensors = as_gptq(stored(32, 128, 32, seed=0))
    with pytest.raises(qcutlass.CheckpointError, match=r"holds 4-bit fields, .* says 8"):
        layer_of(tensors, GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, IN_ENGINE, CPU)


def test_experts_have_the_words_of_files() -> None:
    """Their numbers are those in the model, also where a rank has some of the experts alone."""
    waiting = WaitingExperts(lambda expert: expert - 2)
    waiting.loader("qweight")(None, torch.zeros(1), "w2_qweight", "w2", 3)
    modules = [f"experts.{name}" for name in waiting.names(1, "down")]
    assert modules == ["experts.3.down_proj", "experts.3.w2"]
    layer = stored(32, 96, 64, seed=0)
    dynamic = {rf"+:.*\.{word}$": own for word, own in TWO_SIZES.items()}
    found = layer_of(as_gptq(layer), GPTQ | {"dynamic": dynamic}, "down of expert 1 of this rank", CPU, *modules)
    assert torch.equal(found.effective_weight(), layer.weight)


@pytest.mark.parametrize("targets", [[IN_FILE], [f"re:^{PATTERN}$"], [f"re:{PATTERN}"]], ids=str)
@pytest.mark.parametrize("others", [["model.layers.0.mlp.up_proj"], ["Linear"]], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_targets_of_compressed_tensors(targets: list[str], others: list[str], bits: int) -> None:
    layer = stored(32, 128, 32, bits, seed=0)
    values = compressed((others, {}), (targets, {"num_bits": 8}))
    assert torch.equal(layer_of(as_compressed(layer), values, IN_ENGINE, CPU).effective_weight(), layer.weight)


def test_groups_that_fit_and_contradict_each_other_are_refused() -> None:
    layer = stored(32, 96, 64, seed=0)
    values = compressed((["w1"], TWO_SIZES["w1"]), ([IN_FILE], TWO_SIZES["w2"]))
    with pytest.raises(qcutlass.CheckpointError, match=r"config_groups: expected a target.*contradict each other"):
        layer_of(as_compressed(layer), values, IN_ENGINE, CPU)
    found = layer_of(as_compressed(layer), with_names(values, [mapped]), IN_ENGINE, CPU)
    assert torch.equal(found.effective_weight(), layer.weight)


@pytest.mark.parametrize("rule", [f"+:{PATTERN}", f"+:^{PATTERN}$", IN_FILE])
def test_rules_are_known_by_the_names_of_the_engine(rule: str) -> None:
    layer = stored(32, 96, 64, seed=0)
    values = GPTQ | {"dynamic": {rule: TWO_SIZES["w2"], "+:.*w1": TWO_SIZES["w1"]}}
    found = layer_of(as_gptq(layer), with_names(values, [mapped, list]), IN_ENGINE, CPU)
    assert torch.equal(found.effective_weight(), layer.weight)
    assert with_names({"bits": 4, "dynamic": False}, [mapped]) == {"bits": 4, "dynamic": False}
